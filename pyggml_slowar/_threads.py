"""How many threads evaluations use: all they may, fewer while others want the processors.

The threads of an evaluation wait for each other after every node of the graph, and they wait by
spinning. So one that has lost its processor to somebody else, for a few milliseconds at a time,
stops them all: on two cores with one busy neighbour two threads were 2.7 times as slow as without
it, one thread 1.5 times. What tells is how often the process lost a processor: 5 to 70 times a
second on a quiet machine, 170 and more beside a neighbour.
"""

from __future__ import annotations

import time

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_WINDOW = 0.05  # seconds of evaluating that a judgement is made of
_LOST = 100  # processors lost a second from which the machine counts as shared
_PATIENCE = (4, 32)  # calm windows before another thread is tried: doubled each time it fails

Mark = tuple[float, int]


class Threads:
    """The thread count of one caller's evaluations.

    Parameters
    ----------
    most
        Never more than these.
    adapt
        Use fewer while the machine is shared.
    """

    def __init__(self, most: int, *, adapt: bool) -> None:
        self.n = most
        self._most = most
        self.adapts = adapt and most > 1 and resource is not None
        self._seconds = 0.0
        self._lost = 0
        self._calm = 0
        self._patience = _PATIENCE[0]
        self._on_trial = False

    def before(self) -> Mark | None:
        """To be handed to ``after`` when the evaluation is done."""
        return (time.perf_counter(), _losses()) if self.adapts else None

    def after(self, mark: Mark | None) -> None:
        """Judge the evaluation since ``mark``, with those before it if it was short."""
        if mark is None:
            return
        self._seconds += time.perf_counter() - mark[0]
        self._lost += _losses() - mark[1]
        if self._seconds >= _WINDOW:
            self._judge(self._lost / self._seconds)
            self._seconds = 0.0
            self._lost = 0

    def _judge(self, lost_per_second: float) -> None:
        tried, self._on_trial = self._on_trial, False
        if lost_per_second > _LOST:
            if tried:
                self._patience = min(2 * self._patience, _PATIENCE[1])
            self.n = max(self.n - 1, 1)
            self._calm = 0
            return
        self._calm += 1
        if self.n == self._most:
            self._patience = _PATIENCE[0]
        elif self._calm >= self._patience:
            self.n += 1
            self._calm = 0
            self._on_trial = True


def _losses() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
