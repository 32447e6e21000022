"""A model: weights on devices that never change once it is open."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from . import device as _device
from . import errors, saved
from ._arrays import as_int
from ._batch import MOST, Batch, eval_batch
from ._native import Closing, Handle, call, ffi, lib, text
from .placement import (
    TABLES,
    Placed,
    default_places,
    fitting_layers,
    groups,
    overridden,
    placed_memory,
    split_layers,
)
from .prefix_cache import PrefixCache
from .session import MAX_POSITIONS, Session, as_threads, default_batch, session_params

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from ._batch import Item
    from .fast_ar import FastAR
    from .session import Logits, Output


T = TypeVar("T")


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
    offset: int
    """Where it begins in the file."""
    where: str
    """``"mapped"`` (in place in the file), ``"host"``, ``"repacked"`` or ``"device"``."""
    device: str
    """Name of the device that uses it: ``"CPU"``, ``"CUDA0"``, ..."""
    layer: int
    """-1: of none."""
    note: str
    """Why it is not on the device that was asked for; empty: it is."""


class Bytes(NamedTuple):
    host: int
    device: int


class Estimate(NamedTuple):
    """What ``Model.estimate`` says: bytes beside the CPU and on the devices together."""

    weights: Bytes
    """They are there already, unless the model was opened with ``load=False``."""
    kv: Bytes
    compute: Bytes


_MOST_BATCHES = 4  # combinations of thread count and extra ids with an evaluator of their own
_PLACES = ("mapped", "host", "repacked", "device")


class Model(Closing):
    """A Slow-AR model opened from a GGUF file.

    Parameters
    ----------
    path
        A GGUF file in the public S2 Pro layout. Tensors that the Slow-AR does not use are never
        read.
    backend
        ``"auto"`` (the first GPU, else the CPU; with ``servers`` those), ``"cpu"``, or the name of
        a backend compiled in: ``"cuda"``, ``"metal"``, ``"vulkan"``, ..., or ``"rpc"``. Case does
        not matter.
    device
        Which device of that backend, counted from 0, or several; None: the first, of servers all.
        Layers are split between several in proportion to their free memory.
    n_gpu_layers
        How many layers, from the first on, go to the devices; -1: all. When all are there, so are
        the last norm and the head, and the embedding tables where the device can look rows up in
        them (never on servers, which are not asked). Ignored on the CPU.
    servers
        ``"host:port"`` of device servers (``slowar serve-device``). What is sent there is neither
        encrypted nor authenticated.
    tensor_placement
        ``{pattern: device}``: tensors whose name matches the pattern (as ``fnmatch`` has it, the
        first that does) go to that device, ``"cpu"`` or the name or position of one of
        ``devices``. ``"output.weight"`` is the head, also where the file has none.
    mmap
        Use weights beside the CPU in place in the mapped file, where their alignment allows. The
        file must then not be cut short while the model is open. False: read them into memory.
    repack
        Rearrange layer matrices beside the CPU for its kernels, where there are such
        (``TensorInfo.where`` says which): a slower opening, and a copy in memory of what was a
        mapped file. Q4_K, Q6_K and Q8_0 give the same bits as mapped on CPUs with AVX2, K-quants
        and many sessions faster; other types and CPUs have what ggml has.
    load
        False: everything but the weights, to look at ``config``, ``tensors()``, ``placement()`` and
        ``estimate()``. Sessions cannot be opened.

    Raises
    ------
    FileNotFoundError, PermissionError, IsADirectoryError
        The file cannot be opened.
    ModelFormatError
        It is not a model that can be run; the message names the key or tensor.
    DeviceError
        The backend is not compiled in or has no such device, or a server does not answer.
    DeviceMemoryError
        The weights do not fit; the message says how many layers would.

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
        device: int | Sequence[int] | None = None,
        n_gpu_layers: int = -1,
        servers: Sequence[str] = (),
        tensor_placement: Mapping[str, str | int] | None = None,
        mmap: bool = True,
        repack: bool = False,
        load: bool = True,
    ) -> None:
        n_gpu_layers = as_int("n_gpu_layers", n_gpu_layers, -1, 2**31 - 1)
        self.path = os.fsdecode(path)
        if "\0" in self.path:
            raise ValueError(f"path is {self.path!r}: embedded null character")
        chosen = _device.choose(backend, device, servers)
        self.devices = [_device.device_at(i) for i in chosen]
        """What the layers are split between, or the CPU."""
        self.device = self.devices[0]
        self._file_state = saved.state_of(self.path)
        way = _Opening(self.path, chosen if self.device.is_gpu else [], mmap, repack)
        self._way = way
        self._device_bytes: list[int] = []
        self.n_gpu_layers = 0
        """Layers on devices, after clamping."""
        places: dict[str, int] = {}
        if way.devices:
            places = self._places(way, n_gpu_layers, tensor_placement or {})
        elif tensor_placement:
            raise ValueError("tensor_placement needs a device beside the CPU")
        try:
            self._handle = way.open(places, load=load)
        except errors.DeviceMemoryError as error:
            raise (self._suggesting(error) if self.n_gpu_layers > 0 else error) from None
        pointer = self._handle._pointer

        self.config = config_of(pointer, Config)
        info = info_of(pointer)
        self.nbytes = weight_bytes(info)
        """Bytes of weights, wherever they are."""
        self.n_params: int = info.n_params
        self._n_tensors: int = info.n_tensors
        self._lock = threading.RLock()  # a signal handler may call while it is held
        self._process = os.getpid()
        self._batches: dict[tuple[int, bool, tuple[int, ...]], Batch] = {}
        self._fingerprint: bytes | None = None
        self._fast: FastAR | None = None
        tensors = self.tensors() if self._names else []
        self._device_bytes = [
            sum(t.nbytes for t in tensors if t.device == name) for name in self._names
        ]
        if n_gpu_layers > self.n_gpu_layers:
            why = (
                f"the model has {self.config.n_layer}"
                if self.device.is_gpu
                else "the device is the CPU"
            )
            warnings.warn(
                f"n_gpu_layers={n_gpu_layers} clamped to {self.n_gpu_layers}: {why}", stacklevel=2
            )

    def _places(
        self, way: _Opening, n_gpu_layers: int, rules: Mapping[str, str | int]
    ) -> dict[str, int]:
        """Which of the devices each tensor goes to."""
        plan = way.look({})
        n_layer = 1 + max(t.layer for t in plan)
        self.n_gpu_layers = n_layer if n_gpu_layers < 0 else min(n_gpu_layers, n_layer)
        free = [d.memory_free for d in self.devices]
        layers = split_layers(n_layer, self.n_gpu_layers, free)
        names = [d.name for d in self.devices]

        def placed(*, tables: bool) -> dict[str, int]:
            places = default_places(layers, tables=tables)
            places |= {t.name: layers[t.layer] for t in plan if t.layer >= 0}
            return overridden(places, rules, names)

        # ggml cannot ask a server what it is able to do, and rows of a table are cheap to send.
        if self.device.backend != "RPC":
            places = placed(tables=True)
            # Both tables or none: apart, they cost a look-up on each side.
            if not any(t.note for t in way.look(places) if t.name in TABLES):
                return places
        return placed(tables=False)

    def _suggesting(
        self, error: errors.DeviceMemoryError, kv: int = 0, compute: int = 0
    ) -> errors.DeviceMemoryError:
        """``error`` with the number of layers that would fit.

        Beside a layer's weights are ``kv`` bytes of its cache, and ``compute`` on every device.
        """
        layers = [kv] * self.n_gpu_layers
        for t in self._way.look({}):
            if 0 <= t.layer < self.n_gpu_layers:
                layers[t.layer] += t.nbytes
        free = [_device.device_at(i).memory_free for i in self._way.devices]
        if self._device_bytes:  # the weights there would make room for fewer
            free = [f + n for f, n in zip(free, self._device_bytes, strict=True)]
        n = fitting_layers(layers, free, compute)
        hint = f"n_gpu_layers={n} would fit" if n > 0 else "not one layer would fit"
        return errors.DeviceMemoryError(f"{error}; {hint}")

    def _suggesting_for(
        self, error: errors.DeviceMemoryError, max_seq_len: int, **options: Any
    ) -> errors.DeviceMemoryError:
        """The same for a session with a cache of ``max_seq_len`` positions."""
        if self.n_gpu_layers == 0:
            return error
        try:
            memory = self._estimated(max_seq_len, **options)
        except errors.SlowARError:
            return error  # too large for any memory
        kv = (memory.kv.host + sum(memory.kv.device)) // self.config.n_layer
        return self._suggesting(error, kv, max(memory.compute.device))

    @property
    def _names(self) -> list[str]:
        """Of the devices beside the CPU."""
        return [d.name for d in self.devices] if self._way.devices else []

    def placement(self, max_seq_len: int | None = None, **options: Any) -> list[Placed]:
        """Device and bytes of every group of tensors, of a session's cache, and of its compute.

        Parameters
        ----------
        max_seq_len
            Positions of the cache; None: the context that the model was trained for.
        options
            ``kv_type``, ``attention``, ``kv_placement``, ``chunk``, ``n_threads``, as ``estimate``
            has them.
        """
        length = self.config.n_ctx if max_seq_len is None else max_seq_len
        memory = self._estimated(length, **options)
        rows = [(t.name, t.layer, t.device, t.nbytes, t.note) for t in self.tensors()]
        return groups(rows) + placed_memory(memory, self._names)

    def session(
        self,
        max_seq_len: int | None = None,
        *,
        n_threads: int | None = None,
        attention: str = "auto",
        kv_type: str = "f16",
        logits: Logits = "full",
        extra_ids: Sequence[int] = (),
        own_compute: bool = True,
        kv_placement: str = "auto",
    ) -> Session:
        """A new session on this model.

        Parameters
        ----------
        max_seq_len
            Positions its KV cache holds (prompt and new tokens together). None: call
            ``init_kv_cache`` later.
        n_threads
            CPU threads of an evaluation, 1 to 512; None: ``default_threads()``, and fewer while the
            machine is shared.
        attention
            ``"flash"`` stores keys and values first and reads them in place: fast, and how a prompt
            is cut shows only in rounding (about 3e-5). ``"reference"`` is the documented graph.
            ``"ggml"`` is flash by ggml's own kernels everywhere. ``"auto"``: flash where the device
            has every operation it needs, else reference; ``Session.attention`` says which.
        kv_type
            Of the cache: ``"f16"``, ``"bf16"``, ``"f32"`` or ``"q8_0"`` (head size a multiple
            of 32).
        logits
            What evaluations give unless they are told otherwise: ``"full"`` (n_vocab,),
            ``"semantic"`` (the semantic ids, then ``extra_ids``) or ``"none"``.
        extra_ids
            Token ids whose logits follow the semantic ones, such as 151645, ``<|im_end|>``.
        own_compute
            Set compute memory aside with the cache, so that no later evaluation wants more. False
            for a session that is only evaluated in batches, which have their own.
        kv_placement
            ``"layers"``: each layer's keys and values beside its weights. ``"gpu"``: all on the
            first device as soon as a layer is there, so that all attention runs there. ``"auto"``:
            ``"gpu"`` for the reference, as it is documented, else ``"layers"``.

        Raises
        ------
        TypeError, ValueError
            An argument is out of range; the message names it.
        DeviceError
            ``attention="flash"`` and the device lacks an operation.
        DeviceMemoryError
            The cache does not fit.
        """
        return Session(
            self,
            max_seq_len,
            n_threads=n_threads,
            attention=attention,
            kv_type=kv_type,
            logits=logits,
            extra_ids=extra_ids,
            own_compute=own_compute,
            kv_placement=kv_placement,
        )

    def fast_ar(self) -> FastAR:
        """The Fast-AR of the same file, opened when it is first asked for, closed with the model.

        Raises
        ------
        ModelFormatError
            The file has none, or one that cannot be run.
        SessionStateError
            The model is closed.
        """
        from .fast_ar import FastAR

        with self._lock:
            self._handle.check()
            if self._fast is None:
                self._fast = FastAR(self)
            return self._fast

    # ---- several sessions at once

    def eval_batch(
        self,
        items: Sequence[Item],
        *,
        logits: Logits | None = None,
        chunk: int = 512,
    ) -> Output:
        """Evaluate positions of several sessions in one graph: every weight is read once for all.

        Parameters
        ----------
        items
            1 to 128 pairs (session, tokens): sessions on this model, each at most once, and
            integers of shape (1 + n_codebook, n) as ``Session.prefill`` takes them. Sessions may
            differ in position, cache size and KV type; all use the reference attention or none.
        logits
            ``"full"``, ``"semantic"`` or ``"none"``; None: as the sessions were opened, which must
            agree. For semantic logits they must have the same ``extra_ids``.
        chunk
            Positions of one evaluation: longer prompts are cut, the first sessions first.

        Returns
        -------
        Output
            Stacked in the order of ``items``: hidden (n items, n_embd), logits (n items, ids).

        Raises
        ------
        TypeError, ValueError, ContextFullError, SessionStateError
            The message names the item. No session has moved.
        DeviceMemoryError, ComputeError
            No session has moved.
        """
        return eval_batch(self, items, logits, as_int("chunk", chunk, 1, MAX_POSITIONS))

    def step_batch(
        self,
        sessions: Sequence[Session],
        frames: npt.ArrayLike,
        *,
        logits: Logits | None = None,
    ) -> Output:
        """One position for each session: ``frames`` are integers (n sessions, 1 + n_codebook).

        Otherwise as ``eval_batch``.
        """
        rows = np.asanyarray(frames)  # a mask must come to the gate
        if rows.ndim != 2 or len(rows) != len(sessions):
            raise ValueError(
                f"frames have shape {rows.shape}, expected "
                f"({len(sessions)}, {1 + self.config.n_codebook}): one for each session"
            )
        return eval_batch(self, list(zip(sessions, rows, strict=True)), logits, MOST, frames=True)

    def prefill_batch(
        self,
        sessions: Sequence[Session],
        prompts: Sequence[npt.ArrayLike],
        *,
        logits: Logits | None = None,
        chunk: int = 512,
    ) -> Output:
        """A prompt for each session, of any lengths. Otherwise as ``eval_batch``."""
        if len(prompts) != len(sessions):
            raise ValueError(f"{len(prompts)} prompts for {len(sessions)} sessions")
        return self.eval_batch(
            list(zip(sessions, prompts, strict=True)), logits=logits, chunk=chunk
        )

    def _batch_for(self, sessions: Sequence[Session], *, semantic: bool) -> Batch:
        self._handle.check()
        adapt = all(s._threads.adapts for s in sessions)
        extra_ids = sessions[0].extra_ids if semantic else ()
        key = (max(s.n_threads for s in sessions), adapt, extra_ids)
        batch = self._batches.get(key)
        if batch is None:
            made = Batch(self, n_threads=key[0], adapt=adapt, extra_ids=extra_ids)
            with self._lock:
                if self._handle.closed:
                    made.close()
                    raise errors.SessionStateError("the model is closed")
                batch = self._batches.setdefault(key, made)
                while len(self._batches) > _MOST_BATCHES:
                    del self._batches[next(iter(self._batches))]  # closed by who uses it last
            if batch is not made:
                made.close()
        return batch

    # ---- pasts as values

    def load_session(self, path: str | os.PathLike[str], **options: Any) -> Session:
        """A new session with the past that ``Session.save`` wrote.

        Parameters
        ----------
        path
            A file of this very model: same hyper-parameters, tensors and weights.
        options
            As ``session`` has them; ``max_seq_len`` is by default that of the saved session, and
            KV type and kind of attention are the file's.

        Raises
        ------
        FileNotFoundError, PermissionError, IsADirectoryError
            The file cannot be opened.
        ModelFormatError
            It is not such a file, was cut or altered, or is of another model.
        ContextFullError
            ``max_seq_len`` is less than the positions in it.
        """
        return saved.load(self, Path(os.fsdecode(path)), options)

    def prefix_cache(self, max_bytes: int) -> PrefixCache:
        """A cache of prompts' keys and values for ``Session.prefill(..., cache=...)``.

        Parameters
        ----------
        max_bytes
            Of host memory; what was used longest ago makes room.
        """
        return PrefixCache(self, as_int("max_bytes", max_bytes, 1, 2**62))

    def fingerprint(self) -> bytes:
        """SHA-256 of the hyper-parameters, the tensor table and samples of every tensor's bytes.

        The file is read for it, the first time.

        Raises
        ------
        OSError
            It cannot be read any more.
        SessionStateError
            It has changed since it was opened.
        """
        self._handle.check()
        if self._fingerprint is None:
            self._fingerprint = saved.fingerprint(self)
        return self._fingerprint

    def estimate(
        self,
        max_seq_len: int,
        *,
        n_sessions: int = 1,
        kv_type: str = "f16",
        attention: str = "auto",
        chunk: int | None = None,
        kv_placement: str = "auto",
        n_threads: int | None = None,
    ) -> Estimate:
        """The memory that sessions would take, before it is taken.

        Parameters
        ----------
        max_seq_len, kv_type, attention, kv_placement, n_threads
            As ``session`` has them: each thread works in memory of its own.
        n_sessions
            How many of them, each with compute memory of its own.
        chunk
            Positions of the longest evaluation; None: what a session sets aside.

        Returns
        -------
        Estimate
            Bytes, beside the CPU and on the devices, without those of batches. What a prefill at
            once (the reference's way) needs grows with its length: say it as ``chunk``.
        """
        n_sessions = as_int("n_sessions", n_sessions, 0, 2**30)
        memory = self._estimated(
            max_seq_len,
            kv_type=kv_type,
            attention=attention,
            chunk=chunk,
            kv_placement=kv_placement,
            n_threads=n_threads,
        )
        n_device = sum(self._device_bytes)
        return Estimate(
            weights=Bytes(self.nbytes - n_device, n_device),
            kv=_bytes(memory.kv, n_sessions),
            compute=_bytes(memory.compute, n_sessions),
        )

    def _estimated(
        self,
        max_seq_len: int,
        *,
        kv_type: str = "f16",
        attention: str = "auto",
        chunk: int | None = None,
        kv_placement: str = "auto",
        n_threads: int | None = None,
    ) -> Any:
        """The ``slowar_session_memory`` of one session."""
        max_seq_len = as_int("max_seq_len", max_seq_len, 1, MAX_POSITIONS)
        size = (
            default_batch(attention) if chunk is None else as_int("chunk", chunk, 1, MAX_POSITIONS)
        )
        params, _keep = session_params(
            as_threads(n_threads), attention, kv_type, (), size, kv_placement
        )
        out = ffi.new("slowar_session_memory *")
        self._handle.run(lambda p: call(lib.slowar_session_estimate, p, params, max_seq_len, out))
        return out

    def tensors(self) -> list[TensorInfo]:
        """Every tensor the model uses, in the order of the forward pass."""
        names = self._names
        return self._handle.run(
            lambda pointer: [_tensor(pointer, i, names) for i in range(self._n_tensors)]
        )

    def close(self) -> None:
        """Give the model back; twice is fine.

        Open sessions keep its weights until they are closed, and can be evaluated, but neither
        forked nor evaluated together.
        """
        self._handle.close()
        if os.getpid() == self._process:
            with self._lock:
                batches, self._batches = self._batches, {}
                fast, self._fast = self._fast, None
            if fast is not None:
                fast.close()
            for batch in batches.values():
                batch.close()

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._handle.closed
            else f"{self.nbytes / 2**20:.0f} MiB on {self.device.name}"
        )
        return f"<Model {self.path!r}: {self.config.n_layer} layers, {state}>"


def config_of(pointer: Any, kind: type[T]) -> T:
    """The hyper-parameters that the dataclass ``kind`` names."""
    config = ffi.new("slowar_config *")
    call(lib.slowar_model_config, pointer, config)
    return kind(**{f.name: getattr(config, f.name) for f in fields(kind)})  # type: ignore[arg-type]


def info_of(pointer: Any) -> Any:
    """The ``slowar_model_info``."""
    info = ffi.new("slowar_model_info *")
    call(lib.slowar_model_get_info, pointer, info)
    return info


def weight_bytes(info: Any) -> int:
    places = (info.n_bytes_mapped, info.n_bytes_host, info.n_bytes_repacked, info.n_bytes_device)
    return sum(places)


def _bytes(taken: Any, n_sessions: int) -> Bytes:
    return Bytes(n_sessions * taken.host, n_sessions * sum(taken.device))


@dataclass(frozen=True)
class _Opening:
    """How a file is opened, wherever its tensors go."""

    path: str
    devices: list[int]
    mmap: bool
    repack: bool
    part: int = 0  # SLOWAR_PART_SLOW

    def open(self, places: Mapping[str, int], *, load: bool) -> Handle:
        params = ffi.new("slowar_model_params *")
        names = [ffi.new("char[]", name.encode()) for name in places]
        keep = (
            ffi.new("int32_t[]", self.devices),
            ffi.new("char *[]", names),
            ffi.new("int32_t[]", list(places.values())),
        )
        params.devices, params.names, params.places = keep
        params.n_devices = len(self.devices)
        params.n_places = len(names)
        params.part = self.part
        params.use_mmap = self.mmap
        params.repack = self.repack
        params.load = load
        out = ffi.new("slowar_model **")
        call(lib.slowar_model_open, out, os.fsencode(self.path), params, path=self.path)
        return Handle(out[0], lib.slowar_model_close, "model")

    def look(self, places: Mapping[str, int]) -> list[TensorInfo]:
        """The tensors, where they would be."""
        handle = self.open(places, load=False)
        names = [""] * len(self.devices)
        n = info_of(handle._pointer).n_tensors
        tensors = [_tensor(handle._pointer, i, names) for i in range(n)]
        handle.close()
        return tensors


def _tensor(pointer: object, i: int, devices: Sequence[str]) -> TensorInfo:
    t = ffi.new("slowar_tensor *")
    call(lib.slowar_model_get_tensor, pointer, i, t)
    return TensorInfo(
        name=text(t.name),
        type=text(t.type),
        shape=tuple(reversed([int(n) for n in t.ne[0 : t.n_dims]])),
        nbytes=t.n_bytes,
        offset=t.offset,
        where=_PLACES[t.place],
        device=devices[t.device] if t.device >= 0 else "CPU",
        layer=t.layer,
        note=text(t.reason),
    )
