"""Threads: calls on one session are served in turn, sessions run side by side, the GIL is free."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import SMALL, assert_clean, make_prompt, run_child, same_bits

from pyggml_slowar import ContextFullError, Model, Output, SessionStateError
from pyggml_slowar.make_model import TINY, make_model

THREADS = 4
FRAME = make_prompt(SMALL, 2)[:, 1]


def _together(work: Callable[[int], Any], n: int = THREADS) -> list[Any]:
    """``work(0) ... work(n - 1)`` in a thread each, released at the same moment."""
    gate = threading.Barrier(n)

    def run(i: int) -> Any:
        gate.wait(30)
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))


def test_steps_of_four_threads_on_one_session(small: Model) -> None:
    """All step the same frame, so the k-th result is known whoever gets it."""
    n = 25
    with small.session(THREADS * n, n_threads=1) as session:
        serial = [session.step(FRAME).logits.tobytes() for _ in range(THREADS * n)]
        assert len(set(serial)) == THREADS * n
        session.reset()
        seen = _together(lambda i: [session.step(FRAME).logits.tobytes() for _ in range(n)])
        assert session.n_past == THREADS * n
    order = [[serial.index(logits) for logits in thread] for thread in seen]
    assert all(thread == sorted(thread) for thread in order)  # in each thread's own order
    assert sorted(itertools.chain(*order)) == list(range(THREADS * n))  # each place once


def test_a_chunked_prefill_is_not_cut_by_other_threads(small: Model) -> None:
    prompt = make_prompt(SMALL, 12)
    with small.session(THREADS * 12, n_threads=1) as session:
        serial = [session.prefill(prompt, chunk=2).logits.tobytes() for _ in range(THREADS)]
        session.reset()
        seen = _together(lambda i: session.prefill(prompt, chunk=2).logits.tobytes())
    assert sorted(seen) == sorted(serial)


def test_four_sessions_in_four_threads(small: Model) -> None:
    prompts = [make_prompt(SMALL, 9, seed=i) for i in range(THREADS)]

    def run(i: int) -> list[Output]:
        with small.session(60, n_threads=1) as session:
            out = [session.prefill(prompts[i], chunk=4)]
            return out + [session.step(prompts[i][:, k % 9]) for k in range(40)]

    serial = [run(i) for i in range(THREADS)]
    for seen, expected in zip(_together(run), serial, strict=True):
        assert all(same_bits(a, b) for a, b in zip(seen, expected, strict=True))


def test_four_models_in_four_threads(small_path: Path) -> None:
    """Opening, evaluating and closing share nothing."""

    def run(i: int) -> Output:
        for _ in range(10):
            with (
                Model(small_path, mmap=i % 2 == 0) as model,
                model.session(8, n_threads=1) as session,
            ):
                out = session.step(FRAME)
        return out

    outs = _together(run)
    assert all(same_bits(out, outs[0]) for out in outs)


def test_two_threads_close_while_a_third_evaluates(small_path: Path) -> None:
    """Both wait for the evaluation and neither fails: closed is what they wanted."""
    with Model(small_path) as model:
        session = model.session(200, n_threads=1)
        inside, waiting = threading.Event(), threading.Semaphore(0)

        def progress(done: int, n: int) -> None:
            inside.set()
            if done == n:
                for _ in range(2):
                    assert waiting.acquire(timeout=30)

        def work(i: int) -> None:
            if i == 0:
                prompt = make_prompt(SMALL, 100)
                session.prefill(prompt, chunk=1, progress=progress)
            else:
                assert inside.wait(30)
                waiting.release()
                session.close()

        _together(work, 3)
        with pytest.raises(SessionStateError, match=r"^the session is closed$"):
            session.step(FRAME)


# Every outcome is a right result or SessionStateError; a crash is the child's exit status.
CLOSING = """
import sys, threading
import numpy as np
import pyggml_slowar as slowar

frame = np.ones(11, np.int32)
model = slowar.Model(sys.argv[1], backend="cpu")
with model.session(64, n_threads=1) as session:
    right = [session.step(frame).logits.tobytes() for _ in range(64)]

wrong = []
for round in range(60):
    session = model.session(64, n_threads=1)
    stepped = threading.Event()

    def work():
        try:
            while True:  # until the other thread closes
                for expected in right:
                    if session.step(frame).logits.tobytes() != expected:
                        wrong.append("result")
                    stepped.set()
                session.reset()
        except slowar.SessionStateError as error:
            if str(error) != "the session is closed":
                wrong.append(str(error))
        except BaseException as error:
            wrong.append(repr(error))

    thread = threading.Thread(target=work)
    thread.start()
    stepped.wait(30)
    if round % 2:
        model.close()  # the session's weights must stay
        model = slowar.Model(sys.argv[1], backend="cpu")
    session.close()
    thread.join(30)
    if thread.is_alive():
        wrong.append("hung")
print(wrong)
"""


def test_step_while_another_thread_closes(small_path: Path) -> None:
    assert_clean(run_child(CLOSING, small_path), "[]\n")


# Four threads call whatever there is. What may be refused: no cache, a full one, a rewind too far.
EVERYTHING = """
import sys, threading
import numpy as np
import pyggml_slowar as slowar

prompt = np.ones((11, 5), np.int32)
model = slowar.Model(sys.argv[1], backend="cpu")
session = model.session(16, n_threads=1)
calls = [
    lambda: session.step(prompt[:, 0]), lambda: session.prefill(prompt, chunk=2),
    lambda: session.init_kv_cache(16), session.clear_kv_cache, session.reset,
    lambda: session.rewind(2), lambda: session.trace(prompt, ["l_out-0"]),
    lambda: session.graph(1), lambda: session.n_past, lambda: repr(session), model.tensors,
]
allowed = ("no KV cache", "do not fit behind", "n_past is 2", "n_past 0 and n_tokens 1")
wrong = []

def work(seed):
    rng = np.random.default_rng(seed)
    for _ in range(150):
        try:
            calls[rng.integers(len(calls))]()
        except (slowar.SlowARError, ValueError) as error:
            if not any(words in str(error) for words in allowed):
                wrong.append(str(error))
        except BaseException as error:
            wrong.append(repr(error))

threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for t in threads:
    t.start()
for t in threads:
    t.join(50)
session.init_kv_cache(16)
logits = session.prefill(prompt).logits
with model.session(16, n_threads=1) as fresh:
    right = fresh.prefill(prompt).logits.tobytes() == logits.tobytes()
print(sum(t.is_alive() for t in threads), wrong, right)
"""


def test_four_threads_call_whatever_there_is(small_path: Path) -> None:
    assert_clean(run_child(EVERYTHING, small_path), "0 [] True\n")


# ---- the GIL


class Ticker:
    """A Python thread that wakes every millisecond and keeps the times at which it ran."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.times.append(time.perf_counter())

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def longest_wait(self, start: float, end: float) -> float:
        inside = [t for t in self.times if start < t < end]
        return float(np.diff([start, *inside, end]).max())


WAIT = 0.050  # seconds: the longest that another thread may be kept waiting
LONG = 2 * WAIT  # what a call must last for the test to mean anything


def _longest_wait(call: Callable[[int], object], size: int) -> float:
    """The ticker's longest wait in the calmest of five calls: the system's own pauses come and go.

    A call that held the GIL would stop the ticker for its whole length each time. One that was over
    too soon to tell is made again with twice the size.
    """
    waits: list[float] = []
    with Ticker() as ticker:
        while len(waits) < 5 and min(waits, default=WAIT) >= WAIT:
            start = time.perf_counter()
            call(size)
            end = time.perf_counter()
            if end - start > LONG:
                waits.append(ticker.longest_wait(start, end))
            else:
                size *= 2
    return min(waits)


def test_evaluating_releases_the_gil(tiny: Model) -> None:
    with tiny.session(TINY.n_ctx, n_threads=1) as session:

        def evaluate(n: int) -> None:
            session.reset()
            session.prefill_fast(make_prompt(TINY, n))

        assert _longest_wait(evaluate, TINY.n_ctx // 8) < WAIT


@pytest.fixture(scope="module")
def large_path(tmp_path_factory: pytest.TempPathFactory, small_path: Path) -> Iterator[Path]:
    """A model of 330 MB of zeros that take no space on disk."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    n_vocab = 80_000
    writer = gguf.GGUFWriter(path, "fish-speech")
    for field in gguf.GGUFReader(small_path).fields.values():
        if field.name.startswith("fish"):
            large = {"fish-speech.vocab_size": n_vocab, "fish-speech.embedding_length": 1024}
            value = large.get(field.name, field.contents())
            writer.add_key_value(field.name, value, field.types[0])
    n_bytes = 0
    for tensor in gguf.GGUFReader(small_path).tensors:
        shape = [1024 if n == SMALL.n_embd else n for n in reversed(tensor.shape.tolist())]
        if tensor.name == "embeddings.weight":
            shape[0] = n_vocab
        size = 4 * int(np.prod(shape))
        n_bytes += size
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        header = -(-path.stat().st_size // 32) * 32  # tensors begin at a multiple of 32
        file.truncate(header + n_bytes)
    yield path
    path.unlink()


def test_loading_releases_the_gil(large_path: Path) -> None:
    def load(n: int) -> None:
        for _ in range(n):
            Model(large_path, backend="cpu", mmap=False).close()

    assert _longest_wait(load, 1) < WAIT


def test_checking_a_long_prompt_releases_the_gil(small: Model) -> None:
    """int64 with codes that fit no int32, on text positions: every step of the check is taken."""
    with small.session(8, n_threads=1) as session:

        def refuse(n: int) -> None:
            tokens = np.full((11, n), 2**40, np.int64)
            tokens[0] = 7
            with pytest.raises(ContextFullError):
                session.prefill(tokens)

        assert _longest_wait(refuse, 250_000) < WAIT


@pytest.mark.filterwarnings("ignore:max_seq_len=4096 is beyond:UserWarning")
def test_a_waiting_thread_does_not_hold_the_gil(tiny: Model) -> None:
    """One thread evaluates, a second waits for its session, a third goes on."""
    with tiny.session(2 * TINY.n_ctx, n_threads=1) as session:

        def both(n: int) -> None:
            prompt = make_prompt(TINY, n)
            session.reset()
            _together(lambda i: session.prefill_fast(prompt), 2)

        assert _longest_wait(both, TINY.n_ctx // 8) < WAIT


def test_four_threads_write_a_model_each(tmp_path: Path) -> None:
    """The same seed gives the same model whatever runs beside it."""
    with contextlib.ExitStack() as stack:

        def run(i: int) -> Output:
            make_model(tmp_path / f"{i}.gguf", SMALL, seed=0)
            model = stack.enter_context(Model(tmp_path / f"{i}.gguf"))
            return stack.enter_context(model.session(4, n_threads=1)).step(FRAME)

        outs = _together(run)
    assert all(same_bits(out, outs[0]) for out in outs)
