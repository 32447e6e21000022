"""The devices there are: everything that a session does, on a GPU of the library that is loaded,
against the CPU and against recorded values.

``make test-vulkan`` runs this on Mesa's software Vulkan, a GPU to ggml on any machine. There every
kind of matrix product is a shader that takes seconds to compile: for 1 column, for each number up
to 8, and for more. So nothing here multiplies by 2 to 8 columns.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import SMALL, Tokens, assert_clean, make_prompt, run_child, same_bits
from test_parity import GOLDEN, feed, golden_calls, relative_error

import pyggml_slowar as slowar
from pyggml_slowar.make_model import make_model

BACKEND = os.environ.get("SLOWAR_TEST_BACKEND", "")

if not BACKEND:
    pytest.skip(
        "SLOWAR_TEST_BACKEND names no backend with a GPU (make test-vulkan)",
        allow_module_level=True,
    )

# A GPU sums in another order than the CPU, and the past is in halves: seen 5e-4 on both paths, and
# 1e-3 with a Q8_0 cache. A device that adds in halves or multiplies in 8 bits would need more.
BOUND = 2e-3

CONFIG = replace(SMALL, n_ctx=512, n_layer=3)
N_LAYER = CONFIG.n_layer
ATTENTIONS = ["flash", "reference"]

PAST = make_prompt(CONFIG, 20, seed=1)
FRAMES = make_prompt(CONFIG, 12, seed=2).T

# Of n_gpu_layers, None for the CPU, and head_dim.
Open = Callable[..., slowar.Model]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("device")

    def path_of(head_dim: int) -> Path:
        path = folder / f"{head_dim}.gguf"
        if not path.exists():
            make_model(path, replace(CONFIG, head_dim=head_dim), seed=7)
        return path

    return path_of


@pytest.fixture(scope="module")
def opened(path_of: Callable[[int], Path]) -> Iterator[Open]:
    models: dict[Any, slowar.Model] = {}

    def opened(n_gpu_layers: int | None = -1, head_dim: int = CONFIG.head_dim) -> slowar.Model:
        key = (n_gpu_layers, head_dim)
        if key not in models:
            where: dict[str, Any] = (
                {"backend": "cpu"}
                if n_gpu_layers is None
                else {"backend": BACKEND, "n_gpu_layers": n_gpu_layers}
            )
            models[key] = slowar.Model(path_of(head_dim), **where)
        return models[key]

    yield opened
    for model in models.values():
        model.close()


@pytest.fixture
def gpu(opened: Open) -> slowar.Model:
    return opened()


def error(found: slowar.Output, expected: slowar.Output) -> float:
    np.testing.assert_array_equal(found.ids, expected.ids)
    return max(relative_error(found[i], expected[i]) for i in (0, 1))


def worst(found: list[slowar.Output], expected: list[slowar.Output]) -> float:
    return max(error(a, b) for a, b in zip(found, expected, strict=True))


def assert_same_bits(found: list[slowar.Output], expected: list[slowar.Output]) -> None:
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def steps(session: slowar.Session, n: int = 3) -> list[slowar.Output]:
    return [session.step(frame) for frame in FRAMES[:n]]


def behind(
    model: slowar.Model, tokens: Tokens = PAST, size: int = 100, **options: Any
) -> slowar.Session:
    session = model.session(size, **options)
    session.prefill_fast(tokens)
    return session


def test_it_is_a_gpu(gpu: slowar.Model) -> None:
    assert gpu.device.is_gpu
    assert gpu.device.backend.lower() == BACKEND
    assert gpu.n_gpu_layers == N_LAYER
    assert {t.where for t in gpu.tensors()} == {"device"}


# ---- the same numbers


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(
    "name", ["f32_plain", "f32_wide_heads", "f16_no_gqa", "q8_0_gqa4", "q4_k_one_kv_head"]
)
def test_golden(name: str, attention: str) -> None:
    """Against the PyTorch model, which like this device does not round activations."""
    errors = []
    with (
        np.load(GOLDEN / f"{name}.upstream.npz") as expected,
        slowar.Model(GOLDEN / f"{name}.gguf", backend=BACKEND) as model,
        model.session(64, attention=attention) as session,
    ):
        for (call, tokens), number in golden_calls(name):
            few = 2 <= tokens.shape[1] <= 8
            for part in tokens.T if few else [tokens]:
                output = session.step(part) if few else feed(session, (call, part))
            if output is not None:
                for key in ("hidden", "logits"):
                    recorded = expected[f"f32_{key}_{number}"]
                    errors.append(relative_error(getattr(output, key), recorded))
    assert len(errors) >= 10
    assert max(errors) <= BOUND


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("n_gpu_layers", range(N_LAYER + 1))
def test_every_split(opened: Open, n_gpu_layers: int, attention: str) -> None:
    outs = []
    for n in (None, n_gpu_layers):
        with behind(opened(n), PAST[:, :17], 64, attention=attention) as session:
            outs.append(steps(session, 10))
    assert worst(*outs) <= BOUND


@pytest.mark.parametrize(
    ("kv_type", "head_dim", "n"),
    [
        ("f16", 32, 300),  # more than a block of the mask
        ("f16", 128, 40),
        ("f32", 32, 40),
        ("bf16", 32, 40),
        ("q8_0", 32, 40),
    ],
)
def test_kv_types(opened: Open, kv_type: str, head_dim: int, n: int) -> None:
    tokens = make_prompt(CONFIG, n, seed=3)
    outs = []
    for n_gpu_layers in (None, -1):
        model = opened(n_gpu_layers, head_dim)
        with model.session(320, attention="flash", kv_type=kv_type) as session:
            parts = [session.prefill(part) for part in np.split(tokens, 2, axis=1)]
            outs.append([*parts, *steps(session)])
    assert worst(*outs) <= BOUND


def test_any_length_of_a_q8_0_cache(path_of: Callable[[int], Path]) -> None:
    """A position of a layer may take 68 bytes, and a GPU reads from multiples of 16 to 256."""
    code = """
import sys
import numpy as np
from pyggml_slowar import Model
with Model(sys.argv[1], backend=sys.argv[2]) as model, model.session(65, kv_type="q8_0") as session:
    session.step(np.zeros(11, np.int32))
"""
    assert_clean(run_child(code, path_of(CONFIG.head_dim), BACKEND))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_traces(opened: Open, attention: str) -> None:
    names = ["embd", "result_norm"]
    for il in range(N_LAYER):
        names += [f"{name}-{il}" for name in ("attn_norm", "qkv", "q_rope", "k_rope", "attn_out")]
        names += [f"{name}-{il}" for name in ("ffn_inp", "ffn_norm", "ffn_out", "l_out")]
    traces = []
    for n in (None, N_LAYER, 1):
        with opened(n).session(64, attention=attention) as session:
            session.prefill(PAST[:, :10])
            traces.append(session.trace(PAST[:, 10:], names)[1])
    expected, *found = traces
    for trace in found:
        for name in names:
            assert trace[name].shape == expected[name].shape
            assert relative_error(trace[name], expected[name]) <= BOUND


# ---- choices


@pytest.mark.parametrize("kv_type", ["f16", "f32", "bf16", "q8_0"])
@pytest.mark.parametrize("n_gpu_layers", [1, N_LAYER])
def test_auto_is_flash(opened: Open, n_gpu_layers: int, kv_type: str) -> None:
    with opened(n_gpu_layers).session(64, kv_type=kv_type, own_compute=False) as session:
        assert session.attention == "flash"


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("n_gpu_layers", [1, N_LAYER])
def test_logits(opened: Open, n_gpu_layers: int, attention: str) -> None:
    """Semantic and extra ones are columns of the full ones."""
    tokens, extra = PAST[:, :17], (5, 299, 5)
    with opened(n_gpu_layers).session(
        64, attention=attention, logits="semantic", extra_ids=extra
    ) as session:
        semantic = session.prefill_fast(tokens)
        session.reset()
        full = session.prefill_fast(tokens, logits="full")
        session.reset()
        none = session.prefill_fast(tokens, logits="none")
        step = session.step(FRAMES[0])
    assert list(semantic.ids) == [*range(200, 216), *extra]
    assert relative_error(semantic.logits, full.logits[semantic.ids]) <= 1e-6
    assert none.logits.shape == (0,)
    np.testing.assert_array_equal(none.hidden, full.hidden)
    assert step.logits.shape == (19,)


# ---- cuts and batches


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("chunk", [1, 10])
def test_chunks(gpu: slowar.Model, chunk: int, attention: str) -> None:
    outs = []
    for size in (20, chunk):
        with gpu.session(100, attention=attention) as session:
            session.prefill(PAST, chunk=size)
            outs.append(steps(session))
    assert worst(*outs) <= BOUND


@pytest.mark.parametrize(
    ("n_gpu_layers", "attention"), [(1, "flash"), (N_LAYER, "flash"), (N_LAYER, "reference")]
)
def test_batches(opened: Open, n_gpu_layers: int, attention: str) -> None:
    """Nine prompts of other lengths together, then steps, then prompts again: each as alone."""
    model = opened(n_gpu_layers)
    prompts = [make_prompt(CONFIG, n, seed=n) for n in range(10, 28, 2)]
    more = [PAST[:, : 9 + i] for i in range(9)]
    alone = []
    for prompt, rest in zip(prompts, more, strict=True):
        with model.session(100, attention=attention) as session:
            first = session.prefill_fast(prompt)
            alone.append([first, *steps(session), session.prefill_fast(rest)])
    sessions = [model.session(100, attention=attention, own_compute=False) for _ in prompts]
    together = [model.prefill_batch(sessions, prompts)]
    together += [model.step_batch(sessions, np.stack([frame] * 9)) for frame in FRAMES[:3]]
    together += [model.prefill_batch(sessions, more)]
    for i, outs in enumerate(alone):
        rows = [slowar.Output(out.hidden[i], out.logits[i], out.ids) for out in together]
        assert worst(rows, outs) <= BOUND


# ---- pasts


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("n_gpu_layers", [1, N_LAYER])
def test_pasts(opened: Open, n_gpu_layers: int, attention: str, tmp_path: Path) -> None:
    """Six ways to one past, and the same bits from there."""
    model = opened(n_gpu_layers)
    source = behind(model, attention=attention)
    copied = behind(model, FRAMES.T, 90, attention=attention)
    copied.copy_prefix(source)
    source.save(tmp_path / "past")
    longer = behind(model, attention=attention)
    steps(longer)
    longer.rewind(20)
    again = behind(model, FRAMES.T, attention=attention)
    again.reset()
    again.prefill_fast(PAST)
    grown = behind(model, attention=attention)
    grown.reserve(300)
    forked = source.fork()
    expected = steps(source)
    for session in (forked, copied, model.load_session(tmp_path / "past"), longer, again, grown):
        assert session.n_past == 20
        assert_same_bits(steps(session), expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_past_moves_between_devices(opened: Open, attention: str, tmp_path: Path) -> None:
    models = {n: opened(n) for n in (None, 1, N_LAYER)}
    for n, model in models.items():
        behind(model, attention=attention).save(tmp_path / str(n))
    expected = steps(models[None].load_session(tmp_path / "None"))
    for to, name in ((None, "3"), (1, "None"), (N_LAYER, "None"), (1, "3")):
        session = models[to].load_session(tmp_path / name)
        assert worst(steps(session), expected) <= BOUND


def test_prefix_cache(gpu: slowar.Model) -> None:
    cache = gpu.prefix_cache(2**24)
    longer = np.concatenate([PAST, FRAMES.T], axis=1)
    with gpu.session(100) as session:
        expected = session.prefill(longer)
        session.reset()
        session.prefill(PAST, cache=cache)
        session.reset()
        found = session.prefill(longer, cache=cache)
    assert cache.stats.positions_reused == 20
    assert error(found, expected) <= BOUND


# ---- memory


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("n_gpu_layers", range(N_LAYER + 1))
@pytest.mark.parametrize("length", [64, 200])
def test_estimate(opened: Open, length: int, n_gpu_layers: int, attention: str) -> None:
    model = opened(n_gpu_layers)
    told = model.estimate(length, attention=attention)
    with model.session(length, attention=attention) as session:
        assert sum(told.weights) == model.nbytes
        assert sum(told.kv) == session.nbytes
        assert abs(sum(told.compute) - session.compute_nbytes) <= 0.05 * session.compute_nbytes
        if attention == "flash" and length == 200:
            before = session.compute_nbytes
            session.prefill(make_prompt(CONFIG, 199))
            session.step(FRAMES[0])
            assert session.compute_nbytes == before


def test_a_cache_that_does_not_fit(gpu: slowar.Model) -> None:
    """Refused; then one that fits works."""
    position = 2 * N_LAYER * CONFIG.n_head_kv * CONFIG.head_dim * 2
    with gpu.session() as session:
        with pytest.raises(slowar.DeviceMemoryError, match=r"KV cache of \d+ positions"):
            session.init_kv_cache(gpu.device.memory_total // position + 1)
        session.init_kv_cache(100)
        session.prefill_fast(PAST)
        with behind(gpu) as other:
            assert_same_bits(steps(session), steps(other))


def test_opening_and_closing(path_of: Callable[[int], Path]) -> None:
    path = path_of(CONFIG.head_dim)
    process = psutil.Process()

    def rounds(n: int) -> int:
        for i in range(n):
            n_gpu_layers = i % (N_LAYER + 1)
            with (
                slowar.Model(path, backend=BACKEND, n_gpu_layers=n_gpu_layers) as model,
                behind(model, PAST[:, :17]) as session,
            ):
                session.step(FRAMES[0])
        return int(process.memory_info().rss)

    before = rounds(8)
    after = rounds(20)
    assert after - before < 8 * 2**20


def test_threads(gpu: slowar.Model) -> None:
    """Four sessions in four threads on one device: the bits of one alone."""
    with behind(gpu) as session:
        expected = steps(session)
    found: list[list[slowar.Output]] = []

    def work() -> None:
        with behind(gpu) as session:
            found.append(steps(session))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    for outs in found:
        assert_same_bits(outs, expected)


# ---- where things run


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("n_gpu_layers", range(N_LAYER + 1))
def test_every_node_runs_with_its_layer(opened: Open, n_gpu_layers: int, attention: str) -> None:
    """Nothing falls back to the CPU unannounced, and the graph is cut where the device changes."""
    model = opened(n_gpu_layers)
    with behind(model, attention=attention, kv_placement="layers") as session:
        session.step(FRAMES[0])
        nodes = [node for node in session.graph(1) if node.device]
        assert session.fallbacks == []
        devices = [node.device for node in nodes]
        changes = sum(a != b for a, b in itertools.pairwise(devices))
        for node in nodes:
            name, _, layer = node.name.rpartition("-")
            if (
                name in ("attn_norm", "qkv", "attn_out", "ffn_inp", "ffn_out", "l_out")
                and layer.isdecimal()
            ):
                there = model.device.name if int(layer) < n_gpu_layers else "CPU"
                assert (node.name, node.device) == (node.name, there)
        session.step(FRAMES[1])
        assert session.n_splits <= changes + 1
    assert changes <= (0 if n_gpu_layers == 0 else 1 if n_gpu_layers == N_LAYER else 2)


@pytest.mark.skipif(BACKEND != "vulkan", reason="other devices have other limits")
def test_what_a_device_lacks_is_said(gpu: slowar.Model) -> None:
    """llvmpipe takes 128 MiB in one tensor; the reference repeats a past of 399 001 to 195 MiB."""
    with pytest.warns(UserWarning, match="beyond the model's context"):
        session = gpu.session(400_000, attention="reference", n_threads=1)
    with session:
        nodes = session.graph(1, 399_000)
        there = {(f.op, f.layer) for f in session.fallbacks}
        assert {("REPEAT", il) for il in range(N_LAYER)} <= there
        first = session.fallbacks[0]
        assert first.device == gpu.device.name
        assert first.reason.startswith(f"{first.device} has no REPEAT from f32 to f32 of [")
        on_cpu = [node for node in nodes if node.device == "CPU"]
        assert len(on_cpu) == len(session.fallbacks)
        session.graph(1, 10)
        assert session.fallbacks == []


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("n_gpu_layers", range(N_LAYER + 1))
def test_the_whole_cache_on_the_gpu(opened: Open, n_gpu_layers: int, attention: str) -> None:
    """Once a layer is there; the numbers are those of the CPU."""
    outs = []
    for n in (None, n_gpu_layers):
        model = opened(n)
        with behind(model, attention=attention, kv_placement="gpu") as session:
            outs.append(steps(session))
            places = {p.device for p in session.placement() if p.what == "KV cache"}
    assert places == {model.device.name if n_gpu_layers > 0 else "CPU"}
    assert worst(outs[1], outs[0]) <= BOUND


def test_placement(opened: Open) -> None:
    """Weights, cache and compute of both places, byte for byte."""
    model = opened(1)
    placed = model.placement(100)
    weights = [p for p in placed if p.what not in ("KV cache", "compute")]
    assert sum(p.nbytes for p in weights) == model.nbytes
    assert {p.device for p in weights if p.what == "layers 0-0"} == {model.device.name}
    with behind(model) as session:
        there = {(p.what, p.device): p.nbytes for p in session.placement()}
    told = {(p.what, p.device): p.nbytes for p in placed if p.what == "KV cache"}
    assert {key: n for key, n in there.items() if key[0] == "KV cache"} == told
    assert len(told) == 2
