"""Devices that servers lend, over loopback: results, places, memory, and what goes wrong.

Servers run in processes of their own; those of a test that kills one are that test's alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import SMALL, assert_clean, has_products, make_prompt, run_child, same_bits

import pyggml_slowar as slowar
from pyggml_slowar import Model, Output, Session
from pyggml_slowar.make_model import TINY, make_model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

GOLDEN = Path(__file__).parent / "golden"
NAMES = ["f16_no_gqa", "f32_plain", "f32_wide_heads", "q4_k_one_kv_head", "q8_0_gqa4"]
MIB = 2**20

# The same kernels on this side and on the other: only how rows are shared out could differ.
SAME = 1e-5
# Our own kernel here and ggml's there, a past of F16 here and there, activations of 8 bits.
ACROSS = 2e-3
# How long a lost server may go unnoticed: the requirement's own number.
NOTICED = 10.0

HELLO = 14
ALLOC_BUFFER = 0
SET_TENSOR = 6
GRAPH_COMPUTE = 10


class Server:
    """``slowar serve-device`` in a process of its own."""

    def __init__(self, *options: object, port: int = 0) -> None:
        words = ["serve-device", "--backend", "cpu", "--port", port, "--threads", 1, *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pyggml_slowar.cli", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.fullmatch(r"serving cpu 0 \(.*\) at (.*:(\d+))\n", self.line)
        assert found, (self.line, self.process.communicate(timeout=10))
        self.endpoint, self.port = found[1], int(found[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    @property
    def free(self) -> int:
        return slowar.devices([self.endpoint])[-1].memory_free


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Server]]:
    servers = [Server(), Server()]
    yield servers
    alive = [s.process.poll() for s in servers]
    for s in servers:
        s.kill()
    assert alive == [None, None]  # no test has ended one


@pytest.fixture(scope="module")
def endpoints(pair: list[Server]) -> list[str]:
    return [s.endpoint for s in pair]


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Servers of this test alone."""
    servers: list[Server] = []

    def started(*options: object, port: int = 0) -> Server:
        servers.append(Server(*options, port=port))
        return servers[-1]

    yield started
    for s in servers:
        s.kill()


def relative_error(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    difference = np.linalg.norm(found.astype(np.float64) - expected)
    return float(difference / np.linalg.norm(expected))


def worst(found: Sequence[Output], expected: Sequence[Output]) -> float:
    pairs = list(zip(found, expected, strict=True))
    return max(
        relative_error(a, b)
        for x, y in pairs
        for a, b in ((x.hidden, y.hidden), (x.logits, y.logits))
    )


def converse(session: Session, n_steps: int = 10) -> list[Output]:
    """A prefill of 17 positions and steps behind it."""
    tokens = make_prompt(session.model.config, 17 + n_steps)
    return [session.prefill(tokens[:, :17]), *(session.step(frame) for frame in tokens[:, 17:].T)]


def opened(model: Model, size: int | None = 64, **options: Any) -> Session:
    return model.session(size, n_threads=1, **options)


# ---- results


@pytest.fixture(scope="module")
def local() -> dict[tuple[str, str], list[Output]]:
    """What this machine gives, by model and attention."""
    out = {}
    for name in NAMES:
        with Model(GOLDEN / f"{name}.gguf", backend="cpu") as model:
            for attention in ("ggml", "flash", "reference"):
                with opened(model, attention=attention) as session:
                    out[name, attention] = converse(session)
    return out


def golden_worst(session: Session, name: str, values: str, prefix: str) -> float:
    """Against the values that another program computed."""
    error = 0.0
    session.reset()
    with (
        np.load(GOLDEN / f"{name}.npz") as recorded,
        np.load(GOLDEN / f"{name}{values}.npz") as expected,
    ):
        tokens = recorded["tokens"].T
        calls = [c for c in json.loads(str(recorded["calls"])) if c["call"] != "fast_decode"]
        assert len(calls) >= 5
        for i, c in enumerate(calls):
            if c["call"] == "reset":
                session.reset()
                continue
            part = tokens[:, c["start"] : c["start"] + c["n"]]
            number = c.get("out", i)
            out = session.step(part[:, 0]) if c["call"] == "step" else session.prefill_fast(part)
            for key in ("hidden", "logits"):
                found = relative_error(getattr(out, key), expected[f"{prefix}{key}_{number}"])
                error = max(error, found)
    return error


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_golden(endpoints: list[str], name: str, n_servers: int) -> None:
    """Full offload, both paths, against the other program and against PyTorch. The bounds are those
    of test_parity.py: two ways to sum, 8-bit activations."""
    bound = {"f32_plain": 2e-5, "f32_wide_heads": 2e-5, "f16_no_gqa": 1e-3}.get(name, 1e-2)
    with Model(GOLDEN / f"{name}.gguf", servers=endpoints[:n_servers]) as model:
        assert model.n_gpu_layers == model.config.n_layer
        with opened(model, attention="reference") as session:
            assert golden_worst(session, name, "", "") <= bound
        if not name.startswith("q"):
            with opened(model, attention="flash") as session:
                assert golden_worst(session, name, "", "") <= 2e-3  # F16 is read as it is stored
                assert golden_worst(session, name, ".upstream", "f32_") <= 2e-3


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_every_split_gives_what_this_machine_gives(
    endpoints: list[str],
    local: dict[tuple[str, str], list[Output]],
    name: str,
    n_servers: int,
) -> None:
    """Every number of layers, both places of the cache, both paths: the same arithmetic as here."""
    with Model(GOLDEN / f"{name}.gguf", backend="cpu") as model:
        n_layer = model.config.n_layer
    for n_gpu_layers in range(n_layer + 1):
        servers = endpoints[:n_servers]
        with Model(GOLDEN / f"{name}.gguf", servers=servers, n_gpu_layers=n_gpu_layers) as model:
            for attention in ("ggml", "reference"):
                for kv_placement in ("layers", "gpu"):
                    with opened(model, attention=attention, kv_placement=kv_placement) as session:
                        found = converse(session)
                        where = (n_gpu_layers, attention, kv_placement)
                        assert worst(found, local[name, attention]) <= SAME, where
                        assert session.fallbacks == [], where
                        assert session.n_past == 27
            with opened(model) as session:
                assert session.attention == "flash"
                if not name.startswith("q"):
                    assert worst(converse(session), local[name, "flash"]) <= ACROSS


@pytest.mark.parametrize("name", ["q4_k_one_kv_head", "q8_0_gqa4"])
def test_packed_layers_beside_a_server_s(
    endpoints: list[str], local: dict[tuple[str, str], list[Output]], name: str
) -> None:
    """Layers that stay here may be packed: nothing but this library's products can read them."""
    if not has_products():
        pytest.skip("CPU code without AVX2, FMA or F16C, or not compiled for it: nothing is packed")
    options: dict[str, Any] = {"servers": endpoints[:1], "n_gpu_layers": 1, "repack": True}
    with Model(GOLDEN / f"{name}.gguf", **options) as model:
        here = [t for t in model.tensors() if t.where == "repacked"]
        assert len(here) == 5 * (model.config.n_layer - 1)
        for attention in ("ggml", "reference"):
            with opened(model, attention=attention) as session:
                # Rounding to 8 bits turns sums that differ in the last place into other numbers.
                assert worst(converse(session), local[name, attention]) <= 2e-2
                assert session.fallbacks == []


def test_the_comparison_tells_another_model(
    endpoints: list[str], local: dict[tuple[str, str], list[Output]]
) -> None:
    """Twice the bound would not do: one wrong code of one position is far beyond it."""
    with (
        Model(GOLDEN / "f32_plain.gguf", servers=endpoints) as model,
        opened(model, attention="ggml") as session,
    ):
        tokens = make_prompt(model.config, 17)
        tokens[3, 15] = (tokens[3, 15] + 1) % model.config.codebook_size
        found = session.prefill(tokens)
        assert worst([found], local["f32_plain", "ggml"][:1]) > 100 * SAME


# ---- splits and devices of nodes


def device_changes(session: Session) -> int:
    """Along the graph of a step, views left out."""
    devices = [n.device for n in session.graph(1, 20) if n.device]
    return sum(a != b for a, b in pairwise(devices))


@pytest.mark.parametrize("attention", ["flash", "reference"])
@pytest.mark.parametrize("n_servers", [1, 2])
def test_splits(tiny_path: Path, endpoints: list[str], attention: str, n_servers: int) -> None:
    """The tables are here and all layers there: one change for each server and at most two splits
    besides."""
    with (
        Model(tiny_path, servers=endpoints[:n_servers]) as model,
        opened(model, attention=attention, kv_placement="layers") as session,
    ):
        converse(session, 3)
        assert session.fallbacks == []
        splits = session.n_splits
        changes = device_changes(session)
        assert changes == n_servers
        assert splits <= changes + 2
        if n_servers == 1:
            assert splits <= 2


@pytest.mark.parametrize("attention", ["flash", "reference"])
@pytest.mark.parametrize("n_gpu_layers", [0, 1, 2, -1])
def test_a_node_is_where_its_layer_is(
    tiny_path: Path, endpoints: list[str], attention: str, n_gpu_layers: int
) -> None:
    with (
        Model(tiny_path, servers=endpoints, n_gpu_layers=n_gpu_layers) as model,
        opened(model, attention=attention, kv_placement="layers") as session,
    ):
        layer_of = {t.layer: t.device for t in model.tensors() if t.layer >= 0}
        head = next(t.device for t in model.tensors() if t.name == "norm.weight")
        names = [d.name for d in model.devices]
        assert set(layer_of.values()) <= {*names, "CPU"}
        assert sum(d != "CPU" for d in layer_of.values()) == model.n_gpu_layers
        seen = 0
        for node in session.graph(1, 20):
            found = re.fullmatch(r"[a-z_]+-(\d+)", node.name)
            if found and node.device:
                assert node.device == layer_of[int(found[1])], node
                seen += 1
            elif node.name in ("result_norm", "logits"):
                assert node.device == head, node
                seen += 1
            elif node.name == "embd":
                assert node.device == "CPU"  # where the tables are
        assert seen >= 6 * len(layer_of) + 2


# ---- places and memory


def test_placement_adds_up(tiny_path: Path, pair: list[Server], endpoints: list[str]) -> None:
    before = [s.free for s in pair]
    with Model(tiny_path, servers=endpoints) as model:
        names = [d.name for d in model.devices]
        sums: dict[str, int] = defaultdict(int)
        for t in model.tensors():
            sums[t.device] += t.nbytes
        shown: dict[str, int] = defaultdict(int)
        for p in model.placement(256):
            if p.what not in ("KV cache", "compute"):
                shown[p.device] += p.nbytes
        assert shown == sums
        assert sum(sums.values()) == model.nbytes
        assert sorted(sums) == sorted([*names, "CPU"])
        assert before[0] > 0
        with opened(model, 256) as session:
            plan = {(p.what, p.device): p.nbytes for p in model.placement(256, n_threads=1)}
            real = {(p.what, p.device): p.nbytes for p in session.placement()}
            assert {k for k in real if k[0] == "KV cache"} == {("KV cache", name) for name in names}
            for key, nbytes in real.items():
                assert nbytes == pytest.approx(plan[key], rel=0.05), key
            kv = sum(n for (what, _), n in real.items() if what == "KV cache")
            compute = sum(n for (what, _), n in real.items() if what == "compute")
            assert (kv, compute) == (session.nbytes, session.compute_nbytes)
            estimate = model.estimate(256, n_threads=1)
            assert sum(estimate.kv) == kv
            assert sum(estimate.compute) == pytest.approx(compute, rel=0.05)
            assert sum(estimate.weights) == model.nbytes


def test_memory_is_taken_and_given_back(tiny_path: Path, start: Callable[..., Server]) -> None:
    """A server with a limit of its own counts exactly: buffers are padded by less than 5 %."""
    server = start("--memory", 64)
    assert server.free == 64 * MIB
    for _ in range(2):
        with Model(tiny_path, servers=[server.endpoint]) as model:
            there = sum(t.nbytes for t in model.tensors() if t.device != "CPU")
            taken = 64 * MIB - server.free
            assert there <= taken <= 1.05 * there
            with opened(model, 256) as session:
                name = model.device.name
                more = sum(p.nbytes for p in session.placement() if p.device == name)
                assert more <= 64 * MIB - server.free - taken <= 1.05 * more
                twin = session.fork()
                converse(twin, 2)
                twin.close()
            assert 64 * MIB - server.free == taken
        assert server.free == 64 * MIB


def test_layers_in_proportion_to_free_memory(tmp_path: Path, start: Callable[..., Server]) -> None:
    path = tmp_path / "twelve.gguf"
    make_model(path, replace(SMALL, n_layer=12), seed=4)
    servers = [start("--memory", 64), start("--memory", 128)]
    with Model(path, servers=[s.endpoint for s in servers], load=False) as model:
        names = [d.name for d in model.devices]
        layers = {t.layer: t.device for t in model.tensors() if t.layer >= 0}
        assert [layers[il] for il in range(12)] == [names[0]] * 4 + [names[1]] * 8
        whats = [(p.what, p.device) for p in model.placement(64)]
        assert ("layers 0-3", names[0]) in whats
        assert ("layers 4-11", names[1]) in whats
        with pytest.raises(slowar.SessionStateError):
            opened(model)
    assert [s.free for s in servers] == [64 * MIB, 128 * MIB]


def test_info_plans_and_loads_nothing(tiny_path: Path, start: Callable[..., Server]) -> None:
    servers = [start("--memory", 32), start("--memory", 32)]
    command = [sys.executable, "-m", "pyggml_slowar.cli", "info", str(tiny_path), "--servers"]
    command += [",".join(s.endpoint for s in servers), "--n-gpu-layers", "2"]
    command += ["--place", "layers.0.ffn_norm.weight=cpu"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"layers 0-0 +RPC0", text.stdout)
    assert re.search(r"layers 1-1 +RPC1", text.stdout)
    assert re.search(r"KV cache +RPC1", text.stdout)
    command += ["--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    facts = json.loads(found.stdout)
    assert facts["n_gpu_layers"] == 2
    weights = [p for p in facts["placement"] if p["what"] not in ("KV cache", "compute")]
    assert sum(p["nbytes"] for p in weights) == facts["weight_bytes"]
    assert [s.free for s in servers] == [32 * MIB, 32 * MIB]


def test_tensor_placement(small_path: Path, endpoints: list[str]) -> None:
    with Model(small_path, backend="cpu") as here, opened(here, attention="ggml") as session:
        expected = converse(session)
    rules: dict[str, str | int] = {
        "layers.0.ffn_norm.weight": "cpu",
        "layers.0.*": 1,
        "output.weight": "CPU",
        "layers.0.feed_forward.w1.weight": "cpu",  # comes too late
    }
    with Model(small_path, servers=endpoints, tensor_placement=rules) as model:
        names = [d.name for d in model.devices]
        where = {t.name: t.device for t in model.tensors()}
        assert where["layers.0.ffn_norm.weight"] == "CPU"
        assert where["layers.0.feed_forward.w1.weight"] == names[1]
        assert where["layers.0.attention.wqkv.weight"] == names[1]
        assert where["layers.1.attention.wqkv.weight"] == names[1]
        assert where.get("output.weight", where["embeddings.weight"]) == "CPU"
        with opened(model, attention="ggml") as session:
            assert worst(converse(session), expected) <= SAME
    with Model(small_path, servers=endpoints, tensor_placement={"*": names[0].lower()}) as model:
        assert {t.device for t in model.tensors()} <= {names[0], "CPU"}
        with opened(model, attention="ggml") as session:
            assert worst(converse(session), expected) <= SAME


@pytest.mark.parametrize(
    "rules",
    [
        {"layers.*.w[13].weight": 0},
        {"layers.*_norm.weight": 0},
        {"norm.weight": 0},
        {"layers.*.wo.weight": 0, "layers.*.w2.weight": 0},
    ],
)
def test_products_of_ours_stay_here(
    tmp_path: Path, endpoints: list[str], rules: dict[str, str | int]
) -> None:
    """Quantized matrices that are multiplied here between others that are not: our code is never
    sent to a server, which would take its address for its own."""
    make_model(tmp_path / "q4_k.gguf", TINY, "q4_k", seed=3)
    with Model(tmp_path / "q4_k.gguf", backend="cpu") as here, opened(here) as session:
        expected = converse(session)
    placed = {"*": "cpu"} | rules
    rules_in_order = {name: placed[name] for name in [*rules, "*"]}  # the first that fits
    path = tmp_path / "q4_k.gguf"
    with Model(path, servers=endpoints[:1], tensor_placement=rules_in_order) as model:
        assert {t.device for t in model.tensors()} == {"CPU", model.devices[0].name}
        with opened(model) as session:
            found = converse(session)
            ours = [node for node in session.graph(1) if node.op == "CUSTOM"]
            assert session.fallbacks == []
    assert {node.device for node in ours} == {"CPU"}
    assert worst(found, expected) <= 5e-2  # 8-bit vectors that are rounded here and there


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"layers.9.*": "cpu"}, "no tensor is named like 'layers.9.*'"),
        ({"*": "CUDA0"}, "device 'CUDA0', expected one of cpu, RPC"),
        ({"*": 2}, "device 2, expected one of"),
        ({"*": -1}, "device -1, expected one of"),
        ({"*": True}, "device True, expected one of"),
    ],
)
def test_placements_that_cannot_be(
    small_path: Path, endpoints: list[str], rules: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Model(small_path, servers=endpoints, tensor_placement=rules)


# ---- sessions side by side


def test_batches_of_mixed_sessions(small_path: Path, endpoints: list[str]) -> None:
    """Caches of four types and as many sizes, two of them longer than the other sessions' 256."""
    kinds = [("f16", 64), ("bf16", 48), ("f32", 300), ("q8_0", 40), ("f16", 256)]
    here = Model(small_path, backend="cpu")
    there = Model(small_path, servers=endpoints)
    results = []
    with here, there, contextlib.ExitStack() as stack:
        for model in (here, there):
            with pytest.warns(UserWarning, match="beyond the model's context"):
                sessions = [
                    stack.enter_context(opened(model, n, kv_type=kv_type, attention="ggml"))
                    for kv_type, n in kinds
                ]
            prompts = [make_prompt(model.config, 5 + 3 * i, seed=i) for i in range(len(kinds))]
            outs = [model.prefill_batch(sessions, prompts)]
            frames = make_prompt(model.config, 4, seed=9)
            for frame in frames.T:
                outs.append(model.step_batch(sessions, np.stack([frame] * len(kinds))))
            tokens = make_prompt(model.config, 3, seed=8)
            outs.append(model.eval_batch([(sessions[0], tokens), (sessions[3], frames[:, :1])]))
            assert [s.n_past for s in sessions] == [12, 12, 15, 19, 21]
            results.append(outs)
    assert worst(results[1], results[0]) <= SAME


@pytest.mark.parametrize("attention", ["ggml", "reference"])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_pasts_as_values(
    small_path: Path, endpoints: list[str], tmp_path: Path, attention: str, kv_type: str
) -> None:
    """Copies on the server are the bytes themselves: equal bits. Across, the same arithmetic."""
    with (
        Model(small_path, backend="cpu") as here,
        Model(small_path, servers=endpoints) as there,
        opened(there, attention=attention, kv_type=kv_type) as session,
        opened(here, attention=attention, kv_type=kv_type) as local,
    ):
        tokens = make_prompt(there.config, 30)
        session.prefill(tokens[:, :20])
        local.prefill(tokens[:, :20])
        with (
            session.fork() as twin,
            opened(there, 40, attention=attention, kv_type=kv_type) as short,
        ):
            short.copy_prefix(session, 11)
            assert short.n_past == 11
            expected = session.step(tokens[:, 20])
            assert same_bits(twin.step(tokens[:, 20]), expected)
            session.rewind(11)
            assert same_bits(short.step(tokens[:, 11]), session.step(tokens[:, 11]))
            session.reserve(100)
            short.reserve(100)
            assert session.max_seq_len == 100
            assert same_bits(short.step(tokens[:, 12]), session.step(tokens[:, 12]))
            session.copy_prefix(twin, 20)
        assert worst([expected], [local.step(tokens[:, 20])]) <= SAME
        session.save(tmp_path / "there")
        local.rewind(20)
        local.save(tmp_path / "here")
        after = session.step(tokens[:, 21])
        with there.load_session(tmp_path / "there", n_threads=1) as again:
            assert same_bits(again.step(tokens[:, 21]), after)
        with here.load_session(tmp_path / "there", n_threads=1) as crossed:
            np.testing.assert_array_equal(crossed.tokens, tokens[:, :20])
            assert worst([crossed.step(tokens[:, 21])], [after]) <= SAME
        with there.load_session(tmp_path / "here", n_threads=1) as crossed:
            assert worst([crossed.step(tokens[:, 21])], [after]) <= SAME


def test_prefix_cache(small_path: Path, endpoints: list[str]) -> None:
    with Model(small_path, servers=endpoints) as model, opened(model) as session:
        tokens = make_prompt(model.config, 40)
        cache = model.prefix_cache(4 * MIB)
        expected = session.prefill(tokens, cache=cache)
        session.reset()
        planned = session.n_planned
        found = session.prefill(tokens, cache=cache)
        assert session.n_planned <= planned + 1
        # 39 positions are copied and one is evaluated alone: rounding of another batch size.
        assert worst([found], [expected]) <= 1e-4
        assert session.n_past == 40


def test_sessions_by_turns_and_at_once(
    small_path: Path, tiny_path: Path, endpoints: list[str]
) -> None:
    """Two models, six sessions, and others that come and go: a server forgets its graph whenever
    memory is given back. Equal bits with what each gives alone."""
    n_steps = 25
    with Model(small_path, servers=endpoints) as small, Model(tiny_path, servers=endpoints) as tiny:
        models = [small, tiny, small, small, tiny, small]

        def tokens_of(i: int) -> Any:
            return make_prompt(models[i].config, 9 + n_steps, seed=i)

        def talk(session: Session, i: int) -> Iterator[Output]:
            yield session.prefill(tokens_of(i)[:, :9])
            for frame in tokens_of(i)[:, 9:].T:
                yield session.step(frame)

        alone = []
        for i, model in enumerate(models):
            with opened(model) as session:
                alone.append(list(talk(session, i)))

        sessions = [opened(model) for model in models]
        by_turns = list(zip(*(talk(s, i) for i, s in enumerate(sessions)), strict=True))
        for i, outs in enumerate(zip(*by_turns, strict=True)):
            assert all(map(same_bits, outs, alone[i])), i

        found: dict[int, list[Output]] = {}
        failures: list[BaseException] = []
        stop = threading.Event()

        def work(i: int) -> None:
            try:
                sessions[i].reset()
                found[i] = list(talk(sessions[i], i))
            except BaseException as error:
                failures.append(error)

        def come_and_go() -> None:
            try:
                while not stop.is_set():
                    with opened(small, 32) as session:
                        session.prefill(tokens_of(0)[:, :5])
                        session.fork().close()
            except BaseException as error:
                failures.append(error)

        guest = threading.Thread(target=come_and_go)
        workers = [threading.Thread(target=work, args=(i,)) for i in range(len(sessions))]
        for thread in [guest, *workers]:
            thread.start()
        for thread in workers:
            thread.join(60)
        stop.set()
        guest.join(60)
        assert failures == []
        for i in range(len(sessions)):
            assert all(map(same_bits, found[i], alone[i])), i
        for session in sessions:
            session.close()


# ---- too little memory


def memory_error(run: Callable[[], object]) -> tuple[str, int]:
    """The message, and how many layers it says would fit."""
    with pytest.raises(slowar.DeviceMemoryError) as failure:
        run()
    message = str(failure.value)
    hint = re.search(r"n_gpu_layers=(\d+) would fit", message)
    assert hint or "not one layer would fit" in message, message
    return message, int(hint[1]) if hint else 0


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of 2.3 MiB, each of three matrices and little else."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    make_model(path, replace(SMALL, n_layer=6, n_ff=3072, n_ctx=40000), seed=5)
    return path


def test_weights_that_do_not_fit(wide_path: Path, start: Callable[..., Server]) -> None:
    server = start("--memory", 6)
    message, n = memory_error(lambda: Model(wide_path, servers=[server.endpoint]))
    assert re.search(r"needs \d+\.\d MiB, RPC\d+ has 6\.0 MiB free", message)
    assert 1 <= n < 6
    assert server.free == 6 * MIB
    with Model(wide_path, servers=[server.endpoint], n_gpu_layers=n) as model:
        assert model.n_gpu_layers == n
        assert server.free < 6 * MIB
    memory_error(lambda: Model(wide_path, servers=[server.endpoint], n_gpu_layers=n + 1))
    assert server.free == 6 * MIB


def test_caches_and_compute_that_do_not_fit(wide_path: Path, start: Callable[..., Server]) -> None:
    server = start("--memory", 32)
    with Model(wide_path, servers=[server.endpoint]) as model:
        there = server.free
        message, _ = memory_error(lambda: opened(model, 39000))
        assert re.search(r"needs \d+\.\d MiB, RPC\d+ has \d+\.\d MiB free", message)
        assert server.free == there
        session = opened(model, None)
        memory_error(lambda: session.init_kv_cache(39000))
        session.init_kv_cache(64)
        expected = converse(session, 3)
        memory_error(lambda: session.reserve(39000))  # the old cache stays
        assert (session.n_past, session.max_seq_len) == (20, 64)
        session.rewind(17)
        again = [session.step(f) for f in make_prompt(model.config, 20)[:, 17:].T]
        assert all(map(same_bits, again, expected[1:]))
        session.close()
        # A cache that fits, and compute memory beside it that does not.
        with opened(model, 4096, attention="reference") as long:
            held = server.free
            with pytest.raises(slowar.DeviceMemoryError, match=r"needs \d+\.\d MiB, RPC\d+ has \d"):
                long.prefill_fast(make_prompt(model.config, 3000))
            assert long.n_past == 0
            long.prefill_fast(make_prompt(model.config, 20))
            assert long.n_past == 20
            assert server.free <= held
        assert server.free == there
    assert server.free == 32 * MIB


def test_small_buffers(wide_path: Path, endpoints: list[str], start: Callable[..., Server]) -> None:
    """14 MiB of weights in buffers of at most 1 MiB, a matrix of 0.75 MiB in each: equal bits."""
    server = start("--max-buffer", 1)
    with (
        Model(wide_path, servers=endpoints[:1]) as whole,
        Model(wide_path, servers=[server.endpoint]) as parts,
        opened(whole) as a,
        opened(parts) as b,
    ):
        assert parts.n_gpu_layers == 6
        there = sum(t.nbytes for t in parts.tensors() if t.device != "CPU")
        assert there > 14 * MIB
        assert all(map(same_bits, converse(a), converse(b)))


def test_a_tensor_beyond_the_limit(tmp_path: Path, start: Callable[..., Server]) -> None:
    path = tmp_path / "one.gguf"
    make_model(path, replace(SMALL, n_ff=6000), "f32", seed=6)  # matrices of 1.5 MiB
    server = start("--max-buffer", 1)
    with Model(path, backend="cpu") as here, opened(here, attention="ggml") as session:
        expected = converse(session, 3)
    with Model(path, servers=[server.endpoint]) as model:
        beside = {t.name: t for t in model.tensors() if t.note}
        assert sorted(beside) == sorted(
            f"layers.{il}.feed_forward.w{i}.weight" for il in range(2) for i in (1, 2, 3)
        )
        for t in beside.values():
            assert t.device == "CPU"
            assert re.fullmatch(r"RPC\d+ takes at most 1\.0 MiB in one buffer", t.note)
        assert any("at most 1.0 MiB" in p.note for p in model.placement(64))
        with opened(model, attention="ggml") as session:
            assert worst(converse(session, 3), expected) <= SAME


# ---- servers that are lost


@pytest.fixture(scope="module")
def other_server() -> Iterator[Server]:
    """The one that stays."""
    server = Server("--memory", 256)
    yield server
    server.kill()


class Crowd:
    """A server that is killed, one that stays, and a model on both with two sessions."""

    def __init__(self, path: Path, lost: Server, other: Server, attention: str = "auto") -> None:
        self.path, self.lost, self.other = path, lost, other
        self.endpoints = [lost.endpoint, other.endpoint]
        self.model = Model(path, servers=self.endpoints)
        self.session = opened(self.model, 200, attention=attention)
        self.twin = opened(self.model, 200, attention=attention)
        self.tokens = make_prompt(self.model.config, 190)
        self.session.prefill(self.tokens[:, :20])

    def close(self, start: Callable[..., Server] | None = None) -> None:
        """Everything closes, and the other server has its memory back and serves; with ``start`` a
        new one at the old port does, too."""
        self.session.close()
        self.twin.close()
        self.model.close()
        assert self.other.free == 256 * MIB
        with Model(self.path, servers=[self.other.endpoint]) as model, opened(model) as session:
            expected = converse(session, 2)
        if start is not None:
            again = start(port=self.lost.port)
            assert again.endpoint == self.lost.endpoint
            with Model(self.path, servers=self.endpoints) as model, opened(model) as session:
                assert worst(converse(session, 2), expected) <= SAME


def fails_in_time(run: Callable[[], object]) -> str:
    begin = time.monotonic()
    with pytest.raises(slowar.ComputeError) as failure:
        run()
    assert time.monotonic() - begin < NOTICED
    return str(failure.value)


@pytest.mark.parametrize(
    ("call", "attention"),
    [(call, "auto") for call in ("step", "prefill", "batch", "fork", "copy", "save", "reserve")]
    + [(call, "reference") for call in ("step", "prefill", "batch")],
)
def test_killed_while_idle(
    small_path: Path,
    start: Callable[..., Server],
    other_server: Server,
    tmp_path: Path,
    call: str,
    attention: str,
) -> None:
    crowd = Crowd(small_path, start(), other_server, attention)
    session, twin, tokens = crowd.session, crowd.twin, crowd.tokens
    crowd.lost.kill()
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: session.step(tokens[:, 20]),
        "prefill": lambda: session.prefill(tokens[:, 20:]),
        "batch": lambda: crowd.model.step_batch([session, twin], tokens[:, :2].T),
        "fork": lambda: session.fork(),
        "copy": lambda: twin.copy_prefix(session),
        "save": lambda: session.save(tmp_path / "past"),
        "reserve": lambda: session.reserve(250),
    }
    message = fails_in_time(calls[call])
    assert crowd.lost.endpoint in message
    assert (session.n_past, session.max_seq_len, twin.n_past) == (20, 200, 0)
    assert not (tmp_path / "past").exists()
    for other in calls.values():  # it stays so, whatever comes next
        fails_in_time(other)
    assert (session.n_past, twin.n_past) == (20, 0)
    crowd.close(start if call == "step" else None)


def test_plans_for_a_lost_server(small_path: Path, start: Callable[..., Server]) -> None:
    """No numbers that nobody gave. A new model waits for the old one to be closed."""
    server = start()
    model = Model(small_path, servers=[server.endpoint])
    plan = Model(small_path, servers=[server.endpoint], load=False)
    session = opened(model, None)
    server.kill()
    for look in (plan.placement, model.placement, lambda: model.estimate(64)):
        fails_in_time(look)
    fails_in_time(lambda: session.init_kv_cache(64))
    assert len(model.tensors()) == len(plan.tensors())  # known here
    again = start(port=server.port)
    with pytest.raises(slowar.DeviceError, match=re.escape(server.endpoint)):
        Model(small_path, servers=[again.endpoint])
    session.close()
    model.close()
    assert plan.placement()  # of the new server
    with Model(small_path, servers=[again.endpoint]) as new, opened(new) as session:
        assert converse(session, 1)[0].logits.any()
    plan.close()


@pytest.mark.parametrize("call", ["steps", "prefills", "copies", "saves"])
def test_killed_in_the_middle(
    small_path: Path,
    start: Callable[..., Server],
    other_server: Server,
    tmp_path: Path,
    call: str,
) -> None:
    crowd = Crowd(small_path, start(), other_server)
    session, twin, tokens = crowd.session, crowd.twin, crowd.tokens
    at = 20

    def steps() -> None:
        nonlocal at
        if at == 190:
            session.rewind(20)
            at = 20
        session.step(tokens[:, at])
        at += 1

    def prefills() -> None:
        session.rewind(20)
        session.prefill(tokens[:, 20:], chunk=7)

    def copies() -> None:
        twin.copy_prefix(session)

    def saves() -> None:
        session.save(tmp_path / "past")

    body = {"steps": steps, "prefills": prefills, "copies": copies, "saves": saves}[call]
    body()
    killed: list[float] = []

    def kill() -> None:
        time.sleep(0.15)
        crowd.lost.process.kill()
        killed.append(time.monotonic())

    thread = threading.Thread(target=kill)
    thread.start()

    def until_it_fails() -> None:
        while not killed or time.monotonic() - killed[0] < 2 * NOTICED:
            body()

    with pytest.raises(slowar.ComputeError, match=re.escape(crowd.lost.endpoint)):
        until_it_fails()
    thread.join()
    assert time.monotonic() - killed[0] < NOTICED
    assert session.n_past == (at if call == "steps" else 20)
    crowd.close()


def test_killed_while_loading(
    wide_path: Path, start: Callable[..., Server], other_server: Server
) -> None:
    """At four moments of an opening; whoever comes too late has a model that then fails."""

    def use(endpoints: list[str]) -> None:
        end = time.monotonic() + 2 * NOTICED
        with Model(wide_path, servers=endpoints) as model, opened(model) as session:
            while time.monotonic() < end:
                session.reset()
                converse(session)

    for i in range(4):
        server = start()
        timer = threading.Timer(0.006 * i, server.process.kill)
        timer.start()
        begin = time.monotonic()
        with pytest.raises(
            (slowar.ComputeError, slowar.DeviceError, slowar.DeviceMemoryError)
        ) as failure:
            use([server.endpoint, other_server.endpoint])
        assert time.monotonic() - begin < NOTICED
        assert server.endpoint in str(failure.value), i
        timer.join()
        assert other_server.free == 256 * MIB


# ---- no server there, or a strange one


@contextlib.contextmanager
def listener(serve: Callable[[socket.socket], None] | None) -> Iterator[str]:
    """Does ``serve`` with each connection; None: whoever connects hears nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        assert serve is not None
                        serve(connection)

        if serve is not None:
            threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def receive(connection: socket.socket, n: int) -> bytes:
    out = b""
    while len(out) < n:
        part = connection.recv(n - len(out))
        if not part:
            raise OSError("the other side left")
        out += part
    return out


def request(connection: socket.socket) -> tuple[int, bytes]:
    command, size = struct.unpack("<BQ", receive(connection, 9))
    return command, receive(connection, size)


def hello(connection: socket.socket, version: tuple[int, int, int] = (7, 0, 0)) -> None:
    _, asked = request(connection)
    answer = bytes([*version, 0]) + bytes(len(asked))
    connection.sendall(struct.pack("<Q", len(answer)) + answer)


def refused(endpoint: str) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(slowar.DeviceError) as failure:
        slowar.devices([endpoint])
    return str(failure.value), time.monotonic() - begin


def test_nobody_listens(small_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    message, seconds = refused(f"127.0.0.1:{port}")
    assert message == (
        f"no device server answers at 127.0.0.1:{port}: connecting: Connection refused"
    )
    assert seconds < NOTICED
    with pytest.raises(slowar.DeviceError, match="Connection refused"):
        Model(small_path, servers=[f"127.0.0.1:{port}"])


def test_a_host_that_is_none() -> None:
    message, _ = refused("host.invalid:1")
    assert "host host.invalid" in message


def test_silence() -> None:
    """Five seconds of it are the limit; 4.5: a clock is not exact."""
    with listener(None) as endpoint:
        message, seconds = refused(endpoint)
        assert "silent for 5 s" in message
        assert 4.5 <= seconds < NOTICED


def test_strangers() -> None:
    """What they say is never believed: another size, another protocol, a version, nothing more."""

    def web(c: socket.socket) -> None:
        c.recv(9)
        c.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    def leaves(c: socket.socket) -> None:
        c.recv(1)

    def half(c: socket.socket) -> None:
        request(c)
        c.sendall(struct.pack("<Q", 28) + b"\7")

    def leaves_then(c: socket.socket) -> None:
        hello(c)

    def no_devices(c: socket.socket) -> None:
        hello(c)
        request(c)
        c.sendall(struct.pack("<QI", 4, 0))

    cases: list[tuple[Callable[[socket.socket], None], str]] = [
        (web, "does not speak the protocol"),
        (leaves, "closed|reset|pipe"),
        (half, "closed|reset|pipe"),
        (leaves_then, "closed|reset|pipe"),
        (lambda c: hello(c, (6, 0, 0)), r"speaks version 6\.0 of the protocol, expected 7\.0"),
        (lambda c: hello(c, (7, 1, 0)), r"speaks version 7\.1 of the protocol, expected 7\.0"),
        (no_devices, "it has no device"),
    ]
    for serve, expected in cases:
        with listener(serve) as endpoint:
            message, seconds = refused(endpoint)
            assert re.search(expected, message), (expected, message)
            assert endpoint in message
            assert seconds < NOTICED


def test_a_server_that_is_busy(small_path: Path, pair: list[Server]) -> None:
    """Another process has a model on it."""
    endpoint = pair[0].endpoint
    with Model(small_path, servers=[endpoint]) as model, opened(model) as session:
        expected = converse(session, 3)
        child = run_child(
            "import sys, time, pyggml_slowar as s\n"
            "begin = time.monotonic()\n"
            "try: s.Model(sys.argv[1], servers=[sys.argv[2]])\n"
            "except s.DeviceError as e: print(e, 4.5 <= time.monotonic() - begin < 10)\n",
            small_path,
            endpoint,
        )
        assert_clean(child, f"no device server answers at {endpoint}: silent for 5 s True\n")
        session.reset()
        assert all(map(same_bits, converse(session, 3), expected))


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", ":", "host", "host:", "host:0", "host:99999", "host:-1", "host:1x", "host: 1", ":1"),
        *("[::1]:1", "::1:50052", "host:1:2", "host:\u0663", "host:100000000000000000001"),
    ],
)
def test_endpoints_that_are_none(small_path: Path, endpoint: str) -> None:
    with pytest.raises(slowar.DeviceError, match='expected "host:port" with a port of 1 to'):
        Model(small_path, servers=[endpoint])


@pytest.mark.parametrize("endpoint", [1, None, b"host:1", "host\0:1", "host:1\0"])
def test_endpoints_that_are_no_text(small_path: Path, endpoint: Any) -> None:
    with pytest.raises(ValueError, match='expected "host:port"'):
        Model(small_path, servers=[endpoint])


def test_spaces_are_no_host() -> None:
    message, _ = refused("a b:1")
    assert "a b" in message


def test_one_endpoint_is_no_list(small_path: Path, endpoints: list[str]) -> None:
    with pytest.raises(TypeError, match="expected a list"):
        Model(small_path, servers=endpoints[0])


# ---- strange clients


def test_half_messages_and_garbage_end_nothing(pair: list[Server]) -> None:
    """Whoever leaves makes room for the next, whatever was said before."""
    good_hello = struct.pack("<BQ", HELLO, 24) + bytes(24)
    rubbish = [
        b"",
        b"\x0e",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<BQ", HELLO, 2**60),
        struct.pack("<BQ", HELLO, 24) + bytes(5),
        good_hello + b"\xff",
        good_hello + struct.pack("<BQ", HELLO, 0),
        good_hello + struct.pack("<BQ", ALLOC_BUFFER, 3) + b"abc",
        good_hello + struct.pack("<BQ", ALLOC_BUFFER, 12) + b"abc",
        good_hello + struct.pack("<BQIQ", ALLOC_BUFFER, 12, 7, 64),
        good_hello + struct.pack("<BQIQ", ALLOC_BUFFER, 12, 0, 2**62),
        good_hello + struct.pack("<BQ", SET_TENSOR, 5) + b"abcde",
        good_hello + struct.pack("<BQ", GRAPH_COMPUTE, 100) + b"\xff" * 100,
    ]
    for words in rubbish:
        for leaves in ("at once", "politely"):
            with socket.create_connection(("127.0.0.1", pair[1].port), timeout=10) as c:
                c.sendall(words)
                if leaves == "politely":
                    with contextlib.suppress(OSError):
                        c.shutdown(socket.SHUT_WR)
                        while c.recv(4096):
                            pass
            assert pair[1].free > 0, words
    assert pair[1].process.poll() is None


# ---- flags


def test_rpc_needs_servers(small_path: Path, endpoints: list[str]) -> None:
    for backend in ("rpc", "RPC"):
        with pytest.raises(slowar.DeviceError, match="needs servers="):
            Model(small_path, backend=backend)
    for backend in ("cpu", "CPU", "cuda"):
        with pytest.raises(ValueError, match="expected 'rpc' with servers"):
            Model(small_path, backend=backend, servers=endpoints)
    for backend in ("rpc", "RPC", "Rpc", "auto"):
        with Model(small_path, backend=backend, servers=endpoints, load=False) as model:
            assert [d.description for d in model.devices] == endpoints
    with Model(small_path, servers=endpoints, device=1, load=False) as model:
        assert [d.description for d in model.devices] == endpoints[1:]
    with Model(small_path, servers=endpoints, device=[1, 0], load=False) as model:
        assert [d.description for d in model.devices] == endpoints[::-1]
    with Model(small_path, servers=[endpoints[0]] * 2, load=False) as model:
        assert [d.description for d in model.devices] == endpoints[:1]
    with pytest.raises(slowar.DeviceError, match="no device 2"):
        Model(small_path, servers=endpoints, device=2)


def test_forked(small_path: Path, endpoints: list[str]) -> None:
    """The child gets SessionStateError and ends; the parent goes on."""
    child = run_child(
        "import os, sys, warnings, pyggml_slowar as s, numpy as np\n"
        "warnings.simplefilter('ignore')\n"
        "m = s.Model(sys.argv[1], servers=sys.argv[2:]); q = m.session(16, n_threads=1)\n"
        "frame = np.ones(1 + m.config.n_codebook, int); a = q.step(frame)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: q.step(frame)\n"
        "    except s.SessionStateError: q.close(); m.close(); sys.exit(7)\n"
        "    sys.exit(8)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "q.reset(); print(np.array_equal(q.step(frame).logits, a.logits))\n",
        small_path,
        *endpoints,
    )
    assert_clean(child, "7\nTrue\n")


# ---- ends of processes


def test_the_interpreter_ends_with_a_model_open(small_path: Path, endpoints: list[str]) -> None:
    """Twenty times, a quarter of them in the middle of another thread's steps."""
    code = (
        "import os, sys, threading, pyggml_slowar as s, numpy as np\n"
        "def child(kind):\n"
        "    global m, q\n"
        "    m = s.Model(sys.argv[1], servers=sys.argv[2:]); q = m.session(64, n_threads=1)\n"
        "    frame = np.ones(1 + m.config.n_codebook, int); q.step(frame)\n"
        "    def loop():\n"
        "        while True:\n"
        "            q.reset(); q.step(frame)\n"
        "    if kind: threading.Thread(target=loop, daemon=True).start()\n"
        "for i in range(20):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        child(i % 4 == 3)\n"
        "        sys.exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    child = run_child(code, small_path, endpoints[0], timeout=120)
    assert_clean(child, "0\n" * 20)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_signals_end_a_server(
    small_path: Path,
    start: Callable[..., Server],
    number: signal.Signals,
    status: int,
    busy: bool,
) -> None:
    server = start()
    with contextlib.ExitStack() as stack:
        if busy:
            model = stack.enter_context(Model(small_path, servers=[server.endpoint]))
            session = stack.enter_context(opened(model))
            converse(session, 1)
        server.process.send_signal(number)
        out, err = server.process.communicate(timeout=10)
        assert (server.process.returncode, out) == (status, "")
        assert err in ("", "slowar: interrupted\n")  # which it says unless it serves already
        if busy:
            fails_in_time(lambda: session.step(make_prompt(model.config, 1)[:, 0]))


def test_a_port_that_is_taken(pair: list[Server]) -> None:
    command = [sys.executable, "-m", "pyggml_slowar.cli", "serve-device", "--backend", "cpu"]
    found = subprocess.run(
        [*command, "--port", str(pair[0].port)], capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout) == (1, "")
    assert re.fullmatch(
        rf"slowar: .*listening at 127\.0\.0\.1:{pair[0].port}: .*in use.*\n", found.stderr
    )


def test_everybody_may_come_is_a_warning(small_path: Path, start: Callable[..., Server]) -> None:
    server = start("--host", "0.0.0.0")
    assert server.line.endswith(f" at 0.0.0.0:{server.port}\n")
    with Model(small_path, servers=[f"127.0.0.1:{server.port}"]) as model:
        assert model.n_gpu_layers == 2
    server.process.kill()
    _, err = server.process.communicate(timeout=10)
    assert re.fullmatch(
        rf"slowar: warning: anybody who can reach 0\.0\.0\.0:{server.port} can use .*\n", err
    )


def test_ipv6(start: Callable[..., Server]) -> None:
    """Its address has colons, of which ggml makes nothing."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    server = start("--host", "::1")
    with socket.create_connection(("::1", server.port), timeout=10) as c:
        c.sendall(struct.pack("<BQ", HELLO, 24) + bytes(24))
        size, major = struct.unpack("<QB", receive(c, 9))
        assert (size, major) == (28, 7)
    assert server.process.poll() is None
