"""Keys and values of prompts seen before, kept in host memory."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import errors
from ._arrays import Flat

if TYPE_CHECKING:
    from .model import Model
    from .session import Session


class PrefixStats(NamedTuple):
    """What a prefix cache has done and has."""

    hits: int
    """Prefills that found at least one position."""
    misses: int
    positions_reused: int
    evictions: int
    n_entries: int
    nbytes: int


@dataclass(frozen=True)
class _Entry:
    digests: list[bytes]
    """Of its first 1, 2, ... positions."""
    kv: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        # The digests stand in a list and in the index.
        return int(self.kv.nbytes) + 200 * len(self.digests)


class PrefixCache:
    """Prompts' keys and values, found by the longest run of equal positions from the first on.

    A position is known by the SHA-256 of all rows of all positions up to it, of the KV type and
    of the kind of attention. Made by ``Model.prefix_cache``; any thread may use it.
    """

    def __init__(self, model: Model, max_bytes: int) -> None:
        self.model = model
        self.max_bytes = max_bytes
        self._lock = threading.RLock()  # a signal handler may call while it is held
        self._process = os.getpid()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # the one used last comes last
        self._index: dict[bytes, set[int]] = {}
        self._next = 0
        self._nbytes = self._hits = self._misses = self._reused = self._evictions = 0

    @property
    def stats(self) -> PrefixStats:
        self._check_process()
        with self._lock:
            return PrefixStats(
                self._hits,
                self._misses,
                self._reused,
                self._evictions,
                len(self._entries),
                self._nbytes,
            )

    def clear(self) -> None:
        """Forget all entries; the counts stay."""
        self._check_process()
        with self._lock:
            self._entries.clear()
            self._index.clear()
            self._nbytes = 0

    def _check_process(self) -> None:
        # Before the lock, which a child process may have inherited taken.
        if os.getpid() != self._process:
            raise errors.SessionStateError(f"the prefix cache belongs to process {self._process}")

    def load(self, session: Session, flat: Flat) -> int:
        """Put what is known of ``flat`` behind the session's past: how many positions.

        Never the last of them: it is evaluated whether it is known or not, for its output.
        ``flat`` is a prompt as ``_arrays.as_prompt`` makes it, and fits.
        """
        return session._locked(lambda pointer: self._load(session, pointer, flat))

    def store(self, session: Session) -> None:
        """Keep all positions that the session has."""
        session._locked(lambda pointer: self._store(session, pointer))

    def _load(self, session: Session, pointer: Any, flat: Flat) -> int:
        if session.model is not self.model:
            raise ValueError("the prefix cache is of another model")
        past = session.n_past
        digests = _digests(session, np.concatenate([session._tokens[:past], flat]))
        with self._lock:
            found = self._longest(digests)
            n = max(min(found[1], len(digests) - 1) - past, 0) if found else 0
            self._hits += n > 0
            self._misses += n == 0
            self._reused += n
        if found and n > 0:
            session._write_kv(pointer, flat[:n], found[0].kv[:, past : past + n])
        return n

    def _store(self, session: Session, pointer: Any) -> None:
        tokens = session._tokens[: session.n_past]
        digests = _digests(session, tokens)
        with self._lock:
            found = self._longest(digests)
            if found and found[1] == len(digests):
                return
        entry = _Entry(digests, session._read_kv(pointer, len(tokens)))
        if entry.nbytes > self.max_bytes:
            return
        with self._lock:
            for known in [i for i, e in self._entries.items() if _is_prefix(e, digests)]:
                self._drop(known)
            while self._entries and self._nbytes + entry.nbytes > self.max_bytes:
                self._drop(next(iter(self._entries)))
                self._evictions += 1
            # In this order Ctrl-C leaves an entry that is found less often, never a wrong one.
            number = self._next
            self._next += 1
            self._nbytes += entry.nbytes
            self._entries[number] = entry
            for digest in digests:
                self._index.setdefault(digest, set()).add(number)

    def _longest(self, digests: list[bytes]) -> tuple[_Entry, int] | None:
        """An entry and how many of its first positions these are."""
        for n in range(len(digests), 0, -1):
            if owners := self._index.get(digests[n - 1]):
                owner = next(iter(owners))
                self._entries.move_to_end(owner)
                return self._entries[owner], n
        return None

    def _drop(self, number: int) -> None:
        entry = self._entries[number]
        for digest in entry.digests:
            owners = self._index.get(digest, set())
            owners.discard(number)
            if not owners:
                self._index.pop(digest, None)
        del self._entries[number]
        self._nbytes -= entry.nbytes

    def __repr__(self) -> str:
        return f"<PrefixCache: {len(self._entries)} entries, {self._nbytes / 2**20:.0f} MiB>"


def _is_prefix(entry: _Entry, digests: list[bytes]) -> bool:
    n = len(entry.digests)
    return n <= len(digests) and entry.digests[-1] == digests[n - 1]


def _digests(session: Session, tokens: Flat) -> list[bytes]:
    """Of the first 1, 2, ... positions. Codes of text positions mean nothing and count as 0."""
    c = session.model.config
    rows = tokens.astype("<i4")
    rows[(rows[:, 0] < c.semantic_begin_id) | (rows[:, 0] > c.semantic_end_id), 1:] = 0
    running = hashlib.sha256(f"{session.kv_type} {session._kernel} ".encode())
    out = []
    for row in rows:
        running.update(row.data)
        out.append(running.digest())
    return out
