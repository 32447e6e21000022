"""Devices that ggml found, how a backend flag picks one, and how many threads a CPU is worth."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from . import errors
from ._native import call, ffi, lib, text

_TYPES = ("cpu", "gpu", "igpu", "other")

# ggml's registry calls Metal "MTL".
_ALIASES = {"metal": "mtl"}


@dataclass(frozen=True)
class Device:
    """A device that ggml found.

    Attributes
    ----------
    backend
        ggml's registry name: ``"CPU"``, ``"CUDA"``, ``"Vulkan"``, ``"MTL"`` (Metal), ...
    index
        Counted within its backend: the ``device=`` of ``Model``.
    type
        ``"cpu"``, ``"gpu"``, ``"igpu"`` (a GPU on host memory) or ``"other"``.
    memory_free, memory_total
        Bytes. On the CPU, free is what the system and this process's cgroup still grant.
    """

    backend: str
    index: int
    name: str
    description: str
    type: str
    memory_free: int
    memory_total: int

    @property
    def is_gpu(self) -> bool:
        return self.type in ("gpu", "igpu")


def devices() -> list[Device]:
    """All devices of the compiled-in backends, in ggml's order; the CPU is always among them."""
    return [_device(i) for i in range(lib.slowar_device_count())]


def _device(i: int) -> Device:
    d = ffi.new("slowar_device *")
    call(lib.slowar_device_get, i, d)
    return Device(
        backend=text(d.backend),
        index=d.index,
        name=text(d.name),
        description=text(d.description),
        type=_TYPES[d.type],
        memory_free=d.memory_free,
        memory_total=d.memory_total,
    )


def choose(backend: str, device: int) -> int:
    """The position in ``devices()`` that a backend flag means.

    ``"auto"`` is the first GPU, with its own memory if there is one, else the CPU. Any other name
    is a backend's, upper or lower case, and ``device`` counts within it.

    Raises
    ------
    DeviceError
        The backend is not compiled in or has no such device; the message lists what there is.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend is {backend!r}, expected a str")
    found = devices()
    if backend.lower() == "auto":
        kinds = [d.type for d in found]
        best = next(kind for kind in ("gpu", "igpu", "cpu") if kind in kinds)
        matching = [i for i, kind in enumerate(kinds) if kind == best]
    else:
        name = _ALIASES.get(backend.lower(), backend.lower())
        matching = [
            i for i, d in enumerate(found) if d.backend.lower() == name and d.type != "other"
        ]
    if not 0 <= device < len(matching):
        there = ", ".join(f"{d.backend.lower()} {d.index} ({d.description})" for d in found)
        raise errors.DeviceError(f"backend {backend!r} has no device {device}; there is: {there}")
    return matching[device]


def default_threads() -> int:
    """The least of affinity, cgroup CPU quota and physical cores: the threads that pay here."""
    limits = [_affinity(), _cgroup_quota(Path("/sys/fs/cgroup")), psutil.cpu_count(logical=False)]
    return min((limit for limit in limits if limit), default=1)


def _affinity() -> int | None:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def _cgroup_quota(root: Path) -> int | None:
    """CPUs that a cgroup's quota pays for, rounded up; None without a quota.

    v2's file first, then v1's two. What cannot be read or understood is no quota.
    """
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            words = " ".join((root / name).read_text() for name in names)
        except OSError:
            continue
        try:
            quota, period = (int(word) for word in words.split())
        except ValueError:
            return None  # v2 writes "max"
        return math.ceil(quota / period) if quota > 0 and period > 0 else None
    return None
