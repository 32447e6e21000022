"""From a prompt to codes: the Fast-AR, and the loop around both transformers and the sampler."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generation_reference as reference
import numpy as np
import numpy.typing as npt
import psutil
import pytest
from conftest import SMALL, Tokens, make_prompt
from test_parity import GOLDEN, relative_error

import pyggml_slowar as slowar
from pyggml_slowar.make_model import TINY, fast_shape, make_model

END = 7  # not semantic, and drawn now and then
PROMPT = make_prompt(SMALL, 20, seed=4)

NAMES = ["f32_plain", "f32_wide_heads", "f16_no_gqa", "q8_0_gqa4", "q4_k_one_kv_head"]
# Against the C++ values, which were computed the same way; and against PyTorch in float32, where
# the hidden vector is of an F32 cache and quantised weights do not round activations to 8 bits.
BOUNDS = {
    "f32_plain": (2e-5, 1e-3),
    "f32_wide_heads": (2e-5, 1e-3),
    "f16_no_gqa": (1e-3, 2e-3),
    "q8_0_gqa4": (1e-2, 4e-2),
    "q4_k_one_kv_head": (1e-2, 4e-2),
}


def run(model: slowar.Model, seed: int = 0, **options: Any) -> slowar.Generation:
    settings: dict[str, Any] = {
        "max_frames": 30,
        "im_end_id": END,
        "kv_type": "f32",
        "n_threads": 1,
    }
    return slowar.generate(model, PROMPT, seed=seed, **(settings | options))


# ---- the Fast-AR


def fast_logits(
    fast: slowar.FastAR, hidden: npt.NDArray[np.float32], codes: list[int]
) -> dict[int, npt.NDArray[np.float32]]:
    """Logits by codebook, where ``codes`` are given and then zeros."""
    seen = {}

    def choose(codebook: int, logits: npt.NDArray[np.float32]) -> list[int]:
        seen[codebook] = logits[0].copy()
        return [codes[codebook] if codebook < len(codes) else 0]

    fast.frames(hidden[None], [codes[0]], choose)
    return seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sanitize
def test_golden_codes(name: str) -> None:
    seen = [0.0, 0.0]
    count = 0
    with (
        np.load(GOLDEN / f"{name}.npz") as values,
        np.load(GOLDEN / f"{name}.upstream.npz") as upstream,
        slowar.Model(GOLDEN / f"{name}.gguf", backend="cpu") as model,
    ):
        hidden = None
        for call in json.loads(str(values["calls"])):
            if call["call"] != "fast_decode":
                hidden = values.get(f"hidden_{call.get('out')}", hidden)
                continue
            assert hidden is not None
            found = fast_logits(model.fast_ar(), hidden, call["prefix"])[len(call["prefix"])]
            for i, (file, key) in enumerate(((values, ""), (upstream, "f32_"))):
                expected = file[f"{key}fast_logits_{call['out']}"]
                seen[i] = max(seen[i], relative_error(found, expected))
            count += 1
    assert count == 9
    assert seen[0] <= BOUNDS[name][0]
    assert seen[1] <= BOUNDS[name][1]


@pytest.mark.parametrize("traits", ["plain", "projected", "biased", "qk_norm"])
def test_cached_is_recomputed(traits: str, tmp_path: Path) -> None:
    """All codebooks against a Fast-AR in doubles that begins anew for each; frames in a row."""
    shape = fast_shape(SMALL)
    if traits in ("projected", "biased"):
        shape = dataclasses.replace(
            shape, embedding_length=96, project_in=True, project_in_bias=traits == "biased"
        )
    if traits == "qk_norm":
        shape = dataclasses.replace(shape, attention_qk_norm=True)
    path = tmp_path / "fast.gguf"
    make_model(path, SMALL, fast=shape, seed=6)
    rng = np.random.default_rng(0)
    other = reference.FastReference(path)
    with slowar.Model(path, backend="cpu") as model:
        for _ in range(4):
            hidden = rng.standard_normal(SMALL.n_embd, np.float32)
            codes = rng.integers(0, SMALL.codebook_size, SMALL.n_codebook).tolist()
            for codebook, logits in fast_logits(model.fast_ar(), hidden, codes).items():
                expected = other.logits(hidden, codes[:codebook])
                assert relative_error(logits, expected) <= 3e-6  # float32 over two layers


def test_frames_together_are_frames_alone(other: slowar.Model) -> None:
    """Groups that grow and shrink; each row beside its neighbours as by itself."""
    rng = np.random.default_rng(1)
    for n in (1, 3, 8, 2):
        hidden = rng.standard_normal((n, SMALL.n_embd)).astype(np.float32)
        codes = rng.integers(0, SMALL.codebook_size, (n, SMALL.n_codebook))
        together: dict[int, npt.NDArray[np.float32]] = {}

        def choose(codebook: int, logits: npt.NDArray[np.float32]) -> Any:
            together[codebook] = logits.copy()  # noqa: B023  called in this round alone
            return codes[:, codebook]  # noqa: B023

        made = other.fast_ar().frames(hidden, codes[:, 0], choose)
        np.testing.assert_array_equal(made, codes)
        for i in range(n):
            alone = fast_logits(other.fast_ar(), hidden[i], codes[i].tolist())
            for codebook, logits in together.items():
                assert relative_error(logits[i], alone[codebook]) <= 1e-6


def test_a_number_of_threads(other: slowar.Model) -> None:
    """Any gives the same codes; two numbers in turns."""
    rng = np.random.default_rng(2)
    fast = other.fast_ar()
    hidden = rng.standard_normal((3, SMALL.n_embd)).astype(np.float32)

    def likeliest(_: int, logits: npt.NDArray[np.float32]) -> Any:
        return logits.argmax(axis=1)

    expected = fast.frames(hidden, [1, 2, 3], likeliest)
    assert len(np.unique(expected)) > 8
    for n_threads in (1, 2, 2, 1):
        found = fast.frames(hidden, [1, 2, 3], likeliest, n_threads=n_threads)
        np.testing.assert_array_equal(found, expected)
    wrong: list[tuple[Any, type[Exception]]] = [
        (0, ValueError),
        (513, ValueError),
        (1.5, TypeError),
    ]
    for n, kind in wrong:
        with pytest.raises(kind, match=f"n_threads is {n}"):
            fast.frames(hidden, [1, 2, 3], likeliest, n_threads=n)


def test_a_file_without_a_fast_ar(tmp_path: Path) -> None:
    make_model(tmp_path / "slow.gguf", SMALL, fast=None)
    with slowar.Model(tmp_path / "slow.gguf", backend="cpu") as model:
        with pytest.raises(slowar.ModelFormatError, match="fast_context_length"):
            slowar.stream(model, PROMPT, max_frames=5, im_end_id=END)
        with pytest.raises(slowar.ModelFormatError, match=r"key fish_speech\.fast_context_length"):
            model.fast_ar()
        with model.session(20) as session:
            session.prefill(PROMPT)


@pytest.mark.parametrize(
    ("hidden", "first", "chosen", "says"),
    [
        (np.zeros(64), [0], [0], r"hidden has shape \(64,\), expected \(n, 64\)"),
        (np.zeros((1, 63)), [0], [0], r"hidden has shape \(1, 63\)"),
        (np.zeros((0, 64)), [], [], r"n of 1 to 128"),
        (np.zeros((1, 64)), [16], [0], "codes of codebook 0 are 16 to 16, expected 0 to 15"),
        (np.zeros((1, 64)), [-1], [0], "codes of codebook 0 are -1 to -1"),
        (np.zeros((1, 64)), [0.0], [0], "codes of codebook 0 are float64"),
        (np.zeros((1, 64)), [0, 0], [0], r"codes of codebook 0 are int64 \(2,\)"),
        (np.zeros((1, 64)), [0], [16], "codes of codebook 1 are 16 to 16"),
        (np.zeros((1, 64)), [0], None, "codes of codebook 1 are object"),
    ],
)
@pytest.mark.sanitize
def test_bad_frames(other: slowar.Model, hidden: Any, first: Any, chosen: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        other.fast_ar().frames(hidden, first, lambda *_: chosen)
    codes = other.fast_ar().frames(np.zeros((1, 64)), [3], lambda *_: [5])
    assert codes.tolist() == [[3] + [5] * 9]


def test_tensors_of_a_fast_ar(other: slowar.Model) -> None:
    fast = other.fast_ar()
    tensors = {t.name: t for t in fast.tensors()}
    assert tensors["fast_output.weight"].shape == (SMALL.codebook_size, fast.config.n_embd)
    assert sum(t.nbytes for t in tensors.values()) == fast.nbytes


def test_a_fast_ar_for_fewer_codes_than_semantic_ids(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, semantic_end_id=SMALL.semantic_begin_id + 16)
    make_model(tmp_path / "more.gguf", config)
    with (
        slowar.Model(tmp_path / "more.gguf", backend="cpu") as model,
        pytest.raises(slowar.ModelFormatError, match="17 semantic ids, expected at most 16"),
    ):
        model.fast_ar()


def test_a_fast_ar_is_opened_once_and_closed_with_its_model(other: slowar.Model) -> None:
    model = slowar.Model(other.path, backend="cpu")
    fast = model.fast_ar()
    assert model.fast_ar() is fast
    model.close()
    with pytest.raises(slowar.SessionStateError, match="the Fast-AR is closed"):
        fast.frames(np.zeros((1, 64)), [0], lambda *_: [0])
    with pytest.raises(slowar.SessionStateError, match="the model is closed"):
        model.fast_ar()


# ---- the loop


@pytest.fixture(scope="module", params=["tied", "projected", "qk_norm"])
def looped(
    request: pytest.FixtureRequest,
    other: slowar.Model,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[slowar.Model]:
    """Models whose whole loop is held against one in doubles."""
    if request.param == "tied":
        yield other
        return
    config = dataclasses.replace(SMALL, tie_word_embeddings=False, norm_fastlayer_input=False)
    shape = dataclasses.replace(fast_shape(SMALL), embedding_length=96, project_in=True)
    if request.param == "qk_norm":
        config = dataclasses.replace(SMALL, tie_word_embeddings=False)
        shape = dataclasses.replace(shape, attention_qk_norm=True, project_in_bias=True)
    path = tmp_path_factory.mktemp("looped") / "model.gguf"
    make_model(path, config, fast=shape, seed=8)
    with slowar.Model(path, backend="cpu") as model:
        yield model


def forced_choices(model: slowar.Model, seed: int, forced: Tokens) -> Tokens:
    """(n_codebook, T): what the sampler chooses where ``forced`` is what goes on; -1: the end."""
    begin = model.config.semantic_begin_id
    sampler = slowar.Sampler(model.config, seed=seed, im_end_id=END)
    options: dict[str, Any] = {"kv_type": "f32", "n_threads": 1, "extra_ids": (END,)}
    frames = []
    with model.session(PROMPT.shape[1] + forced.shape[1], logits="semantic", **options) as session:
        out = session.prefill(PROMPT)
        for given in forced.T:
            token = sampler.token(out.logits, out.ids)
            chosen = [-1 if token == END else token - begin]

            def choose(codebook: int, logits: npt.NDArray[np.float32]) -> Any:
                chosen.append(sampler.code(codebook, logits[0]))  # noqa: B023
                return [given[codebook]]  # noqa: B023  called in this round alone

            model.fast_ar().frames(out.hidden[None], given[:1], choose, n_threads=1)
            frames.append(chosen)
            out = session.step([begin + given[0], *given])
    choices: Tokens = np.array(frames, np.int32).T
    return choices


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_teacher_forced(looped: slowar.Model, seed: int) -> None:
    """50 frames of any codes: at each, choices of a loop in doubles that was given the same."""
    rng = np.random.default_rng(seed)
    forced = rng.integers(0, SMALL.codebook_size, (SMALL.n_codebook, 50), np.int32)
    expected = reference.generate(
        Path(looped.path),
        PROMPT,
        max_frames=50,
        im_end_id=END,
        uniforms=reference.philox_uniforms(seed),
        forced=forced,
    )
    np.testing.assert_array_equal(forced_choices(looped, seed, forced), expected)
    assert (expected != forced).mean() > 0.8  # of 16 codes one is given by chance


@pytest.mark.parametrize("min_frames", [0, 50])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_free_running(looped: slowar.Model, seed: int, min_frames: int) -> None:
    """50 frames with the uniforms of docs/generation.md, or until the end token is drawn: the codes
    of a loop in doubles."""
    expected = reference.generate(
        Path(looped.path),
        PROMPT,
        max_frames=50,
        im_end_id=END,
        uniforms=reference.philox_uniforms(seed),
        settings=reference.Settings(min_frames=min_frames),
    )
    found = run(looped, seed, max_frames=50, min_frames=min_frames)
    np.testing.assert_array_equal(found.codes, expected)
    assert found.codes.dtype == np.int32
    assert found.codes.shape[1] >= min_frames
    assert found.seed == seed
    assert found.finished == ("length" if found.codes.shape[1] == 50 else "end")
    np.testing.assert_array_equal(found.tokens, found.codes[0] + SMALL.semantic_begin_id)


def long(model: slowar.Model, seed: int, **options: Any) -> slowar.Generation:
    return run(model, seed, min_frames=30, **options)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_batch_gives_what_each_gives_alone(other: slowar.Model, n: int) -> None:
    alone = [long(other, seed).codes for seed in range(n)]
    seen: list[tuple[int, int]] = []
    together = slowar.generate_batch(
        other,
        [PROMPT] * n,
        max_frames=30,
        min_frames=30,
        seeds=range(n),
        im_end_id=END,
        kv_type="f32",
        n_threads=1,
        on_frame=lambda i, frame: seen.append((i, frame.number)),
    )
    for one, beside in zip(alone, together, strict=True):
        np.testing.assert_array_equal(beside.codes, one)
    assert seen == [(i, number) for number in range(30) for i in range(n)]


def test_voices_of_a_batch_end_apart(other: slowar.Model) -> None:
    alone = [run(other, seed) for seed in range(6)]
    together = slowar.generate_batch(
        other, [PROMPT] * 6, max_frames=30, seeds=range(6), im_end_id=END, kv_type="f32"
    )
    assert len({g.codes.shape[1] for g in alone}) > 2
    for one, beside in zip(alone, together, strict=True):
        np.testing.assert_array_equal(beside.codes, one.codes)
        assert (beside.finished, beside.seed) == (one.finished, one.seed)


def test_a_seed_is_all_that_matters(other: slowar.Model) -> None:
    """Threads, a prompt in pieces, a prefix cache: the same codes; another seed: others."""
    expected = long(other, 5).codes
    cache = other.prefix_cache(2**24)
    for options in ({"n_threads": 2}, {"prefix_cache": cache}, {"prefix_cache": cache}):
        np.testing.assert_array_equal(long(other, 5, **options).codes, expected)
    assert cache.stats.hits > 0
    assert not np.array_equal(long(other, 6).codes, expected)
    drawn = [run(other, None) for _ in range(2)]  # type: ignore[arg-type]
    assert drawn[0].seed != drawn[1].seed
    np.testing.assert_array_equal(run(other, drawn[0].seed).codes, drawn[0].codes)


def test_stream(other: slowar.Model) -> None:
    expected = long(other, 3)
    frames = slowar.stream(
        other, PROMPT, max_frames=30, min_frames=30, seed=3, im_end_id=END, kv_type="f32"
    )
    first = next(frames)
    assert (first.number, first.token) == (0, expected.tokens[0])
    codes = np.stack([first.codes, *(frame.codes for frame in frames)], axis=1)
    np.testing.assert_array_equal(codes, expected.codes)


def test_temperature_0_is_the_largest_logit(other: slowar.Model) -> None:
    one, another = (long(other, seed, temperature=0).codes for seed in (1, 2))
    np.testing.assert_array_equal(one, another)
    assert one.shape == (10, 30)


def test_progress(other: slowar.Model) -> None:
    seen: list[Any] = []
    long(
        other,
        1,
        progress=lambda *at: seen.append(at),
        on_frame=lambda frame: seen.append(frame.number),
    )
    assert seen == [x for i in range(30) for x in (i, (i + 1, 30))]


def assert_never_decreasing(timings: list[slowar.Timings]) -> None:
    """A generation's, frame after frame, and all of them spent in the end."""
    table = np.array([dataclasses.astuple(t) for t in timings])
    assert (np.diff(table, axis=0) >= 0).all()
    assert (table[-1] > 0).all()
    assert (table[:, 0] == table[0, 0]).all()  # the prefill comes before the first


def test_timings(other: slowar.Model) -> None:
    seen: list[slowar.Timings] = []
    found = long(other, 1, on_frame=lambda frame: seen.append(frame.timings))
    assert len(seen) == 30
    assert seen[0].slow_ar == 0  # the first frame follows from the prefill
    assert_never_decreasing([*seen, found.timings])
    streamed = slowar.stream(other, PROMPT, max_frames=5, min_frames=5, im_end_id=END)
    assert_never_decreasing([frame.timings for frame in streamed])


def test_on_prefill(tiny: slowar.Model) -> None:
    """After each 512 positions; of a prompt in the cache, what is left of it."""
    seen: list[tuple[int, int]] = []
    prompt = make_prompt(TINY, 600)
    cache = tiny.prefix_cache(2**24)
    for _ in range(2):
        slowar.generate(
            tiny,
            prompt,
            max_frames=1,
            im_end_id=END,
            prefix_cache=cache,
            on_prefill=lambda *at: seen.append(at),
        )
    assert seen == [(512, 600), (600, 600), (600, 600)]


# ---- ends


def test_cancel_during_the_prompt(tiny: slowar.Model) -> None:
    """No further chunk is evaluated."""
    cancel = threading.Event()
    seen: list[tuple[int, int]] = []

    def on_prefill(done: int, n: int) -> None:
        seen.append((done, n))
        cancel.set()

    found = slowar.generate(
        tiny,
        make_prompt(TINY, 600),
        max_frames=5,
        im_end_id=END,
        cancel=cancel,
        on_prefill=on_prefill,
    )
    assert (found.finished, found.codes.shape, found.tokens.shape) == ("cancelled", (10, 0), (0,))
    assert seen == [(512, 600)]


def test_ctrl_c_during_the_prompt(other: slowar.Model) -> None:
    def on_prefill(done: int, n: int) -> None:
        signal.raise_signal(signal.SIGINT)

    found = long(other, 1, on_prefill=on_prefill, on_interrupt="return")
    assert (found.finished, found.codes.shape) == ("cancelled", (10, 0))
    with pytest.raises(KeyboardInterrupt):
        long(other, 1, on_prefill=on_prefill)


def test_cancel_within_one_frame(other: slowar.Model) -> None:
    cancel = threading.Event()
    made = []

    def on_frame(frame: slowar.Frame) -> None:
        made.append(frame.number)
        if frame.number == 4:
            cancel.set()

    found = long(other, 1, on_frame=on_frame, cancel=cancel)
    assert (found.finished, found.codes.shape) == ("cancelled", (10, 5))
    assert made == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(found.codes, long(other, 1).codes[:, :5])
    again = long(other, 1, cancel=cancel)
    assert (again.finished, again.codes.shape) == ("cancelled", (10, 0))


def test_cancel_from_another_thread(other: slowar.Model) -> None:
    cancel = threading.Event()
    made = 0

    def on_frame(frame: slowar.Frame) -> None:
        nonlocal made
        made = frame.number + 1
        if made == 3:
            threading.Thread(target=cancel.set).start()
            assert cancel.wait(10)

    assert long(other, 1, on_frame=on_frame, cancel=cancel).codes.shape == (10, 3)
    assert made == 3


@pytest.mark.parametrize("way", ["raise", "return"])
def test_ctrl_c(other: slowar.Model, way: Any) -> None:
    def on_frame(frame: slowar.Frame) -> None:
        if frame.number == 2:
            signal.raise_signal(signal.SIGINT)

    if way == "raise":
        with pytest.raises(KeyboardInterrupt):
            long(other, 1, on_frame=on_frame)
    else:
        found = long(other, 1, on_frame=on_frame, on_interrupt="return")
        assert (found.finished, found.codes.shape) == ("cancelled", (10, 3))
    assert long(other, 1).codes.shape == (10, 30)


def test_what_a_callback_raises_comes_out(other: slowar.Model) -> None:
    def on_frame(frame: slowar.Frame) -> None:
        raise LookupError("no room")

    with pytest.raises(LookupError, match="no room"):
        long(other, 1, on_frame=on_frame)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"max_frames": 0}, ValueError, "max_frames is 0, expected 1 to"),
        ({"max_frames": 1.5}, TypeError, "max_frames is 1.5"),
        ({"temperature": -1}, ValueError, "temperature is -1"),
        ({"temperature": float("nan")}, ValueError, "temperature is nan"),
        ({"top_p": 0}, ValueError, "top_p is 0"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"min_frames": -1}, ValueError, "min_frames is -1"),
        ({"im_end_id": 210}, ValueError, "im_end_id is 210, expected an id outside"),
        ({"im_end_id": 300}, ValueError, "im_end_id is 300"),
        ({"on_interrupt": "go on"}, ValueError, "on_interrupt is 'go on'"),
        ({"kv_type": "f8"}, ValueError, "kv_type"),
        ({"max_frames": 237}, slowar.ContextFullError, "20 positions and max_frames of 237.* 256"),
    ],
)
def test_bad_values(
    other: slowar.Model, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        run(other, **options)
    if not {"on_interrupt", "kv_type"} & set(options):
        with pytest.raises(kind, match=says):  # at the call, not with the first frame
            slowar.stream(other, PROMPT, **({"max_frames": 30, "im_end_id": END} | options))
    assert run(other, max_frames=236).codes.shape[0] == 10


def test_many_generations_leave_nothing(other: slowar.Model) -> None:
    process = psutil.Process()

    def rounds(n: int) -> float:
        for seed in range(n):
            run(other, seed, max_frames=3)
        return float(process.memory_info().rss) / 2**20

    before = rounds(50)
    after = rounds(500)
    assert after - before < 4  # MiB; a cache is 0.1, 500 of them 50


def test_one_after_the_other_from_threads(other: slowar.Model) -> None:
    """One Fast-AR serves four generations in four threads: the codes of each alone."""
    expected = [long(other, seed).codes for seed in range(4)]
    found: dict[int, npt.NDArray[np.int32]] = {}

    def work(seed: int) -> None:
        found[seed] = long(other, seed).codes

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(deadline - time.monotonic())
    for seed in range(4):
        np.testing.assert_array_equal(found[seed], expected[seed])
