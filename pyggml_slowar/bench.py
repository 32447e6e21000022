"""``slowar bench``: how fast a model is here, and how near to what the memory allows.

Every figure of a run comes from that run: the memory's read bandwidth is measured beside the steps,
configurations take turns step by step so that a slow moment hits all of them, and medians are of
``repeats`` steps. A step is compared with its floor: the bytes of weights and cache that it must
read, divided by that bandwidth.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from . import _native, device
from ._threads import Threads
from .fast_ar import Codes, FastAR
from .generation import FRAMES_PER_SECOND, Frame, Voice, next_frames
from .model import Model
from .sampler import IM_END_ID, Sampler
from .session import Logits, Session

REAL_TIME = FRAMES_PER_SECOND
"""Steps a second that real time needs."""


@dataclass(frozen=True)
class Plan:
    """What to measure. Every combination of attention, logits and repack is one configuration."""

    model: Path
    attention: Sequence[str] = ("reference", "flash")
    logits: Sequence[Logits] = ("semantic",)
    repack: Sequence[bool] = (False,)
    past: Sequence[int] = (128, 640)
    prefill: Sequence[int] = (128, 512)
    batch: Sequence[int] = ()
    """Sessions stepped together, at the smallest of ``past``, flash attention, semantic logits."""
    n_threads: int | None = None
    """None: ``device.default_threads()``, and beside a busy process as many as pay."""
    repeats: int = 7
    contended: bool = False
    frames: bool = False
    """Whole frames at each of ``past`` and ``repack``: Slow-AR, Fast-AR, sampling. The reference's
    are of mapped weights, if ``repack`` has them."""


@dataclass(frozen=True)
class Configuration:
    attention: str
    logits: Logits
    repack: bool

    def __str__(self) -> str:
        return f"{self.attention}, {self.logits}{', repack' if self.repack else ''}"


@dataclass(frozen=True)
class Step:
    """One configuration at one position.

    ``floor_share`` is floor / median: 1 at best, but for the bandwidth that changes between looks.
    A busy process has its part of the memory's speed.
    """

    configuration: Configuration
    past: int
    median_ms: float
    low_ms: float
    high_ms: float
    floor_share: float


@dataclass(frozen=True)
class Prefill:
    """``n_tokens`` positions behind ``past``, in the configuration's own chunks."""

    configuration: Configuration
    past: int
    n_tokens: int
    tokens_per_second: float


@dataclass(frozen=True)
class BatchStep:
    """One step of ``n_sessions`` sessions together."""

    repack: bool
    n_sessions: int
    past: int
    median_ms: float
    low_ms: float
    high_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class FrameCost:
    """A frame of a generation in milliseconds, medians.

    The reference is the documented graph, and a Fast-AR that begins anew for every code: on mapped
    weights, unless only packed ones were asked for.
    """

    past: int
    repack: bool
    slow_ar_ms: float
    fast_ar_ms: float
    sampling_ms: float
    python_ms: float
    """What is left of the whole."""
    whole_ms: float
    fast_ar_floor_share: float
    reference_slow_ar_ms: float
    reference_fast_ar_ms: float

    @property
    def reference_ms(self) -> float:
        """Of the whole: sampling and Python are the same."""
        mine = self.sampling_ms + self.python_ms
        return self.reference_slow_ar_ms + self.reference_fast_ar_ms + mine


@dataclass(frozen=True)
class Opening:
    repack: bool
    milliseconds: float
    rss_mib: float


@dataclass(frozen=True)
class Report:
    machine: dict[str, Any]
    openings: list[Opening]
    compute_mib: dict[str, float]
    prefills: list[Prefill]
    steps: list[Step]
    contended: list[Step]
    batches: list[BatchStep]
    frames: list[FrameCost]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_bandwidth(n_threads: int) -> float:
    """Bytes a second that ``n_threads`` threads read from memory together."""
    out = _native.ffi.new("double *")
    _native.call(_native.lib.slowar_read_bandwidth, n_threads, out)
    return float(out[0])


class _Memory:
    """The memory's bandwidth, looked at often: it changes with what else the host runs."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self.seen: list[float] = []

    def look(self) -> None:
        self.seen.append(read_bandwidth(self.n_threads))

    def floor_ms(self, n_bytes: int, n_looks: int) -> float:
        """The least time in which ``n_bytes`` are read, by the median of the last looks."""
        return n_bytes / statistics.median(self.seen[-n_looks:]) * 1e3


def run(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Report:
    """Measure what the plan asks for. ``say`` is told what happens."""
    n_threads = plan.n_threads or device.default_threads()
    memory = _Memory(n_threads)
    say("measuring memory bandwidth")
    memory.look()
    openings = []
    with ExitStack() as stack:
        models = {}
        for repack in plan.repack:
            say(f"opening {plan.model}{' with repack' if repack else ''}")
            models[repack], opening = _open(plan.model, repack)
            stack.enter_context(models[repack])
            openings.append(opening)
        if plan.frames:
            for model in models.values():
                model.fast_ar()  # or says what is missing, before anything is measured

        length = max([*plan.past, *plan.prefill]) + max(plan.prefill) + 1
        tokens = random_tokens(next(iter(models.values())), length)
        with ExitStack() as sessions_stack:
            sessions = _open_sessions(plan, models, length, n_threads, sessions_stack)
            prefills = _measure_prefills(plan, sessions, tokens, say)
            steps = _measure_steps(plan, sessions, tokens, memory, say)
            compute = {str(c): s.compute_nbytes / 2**20 for c, s in sessions.items()}
        batches = _measure_batches(plan, models, tokens, n_threads, say) if plan.batch else []
        frames = []
        if plan.frames:
            frames = _measure_frames(plan, models, tokens, memory, say)
        contended = []
        if plan.contended:
            sessions = _open_sessions(plan, models, length, plan.n_threads, stack)
            for session in sessions.values():
                _move_to(session, max(plan.past), tokens)
            with busy_neighbour():
                contended = _measure_steps(plan, sessions, tokens, _Memory(n_threads), say)
    machine = {
        "cpu": next(d for d in device.devices() if d.type == "cpu").description,
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "threads": n_threads,
        "build": device.build_info(),
        "bandwidth_gb_per_s": statistics.median(memory.seen) / 1e9,
        "bandwidth_lowest_gb_per_s": min(memory.seen) / 1e9,
        "bandwidth_highest_gb_per_s": max(memory.seen) / 1e9,
        "load_before": os.getloadavg()[0],
        "model": plan.model.name,
    }
    return Report(machine, openings, compute, prefills, steps, contended, batches, frames)


def random_tokens(model: Model, n: int) -> npt.NDArray[np.int32]:
    """(1 + n_codebook, n) semantic positions: the dearest kind, each looks up every codebook."""
    c = model.config
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, c.codebook_size, (1 + c.n_codebook, n), dtype=np.int32)
    tokens[0] = rng.integers(c.semantic_begin_id, c.semantic_end_id + 1, n)
    return tokens


def step_bytes(model: Model, logits: Logits, past: int) -> int:
    """What one step must read: layer weights, the rows of the head asked for, the cache."""
    c = model.config
    tensors = {t.name: t for t in model.tensors()}
    layers = sum(t.nbytes for name, t in tensors.items() if name.startswith("layers."))
    head = tensors["embeddings.weight" if c.tie_word_embeddings else "output.weight"]
    rows = {"full": c.n_vocab, "semantic": c.semantic_end_id - c.semantic_begin_id + 1, "none": 0}
    cache = 2 * 2 * c.n_layer * c.n_head_kv * c.head_dim * (past + 1)  # K and V, F16
    return layers + head.nbytes * rows[logits] // c.n_vocab + cache


def _open(path: Path, repack: bool) -> tuple[Model, Opening]:
    process = psutil.Process()
    start = time.perf_counter()
    model = Model(path, backend="cpu", repack=repack)
    milliseconds = (time.perf_counter() - start) * 1e3
    return model, Opening(repack, milliseconds, process.memory_info().rss / 2**20)


Sessions = dict[Configuration, Session]


def _open_sessions(
    plan: Plan, models: dict[bool, Model], length: int, n_threads: int | None, stack: ExitStack
) -> Sessions:
    sessions = {}
    for attention, logits, repack in itertools.product(plan.attention, plan.logits, plan.repack):
        session = models[repack].session(
            length, n_threads=n_threads, attention=attention, logits=logits
        )
        sessions[Configuration(attention, logits, repack)] = stack.enter_context(session)
    return sessions


def _measure_batches(
    plan: Plan,
    models: dict[bool, Model],
    tokens: npt.NDArray[np.int32],
    n_threads: int,
    say: Callable[[str], None],
) -> list[BatchStep]:
    """Sizes and repack take turns, step by step."""
    past = min(plan.past)
    cases = list(itertools.product(plan.repack, plan.batch))
    times: dict[tuple[bool, int], list[float]] = {case: [] for case in cases}
    with ExitStack() as stack:
        groups = {
            repack: [
                stack.enter_context(
                    model.session(
                        past + 1, n_threads=n_threads, logits="semantic", own_compute=False
                    )
                )
                for _ in range(max(plan.batch))
            ]
            for repack, model in models.items()
        }
        for first, *others in groups.values():
            _move_to(first, past, tokens)
            for session in others:
                session.copy_prefix(first)
        for i in range(plan.repeats + 1):
            for repack, n in cases:
                say(f"step of {n} sessions at {past}: {i} of {plan.repeats}")
                sessions = groups[repack][:n]
                for session in sessions:
                    session.rewind(past)
                frames = np.repeat(tokens[:, past][None], n, axis=0)
                start = time.perf_counter()
                models[repack].step_batch(sessions, frames)
                if i > 0:  # the first round plans the graphs
                    times[repack, n].append((time.perf_counter() - start) * 1e3)
    out = []
    for (repack, n), ms in times.items():
        median = statistics.median(ms)
        out.append(BatchStep(repack, n, past, median, min(ms), max(ms), n * 1e3 / median))
    return out


def _measure_frames(
    plan: Plan,
    models: dict[bool, Model],
    tokens: npt.NDArray[np.int32],
    memory: _Memory,
    say: Callable[[str], None],
) -> list[FrameCost]:
    """A frame of each kind in turn."""
    documented = models.get(False, models[plan.repack[0]])
    end = _end_token(documented)
    n_threads = memory.n_threads
    out = []
    with ExitStack() as stack:

        def opened(model: Model, attention: str) -> Session:
            return stack.enter_context(
                model.session(
                    max(plan.past) + 1,
                    n_threads=n_threads,
                    attention=attention,
                    logits="semantic",
                    extra_ids=(end,),
                )
            )

        mine = {repack: opened(models[repack], "flash") for repack in plan.repack}
        reference = opened(documented, "reference")
        anew = _Anew(documented.fast_ar(), n_threads)
        stack.callback(anew.close)
        for past in plan.past:
            rows: dict[bool, list[dict[str, float]]] = {repack: [] for repack in mine}
            for i in range(plan.repeats + 1):
                say(f"frame at {past}: {i} of {plan.repeats}")
                memory.look()
                for session in (*mine.values(), reference):
                    _move_to(session, past, tokens)
                for repack, session in mine.items():
                    sampler = Sampler(documented.config, seed=i, min_frames=1, im_end_id=end)
                    row, hidden, codes = _frame(session, tokens[:, past], sampler, n_threads)
                    rows[repack].append(row)
                start = time.perf_counter()
                reference.step(tokens[:, past])
                stepped = time.perf_counter()
                anew.frame(hidden, codes)
                done = time.perf_counter()
                for all_rows in rows.values():
                    all_rows[-1]["reference_slow_ar_ms"] = stepped - start
                    all_rows[-1]["reference_fast_ar_ms"] = done - stepped
            floor = memory.floor_ms(fast_bytes(documented), plan.repeats + 1)
            for repack, all_rows in rows.items():
                ms = {
                    k: statistics.median(row[k] for row in all_rows[1:]) * 1e3 for k in all_rows[0]
                }
                share = floor / ms["fast_ar_ms"]
                out.append(FrameCost(past, repack, fast_ar_floor_share=share, **ms))
    return out


def _end_token(model: Model) -> int:
    """The released one, or where the vocabulary is smaller any that is not semantic."""
    c = model.config
    if c.n_vocab > IM_END_ID:
        return IM_END_ID
    return 0 if c.semantic_begin_id > 0 else c.n_vocab - 1


def _frame(
    session: Session, tokens: npt.NDArray[np.int32], sampler: Sampler, n_threads: int
) -> tuple[dict[str, float], npt.NDArray[np.float32], Codes]:
    """Seconds by what they were spent on, the hidden vector, and the codes."""
    voice = Voice(sampler, max_frames=2)
    start = time.perf_counter()
    output = session.step(tokens)
    slow_ar = time.perf_counter() - start
    (frame,) = next_frames(session.model, [voice], [output], n_threads)
    whole = time.perf_counter() - start
    assert isinstance(frame, Frame)
    t = frame.timings
    return (
        {
            "slow_ar_ms": slow_ar,
            "fast_ar_ms": t.fast_ar,
            "sampling_ms": t.sampling,
            "python_ms": whole - slow_ar - t.fast_ar - t.sampling,
            "whole_ms": whole,
        },
        output.hidden,
        frame.codes,
    )


class _Anew:
    """A Fast-AR on the documented graph that begins with the first position for every code.

    Its evaluator is its own, so that the other's graphs stay ready.
    """

    def __init__(self, fast: FastAR, n_threads: int) -> None:
        self._fast = fast
        self._threads = Threads(n_threads, adapt=False)
        self._evaluator = fast._evaluator(n_threads)
        self._cache = fast._cache("reference")

    def frame(self, hidden: npt.NDArray[np.float32], codes: Codes) -> None:
        def run(pointer: Any) -> None:
            for n in range(1, len(codes)):
                prefix = codes[None, :n]
                self._fast._evaluate(pointer, self._threads, [self._cache], prefix, hidden[None])

        self._evaluator.run(run)

    def close(self) -> None:
        self._cache.close()
        self._evaluator.close()


def fast_bytes(model: Model) -> int:
    """What a frame's Fast-AR must read: all but the embeddings, for each code but the first."""
    fast = model.fast_ar()
    read = sum(t.nbytes for t in fast.tensors() if t.name != "fast_embeddings.weight")
    return read * (model.config.n_codebook - 1)


def _measure_prefills(
    plan: Plan, sessions: Sessions, tokens: npt.NDArray[np.int32], say: Callable[[str], None]
) -> list[Prefill]:
    """Each length behind nothing, and the longest again behind the shortest."""
    cases = [(0, n) for n in plan.prefill]
    if len(plan.prefill) > 1:
        cases.append((min(plan.prefill), max(plan.prefill)))
    out = []
    for past, n in cases:
        for configuration, session in sessions.items():
            say(f"prefill {n} behind {past}: {configuration}")
            _move_to(session, past, tokens)
            start = time.perf_counter()
            session.prefill(tokens[:, past : past + n])
            out.append(Prefill(configuration, past, n, n / (time.perf_counter() - start)))
    return out


def _measure_steps(
    plan: Plan,
    sessions: Sessions,
    tokens: npt.NDArray[np.int32],
    memory: _Memory,
    say: Callable[[str], None],
) -> list[Step]:
    out = []
    for past in plan.past:
        for session in sessions.values():
            _move_to(session, past, tokens)
        times: dict[Configuration, list[float]] = {c: [] for c in sessions}
        for i in range(plan.repeats + 1):
            say(f"step at {past}: {i} of {plan.repeats}")
            memory.look()
            for configuration, session in sessions.items():
                session.rewind(past)
                start = time.perf_counter()
                session.step(tokens[:, past])
                if i > 0:  # the first round warms up
                    times[configuration].append((time.perf_counter() - start) * 1e3)
        for configuration, ms in times.items():
            read = step_bytes(sessions[configuration].model, configuration.logits, past)
            floor = memory.floor_ms(read, plan.repeats + 1)
            median = statistics.median(ms)
            out.append(Step(configuration, past, median, min(ms), max(ms), floor / median))
    return out


def _move_to(session: Session, past: int, tokens: npt.NDArray[np.int32]) -> None:
    """To position ``past``, over noise: time does not depend on what was said before."""
    if session.n_past > past:
        session.rewind(past)
    missing = tokens[:, session.n_past : past].T
    noise = np.random.default_rng(0).standard_normal(2**16).astype(np.float16)
    kv = np.resize(noise.view(np.uint8), session._kv_shape(len(missing)))
    session._handle.run(lambda pointer: session._write_kv(pointer, missing, kv))


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Another process that keeps one CPU busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


def markdown(report: Report) -> str:
    """The report as tables, ratios against the reference of the same run where there is one."""
    m = report.machine
    lines = [
        f"{m['model']} on {m['cpu']} ({m['cpus']} CPUs), {m['threads']} threads, {m['build']}.",
        f"Memory reads at {m['bandwidth_gb_per_s']:.1f} GB/s (the median; "
        f"{m['bandwidth_lowest_gb_per_s']:.1f} to {m['bandwidth_highest_gb_per_s']:.1f}, "
        "looked at before every round of steps).",
        "Steps are the Slow-AR's alone, no real-time factor: Fast-AR and codec come on top. "
        f"Real time needs {REAL_TIME:.2f} steps a second.",
        "",
        "| step | past | median ms | lowest - highest | steps/s | of the floor | of reference |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_step_row(s, report.steps) for s in report.steps),
    ]
    if report.contended:
        lines += [
            "",
            "With a busy process on one CPU:",
            "",
            "| step | past | median ms | lowest - highest | of the quiet step |",
            "| --- | --- | --- | --- | --- |",
            *(_contended_row(s, report.steps) for s in report.contended),
        ]
    if report.batches:
        lines += [
            "",
            "| sessions in a step | past | median ms | lowest - highest | tok/s | of one |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_batch_row(b, report.batches) for b in report.batches),
        ]
    if report.frames:
        lines += [
            "",
            "A frame of a generation, in ms and shares of the whole. Reference: the documented "
            "graph, and a Fast-AR that begins anew for every code.",
            "",
            "| past | Slow-AR | Fast-AR | sampling | Python | whole | Fast-AR of its floor "
            "| reference: Slow-AR | Fast-AR | Fast-AR of the reference's | times as fast |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *(_frame_row(f) for f in report.frames),
        ]
    lines += [
        "",
        "| prefill | behind | positions | tok/s | of the reference |",
        "| --- | --- | --- | --- | --- |",
        *(_prefill_row(p, report.prefills) for p in report.prefills),
        "",
        "| opening | ms | RSS MiB |",
        "| --- | --- | --- |",
        *(
            f"| {'repack' if o.repack else 'mapped'} | {o.milliseconds:.0f} | {o.rss_mib:.0f} |"
            for o in report.openings
        ),
        "",
        "Compute buffers: " + "; ".join(f"{c} {n:.1f} MiB" for c, n in report.compute_mib.items()),
    ]
    return "\n".join(lines)


def _step_row(s: Step, all_steps: list[Step]) -> str:
    base = _reference(s, all_steps)
    ratio = f"{s.median_ms / base.median_ms:.2f} x" if base else ""
    return (
        f"| {s.configuration} | {s.past} | {s.median_ms:.1f} | {s.low_ms:.1f} - {s.high_ms:.1f} "
        f"| {1e3 / s.median_ms:.1f} | {s.floor_share:.2f} | {ratio} |"
    )


def _contended_row(s: Step, quiet: list[Step]) -> str:
    base = next(q for q in quiet if (q.configuration, q.past) == (s.configuration, s.past))
    return (
        f"| {s.configuration} | {s.past} | {s.median_ms:.1f} | {s.low_ms:.1f} - {s.high_ms:.1f} "
        f"| {s.median_ms / base.median_ms:.2f} x |"
    )


def _batch_row(b: BatchStep, all_batches: list[BatchStep]) -> str:
    one = next((o for o in all_batches if o.repack == b.repack and o.n_sessions == 1), None)
    ratio = f"{b.tokens_per_second / one.tokens_per_second:.2f} x" if one else ""
    return (
        f"| {b.n_sessions}{', repack' if b.repack else ''} | {b.past} | {b.median_ms:.1f} "
        f"| {b.low_ms:.1f} - {b.high_ms:.1f} | {b.tokens_per_second:.1f} | {ratio} |"
    )


def _frame_row(f: FrameCost) -> str:
    parts = (f.slow_ar_ms, f.fast_ar_ms, f.sampling_ms, f.python_ms)
    shares = " | ".join(f"{ms:.1f} ({ms / f.whole_ms:.1%})" for ms in parts)
    return (
        f"| {f.past}{', repack' if f.repack else ''} | {shares} "
        f"| {f.whole_ms:.1f} | {f.fast_ar_floor_share:.2f} "
        f"| {f.reference_slow_ar_ms:.1f} | {f.reference_fast_ar_ms:.1f} "
        f"| {f.fast_ar_ms / f.reference_fast_ar_ms:.2f} x "
        f"| {f.reference_ms / f.whole_ms:.1f} |"
    )


def _prefill_row(p: Prefill, all_prefills: list[Prefill]) -> str:
    base = next(
        (
            q
            for q in all_prefills
            if (q.past, q.n_tokens) == (p.past, p.n_tokens)
            and q.configuration == _plain(p.configuration)
        ),
        None,
    )
    ratio = f"{p.tokens_per_second / base.tokens_per_second:.2f} x" if base else ""
    return f"| {p.configuration} | {p.past} | {p.n_tokens} | {p.tokens_per_second:.1f} | {ratio} |"


def _reference(s: Step, all_steps: list[Step]) -> Step | None:
    plain = _plain(s.configuration)
    return next((t for t in all_steps if t.past == s.past and t.configuration == plain), None)


def _plain(c: Configuration) -> Configuration:
    """What a configuration is measured against: the reference graph on mapped weights."""
    return Configuration("reference", c.logits, repack=False)
