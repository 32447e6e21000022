"""A session: the KV cache and the position of one sequence, and the calls that move it forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from . import errors
from ._arrays import Flat, as_frame, as_int, as_prompt
from ._native import Closing, Handle, call, ffi, lib, text
from ._threads import Threads
from .device import default_threads
from .model import Model

T = TypeVar("T")

Progress = Callable[[int, int], object]
"""Called after each chunk with (positions done, positions in all)."""

_MAX_THREADS = 512  # GGML_MAX_N_THREADS
_MAX_POSITIONS = 2**30 - 1  # positions are int32 and their sums must be too


Logits = Literal["full", "semantic", "none"]
"""Which logits an evaluation gives."""

_LOGITS = {"none": 0, "semantic": 1, "full": 2}
_ATTENTION = {"auto": 0, "reference": 1, "flash": 2, "ggml": 3}
_BATCH = 512  # positions of a prefill chunk of the flash path: bounds the compute memory


class Output(NamedTuple):
    """What one evaluation says of its last position. The first two arrays are the caller's own."""

    hidden: npt.NDArray[np.float32]
    """(n_embd,) what the Fast-AR takes."""
    logits: npt.NDArray[np.float32]
    """Unnormalised scores of the next token: (n_vocab,), or fewer when fewer were asked for."""
    ids: npt.NDArray[np.int32]
    """The token id of each of the logits. Read-only and shared."""


@dataclass(frozen=True)
class Node:
    """A node of an evaluation's graph. ``shape`` is numpy order, four dimensions."""

    name: str
    op: str
    type: str
    shape: tuple[int, int, int, int]


def prefill_chunk(n_semantic: int, *, n_gpu_layers: int, single_token_semantic: bool) -> int | None:
    """Positions per evaluation of ``Session.prefill``: the documented policy of the reference path.

    Parameters
    ----------
    n_semantic
        Semantic positions in the prompt.
    n_gpu_layers
        Layers on a GPU; 0 on the CPU.
    single_token_semantic
        The backend evaluates semantic positions one at a time (CUDA, in the reference).

    Returns
    -------
    int or None
        None: the whole prompt at once.
    """
    if n_gpu_layers == 0:
        return None
    if n_semantic > 1 and single_token_semantic:
        return 1
    return min(max(128 // n_gpu_layers, 8), 64)


class Session(Closing):
    """One sequence on a model.

    A call that fails, by whatever cause, leaves the position and every later result as if it had
    not been made. Calls from several threads are served one after the other.

    Parameters
    ----------
    model
        An open model.
    max_seq_len
        Positions the KV cache holds; None: ``init_kv_cache`` later.
    n_threads, attention, kv_type, logits, extra_ids
        As ``Model.session`` has them, which also says what is raised.
    """

    def __init__(
        self,
        model: Model,
        max_seq_len: int | None = None,
        *,
        n_threads: int | None = None,
        attention: str = "auto",
        kv_type: str = "f16",
        logits: Logits = "full",
        extra_ids: Sequence[int] = (),
    ) -> None:
        adapt = n_threads is None
        n_threads = default_threads() if n_threads is None else n_threads
        n_threads = as_int("n_threads", n_threads, 1, _MAX_THREADS)
        self._threads = Threads(n_threads, adapt=adapt)
        c = model.config
        extra = [as_int("an extra id", i, 0, c.n_vocab - 1) for i in extra_ids]
        self.model = model
        self._config = c
        self._logits = _one_of("logits", logits, _LOGITS)
        semantic = np.arange(c.semantic_begin_id, c.semantic_end_id + 1)
        self._ids = {
            _LOGITS["none"]: _read_only(np.empty(0)),
            _LOGITS["semantic"]: _read_only(np.concatenate([semantic, extra])),
            _LOGITS["full"]: _read_only(np.arange(c.n_vocab)),
        }

        params = ffi.new("slowar_session_params *")
        params.n_threads = n_threads
        params.attention = _one_of("attention", attention, _ATTENTION)
        name = ffi.new("char[]", _c_string("kv_type", kv_type))
        params.kv_type = name
        params.n_batch = 0 if attention == "reference" else _BATCH
        ids = ffi.new("int32_t[]", extra)
        params.extra_ids = ids
        params.n_extra_ids = len(extra)
        out = ffi.new("slowar_session **")
        model._handle.run(lambda pointer: call(lib.slowar_session_open, out, pointer, params))
        self._handle = Handle(out[0], lib.slowar_session_close, "session")
        self._state = ffi.new("slowar_session_state *")
        self._refresh(out[0])
        if max_seq_len is not None:
            self.init_kv_cache(max_seq_len)

    # ---- the cache

    def init_kv_cache(self, max_seq_len: int) -> None:
        """Allocate a zeroed KV cache, and compute memory for its far end; position 0.

        The memory is that of a step and, with flash attention, of 512 positions.

        An earlier cache is given back first.

        Parameters
        ----------
        max_seq_len
            Positions it holds: prompt and new tokens together.

        Raises
        ------
        TypeError, ValueError
            ``max_seq_len`` is not an integer of at least 1. The session keeps the cache it had.
        DeviceMemoryError
            It does not fit. The session then has no cache, and a smaller one can be made.
        """
        max_seq_len = as_int("max_seq_len", max_seq_len, 1, _MAX_POSITIONS)

        def make(pointer: Any) -> None:
            try:
                call(lib.slowar_init_kv_cache, pointer, max_seq_len)
            finally:
                self._refresh(pointer)

        self._handle.run(make)
        if max_seq_len > self._config.n_ctx:
            warnings.warn(
                f"max_seq_len={max_seq_len} is beyond the model's context of {self._config.n_ctx}",
                stacklevel=2,
            )

    def clear_kv_cache(self) -> None:
        """Give the cache's and the compute memory back. Without a cache: nothing happens."""

        def clear(pointer: Any) -> None:
            call(lib.slowar_clear_kv_cache, pointer)
            self._refresh(pointer)

        self._handle.run(clear)

    def rewind(self, n_past: int) -> None:
        """Forget the positions from ``n_past`` (0 to the position) on. Memory is kept."""
        n_past = as_int("n_past", n_past, 0, _MAX_POSITIONS)
        self._handle.run(lambda pointer: self._rewind(pointer, n_past))

    def reset(self) -> None:
        """Back to position 0. Memory is kept."""
        self.rewind(0)

    # ---- evaluating

    def prefill(
        self,
        tokens: npt.ArrayLike,
        *,
        chunk: int | None = None,
        progress: Progress | None = None,
        logits: Logits | None = None,
    ) -> Output:
        """Evaluate a prompt, in chunks where that pays.

        Parameters
        ----------
        tokens
            Integers of shape (1 + n_codebook, n): row 0 token ids, the rows below codes. Codes of
            positions whose id is not semantic are ignored. Any integer dtype, byte order and
            layout.
        chunk
            Positions per evaluation; None: 512 with flash attention, ``prefill_chunk`` with the
            reference, whose results depend slightly on it: it keeps the past in F16 and the current
            chunk not.
        progress
            Called with (positions done, n) after each chunk. What it raises ends the prefill.

        logits
            ``"full"``, ``"semantic"`` or ``"none"``; None: as the session was opened.

        Returns
        -------
        Output
            Of the last position.

        Raises
        ------
        TypeError, ValueError
            Not integers, a wrong shape, or a value out of range: row, column, value and range are
            named.
        ContextFullError
            The prompt does not fit behind the position.
        SessionStateError, DeviceMemoryError, ComputeError
        """
        flat = as_prompt(tokens, self._config)
        size = (
            self._default_chunk(flat)
            if chunk is None
            else as_int("chunk", chunk, 1, _MAX_POSITIONS)
        )
        return self._evaluate(flat, logits, size, progress)

    def prefill_fast(self, tokens: npt.ArrayLike, *, logits: Logits | None = None) -> Output:
        """Evaluate a prompt of shape (1 + n_codebook, n) at once. Otherwise as ``prefill``."""
        return self._evaluate(as_prompt(tokens, self._config), logits)

    def step(self, frame: npt.ArrayLike, *, logits: Logits | None = None) -> Output:
        """Evaluate one position: integers of shape (1 + n_codebook,), the token id first.

        Otherwise as ``prefill``.
        """
        return self._evaluate(as_frame(frame, self._config), logits)

    def _default_chunk(self, flat: Flat) -> int | None:
        if self.attention != "reference":
            return _BATCH
        c = self._config
        semantic = (flat[:, 0] >= c.semantic_begin_id) & (flat[:, 0] <= c.semantic_end_id)
        return prefill_chunk(
            int(np.count_nonzero(semantic)),
            n_gpu_layers=self.model.n_gpu_layers,
            single_token_semantic=self.model.device.backend == "CUDA",
        )

    def _evaluate(
        self,
        flat: Flat,
        logits: Logits | None,
        chunk: int | None = None,
        progress: Progress | None = None,
    ) -> Output:
        which = self._logits if logits is None else _one_of("logits", logits, _LOGITS)
        size = chunk or len(flat)
        return self._handle.run(lambda pointer: self._run(pointer, flat, which, size, progress))

    def _run(
        self, pointer: Any, flat: Flat, which: int, chunk: int, progress: Progress | None = None
    ) -> Output:
        """All positions of ``flat`` or none: the way of every evaluation."""
        n = len(flat)
        start = self.n_past
        if self.max_seq_len == 0:
            raise errors.SessionStateError("no KV cache: call init_kv_cache first")
        if n > self.max_seq_len - start:
            raise errors.ContextFullError(
                f"{n} positions do not fit behind position {start} in a cache of {self.max_seq_len}"
            )
        if chunk < n:
            # A bad id in the last chunk must not cost the evaluation of the first.
            call(lib.slowar_check_tokens, pointer, _int32(flat), n)
        ids = self._ids[which]

        def chunks() -> Output:
            hidden = np.empty(self._config.n_embd, np.float32)
            logits = np.empty(len(ids), np.float32)
            for at in range(0, n, chunk):
                part = flat[at : at + chunk]
                last = at + chunk >= n
                mark = self._threads.before()
                call(
                    lib.slowar_eval_cached,
                    pointer,
                    _int32(part),
                    len(part),
                    which,
                    self._threads.n,
                    _float32(hidden) if last else ffi.NULL,
                    _float32(logits) if last and which else ffi.NULL,
                )
                self._threads.after(mark)
                self._refresh(pointer)
                if progress is not None:
                    progress(at + len(part), n)
            return Output(hidden, logits, ids)

        return self._all_or_nothing(pointer, chunks)

    # ---- looking inside

    def trace(
        self, tokens: npt.ArrayLike, names: Iterable[str]
    ) -> tuple[Output, dict[str, npt.NDArray[np.float32]]]:
        """Evaluate a prompt as ``prefill_fast`` does and also return named intermediate tensors.

        Parameters
        ----------
        tokens
            Integers of shape (1 + n_codebook, n).
        names
            Names of tensors of the graph, ``-layer`` behind those of a layer: ``embd``,
            ``attn_norm-0``, ``qkv-0``, ``q_rope-0``, ``k_rope-0``, ``attn_out-0``, ``ffn_inp-0``,
            ``ffn_norm-0``, ``ffn_out-0``, ``l_out-0``, ``result_norm``, ``hidden``, ``logits``;
            with the reference also ``v-0`` and ``attn_probs-0``.

        Returns
        -------
        Output, dict
            Each tensor as float32 in numpy order, positions first: ``attn_norm-0`` is (n, n_embd),
            ``q_rope-0`` is (n, n_head, head_dim), ``attn_probs-0`` is (n_head, n, n_past + n). Two
            dimensions at least. Flash computes only the last position behind the last layer's keys.

        Raises
        ------
        ValueError
            The graph has no such tensor. The position is unchanged.
        """
        flat = as_prompt(tokens, self._config)
        names = list(names)
        keep = [ffi.new("char[]", _c_string("a tensor's name", name)) for name in names]

        def evaluate(pointer: Any) -> tuple[Output, dict[str, npt.NDArray[np.float32]]]:
            output = self._run(pointer, flat, self._logits, len(flat))
            return output, {name: _trace(pointer, i) for i, name in enumerate(names)}

        def traced(pointer: Any) -> tuple[Output, dict[str, npt.NDArray[np.float32]]]:
            try:
                call(lib.slowar_trace_select, pointer, keep, len(keep))
                return self._all_or_nothing(pointer, lambda: evaluate(pointer))
            finally:
                call(lib.slowar_trace_select, pointer, ffi.NULL, 0)

        return self._handle.run(traced)

    def graph(self, n_tokens: int, n_past: int = 0) -> list[Node]:
        """What an evaluation of ``n_tokens`` at position ``n_past`` computes, in order."""
        n_tokens = as_int("n_tokens", n_tokens, 1, _MAX_POSITIONS)
        n_past = as_int("n_past", n_past, 0, _MAX_POSITIONS)
        count = ffi.new("int32_t *")

        def list_nodes(pointer: Any) -> list[Node]:
            call(lib.slowar_graph_nodes, pointer, n_past, n_tokens, ffi.NULL, 0, count)
            nodes = ffi.new("slowar_node[]", count[0])
            call(lib.slowar_graph_nodes, pointer, n_past, n_tokens, nodes, count[0], count)
            return [
                Node(text(n.name), text(n.op), text(n.type), (n.ne[3], n.ne[2], n.ne[1], n.ne[0]))
                for n in nodes
            ]

        return self._handle.run(list_nodes)

    # ---- state

    @property
    def n_past(self) -> int:
        """Positions in the cache."""
        self._handle.check()
        return int(self._state.n_past)

    @property
    def max_seq_len(self) -> int:
        """Positions the cache holds; 0: no cache."""
        self._handle.check()
        return int(self._state.max_seq_len)

    @property
    def attention(self) -> str:
        """``"flash"`` or ``"reference"``: what evaluations take. Known once there is a cache."""
        return "reference" if self._state.attention == _ATTENTION["reference"] else "flash"

    @property
    def n_threads(self) -> int:
        """CPU threads that an evaluation may use; the last one that was left to adapt may use fewer."""
        return int(self._state.n_threads)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache."""
        return int(self._state.n_bytes_kv)

    @property
    def compute_nbytes(self) -> int:
        """Bytes held for intermediate results; grows to what the longest evaluation needed."""
        return int(self._state.n_bytes_compute)

    def _all_or_nothing(self, pointer: Any, body: Callable[[], T]) -> T:
        """Back to where it began if ``body`` raises: an error, Ctrl-C, a callback's own."""
        start = self.n_past
        try:
            return body()
        except BaseException:
            if self.max_seq_len > 0:
                self._rewind(pointer, start)
            raise

    def _rewind(self, pointer: Any, n_past: int) -> None:
        call(lib.slowar_rewind, pointer, n_past)
        self._refresh(pointer)

    def _refresh(self, pointer: Any) -> None:
        call(lib.slowar_session_get_state, pointer, self._state)

    def __repr__(self) -> str:
        if self._handle.closed:
            return "<Session: closed>"
        return f"<Session: position {self._state.n_past} of {self._state.max_seq_len}>"


def _one_of(name: str, value: str, known: dict[str, int]) -> int:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    return known[value]


def _c_string(name: str, value: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, expected a str")
    if "\0" in value:
        raise ValueError(f"{name} is {value!r}: embedded null character")
    return value.encode()


def _read_only(ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    array = ids.astype(np.int32)
    array.flags.writeable = False
    return array


def _int32(array: Flat) -> Any:
    return ffi.from_buffer("int32_t[]", array)


def _float32(array: npt.NDArray[np.float32]) -> Any:
    return ffi.from_buffer("float[]", array)


def _trace(pointer: Any, i: int) -> npt.NDArray[np.float32]:
    ne = ffi.new("int64_t[4]")
    call(lib.slowar_trace_get, pointer, i, ne, ffi.NULL)
    shape = [int(n) for n in reversed(list(ne))]
    while len(shape) > 2 and shape[0] == 1:
        shape.pop(0)
    values = np.empty(shape, np.float32)
    call(lib.slowar_trace_get, pointer, i, ne, _float32(values))
    return values
