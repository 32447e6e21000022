"""A model: weights on devices that never change once it is open."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from . import device as _device
from ._arrays import as_int
from ._native import Closing, Handle, call, ffi, lib, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .session import Logits, Session


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of a model.

    All come from the GGUF metadata, ``head_dim`` from the weights.
    """

    n_ctx: int
    """Context the model was trained for, positions (``fish-speech.context_length``)."""
    n_vocab: int
    """Length of ``Output.logits``."""
    n_embd: int
    """Length of ``Output.hidden``."""
    n_ff: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    """Length of ``q_norm``, else columns of ``wo`` / heads; not n_embd / n_head, which is wrong for
    S2 Pro."""
    n_codebook: int
    """A position is 1 + n_codebook integers: the token id, then one code for each codebook."""
    codebook_size: int
    semantic_begin_id: int
    semantic_end_id: int
    """Inclusive. Positions whose id lies in begin ... end carry codes."""
    rope_freq_base: float
    norm_rms_eps: float
    attention_qk_norm: bool
    scale_codebook_embeddings: bool
    tie_word_embeddings: bool
    norm_fastlayer_input: bool
    """Whether ``Output.hidden`` is taken after the final norm."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as loaded. ``shape`` is numpy order, slowest first; ``type`` is ggml's name."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    where: str
    """``"mapped"`` (in place in the file), ``"host"``, ``"repacked"`` or ``"device"``."""


_PLACES = ("mapped", "host", "repacked", "device")


class Model(Closing):
    """A Slow-AR model opened from a GGUF file.

    Parameters
    ----------
    path
        A GGUF file in the public S2 Pro layout. Tensors that the Slow-AR does not use are never
        read.
    backend
        ``"auto"`` (the first GPU, else the CPU), ``"cpu"``, or the name of a backend compiled in:
        ``"cuda"``, ``"metal"``, ``"vulkan"``, ... Case does not matter.
    device
        Which device of that backend.
    n_gpu_layers
        How many layers, from the first on, go to the GPU; -1: all. Any layer there puts the
        whole KV cache there. The embedding tables, the final
        norm and the head follow when all layers are there and the device can look rows up in them.
        Ignored on the CPU.
    mmap
        Use weights beside the CPU in place in the mapped file, where their alignment allows. The
        file must then not be cut short while the model is open. False: read them into memory.

    repack
        Rearrange layer matrices beside the CPU for its kernels, for the types that ggml can
        (``TensorInfo.where`` says which): faster evaluations, a slower opening, and a copy in
        memory of what was a mapped file.

    Raises
    ------
    FileNotFoundError, PermissionError, IsADirectoryError
        The file cannot be opened.
    ModelFormatError
        It is not a model that can be run; the message names the key or tensor.
    DeviceError
        The backend is not compiled in or has no such device.
    DeviceMemoryError
        The weights do not fit.

    Notes
    -----
    The weights stay in memory until the model and every session on it are closed; the order does
    not matter.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        backend: str = "auto",
        device: int = 0,
        n_gpu_layers: int = -1,
        mmap: bool = True,
        repack: bool = False,
    ) -> None:
        n_gpu_layers = as_int("n_gpu_layers", n_gpu_layers, -1, 2**31 - 1)
        chosen = _device.choose(backend, as_int("device", device, 0, 2**31 - 1))
        self.path = os.fsdecode(path)
        if "\0" in self.path:
            raise ValueError(f"path is {self.path!r}: embedded null character")
        self.device = _device.devices()[chosen]

        params = ffi.new("slowar_model_params *")
        params.device = chosen if self.device.is_gpu else -1
        params.n_gpu_layers = n_gpu_layers
        params.use_mmap = mmap
        params.repack = repack
        out = ffi.new("slowar_model **")
        call(lib.slowar_model_open, out, os.fsencode(self.path), params, path=self.path)
        self._handle = Handle(out[0], lib.slowar_model_close, "model")

        config = ffi.new("slowar_config *")
        call(lib.slowar_model_config, out[0], config)
        self.config = Config(**{f.name: getattr(config, f.name) for f in fields(Config)})

        info = ffi.new("slowar_model_info *")
        call(lib.slowar_model_get_info, out[0], info)
        self.n_gpu_layers: int = info.n_gpu_layers
        """Layers on the GPU, after clamping."""
        self.nbytes: int = (
            info.n_bytes_mapped + info.n_bytes_host + info.n_bytes_repacked + info.n_bytes_device
        )
        """Bytes of weights, wherever they are."""
        self.n_params: int = info.n_params
        self._n_tensors: int = info.n_tensors
        if n_gpu_layers > self.n_gpu_layers:
            why = (
                f"the model has {self.config.n_layer}"
                if self.device.is_gpu
                else "the device is the CPU"
            )
            warnings.warn(
                f"n_gpu_layers={n_gpu_layers} clamped to {self.n_gpu_layers}: {why}", stacklevel=2
            )

    def session(
        self,
        max_seq_len: int | None = None,
        *,
        n_threads: int | None = None,
        attention: str = "auto",
        kv_type: str = "f16",
        logits: Logits = "full",
        extra_ids: Sequence[int] = (),
    ) -> Session:
        """A new session on this model.

        Parameters
        ----------
        max_seq_len
            Positions its KV cache holds (prompt and new tokens together). None: call
            ``init_kv_cache`` later.
        n_threads
            CPU threads of an evaluation, 1 to 512; None: ``default_threads()``.
        attention
            ``"flash"`` stores keys and values first and reads them in place: fast, and how a prompt
            is cut shows only in rounding (about 2e-5). ``"reference"`` is the documented graph.
            ``"ggml"`` is flash by ggml's own kernel everywhere. ``"auto"``: flash where the device
            has every operation it needs, else reference; ``Session.attention`` says which.
        kv_type
            Of the cache: ``"f16"``, ``"bf16"``, ``"f32"`` or ``"q8_0"`` (head size a multiple
            of 32).
        logits
            What evaluations give unless they are told otherwise: ``"full"`` (n_vocab,),
            ``"semantic"`` (the semantic ids, then ``extra_ids``) or ``"none"``.
        extra_ids
            Token ids whose logits follow the semantic ones, such as 151645, ``<|im_end|>``.

        Raises
        ------
        TypeError, ValueError
            An argument is out of range; the message names it.
        DeviceError
            ``attention="flash"`` and the device lacks an operation.
        DeviceMemoryError
            The cache does not fit.
        """
        from .session import Session

        return Session(
            self,
            max_seq_len,
            n_threads=n_threads,
            attention=attention,
            kv_type=kv_type,
            logits=logits,
            extra_ids=extra_ids,
        )

    def tensors(self) -> list[TensorInfo]:
        """Every tensor the model uses, in the order of the forward pass."""
        return self._handle.run(
            lambda pointer: [_tensor(pointer, i) for i in range(self._n_tensors)]
        )

    def close(self) -> None:
        """Give the model back; twice is fine.

        Open sessions keep its weights until they are closed.
        """
        self._handle.close()

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._handle.closed
            else f"{self.nbytes / 2**20:.0f} MiB on {self.device.name}"
        )
        return f"<Model {self.path!r}: {self.config.n_layer} layers, {state}>"


def _tensor(pointer: object, i: int) -> TensorInfo:
    t = ffi.new("slowar_tensor *")
    call(lib.slowar_model_get_tensor, pointer, i, t)
    shape = tuple(reversed([int(n) for n in t.ne[0 : t.n_dims]]))
    return TensorInfo(text(t.name), text(t.type), shape, t.n_bytes, _PLACES[t.place])
