"""The C++ reference of `csrc/reference`, built on first use and driven through cffi.

Shapes are numpy order. Tokens come in the layout of the package: one column per position, row 0
the ids, the other rows the codes.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi
import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Weights = dict[str, npt.NDArray[np.float32]]

SOURCE = Path(__file__).resolve().parent.parent / "csrc" / "reference"

CACHES = ("exact", "past_f16", "stored_f16")
FAULTS = ("none", "rope_neox", "tiled_heads", "mask_without_offset", "scale_without_text")

# In the order of the computation; `{il}` stands for each layer in turn.
LAYER_TRACES = (
    "attn_norm-{il}",
    "qkv-{il}",
    "q_rope-{il}",
    "k_rope-{il}",
    "attn_out-{il}",
    "ffn_inp-{il}",
    "ffn_norm-{il}",
    "ffn_out-{il}",
    "l_out-{il}",
)


class ReferenceCallError(Exception):
    """What the C++ side said when a call failed."""


@dataclass(frozen=True)
class Checkpoint:
    """Configuration and float32 Slow-AR tensors, as `ref_config` names them and the GGUF does."""

    config: dict[str, int | float]
    weights: Weights

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Reads a GGUF file of any tensor types; Fast-AR and codec tensors are left alone."""
        reader = gguf.GGUFReader(path)

        def value(key: str, default: Any = None) -> Any:
            field = reader.get_field(key)
            if field is None and default is None:
                raise KeyError(f"{path}: no metadata key {key}")
            return default if field is None else field.contents()

        arch = value("general.architecture")
        config: dict[str, int | float] = {
            "n_vocab": value(f"{arch}.vocab_size"),
            "n_embd": value(f"{arch}.embedding_length"),
            "n_ff": value(f"{arch}.feed_forward_length"),
            "n_layer": value(f"{arch}.block_count"),
            "n_head": value(f"{arch}.attention.head_count"),
            "n_head_kv": value(f"{arch}.attention.head_count_kv"),
            "n_codebook": value("fish_speech.num_codebooks"),
            "codebook_size": value("fish_speech.codebook_size"),
            "semantic_begin": value("fish_speech.semantic_begin_id"),
            "semantic_end": value("fish_speech.semantic_end_id"),
            "rope_base": value(f"{arch}.rope.freq_base"),
            "rms_eps": value(f"{arch}.attention.layer_norm_rms_epsilon"),
            "qk_norm": value("fish_speech.attention_qk_norm"),
            "scale_codebooks": value("fish_speech.scale_codebook_embeddings"),
            "tied_head": value("fish_speech.tie_word_embeddings"),
            "norm_hidden": value("fish_speech.norm_fastlayer_input", default=True),
        }
        weights = {
            tensor.name: np.asarray(
                gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32
            )
            for tensor in reader.tensors
            if not tensor.name.startswith(("fast_", "c."))
        }
        return cls(config, weights)


def build_reference(build_dir: Path) -> Path:
    """Compiles `csrc/reference` in `build_dir` and returns the shared library."""
    # A virtual environment that is not activated still has its tools beside its python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

    def tool(name: str) -> str:
        found = shutil.which(name, path=path)
        if found is None:
            raise FileNotFoundError(f"{name} is needed to build the reference: pip install {name}")
        return found

    def run(*command: str | Path) -> None:
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}")

    cmake = tool("cmake")
    make_program = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    run(cmake, "-S", SOURCE, "-B", build_dir, "-G", "Ninja", make_program)
    run(cmake, "--build", build_dir)
    (library,) = [
        file
        for file in Path(build_dir).iterdir()
        if file.stem.endswith("slowar_reference") and file.suffix in {".so", ".dylib", ".dll"}
    ]
    return library


@functools.cache
def _ffi() -> Any:
    header = (SOURCE / "reference.h").read_text(encoding="utf-8")
    begin, end = "/* cdef begin */", "/* cdef end */"
    ffi = cffi.FFI()
    ffi.cdef(header[header.index(begin) + len(begin) : header.index(end)])
    return ffi


@functools.cache
def _open(library: Path) -> Any:
    return _ffi().dlopen(str(library))


@functools.cache
def open_reference() -> Any:
    """The library, compiled once per process in a folder that goes away."""
    with tempfile.TemporaryDirectory(
        prefix="slowar-reference-", ignore_cleanup_errors=True
    ) as folder:
        return _open(build_reference(Path(folder)))  # stays mapped when the file is gone


def round_to_half(x: float) -> float:
    """The value that survives a trip through IEEE half precision."""
    return float(open_reference().ref_round_to_half(x))


class Reference:
    """One model with one sequence of positions.

    `cache` is one of `CACHES`, `fault` one of `FAULTS`; `reference.h` says what they mean.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Checkpoint,
        cache: str = "past_f16",
        fault: str = "none",
        *,
        library: Path | None = None,
    ) -> None:
        checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.read(model)
        self.config = dict(checkpoint.config)
        self._ffi = _ffi()
        self._lib = open_reference() if library is None else _open(library)
        self._error = self._ffi.new("ref_error *")

        cache_value = getattr(self._lib, f"REF_CACHE_{cache.upper()}")
        fault_value = getattr(self._lib, f"REF_FAULT_{fault.upper()}")
        config = self._ffi.new("ref_config *", checkpoint.config)
        self._model = self._owned(
            self._lib.ref_model_create(config, self._error), self._lib.ref_model_free
        )
        for name, values in checkpoint.weights.items():
            flat = np.ascontiguousarray(values, dtype=np.float32)
            pointer = self._ffi.from_buffer("float[]", flat)
            self._check(
                self._lib.ref_model_set_tensor(
                    self._model, name.encode(), pointer, flat.size, self._error
                )
            )
        self._session = self._owned(
            self._lib.ref_session_create(self._model, cache_value, fault_value, self._error),
            self._lib.ref_session_free,
        )

    def _check(self, status: int) -> None:
        if status != 0:
            raise ReferenceCallError(self._ffi.string(self._error.message).decode())

    def _owned(self, pointer: Any, free: Any) -> Any:
        self._check(0 if pointer else 1)
        return self._ffi.gc(pointer, free)

    @property
    def n_past(self) -> int:
        return int(self._lib.ref_session_n_past(self._session))

    @property
    def trace_names(self) -> tuple[str, ...]:
        """Every name that `trace` knows, in the order of the computation."""
        layers = [
            n.format(il=il) for il in range(int(self.config["n_layer"])) for n in LAYER_TRACES
        ]
        return ("embd", *layers, "result_norm", "hidden", "logits")

    def eval(self, tokens: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Evaluates int32 (n_codebook + 1, n) and gives hidden (n_embd,) and logits (n_vocab,)."""
        array = np.asarray(tokens)
        n_rows = int(self.config["n_codebook"]) + 1
        if array.ndim != 2 or array.shape[0] != n_rows or array.dtype.kind not in "iu":
            raise ValueError(f"{array.dtype} {array.shape}, expected integers ({n_rows}, n)")
        flat = np.ascontiguousarray(array.T, dtype=np.int32)
        hidden = np.empty(int(self.config["n_embd"]), dtype=np.float64)
        logits = np.empty(int(self.config["n_vocab"]), dtype=np.float64)
        self._check(
            self._lib.ref_eval(
                self._session,
                self._ffi.from_buffer("int32_t[]", flat),
                flat.shape[0],
                self._ffi.from_buffer("double[]", hidden),
                self._ffi.from_buffer("double[]", logits),
                self._error,
            )
        )
        return hidden, logits

    def trace(self, name: str) -> Floats:
        """One intermediate of the last `eval`: (n, width), or (width,) for hidden and logits."""
        n_values = int(self._lib.ref_trace_size(self._session, name.encode()))
        if n_values < 0:
            raise KeyError(name)
        out = np.empty(n_values, dtype=np.float64)
        pointer = self._ffi.from_buffer("double[]", out)
        self._check(
            self._lib.ref_trace(self._session, name.encode(), pointer, n_values, self._error)
        )
        if name in ("hidden", "logits"):
            return out
        n_tokens = int(self._lib.ref_trace_size(self._session, b"embd")) // int(
            self.config["n_embd"]
        )
        return out.reshape(n_tokens, -1)

    def follow(self, il: int, keys: npt.ArrayLike, values: npt.ArrayLike, tolerance: float) -> None:
        """Takes over which way another program's keys and values of the next `eval` round.

        Both are its unrounded float32 (n, n_head_kv, head_dim) of layer `il`. Those further than
        `tolerance` times their root mean square from this program's own are not followed.
        """
        arrays = [np.ascontiguousarray(a, dtype=np.float32) for a in (keys, values)]
        pointers = [self._ffi.from_buffer("float[]", a) for a in arrays]
        self._check(
            self._lib.ref_follow(
                self._session, il, *pointers, arrays[0].size, tolerance, self._error
            )
        )

    def reset(self) -> None:
        """Back to position 0."""
        self._lib.ref_session_reset(self._session)
