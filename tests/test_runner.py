"""BatchRunner: each request's numbers are its own, and each ends in one of the ways it promises."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, Tokens, make_prompt

from pyggml_slowar import (
    BatchRunner,
    ContextFullError,
    Model,
    Output,
    QueueFullError,
    Result,
    SessionStateError,
)
from pyggml_slowar import runner as runner_module

# Keys and values in float32: what is left is float32 sums taken in another order. Seen in 4000
# steps of 4 sessions against the same steps alone: half at most 4.2e-7, 18 above 1e-6, one 1.5e-6.
# A wrong slot, position or neighbour shows at 1e-2.
BOUND = 3e-6
WAIT = 30  # seconds until a test says that it hangs
N_CTX = 64
PROMPT = make_prompt(SMALL, 5)

Trouble = Callable[[], Any]


class _OddError(Exception):
    pass


class Greedy:
    """Chooses by the logits alone, and keeps the frames to itself: ``n`` of them, then the end.

    ``n=None`` has no end. With ``trouble`` what that returns is the frame instead, from call ``at``
    on. Every call runs ``each`` with its number first.
    """

    def __init__(
        self,
        n: int | None = 4,
        seed: int = 0,
        *,
        at: int = 0,
        trouble: Trouble | None = None,
        each: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.n, self.seed, self.at = n, seed, at
        self.trouble, self.each = trouble, each
        self.calls = 0

    def __call__(self, out: Output) -> Any:
        number, self.calls = self.calls, self.calls + 1
        self.each(number)
        if self.trouble is not None and number >= self.at:
            return self.trouble()
        if self.n is not None and number >= self.n:
            return None
        # The best but seed: two requests with the same prompt and other seeds go apart.
        best = int(out.ids[np.argsort(-out.logits)[(self.seed + number) % 4]])
        codes = (best * np.arange(1, 1 + SMALL.n_codebook) + number) % SMALL.codebook_size
        return np.array([best, *codes])


def open_runner(model: Model, **options: Any) -> BatchRunner:
    same = {"max_batch": 4, "n_ctx": N_CTX, "n_threads": 1, "kv_type": "f32"}
    return BatchRunner(model, **{**same, **options})


def alone(
    model: Model, prompt: Tokens, choose: Greedy, n_ctx: int = N_CTX, **options: Any
) -> Result:
    """The request on a session of its own, the prompt at once."""
    frames = []
    same: dict[str, Any] = {"n_threads": 1, "kv_type": "f32", "logits": "semantic"}
    with model.session(n_ctx, **same, **options) as session:
        out = session.prefill_fast(prompt)
        while (frame := choose(out)) is not None:
            frames.append(frame)
            out = session.step(frame)
    return Result(np.array(frames, np.int32).reshape(-1, 1 + SMALL.n_codebook), out)


def error(seen: Output, expected: Output) -> float:
    return max(
        float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for a, b in ((seen.hidden, expected.hidden), (seen.logits, expected.logits))
    )


def assert_same(seen: Result, expected: Result) -> None:
    np.testing.assert_array_equal(seen.frames, expected.frames)
    np.testing.assert_array_equal(seen.output.ids, expected.output.ids)
    assert error(seen.output, expected.output) <= BOUND


class Holding:
    """The runner's thread stands in a request's first choice until it is let go."""

    def __init__(self, runner: BatchRunner, n: int = 1) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.future = runner.submit(PROMPT, Greedy(n, each=self._stand))
        assert self.inside.wait(WAIT)

    def _stand(self, number: int) -> None:
        if number == 0:
            self.inside.set()
            assert self.go.wait(WAIT)

    def let_go(self) -> None:
        self.go.set()


def ended(runner: BatchRunner) -> tuple[int, int, int]:
    """Close and count: (finished, failed, cancelled). Nothing is left over."""
    runner.close()
    s = runner.stats
    assert (s.waiting, s.running) == (0, 0)
    assert s.accepted == s.finished + s.failed + s.cancelled
    return s.finished, s.failed, s.cancelled


@pytest.fixture
def runner(small: Model) -> Iterator[BatchRunner]:
    with open_runner(small) as runner:
        yield runner


@pytest.fixture
def single(small: Model) -> Iterator[BatchRunner]:
    """One request at a time."""
    with open_runner(small, max_batch=1) as runner:
        yield runner


# ---- the same numbers


@pytest.mark.parametrize("max_batch", [1, 2, 8])
@pytest.mark.parametrize("chunk", [3, 128])
def test_as_if_each_were_alone(small: Model, max_batch: int, chunk: int) -> None:
    """24 requests of other lengths on few sessions: they come and go at different evaluations."""
    requests = [(make_prompt(SMALL, 1 + 7 * i % 23, seed=i), i * 5 % 13, i) for i in range(24)]
    with open_runner(small, max_batch=max_batch, chunk=chunk) as runner:
        futures = [runner.submit(p, Greedy(n, seed)) for p, n, seed in requests]
        for future, (prompt, n, seed) in zip(futures, requests, strict=True):
            result = future.result(WAIT)
            assert result.frames.shape == (n, 1 + SMALL.n_codebook)
            assert_same(result, alone(small, prompt, Greedy(n, seed)))
        assert ended(runner) == (24, 0, 0)
        # Each position once: prompts and frames, and not the frame that was never chosen.
        assert runner.stats.positions == sum(p.shape[1] + n for p, n, _ in requests)


def test_full_logits_and_extra_ids(small: Model) -> None:
    with open_runner(small, logits="full") as runner:
        assert runner.submit(PROMPT, Greedy(0)).result(WAIT).output.logits.shape == (300,)
    with open_runner(small, extra_ids=(7,)) as runner:
        out = runner.submit(PROMPT, Greedy(0)).result(WAIT).output
    assert out.ids.tolist() == [*range(200, 216), 7]  # SMALL's semantic ids, then ours
    assert out.logits.shape == (17,)


def test_the_output_is_the_requests_own(small: Model, runner: BatchRunner) -> None:
    """Who scribbles on it spoils nobody else's."""

    def scribble(out: Output) -> None:
        out.hidden[:] = out.logits[:] = np.nan

    holding = Holding(runner)  # the others begin together
    bad = [runner.submit(PROMPT, scribble) for _ in range(2)]
    good = runner.submit(PROMPT, Greedy(3))
    holding.let_go()
    assert_same(good.result(WAIT), alone(small, PROMPT, Greedy(3)))
    for future in bad:
        future.result(WAIT)


def test_an_array_that_changes_later(small: Model, single: BatchRunner) -> None:
    """The prompt is taken at submit, a frame when it is chosen."""
    holding = Holding(single)
    prompt = PROMPT.copy()
    frame = np.empty(1 + SMALL.n_codebook, np.int64)
    inner = Greedy(3)

    def choose(out: Output) -> Any:
        chosen = inner(out)
        if chosen is None:
            return None
        frame[:] = chosen
        return frame

    future = single.submit(prompt, choose)
    prompt[:] = 0
    holding.let_go()
    assert_same(future.result(WAIT), alone(small, PROMPT, Greedy(3)))


def test_first_come_first_served(single: BatchRunner) -> None:
    order: list[int] = []
    holding = Holding(single)
    futures = [
        single.submit(PROMPT, Greedy(i % 3, each=lambda _, i=i: order.append(i)))  # type: ignore[misc]
        for i in range(6)
    ]
    holding.let_go()
    for future in futures:
        future.result(WAIT)
    # i % 3 frames are i % 3 + 1 choices, and one request ends before the next begins.
    assert order == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5]


def test_everybody_takes_part_in_each_evaluation(small: Model, runner: BatchRunner) -> None:
    """Four requests with 10 frames from the same moment on: 11 evaluations, not 44."""
    seen: list[list[int]] = [[] for _ in range(3)]

    def note(i: int) -> Callable[[int], None]:
        return lambda _: seen[i].append(runner.stats.evaluations)

    holding = Holding(runner, n=0)  # over at once: the first evaluation
    futures = [runner.submit(PROMPT, Greedy(10, i, each=note(i))) for i in range(3)]
    holding.let_go()
    for i, future in enumerate(futures):
        assert_same(future.result(WAIT), alone(small, PROMPT, Greedy(10, i)))
    assert seen == [list(range(2, 13))] * 3


def test_a_long_prompt_stalls_nobody(small: Model) -> None:
    """While 44 positions are evaluated 8 at a time, the running request steps in every one."""
    long = make_prompt(SMALL, 44, seed=1)
    with open_runner(small, chunk=8, max_batch=2) as runner:
        steps: list[tuple[int, int]] = []
        began: list[int] = []
        late: list[Future[Result]] = []

        def watch(number: int) -> None:
            s = runner.stats
            steps.append((s.evaluations, s.positions))
            if number == 4:
                late.append(runner.submit(long, Greedy(2, 1, each=first)))

        def first(number: int) -> None:
            if number == 0:
                began.append(runner.stats.evaluations)

        running = runner.submit(PROMPT, Greedy(20, each=watch)).result(WAIT)
        assert_same(running, alone(small, PROMPT, Greedy(20)))
        assert_same(late[0].result(WAIT), alone(small, long, Greedy(2, 1)))
    evaluations, positions = np.array(steps).T
    # One prefill and 20 steps, in evaluations that follow each other without a gap.
    assert evaluations.tolist() == list(range(1, 22))
    # A step each, and from the sixth on five chunks of 8, one of 4, and two steps of the other.
    expected = [1] * 4 + [9] * 5 + [5] + [2] * 2 + [1] * 8
    assert np.diff(positions).tolist() == expected
    assert began == [11]  # 5 evaluations before it came, then 6 chunks


def test_two_long_prompts_share_a_chunk(small: Model) -> None:
    """No evaluation has more than 8 positions of prompts, and the older prompt goes first."""
    with open_runner(small, chunk=8, max_batch=3) as runner:
        positions: list[int] = []
        began: list[tuple[str, int]] = []
        late: list[Future[Result]] = []

        def note(name: str) -> Callable[[int], None]:
            return lambda n: began.append((name, runner.stats.evaluations)) if n == 0 else None

        def watch(number: int) -> None:
            positions.append(runner.stats.positions)
            if number == 0:
                for name, n in (("a", 12), ("b", 20)):
                    choose = Greedy(0, each=note(name))
                    late.append(runner.submit(make_prompt(SMALL, n, seed=n), choose))

        runner.submit(PROMPT, Greedy(8, each=watch)).result(WAIT)
        for future, n in zip(late, (12, 20), strict=True):
            assert_same(future.result(WAIT), alone(small, make_prompt(SMALL, n, seed=n), Greedy(0)))
    assert np.diff(positions).tolist() == [9] * 4 + [1] * 4  # 32 positions of prompts in four
    assert began == [("a", 3), ("b", 5)]  # 12 positions are 8 + 4, all 32 are 4 chunks


# ---- a prefix cache


def test_the_second_time_the_prompt_is_there(small: Model) -> None:
    prompt = make_prompt(SMALL, 30)
    expected = alone(small, prompt, Greedy(3))
    cache = small.prefix_cache(2**24)
    with open_runner(small, cache=cache, chunk=8) as runner:
        assert_same(runner.submit(prompt, Greedy(3)).result(WAIT), expected)
        assert (cache.stats.hits, cache.stats.misses, cache.stats.n_entries) == (0, 1, 1)
        first = runner.stats.positions
        assert_same(runner.submit(prompt, Greedy(3)).result(WAIT), expected)
        # All but the last position, whose output is wanted.
        assert (cache.stats.hits, cache.stats.positions_reused) == (1, 29)
        assert runner.stats.positions - first == 1 + 3
        longer = np.concatenate([prompt[:, :20], make_prompt(SMALL, 9, seed=9)], axis=1)
        seen = runner.submit(longer, Greedy(3)).result(WAIT)
        assert_same(seen, alone(small, longer, Greedy(3)))
        assert (cache.stats.hits, cache.stats.positions_reused) == (2, 29 + 20)
        assert ended(runner) == (3, 0, 0)


def test_a_cache_of_another_model(small: Model, small_path: Path) -> None:
    """Told when the runner is made or by the request, not by the end of the runner."""
    with Model(small_path, backend="cpu") as other:
        cache = other.prefix_cache(2**20)
        with pytest.raises(ValueError, match="another model"), open_runner(small, cache=cache) as r:
            r.submit(PROMPT, Greedy(0)).result(WAIT)


@pytest.mark.parametrize("name", ["load", "store"])
def test_a_cache_that_fails(small: Model, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No memory for an entry: that request may fail, the others and the runner go on."""
    cache = small.prefix_cache(2**20)
    with open_runner(small, cache=cache) as runner:
        holding = Holding(runner, n=5)

        def fail(*_: object) -> None:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(cache, name, fail)
            failing = runner.submit(make_prompt(SMALL, 9, seed=4), Greedy(0))
            holding.let_go()
            done, _ = concurrent.futures.wait([failing], WAIT)
            assert done
            assert not isinstance(failing.exception(), SessionStateError)
        assert_same(holding.future.result(WAIT), alone(small, PROMPT, Greedy(5)))
        assert_same(runner.submit(PROMPT, Greedy(3)).result(WAIT), alone(small, PROMPT, Greedy(3)))


# ---- refused at the door


def _bad(what: str) -> Any:
    tokens = PROMPT.astype(np.int64)
    if what == "id":
        tokens[0, 3] = SMALL.n_vocab
    elif what == "code":
        tokens[4, 1] = SMALL.codebook_size
    return tokens


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        (_bad("id"), ValueError, "token id"),
        (_bad("code"), ValueError, "code at"),
        (PROMPT[:, :0], ValueError, "no position"),
        (PROMPT[:5], ValueError, "shape"),
        (PROMPT[:, 0], ValueError, "shape"),
        (PROMPT.astype(np.float32), TypeError, "dtype"),
        (make_prompt(SMALL, N_CTX + 1), ContextFullError, "a prompt of 65 positions"),
    ],
)
def test_a_prompt_that_cannot_be(
    runner: BatchRunner, prompt: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        runner.submit(prompt, Greedy())
    assert runner.stats.accepted == 0


@pytest.mark.parametrize("deadline", [0, -1, 0.0, -math.inf, math.nan])
def test_a_deadline_that_cannot_be(runner: BatchRunner, deadline: float) -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        runner.submit(PROMPT, Greedy(), deadline=deadline)
    assert runner.stats.accepted == 0


def test_the_queue_is_bounded(small: Model) -> None:
    with open_runner(small, max_batch=1, max_queue=3) as runner:
        holding = Holding(runner)
        waiting = [runner.submit(PROMPT, Greedy(1)) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(QueueFullError, match="3 requests wait already"):
                runner.submit(PROMPT, Greedy(1))
        assert (runner.stats.waiting, runner.stats.running, runner.stats.accepted) == (3, 1, 4)
        holding.let_go()
        for future in waiting:
            future.result(WAIT)
        runner.submit(PROMPT, Greedy(1)).result(WAIT)  # there is room again
        assert ended(runner) == (5, 0, 0)


@pytest.mark.parametrize(
    "options", [{"max_batch": 0}, {"max_batch": 129}, {"max_queue": 0}, {"chunk": 0}, {"n_ctx": 0}]
)
def test_options_that_cannot_be(small: Model, options: dict[str, int]) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"is (0|129), expected 1 to"):
        open_runner(small, **options)
    assert threading.active_count() == before


# ---- one fails, the others do not notice


def _raise() -> Any:
    raise _OddError("the sampler broke")


def _frame(row: int, value: int) -> Tokens:
    frame: Tokens = PROMPT[:, 1].copy()  # a semantic position
    frame[row] = value
    return frame


FAILURES: dict[str, tuple[Trouble, type[Exception], str]] = {
    "raises": (_raise, _OddError, "the sampler broke"),
    "shape": (lambda: PROMPT[:4, 0], ValueError, "shape"),
    "two frames": (lambda: PROMPT[:, :2], ValueError, "shape"),
    "float": (lambda: PROMPT[:, 0] * 1.0, TypeError, "dtype"),
    "a number": (lambda: 5, ValueError, "shape"),
    "words": (lambda: "frame", TypeError, "dtype"),
    "id": (lambda: _frame(0, SMALL.n_vocab), ValueError, "token id"),
    "negative id": (lambda: _frame(0, -1), ValueError, "token id"),
    "code": (lambda: _frame(3, SMALL.codebook_size), ValueError, "code at"),
}


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_choice(small: Model, runner: BatchRunner, name: str, at: int) -> None:
    trouble, kind, message = FAILURES[name]
    holding = Holding(runner, n=8)
    failing = runner.submit(make_prompt(SMALL, 9, seed=3), Greedy(8, at=at, trouble=trouble))
    other = runner.submit(make_prompt(SMALL, 7, seed=4), Greedy(12, 2))
    holding.let_go()
    with pytest.raises(kind, match=message):
        failing.result(WAIT)
    assert_same(holding.future.result(WAIT), alone(small, PROMPT, Greedy(8)))
    assert_same(other.result(WAIT), alone(small, make_prompt(SMALL, 7, seed=4), Greedy(12, 2)))
    # The session it had serves the next as if new.
    for _ in range(4):
        runner.submit(PROMPT, Greedy(2)).result(WAIT)
    assert ended(runner) == (6, 1, 0)


def test_the_context_runs_full(small: Model) -> None:
    """5 positions and 11 frames fill 16; the twelfth frame is one too many."""
    with open_runner(small, n_ctx=16) as runner:
        holding = Holding(runner, n=11)
        endless = Greedy(None)
        full = runner.submit(PROMPT, endless)
        prompt = make_prompt(SMALL, 16)
        whole = runner.submit(prompt, Greedy(0))
        one_more = runner.submit(prompt, Greedy(1))
        holding.let_go()
        for future in (full, one_more):
            with pytest.raises(ContextFullError, match="16 positions"):
                future.result(WAIT)
        assert endless.calls == 12
        assert_same(holding.future.result(WAIT), alone(small, PROMPT, Greedy(11), 16))
        assert_same(whole.result(WAIT), alone(small, prompt, Greedy(0)))
        assert ended(runner) == (2, 2, 0)


def test_even_system_exit_is_one_requests_own(small: Model, runner: BatchRunner) -> None:
    def leave() -> Any:
        raise SystemExit(3)

    holding = Holding(runner, n=4)
    failing = runner.submit(PROMPT, Greedy(trouble=leave))
    holding.let_go()
    with pytest.raises(SystemExit):
        failing.result(WAIT)
    assert_same(holding.future.result(WAIT), alone(small, PROMPT, Greedy(4)))
    assert ended(runner) == (1, 1, 0)


def test_a_callback_of_a_future_that_submits(small: Model, runner: BatchRunner) -> None:
    """It runs in the runner's thread, where no lock is held."""
    second: Future[Future[Result]] = Future()
    first = runner.submit(PROMPT, Greedy(1))
    first.add_done_callback(lambda _: second.set_result(runner.submit(PROMPT, Greedy(2))))
    assert_same(second.result(WAIT).result(WAIT), alone(small, PROMPT, Greedy(2)))


# ---- cancelling


def test_cancelled_before_its_turn(small: Model, single: BatchRunner) -> None:
    holding = Holding(single)
    never, after = Greedy(), Greedy(2)
    futures = single.submit(PROMPT, never), single.submit(PROMPT, after)
    assert futures[0].cancel()
    holding.let_go()
    assert_same(futures[1].result(WAIT), alone(small, PROMPT, Greedy(2)))
    with pytest.raises(CancelledError):
        futures[0].result(WAIT)
    assert never.calls == 0
    assert ended(single) == (2, 0, 1)
    assert single.stats.positions == 5 + 1 + 5 + 2  # nothing of the cancelled one


@pytest.mark.parametrize("when", ["waiting", "running", "ending"])
def test_those_who_wait_hear_of_it(single: BatchRunner, when: str) -> None:
    """concurrent.futures.wait and as_completed return for a cancelled request too."""
    holding = Holding(single)
    here: list[Future[Result]] = []
    n = {"waiting": 0, "running": None, "ending": 0}[when]
    future = single.submit(PROMPT, Greedy(n, each=lambda _: here[0].cancel()))
    here.append(future)
    if when == "waiting":
        future.cancel()
    holding.let_go()
    single.submit(PROMPT, Greedy(0)).result(WAIT)  # it comes behind: the runner has seen all
    assert future.cancelled()
    done, _ = concurrent.futures.wait([future], timeout=1)  # s; it has happened already
    assert done == {future}


@pytest.mark.parametrize("chunk", [8, 3])
def test_cancelled_during_its_prompt(small: Model, chunk: int) -> None:
    """In the third evaluation that it is part of, by the request beside it."""
    with open_runner(small, chunk=chunk, max_batch=2) as runner:
        late: list[Future[Result]] = []
        never = Greedy()
        positions: list[int] = []

        def meddle(number: int) -> None:
            positions.append(runner.stats.positions)
            if number == 2:
                late.append(runner.submit(make_prompt(SMALL, 60, seed=1), never))
            elif number == 5:
                assert late[0].cancel()

        result = runner.submit(PROMPT, Greedy(12, each=meddle)).result(WAIT)
        assert_same(result, alone(small, PROMPT, Greedy(12)))
        assert late[0].cancelled()
        assert never.calls == 0
        assert ended(runner) == (1, 0, 1)
    expected = [1] * 2 + [1 + chunk] * 3 + [1] * 7  # three chunks, and no more of it
    assert np.diff(positions).tolist() == expected


@pytest.mark.parametrize("n", [3, None])
def test_cancelled_while_running(small: Model, runner: BatchRunner, n: int | None) -> None:
    """By its own fourth choice, which then says the end (n=3), or one more frame."""
    here: list[Future[Result]] = []
    choose = Greedy(n, each=lambda number: number == 3 and here[0].cancel())
    holding = Holding(runner, n=9)
    here.append(runner.submit(PROMPT, choose))
    holding.let_go()
    assert_same(holding.future.result(WAIT), alone(small, PROMPT, Greedy(9)))
    with pytest.raises(CancelledError):
        here[0].result(WAIT)
    assert choose.calls == 4  # never asked again
    assert ended(runner) == (1, 0, 1)


def test_a_choice_that_fails_after_it_was_cancelled(runner: BatchRunner) -> None:
    here: list[Future[Result]] = []
    holding = Holding(runner)
    choose = Greedy(trouble=_raise, each=lambda _: here[0].cancel())
    here.append(runner.submit(PROMPT, choose))
    holding.let_go()
    with pytest.raises(CancelledError):
        here[0].result(WAIT)
    assert ended(runner) == (1, 0, 1)


# ---- deadlines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The runner's clock, which stands still but for what this adds to it."""
    now = [1000.0]
    monkeypatch.setattr(runner_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def test_late_in_the_queue(
    small: Model, single: BatchRunner, clock: Callable[[float], None]
) -> None:
    never = Greedy()
    holding = Holding(single)
    late = single.submit(PROMPT, never, deadline=2)
    in_time = single.submit(PROMPT, Greedy(2), deadline=3.5)
    clock(3)
    holding.let_go()
    with pytest.raises(TimeoutError, match="not done after 2 s: 0 of 5 prompt positions and 0 "):
        late.result(WAIT)
    assert_same(in_time.result(WAIT), alone(small, PROMPT, Greedy(2)))
    assert never.calls == 0
    assert ended(single) == (2, 1, 0)


def test_late_while_running(
    small: Model, runner: BatchRunner, clock: Callable[[float], None]
) -> None:
    """A second for each choice: after the choice of its fifth frame it has been here for 5 s."""
    holding = Holding(runner, n=9)
    choose = Greedy(None, each=lambda _: clock(1))
    late = runner.submit(PROMPT, choose, deadline=4.5)
    holding.let_go()
    with pytest.raises(TimeoutError, match=r"after 4\.5 s: 5 of 5 prompt positions and 4 frames"):
        late.result(WAIT)
    assert choose.calls == 5
    assert_same(holding.future.result(WAIT), alone(small, PROMPT, Greedy(9)))
    assert ended(runner) == (1, 1, 0)


def test_late_during_its_prompt(small: Model, clock: Callable[[float], None]) -> None:
    with open_runner(small, chunk=8, max_batch=2) as runner:
        late: list[Future[Result]] = []

        def meddle(number: int) -> None:
            if number == 0:
                late.append(runner.submit(make_prompt(SMALL, 40), Greedy(), deadline=1))
            elif number == 2:
                clock(2)

        result = runner.submit(PROMPT, Greedy(6, each=meddle)).result(WAIT)
        assert_same(result, alone(small, PROMPT, Greedy(6)))
        with pytest.raises(TimeoutError, match="after 1 s: 16 of 40 prompt positions and 0 fr"):
            late[0].result(WAIT)


def test_no_deadline(runner: BatchRunner, clock: Callable[[float], None]) -> None:
    choose = Greedy(3, each=lambda _: clock(1e9))
    for deadline in (None, math.inf):
        choose.calls = 0
        assert len(runner.submit(PROMPT, choose, deadline=deadline).result(WAIT).frames) == 3


# ---- the end


def test_close_ends_what_has_not_ended(small: Model) -> None:
    """One stands in its choice, one is in its prompt, two wait: the choice is the last thing."""
    with open_runner(small, max_batch=2, chunk=8) as runner:
        holding = Holding(runner, n=5)
        never = Greedy()
        others = [runner.submit(make_prompt(SMALL, 40), never) for _ in range(3)]
        closing = threading.Thread(target=runner.close)
        closing.start()
        give_up = time.monotonic() + WAIT
        refusal = ""
        while not refusal and time.monotonic() < give_up:  # until close() has shut the door
            try:
                runner.submit(PROMPT, never).cancel()
            except SessionStateError as failure:
                refusal = str(failure)
            except QueueFullError:
                continue
        assert refusal == "the runner is closed"
        assert closing.is_alive()  # it waits for the choice
        holding.let_go()
        closing.join(WAIT)
        assert not closing.is_alive()
        for future in (holding.future, *others):
            assert future.done()
            with pytest.raises(SessionStateError, match=r"^the runner was closed$"):
                future.result(0)
        runner.close()
        assert never.calls == 0
        assert ended(runner)[:2] == (0, 4)
        with pytest.raises(SessionStateError, match=r"^the runner is closed$"):
            runner.submit(PROMPT, never)


def test_close_of_an_idle_runner(small: Model) -> None:
    runner = open_runner(small)
    assert ended(runner) == (0, 0, 0)
    runner.close()
    with pytest.raises(SessionStateError, match=r"^the runner is closed$"):
        asyncio.run(runner.run(PROMPT, Greedy()))


def test_close_from_inside_a_choice(runner: BatchRunner) -> None:
    holding = Holding(runner, n=5)
    choose = Greedy(5, each=lambda _: runner.close())
    closer = runner.submit(PROMPT, choose)
    finishing = runner.submit(PROMPT, Greedy(0))
    holding.let_go()
    for future in (holding.future, closer):
        with pytest.raises(SessionStateError, match=r"^the runner was closed$"):
            future.result(WAIT)
    assert choose.calls == 1
    finishing.result(WAIT)  # its last evaluation was the closer's
    assert ended(runner) == (1, 2, 0)


def test_four_threads_close(small: Model) -> None:
    runner = open_runner(small)
    future = runner.submit(PROMPT, Greedy(None))
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(runner.close) for _ in range(4)]:
            done.result(WAIT)
    assert isinstance(future.exception(WAIT), (SessionStateError, ContextFullError))


def test_the_model_is_closed_under_it(small_path: Path) -> None:
    model = Model(small_path, backend="cpu")
    with open_runner(model, max_batch=2) as runner:
        holding = Holding(runner, n=5)
        others = [runner.submit(PROMPT, Greedy()) for _ in range(4)]
        model.close()
        holding.let_go()
        for future in [holding.future, *others]:
            with pytest.raises(SessionStateError, match="closed"):
                future.result(WAIT)
        with pytest.raises(SessionStateError, match=r"^the model is closed$"):
            runner.submit(PROMPT, Greedy())
        assert ended(runner) == (0, 5, 0)


def test_the_model_is_closed_during_an_evaluation(small_path: Path) -> None:
    """By another thread while requests step: whenever that is, each ends and none hangs."""
    for n in range(10):
        model = Model(small_path, backend="cpu")
        with open_runner(model) as runner:
            reached = threading.Event()

            def each(number: int, n: int = n, reached: threading.Event = reached) -> None:
                if number == n:
                    reached.set()

            futures = [runner.submit(PROMPT, Greedy(50, i, each=each)) for i in range(4)]
            assert reached.wait(WAIT)
            model.close()
            for future in futures:
                failure = future.exception(WAIT)
                assert failure is None or isinstance(failure, SessionStateError)


def test_sessions_of_others_go_on(small: Model) -> None:
    """A runner's end takes only its own sessions."""
    with small.session(N_CTX, n_threads=1, kv_type="f32", logits="semantic") as session:
        session.prefill(PROMPT)
        with open_runner(small) as runner:
            assert len(runner.submit(PROMPT, Greedy(3)).result(WAIT).frames) == 3
        out = session.step(PROMPT[:, 1])
        session.reset()
        expected = session.prefill_fast(np.concatenate([PROMPT, PROMPT[:, 1:2]], axis=1))
        assert error(out, expected) <= BOUND


# ---- asyncio


def test_ten_tasks(small: Model, runner: BatchRunner) -> None:
    requests = [(make_prompt(SMALL, 2 + i, seed=i), i) for i in range(10)]

    async def main() -> list[Result]:
        runs = [runner.run(p, Greedy(n, n)) for p, n in requests]
        return await asyncio.wait_for(asyncio.gather(*runs), WAIT)

    for result, (prompt, n) in zip(asyncio.run(main()), requests, strict=True):
        assert_same(result, alone(small, prompt, Greedy(n, n)))
    assert ended(runner) == (10, 0, 0)


def test_cancelling_a_task_cancels_its_request(small: Model, runner: BatchRunner) -> None:
    """One in its third choice, one that has not begun; a third does not notice."""

    async def main() -> Result:
        loop = asyncio.get_running_loop()
        reached, go = asyncio.Event(), threading.Event()

        def each(number: int) -> None:
            if number == 2:
                loop.call_soon_threadsafe(reached.set)
                assert go.wait(WAIT)

        choose, never = Greedy(None, each=each), Greedy(None)
        running = asyncio.create_task(runner.run(PROMPT, choose))
        await asyncio.wait_for(reached.wait(), WAIT)
        other = asyncio.create_task(runner.run(PROMPT, Greedy(9, 1)))
        waiting = asyncio.create_task(runner.run(PROMPT, never))
        await asyncio.sleep(0)  # both have submitted
        assert runner.stats.accepted == 3
        for task in (running, waiting):
            task.cancel()
        for task in (running, waiting):
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, WAIT)
        go.set()
        result = await asyncio.wait_for(other, WAIT)
        assert (choose.calls, never.calls) == (3, 0)
        return result

    assert_same(asyncio.run(main()), alone(small, PROMPT, Greedy(9, 1)))
    assert ended(runner) == (1, 0, 2)


def test_what_a_task_is_told(small: Model) -> None:
    with open_runner(small, n_ctx=8) as runner:

        async def told(choose: Greedy) -> BaseException | None:
            try:
                await asyncio.wait_for(runner.run(PROMPT, choose), WAIT)
            except (_OddError, ContextFullError) as failure:
                return failure
            return None

        async def main() -> list[BaseException | None]:
            chooses = [Greedy(trouble=_raise), Greedy(None), Greedy(1)]
            return await asyncio.gather(*map(told, chooses))

        kinds = [type(failure) for failure in asyncio.run(main())]
        assert kinds == [_OddError, ContextFullError, type(None)]


@pytest.mark.parametrize("front", ["thread", "asyncio"])
def test_a_choice_that_has_run_out(runner: BatchRunner, front: str) -> None:
    """``choose=lambda out: next(frames)`` raises StopIteration, which no asyncio future takes."""
    frames = iter([PROMPT[:, 1]])

    def choose(_: Output) -> Any:
        return next(frames)

    async def main() -> None:
        await asyncio.wait_for(runner.run(PROMPT, choose), 5)  # s; it takes a millisecond

    if front == "thread":
        future = runner.submit(PROMPT, choose)
        assert isinstance(future.exception(WAIT), (StopIteration, RuntimeError))
    else:
        with pytest.raises(RuntimeError):
            asyncio.run(main())


# ---- everything at once

OUTCOMES = ("finished", "failed", "cancelled")
EXPECTED = {
    "raises": "_OddError",
    "float": "TypeError",
    "id": "ValueError",
    "full": "ContextFullError",
    "late": "TimeoutError",
}


class Client:
    """50 requests of one thread, at most 12 of them at a time."""

    def __init__(self, runner: BatchRunner, expected: Callable[..., Result], seed: int) -> None:
        self.runner, self.expected = runner, expected
        self.random = random.Random(seed)
        self.pending: list[tuple[Future[Result], str, tuple[int, int, int]]] = []
        self.counts = dict.fromkeys((*OUTCOMES, "refused"), 0)

    def run(self, n: int) -> dict[str, int]:
        for _ in range(n):
            self.submit()
            if len(self.pending) > 12:
                self.answer()
            if self.random.random() < 0.1:
                self.random.choice(self.pending)[0].cancel()
        while self.pending:
            self.answer()
        return self.counts

    def submit(self) -> None:
        draw = self.random
        shape = (draw.randint(1, 24), draw.randint(0, 12), draw.randint(0, 5))
        how = draw.choices(
            ["good", "cancelled", "raises", "float", "id", "full", "late"], [60, 8, 8, 6, 6, 6, 6]
        )[0]
        n, frames, seed = shape
        choose = Greedy(None if how == "full" else frames, seed)
        if how in FAILURES:
            choose.trouble, choose.at = FAILURES[how][0], draw.randint(0, 6)
            choose.n = None
        prompt = make_prompt(SMALL, n, seed=seed)
        while True:
            try:
                future = self.runner.submit(prompt, choose, deadline=1e-9 if how == "late" else 60)
                break
            except QueueFullError:
                self.counts["refused"] += 1
                self.answer()
        if how == "cancelled":
            future.cancel()
        self.pending.append((future, how, shape))

    def answer(self) -> None:
        if not self.pending:
            return
        future, how, shape = self.pending.pop(0)
        try:
            result = future.result(WAIT)
        except CancelledError:
            self.counts["cancelled"] += 1
        except (_OddError, TypeError, ValueError, TimeoutError) as failure:
            if type(failure).__name__ != EXPECTED.get(how):
                raise
            self.counts["failed"] += 1
        else:
            assert how in ("good", "cancelled")  # a cancel may come too late, nothing else may
            assert_same(result, self.expected(*shape))
            self.counts["finished"] += 1


def test_eight_threads_with_fifty_requests_each(small: Model) -> None:
    known: dict[tuple[int, int, int], Result] = {}

    def expected(n: int, frames: int, seed: int) -> Result:
        key = (n, frames, seed)
        if key not in known:  # two threads may both work it out
            known[key] = alone(small, make_prompt(SMALL, n, seed=seed), Greedy(frames, seed))
        return known[key]

    cache = small.prefix_cache(2**18)  # 9 of the longest prompts: there are evictions
    with open_runner(small, max_queue=48, chunk=16, n_ctx=40, cache=cache) as runner:
        clients = [Client(runner, expected, seed) for seed in range(8)]
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(lambda client: client.run(50), clients, timeout=WAIT))
        totals = {name: sum(c[name] for c in counts) for name in counts[0]}
        assert sum(totals[name] for name in OUTCOMES) == 8 * 50
        # Of each outcome there was something: 400 draws with at least 8 % each.
        assert min(totals[name] for name in OUTCOMES) > 10, totals
        assert cache.stats.hits > 0
        assert cache.stats.evictions > 0

        # One more: when it is asked, the runner has done with all before it, and is still open.
        settled: list[Any] = []
        runner.submit(PROMPT, Greedy(0, each=lambda _: settled.append(runner.stats))).result(WAIT)
        (s,) = settled
        assert (s.accepted, s.waiting, s.running) == (401, 0, 1)
        assert (s.finished, s.failed, s.cancelled) == tuple(totals[name] for name in OUTCOMES)

        # The bound is the issue's. Four that never end and others that wait are under way.
        rounds = itertools.count()
        reached = threading.Event()

        def again() -> Tokens:
            if next(rounds) == 8:
                reached.set()
            return PROMPT[:, 1]

        left = [runner.submit(PROMPT, Greedy(trouble=again)) for _ in range(20)]
        assert reached.wait(WAIT)
        start = time.monotonic()
        runner.close()
        assert time.monotonic() - start < 1
        assert all(future.done() for future in left)
        finished, failed, cancelled = ended(runner)
        assert (finished, cancelled) == (totals["finished"] + 1, totals["cancelled"])
        assert failed == totals["failed"] + 20
