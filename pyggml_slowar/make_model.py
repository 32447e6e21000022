"""Random models in the public file layout, for demos, tests and benchmarks without weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from ._native import call, ffi, lib
from .device import default_threads
from .model import Config

TYPES = ("f32", "f16", "q8_0", "q6_k", "q4_k")
"""What ``make_model`` writes matrices as; norms and biases are always f32."""

S2_PRO = Config(
    n_ctx=32768,
    n_vocab=155776,
    n_embd=2560,
    n_ff=9728,
    n_layer=36,
    n_head=32,
    n_head_kv=8,
    head_dim=128,
    n_codebook=10,
    codebook_size=4096,
    semantic_begin_id=151678,
    semantic_end_id=155773,
    rope_freq_base=1e6,
    norm_rms_eps=1e-6,
    attention_qk_norm=True,
    scale_codebook_embeddings=True,
    tie_word_embeddings=True,
    norm_fastlayer_input=True,
)
"""The released model's hyper-parameters."""

TINY = replace(
    S2_PRO,
    n_ctx=2048,
    n_vocab=1000,
    n_embd=256,
    n_ff=512,
    n_layer=3,
    n_head=4,
    n_head_kv=2,
    codebook_size=64,
    semantic_begin_id=900,
    semantic_end_id=963,
)
"""Small enough for a test, with the traits that are easy to get wrong: head size 128 where n_embd /
n_head is 64, two query heads to a KV head, rows that every ggml type can hold."""

PRESETS = {"tiny": TINY, "s2-pro": S2_PRO}


@dataclass(frozen=True)
class FastShape:
    """Hyper-parameters of a Fast-AR, the transformer that makes a frame's codes.

    Named as the metadata keys ``fish_speech.fast_*`` name them.
    """

    context_length: int
    """Positions: the hidden vector and a code for each codebook."""
    embedding_length: int
    feed_forward_length: int
    block_count: int
    head_count: int
    head_count_kv: int
    head_dim: int
    rope_freq_base: float
    layer_norm_rms_eps: float
    attention_qk_norm: bool
    project_in: bool
    """Whether a matrix brings the hidden vector to ``embedding_length``: where that differs."""
    project_in_bias: bool = False
    """Whether it has a bias. No key says so: the tensor is there or not."""


def fast_shape(config: Config) -> FastShape:
    """A Fast-AR with the Slow-AR's own sizes.

    S2 Pro's has 4 layers; that its layers are of the Slow-AR's size is what its 0.4 billion
    parameters come to. Others get as many layers as the Slow-AR, at most 2. No q/k norm, as in
    every file of ``tests/golden``.
    """
    c = config
    return FastShape(
        context_length=c.n_codebook + 1,
        embedding_length=c.n_embd,
        feed_forward_length=c.n_ff,
        block_count=4 if c == S2_PRO else min(c.n_layer, 2),
        head_count=c.n_head,
        head_count_kv=c.n_head_kv,
        head_dim=c.head_dim,
        rope_freq_base=c.rope_freq_base,
        layer_norm_rms_eps=c.norm_rms_eps,
        attention_qk_norm=False,
        project_in=False,
    )


_CHUNK = 1 << 22  # weights drawn and quantised at a time: 16 MiB of float32

Progress = Callable[[int, int], object]


def make_model(
    path: str | os.PathLike[str],
    config: Config,
    type: str = "f32",
    *,
    fast: FastShape | Literal["auto"] | None = "auto",
    fast_type: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file with random weights.

    Matrices are normal with variance 1 / columns, norms 1 with a spread of 0.1, biases 0 with that
    spread, so that activations stay near 1 through any number of layers. The same arguments give
    the same file, and the Slow-AR's weights do not depend on the Fast-AR's.

    Parameters
    ----------
    path
        Written under a temporary name beside it and renamed when complete.
    type
        Of every matrix: one of ``TYPES``. Rows must be a multiple of its block (32 for q8_0, 256
        for q6_k and q4_k).
    fast
        The Fast-AR's shape; ``"auto"``: ``fast_shape(config)``; None: the file has no Fast-AR.
    fast_type
        Of the Fast-AR's matrices; None: ``type``.
    progress
        Called with (weights written, weights in all).

    Raises
    ------
    ValueError
        ``type`` or ``fast_type`` is unknown or does not fit the shapes.
    """
    fast_type = type if fast_type is None else fast_type
    for name, value in (("type", type), ("fast_type", fast_type)):
        if value not in TYPES:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(TYPES)}")
    if fast == "auto":
        fast = fast_shape(config)
    tensors = [(name, shape, type) for name, shape in tensor_shapes(config)]
    if fast is not None:
        more = fast_tensor_shapes(config, fast)
        tensors += [(name, shape, fast_type) for name, shape in more]
    total = sum(int(np.prod(shape)) for _, shape, _ in tensors)
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(partial, "fish-speech")
    try:
        _add_keys(writer, config)
        if fast is not None:
            _add_fast_keys(writer, fast)
        for name, shape, its_type in tensors:
            _add_info(writer, name, shape, its_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        with ThreadPoolExecutor(default_threads()) as pool:
            for i, (name, shape, its_type) in enumerate(tensors):
                mean = 0.0 if name.endswith(".bias") else 1.0
                writer.write_tensor_data(_random_tensor(pool, shape, its_type, (seed, i), mean))
                done += int(np.prod(shape))
                if progress is not None:
                    progress(done, total)
        writer.close()
        partial.replace(target)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def tensor_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The Slow-AR's tensors and their shapes, numpy order, as the public files lay them out."""
    c = config
    yield "embeddings.weight", (c.n_vocab, c.n_embd)
    yield "codebook_embeddings.weight", (c.n_codebook * c.codebook_size, c.n_embd)
    yield "norm.weight", (c.n_embd,)
    for il in range(c.n_layer):
        at = f"layers.{il}."
        sizes = c.n_embd, c.n_ff, c.n_head, c.n_head_kv, c.head_dim
        yield from _layer_shapes(at, *sizes, qk_norm=c.attention_qk_norm)
    if not c.tie_word_embeddings:
        yield "output.weight", (c.n_vocab, c.n_embd)


def fast_tensor_shapes(config: Config, fast: FastShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The Fast-AR's tensors and their shapes, numpy order, in the order of ``tests/golden``."""
    c, f = config, fast
    yield "fast_embeddings.weight", (c.codebook_size, f.embedding_length)
    yield "fast_norm.weight", (f.embedding_length,)
    yield "fast_output.weight", (c.codebook_size, f.embedding_length)
    if f.project_in:
        yield "fast_project_in.weight", (f.embedding_length, c.n_embd)
        if f.project_in_bias:
            yield "fast_project_in.bias", (f.embedding_length,)
    for il in range(f.block_count):
        at = f"fast_layers.{il}."
        sizes = f.embedding_length, f.feed_forward_length, f.head_count, f.head_count_kv, f.head_dim
        yield from _layer_shapes(at, *sizes, qk_norm=f.attention_qk_norm)


def _layer_shapes(
    at: str, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, head_dim: int, *, qk_norm: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_size, kv_size = n_head * head_dim, n_head_kv * head_dim
    yield at + "attention_norm.weight", (n_embd,)
    yield at + "ffn_norm.weight", (n_embd,)
    yield at + "attention.wqkv.weight", (q_size + 2 * kv_size, n_embd)
    yield at + "attention.wo.weight", (n_embd, q_size)
    if qk_norm:
        yield at + "attention.q_norm.weight", (head_dim,)
        yield at + "attention.k_norm.weight", (head_dim,)
    yield at + "feed_forward.w1.weight", (n_ff, n_embd)
    yield at + "feed_forward.w3.weight", (n_ff, n_embd)
    yield at + "feed_forward.w2.weight", (n_embd, n_ff)


def _add_keys(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_uint32("fish-speech.context_length", c.n_ctx)
    writer.add_uint32("fish-speech.vocab_size", c.n_vocab)
    writer.add_uint32("fish-speech.embedding_length", c.n_embd)
    writer.add_uint32("fish-speech.feed_forward_length", c.n_ff)
    writer.add_uint32("fish-speech.block_count", c.n_layer)
    writer.add_uint32("fish-speech.attention.head_count", c.n_head)
    writer.add_uint32("fish-speech.attention.head_count_kv", c.n_head_kv)
    writer.add_float32("fish-speech.rope.freq_base", c.rope_freq_base)
    writer.add_float32("fish-speech.attention.layer_norm_rms_epsilon", c.norm_rms_eps)
    writer.add_uint32("fish_speech.num_codebooks", c.n_codebook)
    writer.add_uint32("fish_speech.codebook_size", c.codebook_size)
    writer.add_uint32("fish_speech.semantic_begin_id", c.semantic_begin_id)
    writer.add_uint32("fish_speech.semantic_end_id", c.semantic_end_id)
    writer.add_bool("fish_speech.tie_word_embeddings", c.tie_word_embeddings)
    writer.add_bool("fish_speech.attention_qk_norm", c.attention_qk_norm)
    writer.add_bool("fish_speech.scale_codebook_embeddings", c.scale_codebook_embeddings)
    writer.add_bool("fish_speech.norm_fastlayer_input", c.norm_fastlayer_input)


def _add_fast_keys(writer: gguf.GGUFWriter, f: FastShape) -> None:
    writer.add_uint32("fish_speech.fast_context_length", f.context_length)
    writer.add_uint32("fish_speech.fast_embedding_length", f.embedding_length)
    writer.add_uint32("fish_speech.fast_feed_forward_length", f.feed_forward_length)
    writer.add_uint32("fish_speech.fast_block_count", f.block_count)
    writer.add_uint32("fish_speech.fast_head_count", f.head_count)
    writer.add_uint32("fish_speech.fast_head_count_kv", f.head_count_kv)
    writer.add_uint32("fish_speech.fast_head_dim", f.head_dim)
    writer.add_float32("fish_speech.fast_rope_freq_base", f.rope_freq_base)
    writer.add_float32("fish_speech.fast_layer_norm_rms_eps", f.layer_norm_rms_eps)
    writer.add_bool("fish_speech.fast_attention_qk_norm", f.attention_qk_norm)
    writer.add_bool("fish_speech.fast_project_in", f.project_in)


def _ggml_type(shape: tuple[int, ...], type: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[type.upper() if len(shape) == 2 else "F32"]


def _row_bytes(shape: tuple[int, ...], type: str) -> int:
    block, size = gguf.GGML_QUANT_SIZES[_ggml_type(shape, type)]
    if shape[-1] % block:
        raise ValueError(
            f"type {type} needs rows of a multiple of {block}, a tensor has {shape[-1]} columns"
        )
    return shape[-1] // block * size


def _add_info(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], type: str) -> None:
    n_bytes = _row_bytes(shape, type)
    # For raw bytes the writer takes the shape in bytes and works out the shape in weights.
    stored = (*shape[:-1], n_bytes)
    writer.add_tensor_info(
        name,
        stored,
        np.dtype(np.uint8),
        int(np.prod(stored)),
        raw_dtype=_ggml_type(shape, type),
    )


def _random_tensor(
    pool: ThreadPoolExecutor,
    shape: tuple[int, ...],
    type: str,
    seed: tuple[int, int],
    mean: float,
) -> npt.NDArray[np.uint8]:
    rows, columns = (1, *shape)[-2:]
    out = np.empty((rows, _row_bytes(shape, type)), np.uint8)
    per_chunk = max(1, _CHUNK // columns)

    def fill(start: int) -> None:
        n = min(per_chunk, rows - start)
        values = np.random.default_rng((*seed, start)).standard_normal((n, columns), np.float32)
        if len(shape) == 1:
            values = np.float32(mean) + values * np.float32(0.1)
        else:
            values *= np.float32(columns**-0.5)
        _quantize(values, _ggml_type(shape, type).name, out[start : start + n])

    list(pool.map(fill, range(0, rows, per_chunk)))
    return out


def _quantize(values: npt.NDArray[np.float32], type: str, out: npt.NDArray[np.uint8]) -> None:
    rows, columns = values.shape
    name = type.lower().replace("_k", "_K").encode()  # ggml's spelling: "q4_K"
    source: Any = ffi.from_buffer("float[]", values)
    target: Any = ffi.from_buffer(out)
    call(lib.slowar_quantize, name, source, rows, columns, target, out.nbytes)
