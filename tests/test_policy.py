"""Decisions that need no model: chunk sizes, thread counts, which device a backend flag means."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SMALL, assert_clean, make_prompt, run_child, same_bits

from pyggml_slowar import (
    Device,
    DeviceError,
    Model,
    default_threads,
    device,
    devices,
    prefill_chunk,
)

# ---- the documented chunk policy: chunk = clamp(128 / n_gpu_layers, 8, 64)


@pytest.mark.parametrize("n_semantic", [0, 1, 2, 1000])
@pytest.mark.parametrize("single", [False, True])
def test_on_the_cpu_a_prompt_is_one_chunk(n_semantic: int, single: bool) -> None:
    chunk = prefill_chunk(n_semantic, n_gpu_layers=0, single_token_semantic=single)
    assert chunk is None


SIZES = [
    (1, 64),  # 128, clamped
    (2, 64),
    (3, 42),  # 42.67, cut
    (4, 32),
    (5, 25),
    (12, 10),
    (14, 9),
    (15, 8),  # 8.53
    (16, 8),
    (17, 8),  # 7.53, clamped
    (36, 8),  # S2 Pro
    (128, 8),
    (129, 8),  # 0 before the clamp
    (10**9, 8),
]


@pytest.mark.parametrize(("n_gpu_layers", "size"), SIZES)
@pytest.mark.parametrize("n_semantic", [0, 1, 2, 1000])
@pytest.mark.parametrize("single", [False, True])
def test_chunks_on_a_gpu(n_gpu_layers: int, size: int, n_semantic: int, single: bool) -> None:
    seen = prefill_chunk(n_semantic, n_gpu_layers=n_gpu_layers, single_token_semantic=single)
    assert seen == (1 if single and n_semantic > 1 else size)


@pytest.mark.parametrize(
    ("backend", "n_gpu_layers", "n_semantic", "chunks"),
    [
        ("CPU", 0, 10, [20]),
        ("CUDA", 16, 10, list(range(1, 21))),  # one position at a time
        ("CUDA", 16, 2, list(range(1, 21))),
        ("CUDA", 16, 1, [8, 16, 20]),
        ("CUDA", 16, 0, [8, 16, 20]),
        ("Vulkan", 16, 10, [8, 16, 20]),
        ("MTL", 12, 10, [10, 20]),
        ("MTL", 1, 10, [20]),  # shorter than a chunk
    ],
)
def test_prefill_follows_the_policy(
    small: Model,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    n_gpu_layers: int,
    n_semantic: int,
    chunks: list[int],
) -> None:
    """Where the layers are is pretended; the evaluations are real and on the CPU."""
    tokens = make_prompt(SMALL, 20)
    tokens[0] = 7
    tokens[0, 20 - n_semantic :] = SMALL.semantic_end_id
    size = chunks[0]
    with small.session(20, n_threads=1, attention="reference") as session:
        expected = session.prefill(tokens, chunk=size)
        session.reset()
        monkeypatch.setattr(small, "n_gpu_layers", n_gpu_layers)
        monkeypatch.setattr(small, "device", dataclasses.replace(small.device, backend=backend))
        seen: list[int] = []
        out = session.prefill(tokens, progress=lambda done, n: seen.append(done))
        assert seen == chunks
        assert same_bits(out, expected)

        session.reset()
        seen.clear()
        session.prefill(tokens, chunk=7, progress=lambda done, n: seen.append(done))
        assert seen == [7, 14, 20]  # a size of the caller's own wins


# ---- threads


@pytest.mark.parametrize(
    ("affinity", "quota", "physical", "threads"),
    [
        (4, None, 8, 4),
        (8, 2, 8, 2),
        (8, None, 4, 4),
        (8, None, None, 8),  # a container that cannot tell its cores
        (None, None, None, 1),
        (1, 1, 1, 1),
    ],
)
def test_default_threads_is_the_least_limit(
    monkeypatch: pytest.MonkeyPatch,
    affinity: int | None,
    quota: int | None,
    physical: int | None,
    threads: int,
) -> None:
    monkeypatch.setattr(device, "_affinity", lambda: affinity)
    monkeypatch.setattr(device, "_cgroup_quota", lambda root: quota)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None if logical else physical)
    assert default_threads() == threads


@pytest.mark.skipif(sys.platform != "linux", reason="sched_setaffinity is Linux's")
def test_affinity_is_heeded(small_path: Path) -> None:
    code = """
import os, sys
import pyggml_slowar as slowar
print(slowar.default_threads() <= len(os.sched_getaffinity(0)))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(slowar.default_threads())
with slowar.Model(sys.argv[1], backend="cpu") as model, model.session() as session:
    print(session.n_threads)
"""
    assert_clean(run_child(code, small_path), "True\n1\n1\n")


V2, QUOTA, PERIOD = "cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, None),
        ({V2: "max 100000\n"}, None),
        ({V2: "100000 100000\n"}, 1),
        ({V2: "150000 100000\n"}, 2),  # a CPU and a half: two threads can use it
        ({V2: "200000 100000\n"}, 2),
        ({V2: "50000 100000\n"}, 1),
        ({V2: "1000 100000\n"}, 1),
        ({V2: "800000 50000\n"}, 16),
        ({QUOTA: "-1\n", PERIOD: "100000\n"}, None),
        ({QUOTA: "250000\n", PERIOD: "100000\n"}, 3),
        ({QUOTA: "50000\n", PERIOD: "100000\n"}, 1),
        ({QUOTA: "250000\n"}, None),  # half of v1's files
        ({V2: "100000 100000\n", QUOTA: "400000\n", PERIOD: "100000\n"}, 1),  # v2 first
        ({V2: "max 100000\n", QUOTA: "400000\n", PERIOD: "100000\n"}, None),
        ({V2: ""}, None),  # files that say nothing usable are no limit and no error
        ({V2: "words without numbers\n"}, None),
        ({V2: "much 100000\n"}, None),
        ({V2: "100000 0\n"}, None),
        ({QUOTA: "\n", PERIOD: "100000\n"}, None),
        ({QUOTA: "250000\n", PERIOD: "0\n"}, None),
    ],
)
def test_cgroup_quota(tmp_path: Path, files: dict[str, str], cpus: int | None) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert device._cgroup_quota(tmp_path) == cpus


def test_cgroup_of_a_machine_without_cgroups(tmp_path: Path) -> None:
    assert device._cgroup_quota(tmp_path / "none") is None


# ---- devices


def _device(backend: str, index: int, type: str) -> Device:
    name = f"{backend}{index}"
    return Device(backend, index, name, f"the {name} of a test", type, 1 << 30, 1 << 31)


CPU = _device("CPU", 0, "cpu")
BLAS = _device("BLAS", 0, "other")
CUDA = [_device("CUDA", i, "gpu") for i in range(2)]
METAL = _device("MTL", 0, "gpu")
IGPU = _device("Vulkan", 0, "igpu")
VULKAN = _device("Vulkan", 1, "gpu")

Found = Callable[[list[Device]], None]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    return lambda there: monkeypatch.setattr(device, "devices", lambda *_: there)


@pytest.mark.parametrize(
    ("there", "backend", "index", "position"),
    [
        ([CPU], "auto", 0, 0),
        ([BLAS, CPU], "auto", 0, 1),
        ([*CUDA, CPU], "auto", 0, 0),
        ([*CUDA, CPU], "auto", 1, 1),
        ([CPU, *CUDA], "auto", 0, 1),
        ([IGPU, CPU], "auto", 0, 0),
        ([IGPU, VULKAN, CPU], "auto", 0, 1),  # own memory before shared
        ([IGPU, CPU, *CUDA], "AUTO", 1, 3),
        ([IGPU, VULKAN, CPU], "vulkan", 0, 0),
        ([IGPU, VULKAN, CPU], "Vulkan", 1, 1),
        ([*CUDA, CPU], "cpu", 0, 2),
        ([*CUDA, BLAS, CPU], "CPU", 0, 3),
        ([IGPU, *CUDA, CPU], "cuda", 1, 2),
        ([METAL, CPU], "metal", 0, 0),
        ([METAL, CPU], "Metal", 0, 0),
        ([METAL, CPU], "MTL", 0, 0),
    ],
)
def test_choose(found: Found, there: list[Device], backend: str, index: int, position: int) -> None:
    found(there)
    assert device.choose(backend, index) == [position]
    assert device.choose(backend, [index]) == [position]


@pytest.mark.parametrize(
    ("there", "backend", "index"),
    [
        ([CPU], "cuda", 0),
        ([CPU], "metal", 0),
        ([CPU], "cpu", 1),
        ([CPU], "auto", 1),
        ([CPU], "", 0),
        ([*CUDA, CPU], "auto", 2),
        ([*CUDA, CPU], "cuda", 2),
        ([BLAS, CPU], "blas", 0),  # works beside the CPU, holds no model
        ([IGPU, VULKAN, CPU], "igpu", 0),
    ],
)
def test_devices_that_are_not_there(
    found: Found, there: list[Device], backend: str, index: int
) -> None:
    found(there)
    listed = ", ".join(f"{d.backend.lower()} {d.index} (the {d.name} of a test)" for d in there)
    message = f"backend {backend!r} has no device {index}; there is: {listed}"
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$") as caught:
        device.choose(backend, index)
    assert isinstance(caught.value, RuntimeError)


def test_several_devices(found: Found) -> None:
    found([*CUDA, CPU])
    assert device.choose("cuda", [1, 0]) == [1, 0]
    assert device.choose("cuda") == [0]
    for wrong in ([0, 0], []):
        with pytest.raises(ValueError, match=r"expected devices that differ, at least one"):
            device.choose("cuda", wrong)
    with pytest.raises(ValueError, match="device is -1, expected 0 to"):
        device.choose("cuda", [0, -1])


def test_the_cpu_is_among_the_devices() -> None:
    cpus = [d for d in devices() if d.type == "cpu"]
    assert [(d.backend, d.index, d.is_gpu) for d in cpus] == [("CPU", 0, False)]
    assert 0 < cpus[0].memory_free <= cpus[0].memory_total
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert cpus[0].memory_total == pages


def test_a_model_on_a_device_that_is_not_there(small_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"^backend 'no-such' has no device 0; there is: "):
        Model(small_path, backend="no-such")
    with pytest.raises(DeviceError, match=r"^backend 'cpu' has no device 1; there is: "):
        Model(small_path, backend="cpu", device=1)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, r"device is -1, expected 0 to 2147483647"),
        (0.0, TypeError, r"device is 0\.0, expected an integer"),
        (True, TypeError, r"device is True, expected an integer"),
        ("0", TypeError, r"device is '0', expected an integer"),
    ],
)
def test_numbers_that_no_device_has(
    small_path: Path, value: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        Model(small_path, device=value)


def test_layers_for_a_gpu_are_clamped_with_a_warning(small_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^n_gpu_layers=2 clamped to 0: the device is the CPU$"):
        Model(small_path, backend="cpu", n_gpu_layers=2).close()
    for n in (0, -1):  # none asked for, and "all that there can be": nothing to say
        with Model(small_path, backend="cpu", n_gpu_layers=n) as model:
            assert model.n_gpu_layers == 0
    with pytest.raises(ValueError, match=r"^n_gpu_layers is -2, expected -1 to 2147483647$"):
        Model(small_path, backend="cpu", n_gpu_layers=-2)
