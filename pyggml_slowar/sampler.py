"""Choosing tokens and codes from logits as the upstream model does.

The random numbers depend on nothing but the seed and what is being chosen.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ._arrays import as_int
from ._native import call, ffi, lib

if TYPE_CHECKING:
    from .model import Config

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

IM_END_ID = 151645
"""``<|im_end|>`` in the released tokenizer."""

RAS_WINDOW = 10  # frames, upstream's RAS_WIN_SIZE
RAS_TEMPERATURE = 1.0  # upstream's RAS_HIGH_TEMP
RAS_TOP_P = 0.9  # upstream's RAS_HIGH_TOP_P
RAS_DRAW = 2**32
"""The draw number of the token that replaces a repeated one; see ``uniforms``."""

_MOST = 2**31 - 1


def uniforms(seed: int, frame: int, draw: int, n: int) -> Floats:
    """The random numbers that one choice between ``n`` candidates is made with.

    Candidate i has half i of the sequence of 64-bit words that Philox4x64-10 gives for the key
    (``seed``, 0) and the counters (1, draw, frame, 0), (2, draw, frame, 0), ..., least significant
    word first, four 64-bit words to a counter. Halves 2w and 2w + 1 are the low and the high 32
    bits of word w. The words are those of ``numpy.random.Philox(key=seed, counter=[0, draw, frame,
    0]).random_raw((n + 1) // 2)``, which counts before it computes. A half h is the number
    (h + 0.5) / 2**32, exact in float64, between 2**-33 and 1 - 2**-33.

    Parameters
    ----------
    seed
        0 to 2**64 - 1.
    frame
        Of the generation, from 0.
    draw
        0: the token; c: the code of codebook c, from 1; ``RAS_DRAW``: the second token.
    n
        Candidates.

    Returns
    -------
    ndarray
        float64 (n,).
    """
    philox = np.random.Philox(key=seed, counter=[0, draw, frame, 0])
    halves = philox.random_raw((n + 1) // 2).astype("<u8").view("<u4")[:n]
    return _as_uniform(halves)


def _as_uniform(halves: npt.NDArray[np.uint32]) -> Floats:
    return np.asarray((halves + 0.5) * 2.0**-32, np.float64)


class Sampler:
    """The choices of one generation: a token for each frame, then the codes of that frame.

    Every choice is that of the upstream model: the logits are ranked; those are removed up to which
    the probabilities, at temperature 1, add up to more than ``top_p``, and those after the first
    ``top_k``; the first stays; what stays is divided by ``temperature``; of its probabilities p and
    uniform numbers u the largest p / -log(u) is chosen. The numbers u depend on the seed, the frame
    and what is chosen and on nothing else: see ``uniforms``.

    A token that is semantic and among those of the last 10 frames is drawn again, with temperature
    1 and ``top_p`` 0.9. The first token of a generation is neither checked nor remembered; the
    frames before the second count as token 0.

    Parameters
    ----------
    config
        The model's: which tokens are semantic.
    temperature
        0 or more. 0: always the largest logit (of equal ones that of the lowest index), no random
        number and no second draw. Between 0 and 1e-5 it is 1e-5, as upstream has it.
    top_p
        Above 0, at most 1.
    top_k
        1 or more; more than there are candidates means all.
    seed
        0 to 2**64 - 1; None: any, which ``seed`` then tells.
    min_frames
        The end token cannot be drawn for frames below this one.
    im_end_id
        The end token, outside of the semantic ones.

    Raises
    ------
    TypeError, ValueError
        A parameter has the wrong type or is out of range.
    """

    def __init__(
        self,
        config: Config,
        *,
        temperature: float = 0.8,
        top_p: float = 0.8,
        top_k: int = 30,
        seed: int | None = None,
        min_frames: int = 0,
        im_end_id: int = IM_END_ID,
    ) -> None:
        self.temperature = _as_float("temperature", temperature)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {temperature}, expected 0 or more, and finite")
        self.top_p = _as_float("top_p", top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {top_p}, expected above 0 and at most 1")
        self.top_k = as_int("top_k", top_k, 1, _MOST)
        self.seed = secrets.randbits(64) if seed is None else as_int("seed", seed, 0, 2**64 - 1)
        self.min_frames = as_int("min_frames", min_frames, 0, _MOST)
        self.im_end_id = as_int("im_end_id", im_end_id, 0, config.n_vocab - 1)
        self._begin, self._end = config.semantic_begin_id, config.semantic_end_id
        if self._begin <= self.im_end_id <= self._end:
            raise ValueError(
                f"im_end_id is {im_end_id}, expected an id outside of the semantic ones, "
                f"{self._begin} to {self._end}"
            )
        self._n_codebook, self._codebook_size = config.n_codebook, config.codebook_size
        self._window = deque([0] * RAS_WINDOW, maxlen=RAS_WINDOW)
        self._ids: npt.NDArray[np.int32] | None = None
        self._where: slice | Indices = slice(0)
        self.n_frames = 0
        """Tokens drawn so far."""

    def check(self, ids: npt.NDArray[np.int32]) -> None:
        """Raise ValueError where ``ids``, int32 (n,), lack one that may be drawn."""
        if ids is not self._ids:
            self._where, self._ids = self._positions(ids), ids

    def token(self, logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]) -> int:
        """Draw the next frame's token.

        Parameters
        ----------
        logits
            float32 (n,), as ``Output.logits`` has them.
        ids
            int32 (n,), as ``Output.ids``. The semantic ids and ``im_end_id`` must be among them;
            no other can be drawn. The candidates are in this order: semantic ids, ``im_end_id``.

        Returns
        -------
        int
            A semantic id or ``im_end_id``.

        Raises
        ------
        ValueError
            An id is missing, shapes differ, or a logit is NaN or infinite. Nothing was drawn.
        """
        self.check(ids)
        candidates = _floats(logits, ids.shape)[self._where]
        if self.n_frames < self.min_frames:
            candidates = candidates[:-1]
        token = self._id(self._choose(candidates, self.n_frames, 0, self.temperature, self.top_p))
        if (
            self.n_frames > 0
            and self.temperature > 0
            and token != self.im_end_id
            and token in self._window
        ):
            # Upstream draws both always; here no draw has a part in another's random numbers.
            token = self._id(
                self._choose(candidates, self.n_frames, RAS_DRAW, RAS_TEMPERATURE, RAS_TOP_P)
            )
        if self.n_frames > 0:
            self._window.append(token)
        self.n_frames += 1
        return token

    def code(self, codebook: int, logits: npt.NDArray[np.float32]) -> int:
        """Draw a code of the frame whose token was drawn last.

        Parameters
        ----------
        codebook
            1 to n_codebook - 1; codebook 0's code is the token's.
        logits
            float32 (codebook_size,), the Fast-AR's.

        Raises
        ------
        ValueError
            No token was drawn yet, ``codebook`` or the shape is wrong, or a logit is NaN or
            infinite.
        """
        codebook = as_int("codebook", codebook, 1, self._n_codebook - 1)
        if self.n_frames == 0:
            raise ValueError("a token has to be drawn before the codes of its frame")
        candidates = _floats(logits, (self._codebook_size,))
        return self._choose(candidates, self.n_frames - 1, codebook, self.temperature, self.top_p)

    def _choose(
        self,
        logits: npt.NDArray[np.float32],
        frame: int,
        draw: int,
        temperature: float,
        top_p: float,
    ) -> int:
        chosen = ffi.new("int32_t *")
        params = ffi.new(
            "slowar_choice_params *", (self.top_k, top_p, temperature, self.seed, frame, draw)
        )
        given = ffi.from_buffer("float[]", logits)
        call(lib.slowar_choose, given, len(logits), params, chosen, ffi.NULL, ffi.NULL, ffi.NULL)
        return int(chosen[0])

    def _id(self, candidate: int) -> int:
        n_semantic = self._end - self._begin + 1
        return self._begin + candidate if candidate < n_semantic else self.im_end_id

    def _positions(self, ids: npt.NDArray[np.int32]) -> slice | Indices:
        """Where the candidates are: a slice, which copies nothing, where they are in order."""
        wanted = np.append(np.arange(self._begin, self._end + 1), self.im_end_id)
        n = len(wanted)
        if np.array_equal(ids[:n], wanted):
            return slice(n)
        order = np.argsort(ids, kind="stable")
        found = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)
        missing = wanted[ids[order[found]] != wanted] if len(ids) else wanted
        if len(missing):
            raise ValueError(
                f"ids have no {missing[0]}, expected the semantic ids, {self._begin} to "
                f"{self._end}, and im_end_id {self.im_end_id} (extra_ids)"
            )
        return np.asarray(order[found], np.intp)


def _floats(logits: npt.ArrayLike, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """``logits`` as C reads them; they are copied only where they are something else."""
    array = np.ascontiguousarray(logits, np.float32)
    if array.shape != shape:
        raise ValueError(f"logits have shape {np.shape(logits)}, expected {shape}")
    return array


def _as_float(name: str, value: object) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, expected a number")
    return float(value)
