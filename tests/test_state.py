"""The cache and the position: every call moves them as documented, or leaves them as they were."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, Tokens, assert_clean, make_prompt, run_child, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_slowar import (
    Config,
    ContextFullError,
    DeviceMemoryError,
    Model,
    Output,
    Session,
    SessionStateError,
)
from pyggml_slowar.make_model import TINY, make_model

pytestmark = pytest.mark.sanitize

START = 5
CAPACITY = 32
PAST = make_prompt(TINY, START, seed=1)
PROMPT = make_prompt(TINY, 12, seed=2)
FRAME = PROMPT[:, 1]
MOST = 2**30 - 1


@pytest.fixture(scope="module", params=["reference", "flash"])
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


only_documented = pytest.mark.parametrize("attention", ["reference"], indirect=True)
only_flash = pytest.mark.parametrize("attention", ["flash"], indirect=True)


@pytest.fixture
def session(tiny: Model, attention: str) -> Iterator[Session]:
    """At position 5 of 32."""
    with tiny.session(CAPACITY, n_threads=1, attention=attention) as session:
        session.prefill(PAST)
        yield session


@pytest.fixture(scope="module")
def expected(tiny: Model, attention: str) -> dict[str, Output]:
    """What calls at position 5 of a session that saw nothing else give."""
    calls: dict[str, Callable[[Session], Output]] = {
        "step": lambda s: s.step(FRAME),
        "prefill": lambda s: s.prefill(PROMPT),
        "chunk 3": lambda s: s.prefill(PROMPT, chunk=3),
    }
    out = {}
    for name, call in calls.items():
        with tiny.session(CAPACITY, n_threads=1, attention=attention) as session:
            session.prefill(PAST)
            out[name] = call(session)
    return out


@pytest.fixture
def unmoved(session: Session, expected: dict[str, Output]) -> Iterator[None]:
    """After the test, position and later results are as if it had called nothing."""
    yield
    assert (session.n_past, session.max_seq_len) == (START, CAPACITY)
    assert same_bits(session.step(FRAME), expected["step"])
    session.rewind(START)
    assert same_bits(session.prefill(PROMPT, chunk=3), expected["chunk 3"])


# ---- a prefill of four chunks of three that fails


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize("column", [0, 7, 11])
def test_a_bad_id_in_a_later_chunk_is_found_before_the_first(session: Session, column: int) -> None:
    tokens = PROMPT.copy()
    tokens[0, column] = TINY.n_vocab
    seen: list[int] = []
    message = f"token id at row 0, column {column} is 1000, expected 0 to 999"
    with pytest.raises(ValueError, match=f"^{message}$"):
        session.prefill(tokens, chunk=3, progress=lambda done, n: seen.append(done))
    assert seen == []


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
def test_a_prompt_longer_than_the_rest_of_the_cache(session: Session, chunk: int | None) -> None:
    tokens = make_prompt(TINY, CAPACITY - START + 1)
    seen: list[int] = []
    message = "^28 positions do not fit behind position 5 in a cache of 32$"
    with pytest.raises(ContextFullError, match=message) as caught:
        session.prefill(tokens, chunk=chunk, progress=lambda done, n: seen.append(done))
    assert isinstance(caught.value, ValueError)
    assert seen == []
    with pytest.raises(ContextFullError, match=message):
        session.prefill_fast(tokens)
    with pytest.raises(ContextFullError, match=message):
        session.trace(tokens, ["hidden"])


class _OddError(Exception):
    pass


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize("at", [3, 6, 12])
@pytest.mark.parametrize("error", [_OddError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_progress(session: Session, at: int, error: type[BaseException]) -> None:
    raised = error("mine")
    seen: list[tuple[int, int]] = []

    def progress(done: int, n: int) -> None:
        seen.append((done, n))
        assert session.n_past == START + done
        if done == at:
            raise raised

    with pytest.raises(error) as caught:
        session.prefill(PROMPT, chunk=3, progress=progress)
    assert caught.value is raised
    assert seen == [(done, 12) for done in range(3, at + 1, 3)]


@pytest.mark.usefixtures("unmoved")
def test_progress_that_cannot_be_called(session: Session) -> None:
    nothing: Any = 7
    with pytest.raises(TypeError, match="not callable"):
        session.prefill(PROMPT, chunk=3, progress=nothing)


@pytest.mark.usefixtures("unmoved")
def test_ctrl_c_in_progress(session: Session) -> None:
    def progress(done: int, n: int) -> None:
        if done == 9:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        session.prefill(PROMPT, chunk=3, progress=progress)


@contextlib.contextmanager
def _handler(handle: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt_at(session: Session, position: int) -> threading.Thread:
    """A thread that sends SIGINT to this process once the session has come to ``position``."""

    def watch() -> None:
        end = time.monotonic() + 30
        while session.n_past < position and time.monotonic() < end:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_ctrl_c_from_outside_takes_effect_between_chunks(tiny: Model) -> None:
    """Of 400 chunks; the signal is sent after the second and must not wait for the last."""
    tokens = make_prompt(TINY, 400)
    with tiny.session(405, n_threads=1) as session:
        session.prefill(PAST)
        expected = session.step(FRAME)
        session.rewind(START)
        positions: list[int] = []

        def handle(number: int, frame: FrameType | None) -> None:
            positions.append(session.n_past)
            raise KeyboardInterrupt

        thread = _interrupt_at(session, START + 2)
        with _handler(handle), pytest.raises(KeyboardInterrupt):
            session.prefill(tokens, chunk=1)
        thread.join()
        assert len(positions) == 1
        assert START + 2 <= positions[0] < START + 400
        assert session.n_past == START
        assert same_bits(session.step(FRAME), expected)


def test_a_signal_handler_that_returns_changes_nothing(tiny: Model) -> None:
    tokens = make_prompt(TINY, 100)
    with tiny.session(105, n_threads=1) as session:
        session.prefill(PAST)
        expected = session.prefill(tokens, chunk=1)
        session.rewind(START)
        caught: list[type[Exception]] = []

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                session.reset()
            except SessionStateError as error:
                caught.append(type(error))

        thread = _interrupt_at(session, START + 2)
        with _handler(handle):
            seen = session.prefill(tokens, chunk=1)
            thread.join()
        assert same_bits(seen, expected)
        assert caught == [SessionStateError]


REENTRANT: dict[str, Callable[[Session], object]] = {
    "step": lambda s: s.step(FRAME),
    "prefill": lambda s: s.prefill(PROMPT),
    "prefill in chunks": lambda s: s.prefill(PROMPT, chunk=3),
    "prefill_fast": lambda s: s.prefill_fast(PROMPT),
    "trace": lambda s: s.trace(PROMPT, ["hidden"]),
    "graph": lambda s: s.graph(1),
    "reset": lambda s: s.reset(),
    "rewind": lambda s: s.rewind(1),
    "init_kv_cache": lambda s: s.init_kv_cache(16),
    "clear_kv_cache": lambda s: s.clear_kv_cache(),
    "close": lambda s: s.close(),
}


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize("call", REENTRANT)
@pytest.mark.parametrize("at", [3, 12])
def test_progress_that_calls_the_session(session: Session, call: str, at: int) -> None:
    def progress(done: int, n: int) -> None:
        if done == at:
            REENTRANT[call](session)

    with pytest.raises(SessionStateError, match="the session is busy"):
        session.prefill(PROMPT, chunk=3, progress=progress)


@pytest.mark.parametrize("call", REENTRANT)
def test_progress_that_calls_the_session_and_goes_on(
    session: Session, expected: dict[str, Output], call: str
) -> None:
    def progress(done: int, n: int) -> None:
        with pytest.raises(SessionStateError, match="the session is busy"):
            REENTRANT[call](session)

    out = session.prefill(PROMPT, chunk=3, progress=progress)
    assert same_bits(out, expected["chunk 3"])
    assert session.n_past == START + 12


@only_flash
def test_progress_may_use_another_session_and_the_model(
    tiny: Model, session: Session, expected: dict[str, Output]
) -> None:
    others: list[Output] = []

    def progress(done: int, n: int) -> None:
        with tiny.session(CAPACITY, n_threads=1) as other:
            other.prefill(PAST)
            others.append(other.step(FRAME))

    assert same_bits(session.prefill(PROMPT, chunk=3, progress=progress), expected["chunk 3"])
    assert len(others) == 4
    assert all(same_bits(other, expected["step"]) for other in others)


# Signals are served where a Python function begins and where a C function returns. A profile
# function is called at exactly these places, and what it raises comes out there.
EVERYWHERE = """
import sys
import numpy as np
import pyggml_slowar as slowar

with slowar.Model(sys.argv[1], backend="cpu") as model:
    session = model.session(32, n_threads=1)
    prompt = np.zeros((11, 6), np.int32)
    prompt[0] = range(6)
    session.prefill(prompt[:, :3])
    after = {}
    for n in (3, 9):
        after[n] = session.step(prompt[:, 0]).logits.tobytes()
        session.rewind(3)
        session.prefill(prompt, chunk=2)
    session.rewind(3)

    def interrupted(place):
        left = place
        def profile(frame, event, arg):
            nonlocal left
            if event in ("call", "c_return") and frame.f_code is not interrupted.__code__:
                left -= 1
                if left == -1:
                    raise KeyboardInterrupt
        sys.setprofile(profile)
        try:
            session.prefill(prompt, chunk=2)
        except KeyboardInterrupt as error:
            return error  # kept alive, as sys.last_exc does in an interactive session
        finally:
            sys.setprofile(None)
        return None

    place = 0
    bad = []
    while (error := interrupted(place)) is not None:
        try:
            at = session.n_past
            if session.step(prompt[:, 0]).logits.tobytes() != after.get(at):
                bad.append((place, f"wrong result at {at}"))
            session.rewind(3)
        except slowar.SlowARError as second:
            bad.append((place, str(second)))
        del error
        if session.n_past != 3:
            session.rewind(3)
        place += 1
    print(place > 60, bad)  # 98 with cffi's functions in C, which are not places
"""


def test_ctrl_c_at_every_place_of_a_prefill(small_path: Path) -> None:
    """Never a wrong position, a wrong result, or a session that is still busy."""
    child = run_child(EVERYWHERE, small_path, timeout=60)
    assert_clean(child, "True []\n")


REENTRY = """
import sys
import pyggml_slowar as slowar

with slowar.Model(sys.argv[1], backend="cpu") as model:
    session = model.session(32, n_threads=1)

    def interrupted(place):
        left = place
        def profile(frame, event, arg):
            nonlocal left
            if event in ("call", "c_return") and frame.f_code is not interrupted.__code__:
                left -= 1
                if left == -1:
                    sys.setprofile(None)
                    try:
                        session.reset()
                    except slowar.SessionStateError:
                        pass
        sys.setprofile(profile)
        session.rewind(0)
        sys.setprofile(None)
        return left < 0

    place = 0
    while interrupted(place):
        place += 1
    print(place > 20)
"""


def test_a_signal_handler_that_calls_the_session_at_every_place(small_path: Path) -> None:
    """It is served or refused; it never waits for the call that it interrupts."""
    assert_clean(run_child(REENTRY, small_path, timeout=30), "True\n")


# ---- the limits of the cache


def test_the_cache_holds_exactly_its_size(session: Session, expected: dict[str, Output]) -> None:
    rest = make_prompt(TINY, CAPACITY - START, seed=3)
    last = session.prefill(rest)
    assert session.n_past == CAPACITY
    message = "^1 positions do not fit behind position 32 in a cache of 32$"
    for call in (session.step, lambda f: session.prefill(f[:, None])):
        with pytest.raises(ContextFullError, match=message):
            call(FRAME)
    assert session.n_past == CAPACITY

    session.rewind(START)
    with pytest.raises(ContextFullError):
        session.prefill(np.repeat(rest, 2, axis=1))
    assert same_bits(session.prefill(rest), last)

    session.rewind(CAPACITY - 1)
    session.step(FRAME)  # the last slot
    session.rewind(START)
    assert same_bits(session.step(FRAME), expected["step"])


def test_a_cache_of_one_position(tiny: Model) -> None:
    with tiny.session(1, n_threads=1) as session, tiny.session(8, n_threads=1) as larger:
        assert same_bits(session.step(FRAME), larger.step(FRAME))
        with pytest.raises(ContextFullError, match="behind position 1 in a cache of 1"):
            session.step(FRAME)
        session.reset()
        with pytest.raises(ContextFullError, match="2 positions do not fit behind position 0"):
            session.prefill(PROMPT[:, :2])


@only_flash
@pytest.mark.parametrize("capacity", [17, 18, 33])
def test_the_size_of_the_cache_does_not_show(
    tiny: Model, expected: dict[str, Output], capacity: int
) -> None:
    with tiny.session(capacity, n_threads=1) as session:
        session.prefill(PAST)
        assert same_bits(session.prefill(PROMPT), expected["prefill"])
        # K and V, float16: 3 layers x 2 heads x 128 values a position
        assert session.nbytes == capacity * 2 * 2 * 3 * 2 * 128


# ---- init_kv_cache


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, f"max_seq_len is 0, expected 1 to {MOST}"),
        (-1, ValueError, f"max_seq_len is -1, expected 1 to {MOST}"),
        (np.int64(-(2**40)), ValueError, f"max_seq_len is -{2**40}, expected 1 to {MOST}"),
        (MOST + 1, ValueError, f"max_seq_len is {MOST + 1}, expected 1 to {MOST}"),
        (2**32 + 8, ValueError, f"max_seq_len is {2**32 + 8}, expected 1 to {MOST}"),
        (10**12, ValueError, f"max_seq_len is {10**12}, expected 1 to {MOST}"),
        (2.5, TypeError, "max_seq_len is 2.5, expected an integer"),
        (8.0, TypeError, "max_seq_len is 8.0, expected an integer"),
        (np.float32(8), TypeError, r"max_seq_len is .*8\.0.*, expected an integer"),
        (True, TypeError, "max_seq_len is True, expected an integer"),
        (np.True_, TypeError, "max_seq_len is .*True.*, expected an integer"),
        ("8", TypeError, "max_seq_len is '8', expected an integer"),
        (None, TypeError, "max_seq_len is None, expected an integer"),
        ([8], TypeError, r"max_seq_len is \[8\], expected an integer"),
    ],
)
@pytest.mark.usefixtures("unmoved")
def test_sizes_that_are_none(
    session: Session, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        session.init_kv_cache(value)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_numpy_integers_are_sizes(tiny: Model, dtype: type[np.integer[Any]]) -> None:
    with tiny.session(dtype(9), n_threads=dtype(1)) as session:
        assert (session.max_seq_len, session.n_threads) == (9, 1)
        session.prefill(PROMPT[:, :9])
        session.rewind(dtype(3))
        assert session.n_past == 3


@pytest.mark.parametrize("size", [10**9, MOST])
def test_a_cache_that_no_memory_holds(
    session: Session, expected: dict[str, Output], size: int
) -> None:
    """3072 bytes a position: 2.8 TiB and more."""
    with pytest.raises(DeviceMemoryError, match=f"a KV cache of {size} positions") as caught:
        session.init_kv_cache(size)
    assert isinstance(caught.value, MemoryError)
    assert (session.n_past, session.max_seq_len, session.nbytes) == (0, 0, 0)
    with pytest.raises(SessionStateError, match=r"^no KV cache: call init_kv_cache first$"):
        session.step(FRAME)
    session.init_kv_cache(CAPACITY)
    session.prefill(PAST)
    assert same_bits(session.step(FRAME), expected["step"])


@only_flash
def test_a_session_that_no_memory_holds(tiny: Model, expected: dict[str, Output]) -> None:
    with pytest.raises(DeviceMemoryError, match="a KV cache of 1000000000 positions"):
        tiny.session(10**9)
    with tiny.session(CAPACITY, n_threads=1) as session:
        session.prefill(PAST)
        assert same_bits(session.step(FRAME), expected["step"])


def test_init_again_with_other_sizes(session: Session, expected: dict[str, Output]) -> None:
    for size in (6, 300, 1, CAPACITY, CAPACITY):
        session.init_kv_cache(size)
        assert (session.n_past, session.max_seq_len) == (0, size)
        assert session.nbytes == size * 3072
        session.prefill(make_prompt(TINY, size, seed=size))
        assert session.n_past == size
    session.reset()
    session.prefill(PAST)
    assert same_bits(session.step(FRAME), expected["step"])


def test_a_size_beyond_the_trained_context_is_a_warning(small: Model) -> None:
    with small.session(SMALL.n_ctx) as session:  # at the limit: none
        message = r"^max_seq_len=257 is beyond the model's context of 256$"
        with pytest.warns(UserWarning, match=message):
            session.init_kv_cache(SMALL.n_ctx + 1)
        assert session.max_seq_len == 257


# ---- no cache, no session, no model

NEED_CACHE: dict[str, Callable[[Session], object]] = {
    name: call
    for name, call in REENTRANT.items()
    if name not in ("init_kv_cache", "clear_kv_cache", "close")
}


def _assert_no_cache(session: Session) -> None:
    for call in NEED_CACHE.values():
        with pytest.raises(SessionStateError, match=r"^no KV cache: call init_kv_cache first$"):
            call(session)
    assert (session.n_past, session.max_seq_len, session.nbytes) == (0, 0, 0)


@only_flash
def test_without_a_cache(tiny: Model, expected: dict[str, Output]) -> None:
    with tiny.session(n_threads=1) as session:
        _assert_no_cache(session)
        session.clear_kv_cache()
        session.clear_kv_cache()
        _assert_no_cache(session)
        session.init_kv_cache(CAPACITY)
        session.prefill(PAST)
        session.clear_kv_cache()
        _assert_no_cache(session)
        session.init_kv_cache(CAPACITY)
        session.prefill(PAST)
        assert same_bits(session.step(FRAME), expected["step"])


def test_after_close(tiny: Model) -> None:
    session = tiny.session(CAPACITY)
    session.close()
    session.close()
    for name, call in REENTRANT.items():
        if name != "close":
            with pytest.raises(SessionStateError, match=r"^the session is closed$"):
                call(session)
    with pytest.raises(SessionStateError, match=r"^the session is closed$"):
        _ = session.n_past
    with pytest.raises(SessionStateError, match=r"^the session is closed$"):
        _ = session.max_seq_len
    assert repr(session) == "<Session: closed>"
    with session:  # leaving the block closes once more
        pass


def test_with_closes(tiny: Model) -> None:
    with tiny.session(CAPACITY) as session:
        assert repr(session) == "<Session: position 0 of 32>"
    assert repr(session) == "<Session: closed>"
    with pytest.raises(_OddError), tiny.session(CAPACITY) as session:
        raise _OddError
    assert repr(session) == "<Session: closed>"


def _as_read(config: Config) -> Config:
    """A GGUF file keeps its two real numbers as float32."""
    eps = float(np.float32(config.norm_rms_eps))
    return dataclasses.replace(config, norm_rms_eps=eps)


def test_a_closed_model(tiny_path: Path) -> None:
    model = Model(tiny_path, backend="cpu")
    assert repr(model) == f"<Model '{tiny_path}': 3 layers, 11 MiB on CPU>"
    model.close()
    model.close()
    for call in (model.tensors, lambda: model.session(8), model.session):
        with pytest.raises(SessionStateError, match=r"^the model is closed$"):
            call()
    assert model.config == _as_read(TINY)  # what was read stays known
    assert repr(model) == f"<Model '{tiny_path}': 3 layers, closed>"


@only_flash
def test_a_session_outlives_its_model(tiny_path: Path, expected: dict[str, Output]) -> None:
    model = Model(tiny_path, backend="cpu")
    first, second = (model.session(CAPACITY, n_threads=1) for _ in range(2))
    model.close()
    del model
    gc.collect()
    for session in (first, second):
        session.prefill(PAST)
        assert same_bits(session.step(FRAME), expected["step"])
        session.close()


@only_flash
def test_a_session_needs_no_reference_to_its_model(
    tiny_path: Path, expected: dict[str, Output]
) -> None:
    session = Model(tiny_path, backend="cpu").session(CAPACITY, n_threads=1)
    gc.collect()
    session.prefill(PAST)
    assert same_bits(session.step(FRAME), expected["step"])


# ---- rewind and reset


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, f"n_past is -1, expected 0 to {MOST}"),
        (START + 1, ValueError, "n_past is 6, expected 0 to 5, the position"),
        (CAPACITY, ValueError, "n_past is 32, expected 0 to 5, the position"),
        (2**32, ValueError, f"n_past is {2**32}, expected 0 to {MOST}"),
        (1.0, TypeError, "n_past is 1.0, expected an integer"),
        (False, TypeError, "n_past is False, expected an integer"),
        (None, TypeError, "n_past is None, expected an integer"),
    ],
)
def test_rewind_out_of_range(
    session: Session, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        session.rewind(value)


@pytest.mark.usefixtures("unmoved")
def test_rewind_to_the_position_itself(session: Session) -> None:
    session.rewind(START)


def test_rewind_and_step_again(session: Session) -> None:
    """Whatever was written behind a position is forgotten, one place at a time and all at once."""
    outs = [session.step(PROMPT[:, i]) for i in range(12)]
    for i in (11, 7, 0):
        session.rewind(START + i)
        session.step(PAST[:, 1])  # other contents of the slot
        session.rewind(START + i)
        again = [session.step(PROMPT[:, j]) for j in range(i, 12)]
        assert all(same_bits(a, b) for a, b in zip(again, outs[i:], strict=True))


@pytest.mark.parametrize("forget", ["reset", "rewind", "init_kv_cache", "clear_kv_cache"])
def test_a_then_b_is_b(session: Session, expected: dict[str, Output], forget: str) -> None:
    session.prefill(make_prompt(TINY, 20, seed=8))
    if forget == "reset":
        session.reset()
    elif forget == "rewind":
        session.rewind(0)
    else:
        if forget == "clear_kv_cache":
            session.clear_kv_cache()
        session.init_kv_cache(CAPACITY)
    assert session.n_past == 0
    session.prefill(PAST)
    assert same_bits(session.prefill(PROMPT), expected["prefill"])


# ---- results


def test_the_same_request_twice(tiny: Model) -> None:
    runs = []
    for _ in range(2):
        with tiny.session(CAPACITY, n_threads=2) as session:
            out = [session.prefill(PAST), session.prefill(PROMPT, chunk=5)]
            runs.append([*out, session.step(PROMPT[:, 0]), session.step(PROMPT[:, 1])])
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))


def test_results_have_the_documented_form(session: Session) -> None:
    out = session.step(FRAME)
    assert out._fields == ("hidden", "logits", "ids")
    assert out.ids.tolist() == list(range(TINY.n_vocab))
    assert (out.hidden.shape, out.logits.shape) == ((TINY.n_embd,), (TINY.n_vocab,))
    for values in (out.hidden, out.logits):
        assert values.dtype == np.float32
        assert values.flags.owndata
        assert values.flags.writeable
        assert values.flags.c_contiguous
        assert np.isfinite(values).all()
        assert float(values.std()) > 0.1  # random weights of unit scale: neither zeros nor constant


def test_results_are_the_callers_own(
    tiny_path: Path, attention: str, expected: dict[str, Output]
) -> None:
    model = Model(tiny_path, backend="cpu")
    session = model.session(CAPACITY, n_threads=1, attention=attention)
    session.prefill(PAST)
    held = session.step(FRAME)
    second = session.step(FRAME)
    assert same_bits(held, expected["step"])

    kept = Output(*(values.copy() for values in second))
    held.hidden[:] = np.nan
    held.logits[:] = np.nan
    assert same_bits(second, kept)
    session.rewind(START)
    assert same_bits(session.step(FRAME), expected["step"])
    assert not any(np.shares_memory(a, b) for a in held[:2] for b in second[:2])

    session.close()
    model.close()
    del session, model
    gc.collect()
    ballast = [np.full(2**20, 7, np.uint8) for _ in range(8)]  # what freed memory would go to
    assert same_bits(second, kept)
    del ballast


def test_traces_are_the_callers_own(session: Session) -> None:
    names = ["l_out-0", "l_out-1", "hidden"]
    _, first = session.trace(PROMPT, names)
    kept = {name: values.copy() for name, values in first.items()}
    session.rewind(START)
    _, second = session.trace(PROMPT[:, ::-1], names)
    for name in names:
        assert np.array_equal(first[name], kept[name])
        assert not np.array_equal(first[name], second[name])
        second[name][:] = np.nan
        assert np.array_equal(first[name], kept[name])


def test_one_position_at_a_time_is_a_series_of_steps(session: Session) -> None:
    steps = [session.step(PROMPT[:, i]) for i in range(12)][-1]
    session.rewind(START)
    assert same_bits(session.prefill(PROMPT, chunk=1), steps)


def test_prefill_is_prefill_fast_on_the_cpu(session: Session, expected: dict[str, Output]) -> None:
    seen: list[tuple[int, int]] = []
    out = session.prefill(PROMPT, progress=lambda done, n: seen.append((done, n)))
    assert seen == [(12, 12)]  # the documented policy on the CPU: one chunk
    assert same_bits(out, expected["prefill"])
    calls: list[Callable[[], Output]] = [
        lambda: session.prefill_fast(PROMPT),
        lambda: session.prefill(PROMPT, chunk=12),
        lambda: session.prefill(PROMPT, chunk=10**6),
    ]
    for call in calls:
        session.rewind(START)
        assert same_bits(call(), expected["prefill"])


@pytest.mark.parametrize("chunk", [1, 5, 6, 11, 12, 13])
def test_progress_counts_every_chunk(session: Session, chunk: int) -> None:
    seen: list[tuple[int, int]] = []
    session.prefill(PROMPT, chunk=chunk, progress=lambda done, n: seen.append((done, n)))
    assert seen == [(min(done, 12), 12) for done in range(chunk, 12 + chunk, chunk)]


def test_chunks_change_little(session: Session, expected: dict[str, Output]) -> None:
    """The past is F16 and a chunk is not: 2^-11 a value, and random signs keep the sum below."""
    for chunk in (1, 3, 7):
        session.rewind(START)
        out = session.prefill(PROMPT, chunk=chunk)
        for a, b in zip(out, expected["prefill"], strict=True):
            assert np.linalg.norm(a - b) <= 2**-10 * np.linalg.norm(b)


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize(
    ("chunk", "error", "message"),
    [
        (0, ValueError, f"chunk is 0, expected 1 to {MOST}"),
        (-3, ValueError, f"chunk is -3, expected 1 to {MOST}"),
        (3.0, TypeError, "chunk is 3.0, expected an integer"),
        (True, TypeError, "chunk is True, expected an integer"),
    ],
)
def test_bad_chunk(session: Session, chunk: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        session.prefill(PROMPT, chunk=chunk)


# ---- trace

N, KV = 12, START + 12  # positions of the traced batch, and with the past

TRACED: dict[str, tuple[int, ...]] = {
    "embd": (N, 256),
    "attn_norm-1": (N, 256),
    "qkv-1": (N, (4 + 2 * 2) * 128),
    "q_rope-1": (N, 4, 128),
    "k_rope-1": (N, 2, 128),
    "v-1": (N, 2, 128),
    "attn_probs-1": (4, N, KV),
    "attn_out-1": (N, 4 * 128),
    "ffn_inp-1": (N, 256),
    "ffn_norm-1": (N, 256),
    "ffn_out-1": (N, 256),
    "l_out-1": (N, 256),
    "result_norm": (N, 256),
    "hidden": (1, 256),
    "logits": (1, 1000),
}


@only_documented
def test_trace(session: Session, expected: dict[str, Output]) -> None:
    names = [*TRACED, "l_out-0", "l_out-2", "qkv-0"]
    out, seen = session.trace(PROMPT, names)
    assert session.n_past == START + N
    assert same_bits(out, expected["prefill"])
    assert list(seen) == names
    assert {name: seen[name].shape for name in TRACED} == TRACED
    assert all(values.dtype == np.float32 for values in seen.values())

    assert np.array_equal(seen["hidden"][0], out.hidden)
    assert np.array_equal(seen["logits"][0], out.logits)
    assert np.array_equal(seen["result_norm"][-1], out.hidden)

    # Rows of a softmax sum to 1 (float32, 17 terms), and row i sees columns 0 ... n_past + i.
    probs = seen["attn_probs-1"]
    assert np.abs(probs.sum(axis=-1) - 1).max() <= 17 * 2**-24
    hidden_from = np.arange(KV) > START + np.arange(N)[:, None]
    assert (probs[:, hidden_from] == 0).all()
    assert (probs[:, ~hidden_from] > 0).all()

    # The residual sums, from the traced parts. The last is rounded twice.
    ffn = seen["ffn_inp-1"] + seen["ffn_out-1"]
    assert np.array_equal(ffn, seen["l_out-1"])
    # V is the last part of qkv: one view of it, copied.
    assert np.array_equal(seen["v-1"], seen["qkv-1"][:, 6 * 128 :].reshape(N, 2, 128))


def test_trace_without_names(session: Session, expected: dict[str, Output]) -> None:
    out, seen = session.trace(PROMPT, [])
    assert seen == {}
    assert same_bits(out, expected["prefill"])


@only_documented
def test_trace_leaves_nothing_behind(session: Session, expected: dict[str, Output]) -> None:
    held = session.compute_nbytes
    session.trace(PROMPT, TRACED)
    session.rewind(START)
    assert same_bits(session.prefill(PROMPT), expected["prefill"])
    assert session.n_past == START + N
    assert session.compute_nbytes >= held > 0


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize(
    "name",
    [
        "",
        "hiddn",
        "l_out",
        "l_out-3",
        "l_out--1",
        "hidden ",
        "x" * 1000,
        "Ü",
        "hidden\0x",
        "cache_k",
    ],
)
def test_trace_of_what_the_graph_does_not_have(session: Session, name: str) -> None:
    with pytest.raises(ValueError, match=r"the graph has no|null"):
        session.trace(PROMPT, ["hidden", name])


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize("name", [None, 7, b"hidden"])
def test_names_of_tensors_are_text(session: Session, name: Any) -> None:
    with pytest.raises(TypeError, match=r"name|str"):
        session.trace(PROMPT, ["hidden", name])


@pytest.mark.usefixtures("unmoved")
def test_a_trace_that_fails_is_taken_back(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr("pyggml_slowar.session._trace", no_memory)
    with pytest.raises(MemoryError):
        session.trace(PROMPT, ["l_out-0"])
    monkeypatch.undo()


# ---- the documented graph, counted

CONFIGS = {
    "tiny": TINY,
    "small": SMALL,
    "one layer": dataclasses.replace(SMALL, n_layer=1),
    "five layers": dataclasses.replace(SMALL, n_layer=5),
    "no GQA": dataclasses.replace(SMALL, n_head_kv=4),
    "one KV head": dataclasses.replace(SMALL, n_head_kv=1),
    "no q/k norm": dataclasses.replace(SMALL, attention_qk_norm=False),
    "no scaling": dataclasses.replace(SMALL, scale_codebook_embeddings=False),
    "untied": dataclasses.replace(SMALL, tie_word_embeddings=False),
    "hidden before the norm": dataclasses.replace(SMALL, norm_fastlayer_input=False),
}


def _documented(c: Config, n_past: int) -> dict[str, int]:
    """How often the documented graph needs each operation that computes or moves values."""
    gqa, past = c.n_head != c.n_head_kv, n_past > 0
    layer = {
        "RMS_NORM": 2 + 2 * c.attention_qk_norm,  # before attention and feed-forward; q and k
        "MUL": 2 + 2 * c.attention_qk_norm,  # each norm's scale
        "MUL_MAT": 7,  # wqkv, q.k, P.v, wo, w1, w3, w2
        "ROPE": 2,  # q, k
        "CPY": 2 + 2 * past,  # k and v into the cache; the past of both to float32
        "CONCAT": 2 * past,  # k and v behind their past
        "REPEAT": 2 * gqa,  # k and v to all query heads
        "SCALE": 1,  # 1 / sqrt(head size)
        "DIAG_MASK_INF": 1,
        "SOFT_MAX": 1,
        "CONT": 3,  # v out of qkv, v transposed for P.v, heads side by side
        "SWIGLU": 1,
        "ADD": 2,  # the two residual sums
    }
    once = {
        "GET_ROWS": 1 + c.n_codebook,  # the id's row, one row a codebook
        "ADD": c.n_codebook,  # n - 1 to sum the codebooks, 1 onto the id's row
        "MUL": 1 + c.scale_codebook_embeddings + 1,  # the mask, the factor; the last norm's scale
        "RMS_NORM": 1,
        "MUL_MAT": 1,  # the head
        "CONT": 1 if c.norm_fastlayer_input else 2,  # the last position; of both sides of the norm
    }
    counts = collections.Counter(once)
    for _ in range(c.n_layer):
        counts.update(layer)
    return {op: n for op, n in counts.items() if n}


@pytest.fixture(scope="module", params=CONFIGS)
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("variant") / "model.gguf"
    make_model(path, CONFIGS[request.param], seed=3)
    with Model(path, backend="cpu") as model:
        assert model.config == _as_read(CONFIGS[request.param])
        yield model


MOVES_NOTHING = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE"}


@pytest.mark.parametrize(("n_tokens", "n_past"), [(1, 0), (7, 0), (1, 4), (7, 4), (1, 15)])
def test_the_documented_graph(variant: Model, n_tokens: int, n_past: int) -> None:
    with variant.session(16, attention="reference") as session:
        nodes = session.graph(n_tokens, n_past)
        assert session.n_past == 0
    c = variant.config
    counts = collections.Counter(node.op for node in nodes if node.op not in MOVES_NOTHING)
    assert counts == _documented(c, n_past)

    # The copies into the cache are F16 and the only ones; the past comes out of it as float32.
    copies = collections.Counter(node.type for node in nodes if node.op == "CPY")
    assert copies["f16"] == 2 * c.n_layer
    assert copies["f32"] == (2 * c.n_layer if n_past else 0)

    shapes = {node.name: node.shape for node in nodes}
    n_kv = n_past + n_tokens
    assert shapes["hidden"] == (1, 1, 1, c.n_embd)  # of the last position alone
    assert shapes["logits"] == (1, 1, 1, c.n_vocab)
    for il in range(c.n_layer):
        assert shapes[f"attn_probs-{il}"] == (1, c.n_head, n_tokens, n_kv)
        assert shapes[f"q_rope-{il}"] == (1, n_tokens, c.n_head, c.head_dim)
        assert shapes[f"k_rope-{il}"] == (1, n_tokens, c.n_head_kv, c.head_dim)
        assert shapes[f"l_out-{il}"] == (1, 1, n_tokens, c.n_embd)
    concats = [node.shape for node in nodes if node.op == "CONCAT"]
    assert set(concats) <= {(1, n_kv, c.n_head_kv, c.head_dim)}
    # Every KV head n_head / n_head_kv times in a row: the repeated dimension is the inner one.
    repeats = [node.shape for node in nodes if node.op == "REPEAT"]
    group = c.n_head // c.n_head_kv
    assert set(repeats) <= {(n_kv, c.n_head_kv, group, c.head_dim)}


def test_every_variant_evaluates(variant: Model) -> None:
    """The identity of the tied head, and hidden on the documented side of the last norm."""
    c = variant.config
    with variant.session(16, n_threads=1) as session:
        session.prefill(make_prompt(c, 5))
        out, seen = session.trace(
            make_prompt(c, 4, seed=1), ["result_norm", f"l_out-{c.n_layer - 1}"]
        )
    side = "result_norm" if c.norm_fastlayer_input else f"l_out-{c.n_layer - 1}"
    assert np.array_equal(out.hidden, seen[side][-1])
    assert not np.array_equal(seen["result_norm"][-1], seen[f"l_out-{c.n_layer - 1}"][-1])


@pytest.mark.usefixtures("unmoved")
def test_looking_at_the_graph_changes_nothing(session: Session) -> None:
    assert session.graph(3, 2) == session.graph(3, 2)
    assert session.graph(1, CAPACITY - 1)[-1].name == "logits"  # beyond the position


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize(
    ("n_tokens", "n_past", "error", "message"),
    [
        (0, 0, ValueError, f"n_tokens is 0, expected 1 to {MOST}"),
        (-1, 0, ValueError, f"n_tokens is -1, expected 1 to {MOST}"),
        (1, -1, ValueError, f"n_past is -1, expected 0 to {MOST}"),
        (33, 0, ValueError, "n_past 0 and n_tokens 33, expected .* together at most 32"),
        (1, 32, ValueError, "n_past 32 and n_tokens 1, expected .* together at most 32"),
        (MOST, MOST, ValueError, f"n_past {MOST} and n_tokens {MOST}, expected .* at most 32"),
        (1.0, 0, TypeError, "n_tokens is 1.0, expected an integer"),
        (1, True, TypeError, "n_past is True, expected an integer"),
    ],
)
def test_graphs_that_cannot_be(
    session: Session, n_tokens: Any, n_past: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        session.graph(n_tokens, n_past)


# ---- random programs


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the sequence there is: where it began, what it was given."""

    start: int
    tokens: Tokens


SIZES = (1, 7, 24)


@st.composite
def _programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    names = st.sampled_from(
        ["step"] * 4
        + ["prefill"] * 3
        + ["rewind"] * 3
        + [
            "fast",
            "reset",
            "init",
            "clear",
            "bad id",
            "bad progress",
            "trace",
            "graph",
            "bad rewind",
        ]
    )
    small = st.integers(0, 9)
    return [
        ("init", 2, 0),
        *draw(st.lists(st.tuples(names, small, small), min_size=3, max_size=15)),
    ]


class Program:
    """Runs calls on a session and keeps, beside it, what its cache should hold."""

    def __init__(self, model: Model) -> None:
        self.session = model.session(n_threads=1)
        self.capacity = 0
        self.position = 0
        self.history: list[Evaluation] = []
        self.last: Output | None = None
        self.seed = itertools.count()

    def evaluate(self, n: int, chunk: int, call: Callable[[Tokens], Output]) -> None:
        tokens = make_prompt(SMALL, n, seed=next(self.seed))
        if self.capacity == 0:
            with pytest.raises(SessionStateError):
                call(tokens)
        elif self.position + n > self.capacity:
            with pytest.raises(ContextFullError):
                call(tokens)
        else:
            self.last = call(tokens)
            for at in range(0, n, chunk):
                part = tokens[:, at : at + chunk]
                self.history.append(Evaluation(self.position, part))
                self.position += part.shape[1]

    def forget(self, position: int) -> None:
        """What began before a position stays, whole: its later slots are written and not read."""
        self.position = position
        self.history = [e for e in self.history if e.start < position]
        self.last = None

    def run(self, name: str, a: int, b: int) -> None:
        session = self.session
        if name == "step":
            self.evaluate(1, 1, lambda t: session.step(t[:, 0]))
        elif name == "fast":
            self.evaluate(a + 1, a + 1, session.prefill_fast)
        elif name == "prefill":
            self.evaluate(a + 1, b + 1, lambda t: session.prefill(t, chunk=b + 1))
        elif name == "trace":
            self.evaluate(a + 1, a + 1, lambda t: session.trace(t, ["l_out-1"])[0])
        elif name == "init":
            self.capacity = SIZES[a % 3]
            session.init_kv_cache(self.capacity)
            self.forget(0)
        elif name == "clear":
            session.clear_kv_cache()
            self.capacity = 0
            self.forget(0)
        elif self.capacity == 0:
            with pytest.raises(SessionStateError):
                session.reset()
        elif name in ("rewind", "reset"):
            position = min(a, self.position) if name == "rewind" else 0
            session.rewind(position)
            if position < self.position:
                self.forget(position)
        elif name == "graph":
            session.graph(1, min(a, self.capacity - 1))
        else:
            self.fail(name, a, b)

    def fail(self, name: str, a: int, b: int) -> None:
        tokens = make_prompt(SMALL, a + 1, seed=a)
        if name == "bad rewind":
            with pytest.raises(ValueError, match="the position"):
                self.session.rewind(self.position + 1 + a)
        elif name == "bad id":
            tokens[0, -1] = SMALL.n_vocab
            with pytest.raises(ValueError, match=r"token id|do not fit"):
                self.session.prefill(tokens, chunk=b + 1)
        elif self.position + a + 1 <= self.capacity:

            def progress(done: int, n: int) -> None:
                if done == n:
                    raise _OddError

            with pytest.raises(_OddError):
                self.session.prefill(tokens, chunk=b + 1, progress=progress)

    def check(self, model: Model) -> None:
        """The sequence from scratch, with the same boundaries, on a session of its own."""
        assert (self.session.n_past, self.session.max_seq_len) == (self.position, self.capacity)
        if self.capacity == 0:
            return
        with model.session(self.capacity, n_threads=1) as fresh:
            out = None
            for e in self.history:
                fresh.rewind(e.start)
                out = fresh.prefill_fast(e.tokens)
            fresh.rewind(self.position)
            if self.last is not None:
                assert out is not None
                assert same_bits(self.last, out)
            if self.position < self.capacity:
                frame = make_prompt(SMALL, 2, seed=77)[:, 1]
                assert same_bits(self.session.step(frame), fresh.step(frame))


@settings(max_examples=200)
@given(_programs())
def test_random_programs(small: Model, program: list[tuple[str, int, int]]) -> None:
    run = Program(small)
    with run.session:
        for call in program:
            run.run(*call)
            assert run.session.n_past == run.position
        run.check(small)
