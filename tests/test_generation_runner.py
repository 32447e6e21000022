"""Generations through BatchRunner: each voice's codes are those that it has alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from conftest import SMALL, Tokens, make_prompt
from test_generation import END, assert_never_decreasing
from test_runner import WAIT, Greedy, Holding, assert_same, ended
from test_runner import alone as greedy_alone

import pyggml_slowar as slowar
from pyggml_slowar import runner as runner_module
from pyggml_slowar.make_model import make_model
from pyggml_slowar.sampler import Sampler

N_CTX = 80


class _OddError(Exception):
    pass


class Wish(NamedTuple):
    """What is asked for one voice."""

    prompt: Tokens
    max_frames: int
    seed: int

    def options(self) -> dict[str, Any]:
        return {"max_frames": self.max_frames, "seed": self.seed, "im_end_id": END}


# Prompts of 3 to 38 positions and 6 to 39 frames.
WISHES = [Wish(make_prompt(SMALL, 3 + 5 * i, seed=i), 6 + 11 * i % 34, i) for i in range(8)]


@pytest.fixture(scope="module")
def alone(other: slowar.Model) -> list[slowar.Generation]:
    """What each wish becomes on a session of its own, its prompt at once."""
    found = [
        slowar.generate(other, wish.prompt, kv_type="f32", n_threads=1, **wish.options())
        for wish in WISHES
    ]
    # Some end and some are long enough, so that voices leave at different rounds.
    assert {g.finished for g in found} == {"end", "length"}
    assert len({g.codes.shape[1] for g in found}) > 4
    return found


def open_runner(model: slowar.Model, **options: Any) -> slowar.BatchRunner:
    same = {"max_batch": 4, "n_ctx": N_CTX, "n_threads": 1, "kv_type": "f32", "extra_ids": (END,)}
    return slowar.BatchRunner(model, **{**same, **options})


@pytest.fixture
def runner(other: slowar.Model) -> Iterator[slowar.BatchRunner]:
    with open_runner(other) as runner:
        yield runner


@pytest.fixture
def single(other: slowar.Model) -> Iterator[slowar.BatchRunner]:
    """One request at a time."""
    with open_runner(other, max_batch=1) as runner:
        yield runner


def ask(runner: slowar.BatchRunner, i: int, **options: Any) -> Future[slowar.Generation]:
    return runner.generate(WISHES[i].prompt, **WISHES[i].options(), **options)


def assert_equal(seen: slowar.Generation, expected: slowar.Generation) -> None:
    np.testing.assert_array_equal(seen.codes, expected.codes)
    np.testing.assert_array_equal(seen.tokens, expected.tokens)
    assert (seen.finished, seen.seed) == (expected.finished, expected.seed)
    assert seen.codes.dtype == seen.tokens.dtype == np.int32


# ---- the same codes


@pytest.mark.parametrize("n", [1, 3, 8])
def test_voices_at_once(other: slowar.Model, alone: list[slowar.Generation], n: int) -> None:
    """All prompts in one evaluation, then a frame of each that still speaks in every one."""
    with open_runner(other, max_batch=n + 1, chunk=256) as runner:
        holding = Holding(runner, n=0)  # over at once: the first evaluation
        futures = [ask(runner, i) for i in range(n)]
        holding.let_go()
        for future, expected in zip(futures, alone, strict=False):
            assert_equal(future.result(WAIT), expected)
        # The frame that comes last is not evaluated, unless the end token comes behind it.
        rounds = max(g.codes.shape[1] + (g.finished == "end") for g in alone[:n])
        assert runner.stats.evaluations == 1 + rounds
        assert ended(runner) == (1 + n, 0, 0)


def test_beside_plain_requests(other: slowar.Model, alone: list[slowar.Generation]) -> None:
    with open_runner(other, max_batch=8) as runner:
        holding = Holding(runner, n=5)
        voices = [ask(runner, i) for i in range(4)]
        plain = [runner.submit(make_prompt(SMALL, 4 + i), Greedy(9 * i, i)) for i in range(3)]
        holding.let_go()
        for future, expected in zip(voices, alone, strict=False):
            assert_equal(future.result(WAIT), expected)
        for i, request in enumerate(plain):
            choose = Greedy(9 * i, i)
            result = greedy_alone(other, make_prompt(SMALL, 4 + i), choose, extra_ids=(END,))
            assert_same(request.result(WAIT), result)
        assert ended(runner) == (8, 0, 0)


@pytest.mark.parametrize("chunk", [3, 128])
def test_few_sessions(other: slowar.Model, alone: list[slowar.Generation], chunk: int) -> None:
    """Eight voices come and go on two sessions; a prompt in pieces of 3 gives the same codes."""
    with open_runner(other, max_batch=2, chunk=chunk) as runner:
        futures = [ask(runner, i) for i in range(8)]
        for future, expected in zip(futures, alone, strict=True):
            assert_equal(future.result(WAIT), expected)
        assert ended(runner) == (8, 0, 0)


def test_from_a_prefix_cache(other: slowar.Model, alone: list[slowar.Generation]) -> None:
    cache = other.prefix_cache(2**24)
    with open_runner(other, cache=cache) as runner:
        for _ in range(2):
            assert_equal(ask(runner, 7).result(WAIT), alone[7])
    assert cache.stats.positions_reused == WISHES[7].prompt.shape[1] - 1


# ---- one goes wrong, the others do not notice


@pytest.mark.parametrize("how", ["cancelled", "raises", "late"])
def test_one_that_goes(
    other: slowar.Model,
    alone: list[slowar.Generation],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At its fifth frame, beside two that go on; the next gets its session."""
    now = [1000.0]
    monkeypatch.setattr(runner_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    here: list[Future[slowar.Generation]] = []
    made = []

    def on_frame(frame: slowar.Frame) -> None:
        made.append(frame.number)
        if frame.number == 4:
            if how == "raises":
                raise _OddError("no room")
            if how == "cancelled":
                assert here[0].cancel()
            now[0] += 2

    with open_runner(other, max_batch=3) as runner:
        holding = Holding(runner, n=0)
        here.append(
            runner.generate(
                WISHES[5].prompt,
                max_frames=20,
                min_frames=20,
                im_end_id=END,
                on_frame=on_frame,
                deadline=1 if how == "late" else None,
            )
        )
        others = [ask(runner, i) for i in (3, 4)]
        behind = ask(runner, 6)
        holding.let_go()
        kind, says = {
            "cancelled": (CancelledError, None),
            "raises": (_OddError, "no room"),
            "late": (TimeoutError, r"not done after 1 s: 28 of 28 prompt positions and 4 frames"),
        }[how]
        with pytest.raises(kind, match=says):
            here[0].result(WAIT)
        for i, future in zip((3, 4), others, strict=True):
            assert_equal(future.result(WAIT), alone[i])
        assert_equal(behind.result(WAIT), alone[6])
        assert made == [0, 1, 2, 3, 4]
        assert ended(runner) == ((4, 0, 1) if how == "cancelled" else (4, 1, 0))


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, seed: int) -> None:
    """The sampler with this seed meets a NaN in its fourth frame: in the token's or a code's."""
    original = getattr(Sampler, name)

    def spoilt(self: Sampler, *arguments: Any) -> int:
        values = list(arguments)
        at = {"token": 0, "code": 1}[name]
        if self.seed == seed and self.n_frames == {"token": 3, "code": 4}[name]:
            values[at] = np.full_like(values[at], np.nan)
        return int(original(self, *values))

    monkeypatch.setattr(Sampler, name, spoilt)


@pytest.mark.parametrize("name", ["token", "code"])
def test_a_voice_that_meets_nan(
    other: slowar.Model,
    alone: list[slowar.Generation],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = "the highest of the logits is nan"
    made = []
    spoil(monkeypatch, name, 99)
    with open_runner(other) as runner:
        holding = Holding(runner, n=0)
        wrong = runner.generate(
            WISHES[2].prompt,
            max_frames=20,
            min_frames=20,
            seed=99,
            im_end_id=END,
            on_frame=lambda frame: made.append(frame.number),
        )
        others = [ask(runner, i) for i in (1, 3, 4)]
        holding.let_go()
        with pytest.raises(ValueError, match=says):
            wrong.result(WAIT)
        for i, future in zip((1, 3, 4), others, strict=True):
            assert_equal(future.result(WAIT), alone[i])
        assert made == [0, 1, 2]
        assert ended(runner) == (4, 1, 0)
    options: dict[str, Any] = {"max_frames": 20, "min_frames": 20, "im_end_id": END}
    with pytest.raises(ValueError, match=says):
        slowar.generate(other, WISHES[2].prompt, seed=99, **options)
    with pytest.raises(ValueError, match=says):
        slowar.generate_batch(other, [WISHES[2].prompt] * 2, seeds=[1, 99], **options)


def test_a_fast_ar_that_fails(
    other: slowar.Model, alone: list[slowar.Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All voices of that round, and none of the plain requests."""

    def fail(*_: object, **__: object) -> npt.NDArray[np.int32]:
        raise slowar.ComputeError("a device is gone")

    with open_runner(other) as runner:
        holding = Holding(runner, n=5)
        with monkeypatch.context() as patch:
            patch.setattr(other.fast_ar(), "frames", fail)
            voices = [ask(runner, i) for i in range(2)]
            holding.let_go()
            for voice in voices:
                with pytest.raises(slowar.ComputeError, match="a device is gone"):
                    voice.result(WAIT)
        assert len(holding.future.result(WAIT).frames) == 5
        assert_equal(ask(runner, 3).result(WAIT), alone[3])
        assert ended(runner) == (2, 2, 0)


# ---- asyncio


def test_ten_tasks(runner: slowar.BatchRunner, alone: list[slowar.Generation]) -> None:
    """Awaited and streamed in turns."""

    async def streamed(i: int) -> npt.NDArray[np.int32]:
        frames = runner.stream(WISHES[i].prompt, **WISHES[i].options())
        made = [frame async for frame in frames]
        assert [frame.number for frame in made] == list(range(len(made)))
        assert [frame.token for frame in made] == alone[i].tokens.tolist()
        return np.stack([frame.codes for frame in made], axis=1)

    async def awaited(i: int) -> npt.NDArray[np.int32]:
        made = await runner.generate_async(WISHES[i].prompt, **WISHES[i].options())
        assert_equal(made, alone[i])
        return made.codes

    async def main() -> list[npt.NDArray[np.int32]]:
        tasks = [(streamed if i % 2 else awaited)(i) for i in range(8)]
        return await asyncio.wait_for(asyncio.gather(*tasks), WAIT)

    for codes, expected in zip(asyncio.run(main()), alone, strict=True):
        np.testing.assert_array_equal(codes, expected.codes)
    assert ended(runner) == (8, 0, 0)


class Beside:
    """A request that stands in its first choice until ``begin`` and in its fourth until ``go``.

    What begins with it has handed out two frames then. With ``fourth`` it calls that instead.
    """

    def __init__(
        self, runner: slowar.BatchRunner, fourth: Callable[[], object] | None = None
    ) -> None:
        self.begin, self.go = threading.Event(), threading.Event()
        self._inside = threading.Event()
        self._fourth = fourth or (lambda: self.go.wait(WAIT))
        self.future = runner.submit(make_prompt(SMALL, 5), Greedy(6, each=self._stand))
        assert self._inside.wait(WAIT)

    def _stand(self, number: int) -> None:
        self._inside.set()
        if number == 0:
            assert self.begin.wait(WAIT)
        elif number == 3:
            self._fourth()


ENDLESS: dict[str, Any] = {"max_frames": 70, "min_frames": 70, "im_end_id": END}


def test_frames_come_while_others_are_made(runner: slowar.BatchRunner) -> None:
    beside = Beside(runner)

    async def main() -> list[int]:
        frames = runner.stream(WISHES[0].prompt, **ENDLESS)
        first = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)  # it has been submitted
        beside.begin.set()
        made = [await first, await anext(frames)]
        beside.go.set()
        made += [frame async for frame in frames]
        return [frame.number for frame in made]

    assert asyncio.run(asyncio.wait_for(main(), WAIT)) == list(range(70))
    assert len(beside.future.result(WAIT).frames) == 6
    assert ended(runner) == (2, 0, 0)


@pytest.mark.parametrize("how", ["closed", "cancelled", "awaiting"])
def test_who_stops_frees_the_session(
    other: slowar.Model, alone: list[slowar.Generation], how: str
) -> None:
    """The iterator closed, its task cancelled, a task that awaits all: the next has its turn."""

    async def main(runner: slowar.BatchRunner) -> slowar.Generation:
        beside = Beside(runner)
        loop = asyncio.get_running_loop()
        reached = asyncio.Event()

        def on_frame(frame: slowar.Frame) -> None:
            if frame.number == 1:
                loop.call_soon_threadsafe(reached.set)

        async def read() -> None:
            if how == "awaiting":
                await runner.generate_async(WISHES[0].prompt, on_frame=on_frame, **ENDLESS)
            frames = runner.stream(WISHES[0].prompt, **ENDLESS)
            async for frame in frames:
                on_frame(frame)
                if how == "closed" and frame.number == 1:
                    await frames.aclose()

        task = asyncio.create_task(read())
        await asyncio.sleep(0)  # it has submitted
        beside.begin.set()
        await reached.wait()
        if how == "closed":
            await task
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        beside.go.set()
        return await runner.generate_async(WISHES[1].prompt, **WISHES[1].options())

    with open_runner(other, max_batch=2) as runner:
        assert_equal(asyncio.run(asyncio.wait_for(main(runner), WAIT)), alone[1])
        assert ended(runner) == (2, 0, 1)


@pytest.mark.parametrize("way", ["generate_async", "stream"])
@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"deadline": 1e-9}, TimeoutError, "not done after 1e-09 s"),
        ({"max_frames": 0}, ValueError, "max_frames is 0"),
        ({"im_end_id": 8}, ValueError, "ids have no 8"),
    ],
)
def test_what_a_task_is_told(
    runner: slowar.BatchRunner, way: str, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    async def main() -> None:
        asked = ENDLESS | options
        if way == "stream":
            async for _ in runner.stream(WISHES[0].prompt, **asked):
                pass
        else:
            await runner.generate_async(WISHES[0].prompt, **asked)

    with pytest.raises(kind, match=says):
        asyncio.run(asyncio.wait_for(main(), WAIT))


def test_closed_under_a_stream(runner: slowar.BatchRunner) -> None:
    beside = Beside(runner, fourth=runner.close)
    made = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(beside.begin.set)  # once it has submitted
        async for frame in runner.stream(WISHES[0].prompt, **ENDLESS):
            made.append(frame.number)

    with pytest.raises(slowar.SessionStateError, match=r"^the runner was closed$"):
        asyncio.run(asyncio.wait_for(main(), WAIT))
    assert made == [0, 1, 2]


def test_a_callback_that_has_run_out(runner: slowar.BatchRunner) -> None:
    """StopIteration, which no asyncio future takes."""
    rest = iter(range(2))
    options: dict[str, Any] = {"on_frame": lambda _: next(rest), **ENDLESS}
    with pytest.raises(RuntimeError, match=r"^on_frame raised StopIteration$"):
        asyncio.run(asyncio.wait_for(runner.generate_async(WISHES[0].prompt, **options), WAIT))


# ---- refused at the door


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"max_frames": 0}, ValueError, "max_frames is 0, expected 1 to"),
        ({"max_frames": 1.5}, TypeError, "max_frames is 1.5"),
        ({"temperature": -1}, ValueError, "temperature is -1"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"im_end_id": 8}, ValueError, r"ids have no 8.* im_end_id 8 \(extra_ids\)"),
        ({"im_end_id": 210}, ValueError, "im_end_id is 210, expected an id outside"),
        ({"deadline": 0}, ValueError, "deadline is 0 s"),
        ({"kv_type": "f32"}, TypeError, "kv_type"),
        (
            {"max_frames": 78},
            slowar.ContextFullError,
            "3 positions and max_frames of 78 are more than the runner's n_ctx of 80",
        ),
    ],
)
def test_bad_values(
    runner: slowar.BatchRunner, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        runner.generate(WISHES[0].prompt, **(WISHES[0].options() | options))
    assert runner.stats.accepted == 0
    most = runner.generate(WISHES[0].prompt, max_frames=77, min_frames=77, im_end_id=END)
    assert most.result(WAIT).codes.shape == (10, 77)


def test_bad_prompts_and_a_closed_runner(runner: slowar.BatchRunner) -> None:
    wrong = WISHES[0].prompt.copy()
    wrong[0, 1] = SMALL.n_vocab
    with pytest.raises(ValueError, match="token id at row 0, column 1"):
        runner.generate(wrong, max_frames=5, im_end_id=END)
    with pytest.raises(ValueError, match="shape"):
        runner.generate(wrong[:4], max_frames=5, im_end_id=END)
    runner.close()
    with pytest.raises(slowar.SessionStateError, match=r"^the runner is closed$"):
        ask(runner, 0)
    assert ended(runner) == (0, 0, 0)


def test_a_file_without_a_fast_ar(tmp_path: Path) -> None:
    make_model(tmp_path / "slow.gguf", SMALL, fast=None)
    with (
        slowar.Model(tmp_path / "slow.gguf", backend="cpu") as model,
        open_runner(model) as runner,
    ):
        with pytest.raises(slowar.ModelFormatError, match=r"key fish_speech\.fast_context_length"):
            ask(runner, 0)
        assert len(runner.submit(WISHES[0].prompt, Greedy(2)).result(WAIT).frames) == 2


# ---- timings


def test_timings(runner: slowar.BatchRunner) -> None:
    seen: list[slowar.Timings] = []
    found = runner.generate(
        WISHES[4].prompt,
        max_frames=12,
        min_frames=12,
        im_end_id=END,
        on_frame=lambda frame: seen.append(frame.timings),
    ).result(WAIT)
    assert len(seen) == 12
    assert_never_decreasing([*seen, found.timings])
