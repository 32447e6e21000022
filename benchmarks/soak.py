"""Hours of a BatchRunner in minutes: does memory grow, is a request lost?

python benchmarks/soak.py [--minutes N] [--model FILE] [--seed N]

Four threads and an asyncio loop send requests at random moments: good ones, cancelled ones, late
ones, and ones that fail. Each must end in a way that its kind allows. A line every 10 s; at the end
the checks and one line for the documentation. Exits with 1 if a request was lost or answered
wrongly, or if the memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

import pyggml_slowar as slowar
from pyggml_slowar.make_model import TINY, make_model

THREADS = 4
TASKS = 4  # clients on the asyncio loop
N_CTX = 128
MOST_MIB = 10.0  # that resident memory may grow by
GRACE = 60.0  # seconds after the end in which what was accepted must be answered

# How a request may end, for each kind. A cancel or a deadline may come too late.
ALLOWED = {
    "good": {"answered"},
    "cancelled": {"answered", "cancelled"},
    "late": {"answered", "TimeoutError"},
    "raises": {"OddError"},
    "bad frame": {"ValueError"},
    "full": {"ContextFullError"},
}
WEIGHTS = (60, 12, 8, 8, 6, 6)


class OddError(Exception):
    """What a broken sampler raises."""


@dataclass
class Request:
    """One request as it is drawn: a prompt, a kind, and how many frames it wants."""

    prompt: npt.NDArray[np.int64]
    kind: str
    n_frames: int
    deadline: float | None
    patience: float
    """Seconds until it is cancelled, where it is."""
    calls: int = 0

    def choose(self, out: slowar.Output) -> npt.NDArray[np.int64] | None:
        self.calls += 1
        if self.calls > self.n_frames and self.kind != "full":
            if self.kind == "raises":
                raise OddError
            return np.zeros(3, np.int64) if self.kind == "bad frame" else None
        frame = np.zeros(len(self.prompt), np.int64)
        frame[0] = out.ids[np.argmax(out.logits)]
        return frame


class Requests:
    """Draws requests. A third begin with one of four voices, so that a prefix cache has work."""

    def __init__(self, config: slowar.Config, seed: int) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.voices = [self._tokens(40, np.random.default_rng(i)) for i in range(4)]
        self.numbers = np.random.default_rng(seed)

    def _tokens(self, n: int, numbers: np.random.Generator) -> npt.NDArray[np.int64]:
        c = self.config
        tokens = numbers.integers(0, c.codebook_size, (1 + c.n_codebook, n))
        tokens[0] = numbers.integers(0, c.n_vocab, n)
        return tokens

    def draw(self) -> Request:
        kind = self.random.choices(list(ALLOWED), WEIGHTS)[0]
        prompt = self._tokens(self.random.randint(1, 30), self.numbers)
        if self.random.random() < 1 / 3:
            prompt = np.concatenate([self.random.choice(self.voices), prompt], axis=1)
        return Request(
            prompt=prompt,
            kind=kind,
            n_frames=self.random.randint(0, 40),
            deadline=self.random.uniform(0.001, 0.05) if kind == "late" else None,
            patience=self.random.uniform(0, 0.05),
        )

    def pause(self) -> float:
        """Arrivals come in bursts: mostly none, now and then a longer rest."""
        return self.random.choice((0.0, 0.0, 0.005, 0.05, 0.5))


class Book:
    """What became of the requests, counted by those who sent them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.accepted = 0
        self.refused = 0  # the queue was full
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def accept(self) -> None:
        with self.lock:
            self.accepted += 1

    def refuse(self) -> None:
        with self.lock:
            self.refused += 1

    def end(self, request: Request, failure: BaseException | None) -> None:
        how = "answered" if failure is None else type(failure).__name__
        if isinstance(failure, (CancelledError, asyncio.CancelledError)):
            how = "cancelled"
        with self.lock:
            self.ends[how] += 1
            if how not in ALLOWED[request.kind]:
                self.wrong.append(f"{request.kind}: {failure!r}")


def client(runner: slowar.BatchRunner, requests: Requests, book: Book, end: float) -> None:
    """A thread: up to eight requests at a time, the oldest awaited first."""
    pending: list[tuple[Future[slowar.Result], Request]] = []
    while time.monotonic() < end:
        request = requests.draw()
        try:
            future = runner.submit(request.prompt, request.choose, deadline=request.deadline)
        except slowar.QueueFullError:
            book.refuse()
        else:
            book.accept()
            pending.append((future, request))
            if request.kind == "cancelled":
                threading.Event().wait(request.patience)
                future.cancel()
        while len(pending) > 8:
            settle(*pending.pop(0), book)
        threading.Event().wait(requests.pause())
    for future, request in pending:
        settle(future, request, book)


def settle(future: Future[slowar.Result], request: Request, book: Book) -> None:
    try:
        future.result(GRACE)
    except (Exception, CancelledError) as failure:
        if future.done():  # else nobody answered: lost, and missed in the count
            book.end(request, failure)
    else:
        book.end(request, None)


async def task(runner: slowar.BatchRunner, requests: Requests, book: Book, end: float) -> None:
    """A client on the loop: one request at a time, cancelled through its task."""
    while time.monotonic() < end:
        request = requests.draw()
        run = asyncio.create_task(
            runner.run(request.prompt, request.choose, deadline=request.deadline)
        )
        if request.kind == "cancelled":
            await asyncio.sleep(request.patience)
            run.cancel()
        done, _ = await asyncio.wait([run], timeout=GRACE)
        if not done:
            book.accept()  # and never answered
            continue
        failure = asyncio.CancelledError() if run.cancelled() else run.exception()
        if isinstance(failure, slowar.QueueFullError):
            book.refuse()
        else:
            book.accept()
            book.end(request, failure)
        await asyncio.sleep(requests.pause())


def loop(runner: slowar.BatchRunner, all_requests: list[Requests], book: Book, end: float) -> None:
    async def main() -> None:
        await asyncio.gather(*(task(runner, r, book, end) for r in all_requests))

    asyncio.run(main())


def rss() -> float:
    """MiB in memory."""
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 2**20


def soak(model: slowar.Model, seconds: float, seed: int) -> bool:
    book = Book()
    cache = model.prefix_cache(4 << 20)
    runner = slowar.BatchRunner(
        model, max_batch=8, n_ctx=N_CTX, max_queue=12, chunk=32, n_threads=1, cache=cache
    )
    start = time.monotonic()
    end = start + seconds
    draws = [Requests(model.config, seed * 1000 + i) for i in range(THREADS + TASKS)]
    threads = [
        threading.Thread(target=client, args=(runner, requests, book, end))
        for requests in draws[:THREADS]
    ]
    threads.append(threading.Thread(target=loop, args=(runner, draws[THREADS:], book, end)))
    for thread in threads:
        thread.start()

    settled = start + min(60.0, seconds / 10)
    early = 0.0
    while (now := time.monotonic()) < end:
        moment = settled if early == 0 else min(now + 10, end)
        threading.Event().wait(max(moment - now, 0))
        memory = rss()
        early = early or memory
        s = runner.stats
        print(
            f"{time.monotonic() - start:6.0f} s  {s.accepted} requests  {memory:.1f} MiB  "
            f"{s.waiting} waiting  {s.running} running",
            flush=True,
        )
    late = rss()
    for thread in threads:
        thread.join(2 * GRACE)
    hung = sum(thread.is_alive() for thread in threads)
    runner.close()
    return report(book, runner.stats, cache.stats, seconds, (early, late, hung))


def report(
    book: Book,
    s: slowar.RunnerStats,
    c: slowar.PrefixStats,
    seconds: float,
    seen: tuple[float, float, int],
) -> bool:
    early, late, hung = seen
    growth = late - early
    ended = sum(book.ends.values())
    lost = max(book.accepted, s.accepted) - ended
    print(f"\naccepted {s.accepted}, refused as the queue was full {book.refused}")
    for how, n in book.ends.most_common():
        print(f"  {how}: {n}")
    checks = {
        "the runner and its clients count the same requests": s.accepted == book.accepted,
        "every accepted request ended": lost == 0 and hung == 0,
        "in a way that its kind allows": not book.wrong,
        "the runner's totals are exact": s.accepted == s.finished + s.failed + s.cancelled
        and s.waiting == s.running == 0,
        f"memory grew by no more than {MOST_MIB:g} MiB": growth <= MOST_MIB,
    }
    for words, good in checks.items():
        print(f"{'yes' if good else 'NO '}  {words}")
    for line in book.wrong[:10]:
        print(f"     {line}")
    print(f"memory {early:.1f} MiB early, {late:.1f} MiB at the end: {growth:+.1f} MiB")
    answered, cancelled = book.ends["answered"], book.ends["cancelled"]
    row = {
        "minutes": f"{seconds / 60:g}",
        "accepted": s.accepted,
        "answered": answered,
        "cancelled": cancelled,
        "failed or late": ended - answered - cancelled,
        "refused": book.refused,
        "lost": lost,
        "evaluations": s.evaluations,
        "positions reused": c.positions_reused,
        "MiB early": f"{early:.1f}",
        "MiB late": f"{late:.1f}",
    }
    print(f"\n| {' | '.join(row)} |\n|{' --- |' * len(row)}")
    print(f"| {' | '.join(map(str, row.values()))} |")
    return all(checks.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", type=Path, help="default: a tiny one is made")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if path is None:
            path = Path(folder) / "tiny.gguf"
            make_model(path, TINY, seed=args.seed)
        with slowar.Model(path, backend="cpu") as model:
            good = soak(model, 60 * args.minutes, args.seed)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
