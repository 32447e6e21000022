"""A session: the KV cache and the position of one sequence, and the calls that move it forward."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from . import errors, saved
from ._arrays import Flat, as_frame, as_int, as_prompt, check_tokens
from ._native import Closing, Handle, call, ffi, lib, text, together
from ._threads import Threads
from .device import default_threads
from .placement import Placed, placed_memory

if TYPE_CHECKING:
    from .model import Model
    from .prefix_cache import PrefixCache

T = TypeVar("T")

Progress = Callable[[int, int], object]
"""Called after each chunk with (positions done, positions in all)."""

MAX_THREADS = 512  # GGML_MAX_N_THREADS
MAX_POSITIONS = 2**30 - 1  # positions are int32 and their sums must be too


Logits = Literal["full", "semantic", "none"]
"""Which logits an evaluation gives."""

LOGITS = {"none": 0, "semantic": 1, "full": 2}
_ATTENTION = {"auto": 0, "reference": 1, "flash": 2, "ggml": 3}
_KV_PLACEMENT = {"auto": 0, "layers": 1, "gpu": 2}
_BATCH = 512  # positions of a prefill chunk of the flash path: bounds the compute memory


class Output(NamedTuple):
    """What one evaluation says of its last position. The first two arrays are the caller's own.

    Of ``Model.eval_batch`` and its kin they have one row for each session.
    """

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
    device: str
    """Name of the device that runs it; empty for a view, which nothing runs."""


@dataclass(frozen=True)
class Fallback:
    """An operation that the CPU does because the device of its layer cannot."""

    op: str
    """ggml's name: ``"SET_ROWS"``."""
    layer: int
    """-1: before the first layer; n_layer: behind the last."""
    device: str
    reason: str


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
    n_threads, attention, kv_type, logits, extra_ids, own_compute, kv_placement
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
        own_compute: bool = True,
        kv_placement: str = "auto",
    ) -> None:
        adapt = n_threads is None
        n_threads = as_threads(n_threads)
        self._threads = Threads(n_threads, adapt=adapt)
        c = model.config
        extra = [as_int("an extra id", i, 0, c.n_vocab - 1) for i in extra_ids]
        self.model = model
        self._config = c
        self._logits = one_of("logits", logits, LOGITS)
        semantic = np.arange(c.semantic_begin_id, c.semantic_end_id + 1)
        self._ids = {
            LOGITS["none"]: _read_only(np.empty(0)),
            LOGITS["semantic"]: _read_only(np.concatenate([semantic, extra])),
            LOGITS["full"]: _read_only(np.arange(c.n_vocab)),
        }

        self.extra_ids = tuple(extra)
        """Token ids whose logits follow the semantic ones."""
        self.kv_type = kv_type
        """Of the cache."""
        self._asked = attention
        self._own_compute = own_compute
        self._kv_placement = kv_placement
        self._tokens = np.empty((0, 1 + c.n_codebook), np.int32)

        n_batch = default_batch(attention) if own_compute else -1
        params, _keep = session_params(n_threads, attention, kv_type, extra, n_batch, kv_placement)
        out = ffi.new("slowar_session **")
        model._handle.run(lambda pointer: call(lib.slowar_session_open, out, pointer, params))
        self._handle = Handle(out[0], lib.slowar_session_close, "session")
        self._state = ffi.new("slowar_session_state *")
        self._refresh(out[0])
        if max_seq_len is not None:
            try:
                self.init_kv_cache(max_seq_len)
            except BaseException:  # whoever keeps it would keep the weights, too
                self.close()
                raise

    # ---- the cache

    def init_kv_cache(self, max_seq_len: int) -> None:
        """Allocate a zeroed KV cache, and compute memory for its far end; position 0.

        The compute memory is that of a step and, with flash attention, of 512 positions; with
        ``own_compute=False`` there is none.

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
        max_seq_len = as_int("max_seq_len", max_seq_len, 1, MAX_POSITIONS)
        self._allocate(lib.slowar_init_kv_cache, max_seq_len)
        self._warn_of_length(max_seq_len)

    def reserve(self, max_seq_len: int) -> None:
        """Make room for ``max_seq_len`` positions and keep those there are.

        The larger cache and the smaller exist together while the past is copied. A cache that is
        large enough already stays as it is.

        Raises
        ------
        TypeError, ValueError
            ``max_seq_len`` is not an integer of at least 1.
        DeviceMemoryError
            It does not fit. The session keeps the cache it had.
        SessionStateError
            There is no cache.
        """
        max_seq_len = as_int("max_seq_len", max_seq_len, 1, MAX_POSITIONS)
        self._allocate(lib.slowar_reserve, max_seq_len)
        self._warn_of_length(max_seq_len)

    def clear_kv_cache(self) -> None:
        """Give the cache's and the compute memory back. Without a cache: nothing happens."""
        self._change(lib.slowar_clear_kv_cache)

    def rewind(self, n_past: int) -> None:
        """Forget the positions from ``n_past`` (0 to the position) on. Memory is kept."""
        self._change(lib.slowar_rewind, as_int("n_past", n_past, 0, MAX_POSITIONS))

    def reset(self) -> None:
        """Back to position 0. Memory is kept."""
        self.rewind(0)

    def fork(self) -> Session:
        """An independent session with the same past, cache size and options.

        Only the used slots are copied. The model must be open.

        Raises
        ------
        DeviceMemoryError
            A second cache does not fit.
        SessionStateError
            There is no cache.
        """
        self._check_cache()
        twin = Session(
            self.model,
            n_threads=None if self._threads.adapts else self.n_threads,
            attention=self._asked,
            kv_type=self.kv_type,
            logits=_name_of(self._logits),
            extra_ids=self.extra_ids,
            own_compute=self._own_compute,
            kv_placement=self._kv_placement,
        )
        try:
            twin._allocate(lib.slowar_init_kv_cache, self.max_seq_len)
            twin.copy_prefix(self)
        except BaseException:
            twin.close()
            raise
        return twin

    def copy_prefix(self, other: Session, n: int | None = None) -> None:
        """The first ``n`` positions of ``other`` become all that this session has.

        Parameters
        ----------
        other
            A session with the same model, KV type and attention.
        n
            0 to ``other.n_past``, at most this session's ``max_seq_len``; None: all of them.

        Raises
        ------
        TypeError, ValueError
            ``n`` is out of range, or the sessions do not match. Nothing has changed.
        SessionStateError
            One of them has no cache.

        Notes
        -----
        Ctrl-C in the middle of it leaves this session at position 0.
        """
        if n is not None:
            n = as_int("n", n, 0, MAX_POSITIONS)
        if other is self:
            self.rewind(self.n_past if n is None else n)
            return
        if other.model is not self.model:
            raise ValueError("the other session is on another model")

        def copy(pointers: list[Any]) -> None:
            self._refresh(pointers[0])
            other._refresh(pointers[1])
            self._check_cache()
            other._check_cache()
            if other._kernel != self._kernel:
                raise ValueError(
                    f"the other session's attention is {other._kernel}, expected {self._kernel}"
                )
            count = other.n_past if n is None else n
            try:
                call(lib.slowar_copy_prefix, pointers[0], pointers[1], count)
                self._note(pointers[0], other._tokens[:count])
            except Exception:
                raise
            except BaseException:  # Ctrl-C between the two: better no past than a wrong one
                self._rewind(pointers[0], 0)
                raise

        together([self._handle, other._handle], copy)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the past to a file that ``Model.load_session`` reads.

        The file appears whole or not at all, whatever stood there before. See ``docs/sessions.md``
        for the format.

        Raises
        ------
        OSError
            The file cannot be written, or the model's cannot be read any more.
        SessionStateError
            There is no cache, or the model's file has changed since it was opened.
        """
        fingerprint = self.model.fingerprint()

        def take(pointer: Any) -> saved.Past:
            self._check_cache()
            n = self.n_past
            return saved.Past(
                fingerprint=fingerprint,
                kv_type=self.kv_type,
                attention=self._kernel,
                max_seq_len=self.max_seq_len,
                tokens=self._tokens[:n].copy(),
                kv=self._read_kv(pointer, n),
            )

        saved.write(Path(os.fsdecode(path)), self._locked(take))

    # ---- evaluating

    def prefill(
        self,
        tokens: npt.ArrayLike,
        *,
        chunk: int | None = None,
        progress: Progress | None = None,
        logits: Logits | None = None,
        cache: PrefixCache | None = None,
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
        cache
            Of the same model (``Model.prefix_cache``): positions that it has, of the past and the
            prompt together, are copied instead of evaluated, and what was evaluated is added to it.

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
            self._default_chunk(flat) if chunk is None else as_int("chunk", chunk, 1, MAX_POSITIONS)
        )
        return self._evaluate(flat, logits, _Way(size, progress, cache))

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

    def _which(self, logits: Logits | None) -> int:
        return self._logits if logits is None else one_of("logits", logits, LOGITS)

    def _evaluate(self, flat: Flat, logits: Logits | None, how: _Way | None = None) -> Output:
        which = self._which(logits)
        return self._locked(lambda pointer: self._run(pointer, flat, which, how or _AT_ONCE))

    def _run(self, pointer: Any, flat: Flat, which: int, how: _Way) -> Output:
        """All positions of ``flat`` or none: the way of every evaluation."""
        self._check_room(flat)
        if (how.chunk or len(flat)) < len(flat) or how.cache is not None:
            # A bad id in the last chunk must not cost the evaluation of the first.
            check_tokens(pointer, flat)

        def body() -> Output:
            if how.cache is None:
                return self._run_chunks(pointer, flat, which, how)
            known = how.cache._load(self, pointer, flat)
            out = self._run_chunks(pointer, flat, which, how, known)
            how.cache._store(self, pointer)
            return out

        return self._all_or_nothing(pointer, body)

    def _run_chunks(
        self, pointer: Any, flat: Flat, which: int, how: _Way, known: int = 0
    ) -> Output:
        """The positions of ``flat`` from ``known`` on."""
        n = len(flat)
        chunk = how.chunk or n
        ids = self._ids[which]
        hidden = np.empty(self._config.n_embd, np.float32)
        logits = np.empty(len(ids), np.float32)
        for at in range(known, n, chunk):
            part = flat[at : at + chunk]
            last = at + chunk >= n
            mark = self._threads.before()
            call(
                lib.slowar_eval_cached,
                pointer,
                ffi.from_buffer("int32_t[]", part),
                len(part),
                which,
                self._threads.n,
                _float32(hidden) if last else ffi.NULL,
                _float32(logits) if last and which else ffi.NULL,
            )
            self._threads.after(mark)
            self._note(pointer, part)
            if how.progress is not None:
                how.progress(at + len(part), n)
        return Output(hidden, logits, ids)

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
            output = self._run(pointer, flat, self._logits, _AT_ONCE)
            return output, {name: _trace(pointer, i) for i, name in enumerate(names)}

        def traced(pointer: Any) -> tuple[Output, dict[str, npt.NDArray[np.float32]]]:
            try:
                call(lib.slowar_trace_select, pointer, keep, len(keep))
                return self._all_or_nothing(pointer, lambda: evaluate(pointer))
            finally:
                call(lib.slowar_trace_select, pointer, ffi.NULL, 0)

        return self._locked(traced)

    def graph(self, n_tokens: int, n_past: int = 0) -> list[Node]:
        """What an evaluation of ``n_tokens`` at position ``n_past`` computes, in order."""
        n_tokens = as_int("n_tokens", n_tokens, 1, MAX_POSITIONS)
        n_past = as_int("n_past", n_past, 0, MAX_POSITIONS)
        count = ffi.new("int32_t *")

        def list_nodes(pointer: Any) -> list[Node]:
            call(lib.slowar_graph_nodes, pointer, n_past, n_tokens, ffi.NULL, 0, count)
            nodes = ffi.new("slowar_node[]", count[0])
            call(lib.slowar_graph_nodes, pointer, n_past, n_tokens, nodes, count[0], count)
            return [
                Node(
                    name=text(n.name),
                    op=text(n.op),
                    type=text(n.type),
                    shape=(n.ne[3], n.ne[2], n.ne[1], n.ne[0]),
                    device=text(n.device),
                )
                for n in nodes
            ]

        return self._locked(list_nodes)

    # ---- state

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """(1 + n_codebook, n_past) what the cache holds, as it was evaluated."""
        return self._locked(lambda _: self._tokens[: self.n_past].T.copy())

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
        """CPU threads that an evaluation may use.

        It uses fewer while the machine is shared, unless somebody said how many.
        """
        return int(self._state.n_threads)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache."""
        return int(self._state.n_bytes_kv)

    @property
    def compute_nbytes(self) -> int:
        """Bytes held for intermediate results; grows to what the longest evaluation needed."""
        return int(self._state.n_bytes_compute)

    @property
    def _kernel(self) -> str:
        """What pasts are told apart by: ggml's kernel sums in another way than ours."""
        return "ggml" if self._asked == "ggml" else self.attention

    @property
    def n_planned(self) -> int:
        """Graphs built for evaluations so far; the other evaluations found theirs ready."""
        return int(self._state.n_planned)

    @property
    def n_splits(self) -> int:
        """Parts of a step's graph, each for one device; known once there is a cache."""
        return int(self._state.n_splits)

    @property
    def fallbacks(self) -> list[Fallback]:
        """Operations of a step that run on the CPU although their layer is on a device."""

        def each(pointer: Any) -> list[Fallback]:
            f = ffi.new("slowar_fallback *")
            out = []
            for i in range(self._state.n_fallbacks):
                call(lib.slowar_session_get_fallback, pointer, i, f)
                out.append(Fallback(text(f.op), f.layer, text(f.device), text(f.reason)))
            return out

        return self._locked(each)

    def placement(self) -> list[Placed]:
        """Device and bytes of the cache and of the compute memory that there are."""
        memory = ffi.new("slowar_session_memory *")
        self._locked(lambda pointer: call(lib.slowar_session_get_memory, pointer, memory))
        return placed_memory(memory, self.model._names)

    def _check_cache(self) -> None:
        if self.max_seq_len == 0:
            raise errors.SessionStateError("no KV cache: call init_kv_cache first")

    def _check_room(self, flat: Flat) -> None:
        self._check_cache()
        if len(flat) > self.max_seq_len - self.n_past:
            raise errors.ContextFullError(
                f"{len(flat)} positions do not fit behind position {self.n_past} in a cache of "
                f"{self.max_seq_len}"
            )

    def _warn_of_length(self, max_seq_len: int) -> None:
        if max_seq_len > self._config.n_ctx:
            warnings.warn(
                f"max_seq_len={max_seq_len} is beyond the model's context of {self._config.n_ctx}",
                stacklevel=3,
            )

    def _note(self, pointer: Any, flat: Flat) -> None:
        """``flat`` was evaluated."""
        self._refresh(pointer)
        end = self._state.n_past
        if end > len(self._tokens):
            longer = np.empty((2 * end, self._tokens.shape[1]), np.int32)
            longer[: len(self._tokens)] = self._tokens
            self._tokens = longer
        self._tokens[end - len(flat) : end] = flat

    def _kv_shape(self, n: int) -> tuple[int, int, int]:
        rows = 2 * self._config.n_layer
        return rows, n, int(self._state.n_bytes_position) // rows

    def _read_kv(self, pointer: Any, n: int) -> npt.NDArray[np.uint8]:
        """(2 * n_layer, n, bytes of a row): each layer's first ``n`` keys, then its values."""
        out = np.empty(self._kv_shape(n), np.uint8)
        if n > 0:
            call(lib.slowar_read_kv, pointer, 0, n, ffi.from_buffer(out), out.nbytes)
        return out

    def _write_kv(self, pointer: Any, tokens: Flat, kv: npt.NDArray[np.uint8]) -> None:
        """Positions behind those there are, as ``_read_kv`` gives them."""
        kv = np.ascontiguousarray(kv)
        if kv.size > 0:
            call(
                lib.slowar_write_kv,
                pointer,
                self.n_past,
                len(tokens),
                ffi.from_buffer(kv),
                kv.nbytes,
            )
            self._note(pointer, tokens)

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

    def _change(self, function: Callable[..., int], *args: int) -> None:
        """Call a C function that changes the session, and look where it is then."""

        def change(pointer: Any) -> None:
            try:
                call(function, pointer, *args)
            finally:
                self._refresh(pointer)

        self._locked(change)

    def _allocate(self, function: Callable[..., int], max_seq_len: int) -> None:
        """``_change`` that takes memory, and says what would fit where there is too little."""
        try:
            self._change(function, max_seq_len)
        except errors.DeviceMemoryError as error:
            raise self.model._suggesting_for(
                error,
                max_seq_len,
                kv_type=self.kv_type,
                attention=self._asked,
                kv_placement=self._kv_placement,
            ) from None

    def _locked(self, body: Callable[[Any], T]) -> T:
        """``body`` with the C pointer, after a look at where the session is.

        Ctrl-C may have kept an earlier call from looking.
        """

        def current(pointer: Any) -> T:
            self._refresh(pointer)
            return body(pointer)

        return self._handle.run(current)

    def _refresh(self, pointer: Any) -> None:
        # Twice in a step: the sentence that call() makes room for is only wanted when it fails.
        if lib.slowar_session_get_state(pointer, self._state, ffi.NULL):
            call(lib.slowar_session_get_state, pointer, self._state)

    def __repr__(self) -> str:
        if self._handle.closed:
            return "<Session: closed>"
        return f"<Session: position {self._state.n_past} of {self._state.max_seq_len}>"


@dataclass(frozen=True)
class _Way:
    """How a prompt is evaluated; the default is at once."""

    chunk: int | None = None
    progress: Progress | None = None
    cache: PrefixCache | None = None


_AT_ONCE = _Way()


def as_threads(n_threads: int | None) -> int:
    """The threads that were asked for, or those that pay here."""
    n_threads = default_threads() if n_threads is None else n_threads
    return as_int("n_threads", n_threads, 1, MAX_THREADS)


def session_params(
    n_threads: int,
    attention: str,
    kv_type: str,
    extra_ids: Sequence[int],
    n_batch: int,
    kv_placement: str,
) -> tuple[Any, Any]:
    """``slowar_session_params`` and what must live as long."""
    params = ffi.new("slowar_session_params *")
    params.n_threads = n_threads
    params.attention = one_of("attention", attention, _ATTENTION)
    params.kv_placement = one_of("kv_placement", kv_placement, _KV_PLACEMENT)
    name = ffi.new("char[]", _c_string("kv_type", kv_type))
    params.kv_type = name
    params.n_batch = n_batch
    ids = ffi.new("int32_t[]", list(extra_ids))
    params.extra_ids = ids
    params.n_extra_ids = len(ids)
    return params, (name, ids)


def default_batch(attention: str) -> int:
    """Positions whose compute memory a cache comes with, beside that of a step."""
    return 0 if attention == "reference" else _BATCH


def _name_of(which: int) -> Logits:
    names: dict[int, Logits] = {0: "none", 1: "semantic", 2: "full"}
    return names[which]


def one_of(name: str, value: str, known: dict[str, int]) -> int:
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
