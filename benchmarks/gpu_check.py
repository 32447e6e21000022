"""Everything that is to be known of a device, in one run: parity, splits, speed.

python benchmarks/gpu_check.py [--backend auto] [--servers HOST:PORT,...] [--full] [--bandwidth N]

Prints a markdown page. Without --full it takes seconds and needs no file; with it, it makes the
full-size random models (2.2 and 4.1 GiB, kept in the user's cache folder) and measures steps,
prefill and batches on them: under five minutes on a machine with one large GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from performance import cached_model

import pyggml_slowar as slowar
from pyggml_slowar import Model, Output, Session, bench, device, make_model

WEIGHTS = make_model.TYPES
CACHES = ("f16", "bf16", "f32", "q8_0")
PATHS = ("flash", "reference")
N_STEPS = 200
BATCHES = (1, 2, 4, 8, 16, 32, 64)

# Rows of 256: every quantised type and every device's kernels take them.
MODEL = dataclasses.replace(make_model.TINY, n_embd=256, n_ff=512, n_layer=4)

Rows = Iterator[tuple[Any, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--servers", type=lambda text: text.split(","), default=[])
    parser.add_argument("--full", action="store_true", help="the full-size models too")
    parser.add_argument("--bandwidth", type=float, help="of the device's memory, GB/s, as sold")
    options = parser.parse_args()

    def opened(path: Path, **more: Any) -> Model:
        return Model(path, backend=options.backend, servers=options.servers, **more)

    with tempfile.TemporaryDirectory() as folder:
        paths = {type: Path(folder) / f"{type}.gguf" for type in WEIGHTS}
        for type, path in paths.items():
            make_model.make_model(path, MODEL, type, seed=1)
        with opened(paths["q8_0"]) as model:
            if not model.device.is_gpu:
                raise SystemExit(f"{model.device.name} is no GPU: there is nothing to check")
            for d in model.devices:
                free, total = d.memory_free / 2**30, d.memory_total / 2**30
                print(f"{d.backend} {d.name}: {d.description}, {free:.1f} of {total:.1f} GiB free")
        print(device.build_info(), end="\n\n")
        table("weights | cache | path | error | splits | fallbacks", parity(opened, paths))
        table("layers | path | cache placed | error | splits", offload(opened, paths["q8_0"]))
    if options.full:
        speed = Speed(opened, (options.bandwidth or 0) * 1e9)
        table("weights | past | p50 ms | p99 ms | steps/s | of the bandwidth", speed.steps())
        table("weights | positions | tok/s", speed.prefills())
        table("weights | sessions | ms a step | positions/s | x one", speed.batches())


def table(head: str, rows: Rows) -> None:
    print(f"| {head} |")
    print("|" + " --- |" * len(head.split("|")), flush=True)
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    print()


def run(session: Session) -> list[Output]:
    """A prompt of 17 positions and ten steps."""
    tokens = bench.random_tokens(session.model, 27)
    return [session.prefill(tokens[:, :17]), *(session.step(frame) for frame in tokens[:, 17:].T)]


def error(a: list[Output], b: list[Output]) -> str:
    """The largest relative error of any vector."""
    pairs = zip(a, b, strict=True)
    worst = max(max(relative(x.hidden, y.hidden), relative(x.logits, y.logits)) for x, y in pairs)
    return f"{worst:.1e}"


def relative(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def parity(opened: Callable[..., Model], paths: dict[str, Path]) -> Rows:
    """Every weight and cache type on both paths, against the CPU."""
    for type, path in paths.items():
        with opened(path) as model, Model(path, backend="cpu") as host:
            for kv_type in CACHES:
                for attention in PATHS:
                    with host.session(64, kv_type=kv_type, attention=attention) as session:
                        expected = run(session)
                    try:
                        with model.session(64, kv_type=kv_type, attention=attention) as session:
                            difference = error(run(session), expected)
                            splits, fallbacks = session.n_splits, len(session.fallbacks)
                    except slowar.DeviceError as e:
                        yield type, kv_type, attention, str(e), "", ""
                        continue
                    yield type, kv_type, attention, difference, splits, fallbacks


def offload(opened: Callable[..., Model], path: Path) -> Rows:
    """Every number of layers on the device, both places for the cache."""
    with Model(path, backend="cpu") as host:
        for attention in PATHS:
            with host.session(64, attention=attention) as session:
                expected = run(session)
            for kv_placement in ("layers", "gpu"):
                for n in range(MODEL.n_layer + 1):
                    with (
                        opened(path, n_gpu_layers=n) as model,
                        model.session(
                            64, attention=attention, kv_placement=kv_placement
                        ) as session,
                    ):
                        difference = error(run(session), expected)
                        yield n, attention, kv_placement, difference, session.n_splits


@dataclasses.dataclass
class Speed:
    """Times of the full-size models; ``bandwidth`` in bytes a second, 0: not known."""

    opened: Callable[..., Model]
    bandwidth: float

    def models(self) -> Iterator[tuple[str, Model]]:
        for type in ("q4_k", "q8_0"):
            with self.opened(cached_model(type)) as model:
                yield type, model

    def steps(self) -> Rows:
        for type, model in self.models():
            with model.session(4096, logits="semantic") as session:
                tokens = bench.random_tokens(model, 2048 + N_STEPS)
                for past in (128, 640, 2048):
                    session.reset()
                    session.prefill(tokens[:, :past])
                    ms = []
                    for frame in tokens[:, past : past + N_STEPS].T:
                        start = time.perf_counter()
                        session.step(frame)
                        ms.append((time.perf_counter() - start) * 1e3)
                    p50, p99 = np.percentile(ms, [50, 99])
                    n_bytes = bench.step_bytes(model, "semantic", past)
                    share = f"{n_bytes / self.bandwidth / p50 * 1e3:.2f}" if self.bandwidth else "?"
                    yield type, past, f"{p50:.2f}", f"{p99:.2f}", f"{1e3 / p50:.0f}", share

    def prefills(self) -> Rows:
        for type, model in self.models():
            with model.session(4096, logits="semantic") as session:
                for n in (128, 512, 2048):
                    tokens = bench.random_tokens(model, n)
                    seconds = []
                    for _ in range(4):
                        session.reset()
                        start = time.perf_counter()
                        session.prefill(tokens)
                        seconds.append(time.perf_counter() - start)
                    yield type, n, f"{n / statistics.median(seconds[1:]):.0f}"

    def batches(self) -> Rows:
        for type, model in self.models():
            tokens = bench.random_tokens(model, 128)
            one = 0.0
            sessions: list[Session] = []
            for n in BATCHES:
                while len(sessions) < n:
                    sessions.append(model.session(256, logits="semantic", own_compute=False))
                    model.prefill_batch(sessions[-1:], [tokens])
                frames = np.tile(tokens[:, 0], (n, 1))
                seconds = []
                for _ in range(12):
                    start = time.perf_counter()
                    model.step_batch(sessions, frames)
                    seconds.append(time.perf_counter() - start)
                step = statistics.median(seconds[2:])
                one = one or step
                yield type, n, f"{step * 1e3:.2f}", f"{n / step:.0f}", f"{n * one / step:.2f}"
            for session in sessions:
                session.close()


if __name__ == "__main__":
    main()
