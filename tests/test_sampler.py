"""The sampler against what was recorded of the upstream one, against a plain implementation that
sorts everything, and its random numbers against a Philox written out here."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import SMALL
from generation_reference import (
    ReferenceSampler,
    Settings,
    choose,
    philox_uniforms,
)
from generation_reference import probabilities as reference_probabilities

import pyggml_slowar as slowar
from pyggml_slowar import Sampler
from pyggml_slowar.make_model import S2_PRO
from pyggml_slowar.sampler import RAS_DRAW, Ranked, _as_uniform, probabilities, rank, uniforms

GOLDEN = Path(__file__).parent / "golden" / "sampler.npz"

IM_END = 5
BEGIN, END = SMALL.semantic_begin_id, SMALL.semantic_end_id
IDS = np.append(np.arange(BEGIN, END + 1), IM_END).astype(np.int32)  # as logits="semantic" has them
FULL = np.arange(SMALL.n_vocab, dtype=np.int32)

Logits = npt.NDArray[np.float32]


def full_probabilities(
    logits: Logits, temperature: float, top_p: float, top_k: int
) -> npt.NDArray[np.float64]:
    """The package's, of every candidate."""
    ranked = rank(logits, top_k)
    p = probabilities(ranked, temperature, top_p)
    out = np.zeros(len(logits))
    out[ranked.candidates[: len(p)]] = p
    return out


def random_logits(rng: np.random.Generator, n: int) -> Logits:
    """Of some spread between nearly flat and nearly one-hot; in a third of cases with many ties, in
    a third with many that are -inf."""
    x = rng.normal(size=n) * 10 ** rng.uniform(-1, 1.3)
    kind = rng.integers(3)
    if kind == 0:
        x = np.round(x)
    elif kind == 1:
        x[rng.random(n) < 0.5] = -np.inf
        x[rng.integers(n)] = 0.0
    return np.asarray(x, np.float32)


def settings_of(rng: np.random.Generator) -> tuple[float, float, int]:
    return (
        float(rng.choice([1e-5, 0.3, 0.8, 1.0, 1.5])),
        float(rng.choice([1e-3, 0.1, 0.5, 0.8, 0.9, 0.999, 1.0])),
        int(rng.choice([1, 2, 5, 30, 100, 4096, 10**6])),
    )


# What is drawn from


def test_recorded_upstream_sampler() -> None:
    """float32's rounding of a probability is 6e-8 at most, as far as which are kept is the same."""
    with np.load(GOLDEN) as data:
        columns = [data[k] for k in ("logits", "temperature", "top_p", "top_k", "uniform")]
        assert len(columns[0]) == 30
        for row, (logits, temperature, top_p, top_k, u) in enumerate(zip(*columns, strict=True)):
            p = full_probabilities(logits, float(temperature), float(top_p), int(top_k))
            assert np.abs(p - data["probs"][row]).max() <= 1e-6  # seen 7.6e-8
            assert choose(p, u) == data["choice"][row]


@pytest.mark.parametrize("n", [17, 331, 4097])
def test_nothing_is_lost_by_not_sorting_all(n: int) -> None:
    """A plain sort of everything in float64 keeps the same candidates, ties included, and gives the
    same probabilities. 300 cases of each size; 1e-12 is 1e4 times float64's own error."""
    rng = np.random.default_rng(n)
    for _ in range(300):
        logits = random_logits(rng, n)
        temperature, top_p, top_k = settings_of(rng)
        seen = full_probabilities(logits, temperature, top_p, top_k)
        expected = reference_probabilities(logits, temperature, top_p, top_k)
        np.testing.assert_array_equal(seen > 0, expected > 0)
        assert np.abs(seen - expected).max() <= 1e-12
        assert abs(seen.sum() - 1) <= 1e-12


def test_the_one_that_crosses_goes_too() -> None:
    """Probabilities 0.5, 0.3 and 0.2: up to 0.79 only the first remains, and of 0.1 it does too."""
    logits = np.log([0.2, 0.5, 0.3]).astype(np.float32)
    assert np.flatnonzero(full_probabilities(logits, 1.0, 0.79, 3)).tolist() == [1]
    assert np.flatnonzero(full_probabilities(logits, 1.0, 0.1, 3)).tolist() == [1]
    assert np.flatnonzero(full_probabilities(logits, 1.0, 0.81, 3)).tolist() == [1, 2]


def test_the_one_that_reaches_stays() -> None:
    """Four equal ones: the second brings the sum to 0.5, which is not more than 0.5."""
    logits = np.zeros(4, np.float32)
    assert np.flatnonzero(full_probabilities(logits, 1.0, 0.5, 4)).tolist() == [1, 2]


def test_top_p_1_removes_nothing() -> None:
    """Sums that end above 1 by rounding: 8 of these 20 000 here."""
    rng = np.random.default_rng(0)
    for _ in range(20_000):
        n = int(rng.choice([2, 3, 5, 17, 64]))
        ranked = rank((rng.normal(size=n) * rng.uniform(0.1, 4)).astype(np.float32), n)
        assert len(probabilities(ranked, 1.0, 1.0)) == n


def test_temperature_comes_last() -> None:
    """At temperature 100 all are alike and top_p 0.79 would keep two of three: it sees the
    temperature-1 probabilities, and keeps one."""
    logits = np.log([0.2, 0.5, 0.3]).astype(np.float32)
    assert np.flatnonzero(full_probabilities(logits, 100.0, 0.79, 3)).tolist() == [1]
    p = full_probabilities(logits, 0.5, 0.81, 3)
    # 0.5**2 to 0.3**2, float32 logits
    np.testing.assert_allclose(p, [0, 0.25 / 0.34, 0.09 / 0.34], rtol=1e-6)


def test_ties_go_by_index_and_zero_is_last() -> None:
    logits = np.zeros(50, np.float32)
    assert rank(logits, 4).candidates.tolist() == [1, 2, 3, 4]
    assert rank(logits, 50).candidates.tolist() == [*range(1, 50), 0]
    logits[[7, 9]] = 1
    assert rank(logits, 4).candidates.tolist() == [7, 9, 1, 2]
    logits[0] = 1
    assert rank(logits, 4).candidates.tolist() == [7, 9, 0, 1]


@pytest.mark.parametrize("n", [17, 4097])
def test_frequencies(n: int) -> None:
    """4000 draws of one distribution, each seed its own: chi-square over what is kept. Its 1 - 1e-6
    quantile for 9 degrees of freedom is 45; the seeds are fixed, so it is the same on every run."""
    logits = np.full(n, -5.0, np.float32)
    logits[-12:-2] = np.linspace(0, 2, 10)  # the last of the kept, where words are many
    ranked = rank(logits, 10)
    p = full_probabilities(logits, 0.9, 1.0, 10)
    counts = np.zeros(n)
    for seed in range(4000):
        sampler = Sampler(S2_PRO, seed=seed)
        counts[sampler._draw(ranked, 3, 2, 0.9, 1.0)] += 1
    kept = p > 0
    assert counts[~kept].sum() == 0
    assert ((counts[kept] - 4000 * p[kept]) ** 2 / (4000 * p[kept])).sum() < 45


# Random numbers


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize(("frame", "draw"), [(0, 0), (7, 3), (2**31 - 1, RAS_DRAW)])
def test_uniforms_are_philox(seed: int, frame: int, draw: int) -> None:
    """Bit by bit what docs/generation.md says, computed with Python's integers."""
    for n in (1, 2, 7, 8, 9, 50):
        expected = philox_uniforms(seed)(frame, draw, n)
        np.testing.assert_array_equal(uniforms(seed, frame, draw, n), expected)


def test_one_value_to_compare_another_program_with() -> None:
    """The example of docs/generation.md."""
    assert uniforms(42, 3, 1, 4).tolist() == [
        0.7643272642744705,
        0.9950644782511517,
        0.055830554221756756,
        0.661563394474797,
    ]


def test_uniforms_are_never_0_or_1() -> None:
    """The ends of the mapping from 32 bits: -log of 0 and of 1 would be inf and 0."""
    low, high = _as_uniform(np.array([0, 2**32 - 1], np.uint32)).tolist()
    assert (low, high) == (2.0**-33, 1 - 2.0**-33)


def test_draws_have_numbers_of_their_own() -> None:
    """Over 3 seeds, 4 frames and all draws of a frame nothing comes twice: among 120 times 64
    numbers of 32 bits, 7680**2 / 2**33 = 0.7 % chance of one pair, fixed by the seeds."""
    seen = np.concatenate(
        [
            uniforms(seed, frame, draw, 64)
            for seed in (0, 1, 2**40)
            for frame in range(4)
            for draw in [*range(9), RAS_DRAW]
        ]
    )
    assert len(np.unique(seen)) == len(seen) == 7680


def test_a_draw_depends_on_no_other() -> None:
    """Codes of frame 2 come out the same whether codes were drawn before or not."""
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(3, len(IDS))).astype(np.float32)
    codes = rng.normal(size=(9, SMALL.codebook_size)).astype(np.float32)
    every, few = Sampler(SMALL, seed=9, im_end_id=IM_END), Sampler(SMALL, seed=9, im_end_id=IM_END)
    for logits in tokens:
        every.token(logits, IDS)
        all_codes = [every.code(c + 1, codes[c]) for c in range(9)]
    for logits in tokens:
        few.token(logits, IDS)
    assert few.code(7, codes[6]) == all_codes[6]
    assert few.code(2, codes[1]) == all_codes[1]


# A generation


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_generation_is_the_plain_one(temperature: float, seed: int) -> None:
    """60 frames of 17 candidates, so that nearly every token is a repeated one, and codes."""
    rng = np.random.default_rng(seed % 1000)
    settings = Settings(temperature=temperature, top_p=0.95, top_k=12, min_frames=20)
    reference = ReferenceSampler(settings, philox_uniforms(seed), BEGIN, END, IM_END)
    sampler = Sampler(SMALL, seed=seed, im_end_id=IM_END, **dataclasses.asdict(settings))
    for _ in range(60):
        logits = rng.normal(size=SMALL.n_vocab).astype(np.float32)
        assert sampler.token(logits, FULL) == reference.token(logits)
        for codebook in range(1, 10):
            logits = rng.normal(size=SMALL.codebook_size).astype(np.float32)
            assert sampler.code(codebook, logits) == reference.code(codebook, logits)
    assert sampler.n_frames == 60


def peaked(wanted: int, ids: npt.NDArray[np.int32] = IDS) -> Logits:
    """Logits that leave no choice but one: e**-20 for each other."""
    return np.where(ids == wanted, 20, 0).astype(np.float32)


def redrawn(sampler: Sampler, tokens: list[int], ids: npt.NDArray[np.int32] = IDS) -> list[bool]:
    """For each token, wanted and drawn one after the other, whether a second draw was made."""
    calls: list[int] = []
    plain = sampler._draw

    def spy(ranked: Ranked, frame: int, draw: int, temperature: float, top_p: float) -> int:
        calls.append(draw)
        if draw == RAS_DRAW:
            assert (temperature, top_p) == (1.0, 0.9)  # upstream's
        return plain(ranked, frame, draw, temperature, top_p)

    sampler._draw = spy  # type: ignore[method-assign]
    out = []
    for token in tokens:
        assert sampler.token(peaked(token, ids), ids) == token
        out.append(calls.pop() == RAS_DRAW)
    return out


def test_repetition_window() -> None:
    """The first token is not remembered; one of the last 10 is drawn again, the 11th is not."""
    a, others = BEGIN, list(range(BEGIN + 1, BEGIN + 11))
    sampler = Sampler(SMALL, seed=0, im_end_id=IM_END)
    assert redrawn(sampler, [a, a, a]) == [False, False, True]
    assert redrawn(Sampler(SMALL, seed=0, im_end_id=IM_END), [a, a, *others, a]) == [False] * 13
    assert redrawn(Sampler(SMALL, seed=0, im_end_id=IM_END), [a, a, *others[:9], a])[-1]


def test_frames_that_never_were_count_as_token_0() -> None:
    """Which is semantic here: from the second token on it is drawn again, and no other is."""
    config = dataclasses.replace(SMALL, semantic_begin_id=0, semantic_end_id=15)
    ids = np.arange(17, dtype=np.int32)
    sampler = Sampler(config, seed=0, im_end_id=16)
    assert redrawn(sampler, [0, 1, 0], ids) == [False, False, True]


def test_the_end_token_is_never_drawn_again() -> None:
    sampler = Sampler(SMALL, seed=0, im_end_id=IM_END)
    assert redrawn(sampler, [IM_END] * 5) == [False] * 5


def test_min_frames_keeps_the_end_out() -> None:
    sampler = Sampler(SMALL, seed=0, min_frames=3, im_end_id=IM_END)
    logits = peaked(IM_END)
    tokens = [sampler.token(logits, IDS) for _ in range(4)]
    assert all(BEGIN <= token <= END for token in tokens[:3])
    assert tokens[3] == IM_END


def test_no_other_token_can_be_drawn() -> None:
    """Every other id has a logit that would win."""
    logits = np.where(np.isin(FULL, IDS), 0, 100).astype(np.float32)
    sampler = Sampler(SMALL, seed=0, temperature=1.5, top_p=1.0, top_k=100, im_end_id=IM_END)
    assert {sampler.token(logits, FULL) for _ in range(300)} == set(IDS.tolist())


@pytest.mark.parametrize("ids", [FULL, IDS[::-1].copy(), np.append(IDS, [7, 8]).astype(np.int32)])
def test_the_order_of_ids_does_not_matter(ids: npt.NDArray[np.int32]) -> None:
    rng = np.random.default_rng(3)
    one, other = (Sampler(SMALL, seed=4, top_k=12, im_end_id=IM_END) for _ in range(2))
    for _ in range(20):
        of = rng.normal(size=SMALL.n_vocab).astype(np.float32)
        assert one.token(of[ids], ids) == other.token(of[IDS], IDS)


def test_temperature_0_is_argmax_for_any_seed() -> None:
    """Also of a repeated token, and of equal logits the first."""
    logits = peaked(BEGIN + 3)
    sampler = Sampler(SMALL, temperature=0, im_end_id=IM_END)
    assert [sampler.token(logits, IDS) for _ in range(5)] == [BEGIN + 3] * 5
    assert sampler.code(1, np.ones(SMALL.codebook_size, np.float32)) == 0


def test_a_seed_is_found_and_told() -> None:
    one, other = Sampler(SMALL, im_end_id=IM_END), Sampler(SMALL, im_end_id=IM_END)
    assert one.seed != other.seed  # 1 in 2**64
    assert 0 <= one.seed < 2**64
    assert slowar.Sampler is Sampler


# Refusals


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("temperature", -0.1, ValueError, "temperature is -0.1, expected 0 or more, and finite"),
        ("temperature", math.nan, ValueError, "temperature is nan, expected 0 or more, and finite"),
        ("temperature", math.inf, ValueError, "temperature is inf, expected 0 or more, and finite"),
        ("temperature", "1", TypeError, "temperature is '1', expected a number"),
        ("temperature", True, TypeError, "temperature is True, expected a number"),
        ("top_p", 0, ValueError, "top_p is 0, expected above 0 and at most 1"),
        ("top_p", 1.01, ValueError, "top_p is 1.01, expected above 0 and at most 1"),
        ("top_p", math.nan, ValueError, "top_p is nan, expected above 0 and at most 1"),
        ("top_k", 0, ValueError, "top_k is 0, expected 1 to 2147483647"),
        ("top_k", 3.0, TypeError, "top_k is 3.0, expected an integer"),
        ("seed", -1, ValueError, "seed is -1, expected 0 to 18446744073709551615"),
        ("seed", 2**64, ValueError, f"seed is {2**64}, expected 0 to {2**64 - 1}"),
        ("min_frames", -1, ValueError, "min_frames is -1, expected 0 to 2147483647"),
        ("im_end_id", 300, ValueError, "im_end_id is 300, expected 0 to 299"),
        (
            "im_end_id",
            BEGIN,
            ValueError,
            "im_end_id is 200, expected an id outside of the semantic ones, 200 to 215",
        ),
    ],
)
def test_bad_parameters(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        Sampler(SMALL, **{"im_end_id": IM_END, name: value})
    assert str(raised.value) == message


def test_numpy_numbers_are_numbers() -> None:
    sampler = Sampler(
        SMALL,
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.uint64(2**63),
        im_end_id=5,
    )
    assert (sampler.temperature, sampler.top_k, sampler.seed) == (0.5, 3, 2**63)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_bad_logits_change_nothing(temperature: float) -> None:
    sampler = Sampler(SMALL, seed=1, temperature=temperature, im_end_id=IM_END)
    good = np.zeros(len(IDS), np.float32)
    with pytest.raises(ValueError, match="a token has to be drawn before"):
        sampler.code(1, np.zeros(16, np.float32))
    nan, inf = good.copy(), good.copy()
    nan[3], inf[3] = np.nan, np.inf
    for bad, word in ((nan, "nan"), (inf, "inf"), (np.full_like(good, -np.inf), "-inf")):
        with pytest.raises(ValueError, match=f"the highest of the logits is {word}, expected a"):
            sampler.token(bad, IDS)
    with pytest.raises(ValueError, match=r"logits have shape \(16,\), expected \(17,\)"):
        sampler.token(good[1:], IDS)
    with pytest.raises(ValueError, match="ids have no 5, expected the semantic ids, 200 to 215, "):
        sampler.token(good[1:], IDS[:-1])
    with pytest.raises(ValueError, match="ids have no 200"):
        sampler.token(good[:0], IDS[:0])
    assert sampler.n_frames == 0
    sampler.token(good, IDS)
    with pytest.raises(ValueError, match=r"logits have shape \(17,\), expected \(16,\)"):
        sampler.code(1, good)
    with pytest.raises(ValueError, match="codebook is 0, expected 1 to 9"):
        sampler.code(0, good[1:])
    with pytest.raises(ValueError, match="the highest of the logits is nan"):
        sampler.code(1, nan[1:])


# Speed


def test_a_draw_is_quick() -> None:
    """A frame has 10 choices between 4096 or 4097; 2 % of a frame of 230 ms are 460 µs for each.
    Seen 105 to 194 µs on a busy machine of two cores. The quickest of 20 rounds counts."""
    rng = np.random.default_rng(0)
    ids = np.append(np.arange(151678, 155774), 151645).astype(np.int32)
    logits = (3 * rng.normal(size=(50, 4097))).astype(np.float32)
    sampler = Sampler(S2_PRO, seed=0)
    rounds = []
    for _ in range(20):
        start = time.perf_counter()
        for row in logits:
            sampler.token(row, ids)
            sampler.code(1, row[1:])
        rounds.append((time.perf_counter() - start) / 100)
    assert min(rounds) < 460e-6
