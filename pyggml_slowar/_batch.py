"""Evaluations of several sessions in one graph: what is behind ``Model.eval_batch``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import errors
from ._arrays import Flat, as_frame, as_prompt, check_tokens
from ._native import Closing, Handle, call, ffi, lib, together
from ._threads import Threads
from .session import LOGITS, Output, one_of

if TYPE_CHECKING:
    from .model import Model
    from .session import Logits, Session

MOST = 128
"""Sessions of one evaluation."""

Item = tuple["Session", npt.ArrayLike]


Part = tuple[int, int, int]
"""Of session number i the positions [begin, end)."""


@dataclass(frozen=True)
class Group:
    """Who is evaluated together, what, and the logits wanted."""

    sessions: Sequence[Session]
    flats: Sequence[Flat]
    which: int


class Batch(Closing):
    """Threads and compute memory for evaluations of several sessions at once."""

    def __init__(
        self, model: Model, *, n_threads: int, adapt: bool, extra_ids: Sequence[int]
    ) -> None:
        out = ffi.new("slowar_batch **")
        ids = ffi.new("int32_t[]", list(extra_ids))
        model._handle.run(
            lambda pointer: call(lib.slowar_batch_open, out, pointer, n_threads, ids, len(ids))
        )
        self._handle = Handle(out[0], lib.slowar_batch_close, "batch")
        self._threads = Threads(n_threads, adapt=adapt)
        self._n_embd = model.config.n_embd
        self._state = ffi.new("slowar_batch_state *")

    @property
    def n_planned(self) -> int:
        """Graphs built so far; the other evaluations found theirs ready."""
        self._handle.run(lambda p: call(lib.slowar_batch_get_state, p, self._state))
        return int(self._state.n_planned)

    @property
    def compute_nbytes(self) -> int:
        """Bytes held for intermediate results."""
        self._handle.run(lambda p: call(lib.slowar_batch_get_state, p, self._state))
        return int(self._state.n_bytes_compute)

    def evaluate(self, group: Group, chunk: int) -> Output:
        """All positions of all sessions, at most ``chunk`` of them at a time, or none."""
        handles = [self._handle, *(s._handle for s in group.sessions)]
        return together(handles, lambda pointers: self._run(pointers, group, chunk))

    def _run(self, pointers: Sequence[Any], group: Group, chunk: int) -> Output:
        pairs = zip(group.sessions, pointers[1:], group.flats, strict=True)
        for i, (session, pointer, flat) in enumerate(pairs):
            session._refresh(pointer)
            with _naming(i):
                session._check_room(flat)
                check_tokens(pointer, flat)
        ids = group.sessions[0]._ids[group.which]
        out = Output(
            np.empty((len(group.sessions), self._n_embd), np.float32),
            np.empty((len(group.sessions), len(ids)), np.float32),
            ids,
        )
        starts = [s.n_past for s in group.sessions]
        try:
            for parts in rounds([len(flat) for flat in group.flats], chunk):
                self._round(pointers, group, parts, out)
        except BaseException:
            for pointer, session, start in zip(pointers[1:], group.sessions, starts, strict=True):
                session._rewind(pointer, start)
            raise
        return out

    def _round(
        self, pointers: Sequence[Any], group: Group, parts: Sequence[Part], out: Output
    ) -> None:
        """One graph. What it says of those that end here goes to ``out``."""
        slices = [group.flats[i][begin:end] for i, begin, end in parts]
        items = ffi.new("slowar_batch_item[]", len(parts))
        for item, (i, _, _), tokens in zip(items, parts, slices, strict=True):
            item.session = pointers[1 + i]
            item.tokens = ffi.from_buffer("int32_t[]", tokens)
            item.n_tokens = len(tokens)
        hidden = np.empty((len(parts), out.hidden.shape[1]), np.float32)
        logits = np.empty((len(parts), out.logits.shape[1]), np.float32)
        done = [row for row, (i, _, end) in enumerate(parts) if end == len(group.flats[i])]
        which = group.which if done else LOGITS["none"]
        mark = self._threads.before()
        call(
            lib.slowar_eval_batch,
            pointers[0],
            items,
            len(parts),
            which,
            self._threads.n,
            ffi.from_buffer("float[]", hidden) if done else ffi.NULL,
            ffi.from_buffer("float[]", logits) if which else ffi.NULL,
        )
        self._threads.after(mark)
        for (i, _, _), tokens in zip(parts, slices, strict=True):
            group.sessions[i]._note(pointers[1 + i], tokens)
        rows = [parts[row][0] for row in done]
        out.hidden[rows] = hidden[done]
        out.logits[rows] = logits[done]


def rounds(lengths: Sequence[int], chunk: int) -> list[list[Part]]:
    """Which positions share a graph: ``chunk`` of them at most, the first sessions first."""
    out: list[list[Part]] = []
    at = [0] * len(lengths)
    while any(a < n for a, n in zip(at, lengths, strict=True)):
        left = chunk
        parts = []
        for i, n in enumerate(lengths):
            take = min(n - at[i], left)
            if take > 0:
                parts.append((i, at[i], at[i] + take))
                at[i] += take
                left -= take
        out.append(parts)
    return out


def eval_batch(
    model: Model, items: Sequence[Item], logits: Logits | None, chunk: int, *, frames: bool = False
) -> Output:
    """What ``Model.eval_batch`` says; with ``frames`` each item is one position."""
    items = list(items)
    if not 1 <= len(items) <= MOST:
        raise ValueError(f"{len(items)} items, expected 1 to {MOST}")
    gate = as_frame if frames else as_prompt
    sessions = [session for session, _ in items]
    flats = []
    for i, (session, tokens) in enumerate(items):
        if session.model is not model:
            raise ValueError(f"item {i}: its session is on another model")
        first = next(j for j, other in enumerate(sessions) if other is session)
        if first != i:
            raise ValueError(f"item {i}: its session is item {first}'s too")
        with _naming(i):
            session._handle.check()
            flats.append(gate(tokens, model.config))
    which = _which(sessions, logits)
    extra = {s.extra_ids for s in sessions}
    if which == LOGITS["semantic"] and len(extra) > 1:
        raise ValueError(f"the sessions have different extra ids: {sorted(extra)}")
    return evaluate(Group(sessions, flats, which), chunk)


def evaluate(group: Group, chunk: int) -> Output:
    """A group whose tokens are checked."""
    semantic = group.which == LOGITS["semantic"]
    batch = group.sessions[0].model._batch_for(group.sessions, semantic=semantic)
    return batch.evaluate(group, chunk)


def _which(sessions: Sequence[Session], logits: Logits | None) -> int:
    if logits is not None:
        return one_of("logits", logits, LOGITS)
    found = {s._logits for s in sessions}
    if len(found) > 1:
        raise ValueError("the sessions were opened for different logits: say which")
    return found.pop()


@contextmanager
def _naming(i: int) -> Iterator[None]:
    """Whatever is wrong in here is about item ``i``."""
    try:
        yield
    except (TypeError, ValueError, errors.SlowARError) as error:
        raise type(error)(f"item {i}: {error}") from None
