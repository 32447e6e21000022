"""The gate between numpy and C: every token array passes here once."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.ma as ma  # numpy's own import of it is lazy, and a fork could come in between
import numpy.typing as npt

from ._native import call, ffi, lib

if TYPE_CHECKING:
    from .model import Config

Flat = npt.NDArray[np.int32]

_INT32 = np.iinfo(np.int32)


def as_int(name: str, value: object, least: int, most: int) -> int:
    """``value`` as an int in [least, most].

    bool, float and the rest are a TypeError; numpy integers are fine.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}, expected {least} to {most}")
    return number


def as_prompt(tokens: npt.ArrayLike, config: Config) -> Flat:
    """A prompt of shape (1 + n_codebook, n) as a position-major int32 copy (n, 1 + n_codebook)."""
    array = _integers(tokens)
    rows = 1 + config.n_codebook
    if array.ndim != 2 or array.shape[0] != rows:
        hint = "; transpose it" if array.ndim == 2 and array.shape[1] == rows else ""
        raise ValueError(f"tokens have shape {array.shape}, expected ({rows}, n){hint}")
    if array.shape[1] == 0:
        raise ValueError(f"tokens have shape {array.shape}: there is no position to evaluate")
    return _flat(array, config)


def as_frame(frame: npt.ArrayLike, config: Config) -> Flat:
    """One position, (1 + n_codebook,) or (1 + n_codebook, 1), as int32 (1, 1 + n_codebook)."""
    array = _integers(frame)
    rows = 1 + config.n_codebook
    if array.shape not in ((rows,), (rows, 1)):
        raise ValueError(f"the frame has shape {array.shape}, expected ({rows},)")
    return _flat(array.reshape(rows, 1), config)


def _integers(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    if ma.is_masked(tokens):
        raise ValueError("tokens have masked values: fill them first")
    array = np.asarray(tokens)
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens have dtype {array.dtype}, expected an integer dtype")
    return array


def _flat(array: npt.NDArray[Any], config: Config) -> Flat:
    # A copy before the first look: values are checked and then used, and no other thread may write
    # to them in between.
    array = array.copy()
    if not np.can_cast(array.dtype, np.int32):
        array = _narrowed(array, config)
    return np.array(array.T, dtype=np.int32, order="C")


def _narrowed(array: npt.NDArray[Any], config: Config) -> npt.NDArray[Any]:
    """The same numbers in int32's range: what is outside is refused, but not in text codes.

    Codes of text positions mean nothing and become 0.
    """
    outside = (array < _INT32.min) | (array > _INT32.max)
    if not outside.any():
        return array
    text = (array[0] < config.semantic_begin_id) | (array[0] > config.semantic_end_id)
    outside[1:, text] = False
    if outside.any():
        row, column = (int(i) for i in np.argwhere(outside)[0])
        what, most = ("token id", config.n_vocab) if row == 0 else ("code", config.codebook_size)
        value = array[row, column]
        raise ValueError(
            f"{what} at row {row}, column {column} is {value}, expected 0 to {most - 1}"
        )
    array[1:, text] = 0
    return array


def check_tokens(pointer: Any, flat: Flat) -> None:
    """Raise ValueError for an id or a code out of range. ``pointer`` is any open session's."""
    call(lib.slowar_check_tokens, pointer, ffi.from_buffer("int32_t[]", flat), len(flat))
