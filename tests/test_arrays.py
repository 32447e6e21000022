"""Token arrays: what is taken, what is refused and in which words; a refusal changes nothing."""

from __future__ import annotations

import array
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import Tokens, make_prompt, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_slowar import Model, Output, Session, _arrays
from pyggml_slowar.make_model import TINY

pytestmark = pytest.mark.sanitize

ROWS = 1 + TINY.n_codebook
LAST_ID = TINY.n_vocab - 1  # 999
LAST_CODE = TINY.codebook_size - 1  # 63
START = 5  # the position that refused calls must leave alone
FRAME = make_prompt(TINY, 2, seed=9)[:, 1]

Call = Callable[[Session, Any], Output]

CALLS: dict[str, Call] = {
    "prefill": lambda s, tokens: s.prefill(tokens),
    "prefill in chunks": lambda s, tokens: s.prefill(tokens, chunk=3),
    "prefill_fast": lambda s, tokens: s.prefill_fast(tokens),
    "step": lambda s, tokens: s.step(np.asarray(tokens)[:, 0]),
}
PROMPT_CALLS = [name for name in CALLS if name != "step"]


class Witness:
    """A session at position 5 that knows what its next step gives, bit for bit."""

    def __init__(self, model: Model) -> None:
        self.session = model.session(64, n_threads=1)
        self.session.prefill(make_prompt(TINY, START, seed=3))
        self.next = self.session.step(FRAME)
        self.session.rewind(START)

    def refuses(
        self,
        call: Call,
        tokens: Any,
        error: type[Exception] | tuple[type[Exception], ...],
        message: str | re.Pattern[str],
    ) -> None:
        pattern = message if isinstance(message, re.Pattern) else "^" + re.escape(message) + "$"
        try:
            with pytest.raises(error, match=pattern):
                call(self.session, tokens)
            self.check()
        finally:
            self.session.rewind(START)  # a failure here must not fail the tests that follow

    def result(self, call: Call, tokens: Any) -> Output:
        try:
            return call(self.session, tokens)
        finally:
            self.session.rewind(START)

    def check(self) -> None:
        assert self.session.n_past == START
        assert same_bits(self.result(CALLS["step"], FRAME[:, None]), self.next)


@pytest.fixture(scope="module")
def witness(tiny: Model) -> Iterator[Witness]:
    witness = Witness(tiny)
    yield witness
    witness.session.close()


# ---- values out of range


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", [-1, TINY.n_vocab, 2**31 - 1, -(2**31)])
def test_bad_id(witness: Witness, call: str, value: int) -> None:
    n = 1 if call == "step" else 40
    for column in {0, n // 2, n - 1}:
        tokens = make_prompt(TINY, n)
        tokens[0, column] = value
        message = f"token id at row 0, column {column} is {value}, expected 0 to {LAST_ID}"
        witness.refuses(CALLS[call], tokens, ValueError, message)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", [-1, TINY.codebook_size, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("row", range(1, ROWS))
def test_bad_code_of_a_semantic_position(witness: Witness, call: str, value: int, row: int) -> None:
    n = 1 if call == "step" else 40
    tokens = make_prompt(TINY, n)
    tokens[0, -1] = TINY.semantic_begin_id if row % 2 else TINY.semantic_end_id
    tokens[row, -1] = value
    message = f"code at row {row}, column {n - 1} is {value}, expected 0 to {LAST_CODE}"
    witness.refuses(CALLS[call], tokens, ValueError, message)


WIDE = [
    (np.int64, 2**31),
    (np.int64, 2**32 + 5),  # its low 32 bits are a valid id
    (np.int64, -(2**31) - 1),
    (np.int64, -(2**63)),
    (np.uint32, 2**31),
    (np.uint32, 2**32 - 1),
    (np.uint64, 2**31 + 5),
    (np.uint64, 2**32 + 5),
    (np.uint64, 2**63),
    (np.uint64, 2**64 - 1),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("dtype", "value"), WIDE)
def test_value_beyond_int32(witness: Witness, call: str, dtype: npt.DTypeLike, value: int) -> None:
    column = 0 if call == "step" else 17
    tokens = make_prompt(TINY, 1 if call == "step" else 18).astype(dtype)
    tokens[0, column] = value
    message = f"token id at row 0, column {column} is {value}, expected 0 to {LAST_ID}"
    witness.refuses(CALLS[call], tokens, ValueError, message)

    tokens[0, column] = TINY.semantic_begin_id
    tokens[ROWS - 1, column] = value
    message = f"code at row 10, column {column} is {value}, expected 0 to {LAST_CODE}"
    witness.refuses(CALLS[call], tokens, ValueError, message)


def test_the_ends_of_every_range_are_taken(witness: Witness) -> None:
    tokens = np.zeros((ROWS, 6), np.int32)
    tokens[0] = 0, LAST_ID, 900, 963, 899, 964  # 900 and 963 bound the semantic range
    tokens[1:, 2] = 0
    tokens[1:, 3] = LAST_CODE
    tokens[1:, 4:] = -1  # just outside the semantic range: text
    assert np.isfinite(witness.result(CALLS["prefill"], tokens).logits).all()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.int8, -1),
        (np.int32, -(2**31)),
        (np.int32, 2**31 - 1),
        (np.int64, 2**40),
        (np.int64, -(2**63)),
        (np.uint32, 2**32 - 1),
        (np.uint64, 2**63),
        (np.uint64, 2**64 - 1),
    ],
)
def test_codes_of_text_positions_are_ignored(
    witness: Witness, call: str, dtype: npt.DTypeLike, value: int
) -> None:
    clean = make_prompt(TINY, 1 if call == "step" else 7)
    clean[0] = np.arange(clean.shape[1]) + 100  # all text, and small enough for int8
    clean[1:] = 0
    tokens = clean.astype(dtype)
    tokens[1:] = value
    expected = witness.result(CALLS[call], clean)
    assert same_bits(witness.result(CALLS[call], tokens), expected)


@pytest.mark.parametrize(("dtype", "value"), [(np.int64, 2**40), (np.uint64, 2**63)])
def test_codes_are_ignored_on_the_text_positions_of_a_mixed_prompt_alone(
    witness: Witness, dtype: npt.DTypeLike, value: int
) -> None:
    clean = make_prompt(TINY, 8)  # columns 1, 3, 5, 7 are semantic
    tokens = clean.astype(dtype)
    tokens[1:, ::2] = value
    before = tokens.copy()
    expected = witness.result(CALLS["prefill"], clean)
    assert same_bits(witness.result(CALLS["prefill"], tokens), expected)
    assert np.array_equal(tokens, before)  # the caller's array is read, never written

    other = clean.copy()
    other[4, 7] ^= 1  # a code of a semantic position does count
    assert not same_bits(witness.result(CALLS["prefill"], other), expected)


# ---- kinds of array: the same numbers, or a refusal

NARROW = make_prompt(TINY, 12, seed=4)
NARROW[0] = np.arange(12) * 10  # text ids and codes below 128: every integer dtype holds them


def _matrix(tokens: Tokens) -> Any:
    return np.matrix(tokens)


class _Offers:
    """An object that is no array but can make one."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Tokens:
        return self.tokens


def _unaligned(tokens: Tokens) -> Any:
    raw = np.zeros(tokens.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(tokens.tobytes(), np.uint8)
    view = raw[1:].view(tokens.dtype).reshape(tokens.shape)
    assert not view.flags.aligned
    return view


def _read_only(tokens: Tokens) -> Any:
    tokens = tokens.copy()
    tokens.flags.writeable = False
    return tokens


def _as(dtype: str) -> Callable[[Tokens], npt.NDArray[Any]]:
    return lambda tokens: tokens.astype(dtype)


KINDS: dict[str, Callable[[Tokens], Any]] = {
    **{
        f"{order}{name}": _as(order + name)
        for order in "<>"
        for name in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
    },
    "C int": lambda t: t.astype(np.intc),
    "C long long": lambda t: t.astype(np.longlong),
    "Fortran order": np.asfortranarray,
    "transposed view": lambda t: np.ascontiguousarray(t.T).T,
    "every other column": lambda t: np.repeat(t, 2, axis=1)[:, ::2],
    "every other row": lambda t: np.repeat(t, 2, axis=0)[::2],
    "backwards": lambda t: t[::-1, ::-1].copy()[::-1, ::-1],
    "inner part": lambda t: np.pad(t, 3, constant_values=-7)[3:-3, 3:-3],
    "unaligned": _unaligned,
    "read-only": _read_only,
    "nested lists": lambda t: t.tolist(),
    "nested tuples": lambda t: tuple(map(tuple, t.tolist())),
    "list of arrays": list,
    "list of array.array": lambda t: [array.array("i", row) for row in t.tolist()],
    "lists of numpy scalars": lambda t: [list(row) for row in t.astype(np.int16)],
    "memoryview": lambda t: memoryview(t.copy()),
    "matrix": _matrix,
    "with __array__": _Offers,
    "mask without a masked value": lambda t: np.ma.masked_array(t, mask=np.zeros_like(t, bool)),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [12, 11, 1])
def test_kinds_of_prompt(witness: Witness, kind: str, n: int) -> None:
    tokens = NARROW[:, :n].copy()
    expected = witness.result(CALLS["prefill"], tokens)
    for name in ("prefill", "prefill_fast"):
        assert same_bits(witness.result(CALLS[name], KINDS[kind](tokens)), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "matrix"])
def test_kinds_of_frame(witness: Witness, kind: str) -> None:
    column = NARROW[:, 3:4].copy()
    expected = witness.result(CALLS["prefill"], column)

    def step(session: Session, frame: Any) -> Output:
        return session.step(frame)

    assert same_bits(witness.result(step, KINDS[kind](column)), expected)  # (11, 1)
    flat = np.asarray(KINDS[kind](column))[:, 0]  # (11,), strided where the kind is
    assert same_bits(witness.result(step, flat), expected)
    assert same_bits(witness.result(step, flat.tolist()), expected)


def test_memory_mapped(witness: Witness, tmp_path: Path) -> None:
    np.save(tmp_path / "prompt.npy", NARROW)
    mapped = np.load(tmp_path / "prompt.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    expected = witness.result(CALLS["prefill"], NARROW)
    assert same_bits(witness.result(CALLS["prefill"], mapped), expected)


def test_as_many_columns_as_rows(witness: Witness) -> None:
    """Rows are rows even where the shape cannot tell: eleven columns are eleven steps."""
    tokens = make_prompt(TINY, ROWS)
    expected = witness.result(lambda s, t: [s.step(t[:, i]) for i in range(ROWS)][-1], tokens)
    seen = witness.result(lambda s, t: s.prefill(t, chunk=1), tokens)
    assert same_bits(seen, expected)


def _numbers(*shape: int) -> npt.NDArray[np.int64]:
    return np.ones(shape, np.int64)


FIELDS = np.zeros((ROWS, 2), [("id", "i4"), ("code", "i4")])

REFUSED_PROMPTS: list[tuple[str, Any, type[Exception], str]] = [
    ("transposed", _numbers(12, ROWS), ValueError, "have shape (12, 11), expected (11, n); transp"),
    ("a row short", _numbers(10, 12), ValueError, "have shape (10, 12), expected (11, n)"),
    ("a row more", _numbers(12, 12), ValueError, "have shape (12, 12), expected (11, n)"),
    ("1-D of 11", _numbers(11), ValueError, "have shape (11,), expected (11, n)"),
    ("1-D of 22", _numbers(22), ValueError, "have shape (22,), expected (11, n)"),
    ("3-D", _numbers(1, 11, 4), ValueError, "have shape (1, 11, 4), expected (11, n)"),
    ("3-D of 11", _numbers(11, 4, 1), ValueError, "have shape (11, 4, 1), expected (11, n)"),
    ("0-D", np.array(5), ValueError, "have shape (), expected (11, n)"),
    ("int", 5, ValueError, "have shape (), expected (11, n)"),
    ("numpy scalar", np.int32(5), ValueError, "have shape (), expected (11, n)"),
    ("no column", _numbers(11, 0), ValueError, "have shape (11, 0): there is no position"),
    ("no row", _numbers(0, 11), ValueError, "have shape (0, 11), expected (11, n)"),
    ("nothing", np.array([], np.int32), ValueError, "have shape (0,), expected (11, n)"),
    ("empty list", [], TypeError, "have dtype float64, expected an integer dtype"),
    ("float64", NARROW.astype(np.float64), TypeError, "have dtype float64, expected an integer"),
    ("float32", NARROW.astype(np.float32), TypeError, "have dtype float32, expected an integer"),
    ("float16", NARROW.astype(np.float16), TypeError, "have dtype float16, expected an integer"),
    ("bool", NARROW > 5, TypeError, "have dtype bool, expected an integer dtype"),
    ("object", NARROW.astype(object), TypeError, "have dtype object, expected an integer dtype"),
    ("complex", NARROW.astype(complex), TypeError, "have dtype complex128, expected an integer"),
    ("datetime", NARROW.astype("M8[s]"), TypeError, "have dtype datetime64[s], expected an integ"),
    ("timedelta", NARROW.astype("m8[s]"), TypeError, "have dtype timedelta64[s], expected an int"),
    ("text", NARROW.astype(str), TypeError, "have dtype <U11, expected an integer dtype"),
    ("bytes", NARROW.astype(bytes), TypeError, "have dtype |S11, expected an integer dtype"),
    ("fields", FIELDS, TypeError, "expected an integer dtype"),
    ("void", FIELDS.view("V8"), TypeError, "have dtype |V8, expected an integer dtype"),
    ("a string", "1 2 3", TypeError, "have dtype <U5, expected an integer dtype"),
    ("bytes object", b"\0" * 44, TypeError, "expected an integer dtype"),
    ("None", None, TypeError, "have dtype object, expected an integer dtype"),
    ("a list with None", [[None] * 2] * ROWS, TypeError, "have dtype object, expected an integer"),
    ("a list of bool", [[True] * 2] * ROWS, TypeError, "have dtype bool, expected an integer"),
    ("a list of float", [[1.0] * 2] * ROWS, TypeError, "have dtype float64, expected an integer"),
    ("beyond 64 bits", [[2**64] * 2] * ROWS, TypeError, "have dtype object, expected an integer"),
    ("a dict", {0: 1}, TypeError, "have dtype object, expected an integer dtype"),
    ("a generator", (i for i in range(11)), TypeError, "have dtype object, expected an integer"),
    ("ragged", [[1, 2], [1]] + [[1, 2]] * 9, ValueError, "inhomogeneous shape"),
]


@pytest.mark.parametrize("name", PROMPT_CALLS)
@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [row[1:] for row in REFUSED_PROMPTS],
    ids=[row[0] for row in REFUSED_PROMPTS],
)
def test_refused_prompts(
    witness: Witness, name: str, tokens: Any, error: type[Exception], message: str
) -> None:
    witness.refuses(CALLS[name], tokens, error, re.compile(re.escape(message)))


REFUSED_FRAMES: list[tuple[str, Any, type[Exception], str]] = [
    ("12", _numbers(12), ValueError, "the frame has shape (12,), expected (11,)"),
    ("10", _numbers(10), ValueError, "the frame has shape (10,), expected (11,)"),
    ("22", _numbers(22), ValueError, "the frame has shape (22,), expected (11,)"),
    ("two columns", _numbers(11, 2), ValueError, "the frame has shape (11, 2), expected (11,)"),
    ("a row", _numbers(1, 11), ValueError, "the frame has shape (1, 11), expected (11,)"),
    ("square", _numbers(11, 11), ValueError, "the frame has shape (11, 11), expected (11,)"),
    ("3-D", _numbers(11, 1, 1), ValueError, "the frame has shape (11, 1, 1), expected (11,)"),
    ("0-D", np.array(5), ValueError, "the frame has shape (), expected (11,)"),
    ("nothing", _numbers(0), ValueError, "the frame has shape (0,), expected (11,)"),
    ("float", FRAME.astype(np.float64), TypeError, "dtype float64, expected an integer dtype"),
    ("bool", FRAME > 5, TypeError, "dtype bool, expected an integer dtype"),
    ("object", FRAME.astype(object), TypeError, "dtype object, expected an integer dtype"),
    ("None", None, TypeError, "dtype object, expected an integer dtype"),
    ("text", ["1"] * ROWS, TypeError, "dtype <U1, expected an integer dtype"),
    ("fields", FIELDS[:, 0], TypeError, "expected an integer dtype"),
    ("ragged", [1] * 10 + [[1]], ValueError, "inhomogeneous shape"),
]


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [row[1:] for row in REFUSED_FRAMES],
    ids=[row[0] for row in REFUSED_FRAMES],
)
def test_refused_frames(witness: Witness, frame: Any, error: type[Exception], message: str) -> None:
    def step(session: Session, frame: Any) -> Output:
        return session.step(frame)

    witness.refuses(step, frame, error, re.compile(re.escape(message)))


@pytest.mark.parametrize("call", CALLS)
def test_a_masked_value_is_no_number(witness: Witness, call: str) -> None:
    tokens = np.ma.masked_array(NARROW[:, :1], mask=False)
    tokens[0, 0] = np.ma.masked  # a valid id lies below the mask

    def evaluate(session: Session, tokens: Any) -> Output:
        return session.step(tokens) if call == "step" else CALLS[call](session, tokens)

    witness.refuses(evaluate, tokens, (TypeError, ValueError), re.compile("mask"))


# ---- the same values under any dtype and layout

DTYPES = [order + kind + size for order in "<>" for kind in "iu" for size in "1248"]


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[Tokens, npt.NDArray[Any]]:
    """A prompt, and the same numbers in another dtype, byte order and memory layout."""
    dtype: np.dtype[Any] = np.dtype(draw(st.sampled_from(DTYPES)))
    n = draw(st.integers(1, 14))
    most = min(LAST_ID, np.iinfo(dtype).max)
    ids = draw(st.lists(st.integers(0, most), min_size=n, max_size=n))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = rng.integers(0, TINY.codebook_size, (ROWS, n), np.int32)
    tokens[0] = ids

    spread = [draw(st.sampled_from((1, 2, 3))) for _ in range(2)]
    margin = [draw(st.integers(0, 2)) for _ in range(2)]
    junk = draw(st.sampled_from((np.iinfo(dtype).min, np.iinfo(dtype).max)))
    shape = [size * s + 2 * m for size, s, m in zip(tokens.shape, spread, margin, strict=True)]
    stored = np.full(shape, junk, dtype, order=draw(st.sampled_from("CF")))
    if draw(st.booleans()):
        stored = stored[::-1, ::-1]
    part = tuple(
        slice(m, m + size * s, s) for size, s, m in zip(tokens.shape, spread, margin, strict=True)
    )
    view = stored[part]
    view[...] = tokens
    view.flags.writeable = draw(st.booleans())
    return tokens, view


@settings(max_examples=150)
@given(_layouts())
def test_any_layout_of_the_same_numbers(
    witness: Witness, layout: tuple[Tokens, npt.NDArray[Any]]
) -> None:
    tokens, view = layout
    assert np.array_equal(view, tokens)
    expected = witness.result(CALLS["prefill"], tokens)
    assert same_bits(witness.result(CALLS["prefill"], view), expected)
    assert np.array_equal(view, tokens)


@settings(max_examples=150)
@given(
    dtype=st.sampled_from(["<i4", ">i4", "<i8", ">i8", "<u4", "<u8", ">u8"]),
    row=st.integers(0, ROWS - 1),
    column=st.integers(0, 6),
    data=st.data(),
)
def test_any_value_is_taken_or_named(
    witness: Witness, dtype: str, row: int, column: int, data: st.DataObject
) -> None:
    """One value anywhere in the dtype's range: ignored, used, or refused with its place."""
    limits = np.iinfo(np.dtype(dtype).type)
    near = st.sampled_from([0, 63, 64, 899, 900, 963, 964, 999, 1000])
    value = data.draw(near | st.integers(int(limits.min), int(limits.max)))
    tokens = make_prompt(TINY, 7).astype(dtype)
    tokens[row, column] = value
    semantic = TINY.semantic_begin_id <= int(tokens[0, column]) <= TINY.semantic_end_id
    most = LAST_ID if row == 0 else LAST_CODE
    if 0 <= value <= most or (row > 0 and not semantic):
        assert np.isfinite(witness.result(CALLS["prefill"], tokens).logits).all()
    else:
        what = "token id" if row == 0 else "code"
        message = f"{what} at row {row}, column {column} is {value}, expected 0 to {most}"
        witness.refuses(CALLS["prefill"], tokens, ValueError, message)


# ---- an array that changes while it is read


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_array_may_change_once_the_call_has_begun(
    witness: Witness, dtype: npt.DTypeLike
) -> None:
    expected = witness.result(lambda s, t: s.prefill(t, chunk=2), NARROW)
    # (1 + n_codebook, n) that needs neither conversion nor transposition, so that a view would do
    tokens = np.ascontiguousarray(NARROW.T.astype(dtype)).T

    def spoil(done: int, n: int) -> None:
        tokens[...] = -1

    seen = witness.result(lambda s, t: s.prefill(t, chunk=2, progress=spoil), tokens)
    assert same_bits(seen, expected)


def test_an_array_that_another_thread_writes_to_is_read_once(witness: Witness) -> None:
    """At whatever line of the check an id turns from 5 into 2**32 + 6, one of the two is read."""
    frame = np.zeros((ROWS, 1), np.int64)
    frame[0] = 5
    expected = witness.result(CALLS["prefill"], frame)
    refusal = f"token id at row 0, column 0 is {2**32 + 6}, expected 0 to {LAST_ID}"

    lines = 0
    while True:
        frame[0] = 5
        left = lines

        def write(frame_object: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if frame_object.f_code.co_filename != _arrays.__file__:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    frame[0] = 2**32 + 6
            return write

        before = sys.gettrace()
        sys.settrace(write)
        try:
            seen: Output | str = witness.session.prefill(frame)
        except ValueError as error:
            seen = str(error)
        finally:
            sys.settrace(before)
            witness.session.rewind(START)
        assert seen == refusal if isinstance(seen, str) else same_bits(seen, expected)
        if left >= 0:  # the call has no more lines at which to change it
            break
        lines += 1
    assert lines >= 10  # as_prompt, _integers and _flat have that many together
