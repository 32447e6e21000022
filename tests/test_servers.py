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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import assert_clean, make_prompt, run_child, same_bits

import pyggml_slowar as slowar
from pyggml_slowar import Model, Output, Session

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
    return sum(a != b for a, b in zip(devices, devices[1:], strict=False))


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
            plan = {(p.what, p.device): p.nbytes for p in model.placement(256)}
            real = {(p.what, p.device): p.nbytes for p in session.placement()}
            assert {k for k in real if k[0] == "KV cache"} == {("KV cache", name) for name in names}
            for key, nbytes in real.items():
                assert nbytes == pytest.approx(plan[key], rel=0.05), key
            kv = sum(n for (what, _), n in real.items() if what == "KV cache")
            compute = sum(n for (what, _), n in real.items() if what == "compute")
            assert (kv, compute) == (session.nbytes, session.compute_nbytes)
            estimate = model.estimate(256)
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
    from dataclasses import replace

    from conftest import SMALL

    from pyggml_slowar.make_model import make_model

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
