"""Devices that ggml found, how a backend flag picks one, and how many threads a CPU is worth."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
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


def build_info() -> str:
    """Version and commit of ggml, the level of the CPU code, the backends compiled in."""
    return text(lib.slowar_build_info())


def devices(servers: Sequence[str] = ()) -> list[Device]:
    """All devices of the compiled-in backends, in ggml's order; the CPU is always among them.

    Parameters
    ----------
    servers
        ``"host:port"`` of device servers (``slowar serve-device``), whose devices follow.

    Raises
    ------
    DeviceError
        A server does not answer within five seconds.
    """
    here = range(lib.slowar_device_count())
    return [device_at(i) for i in [*here, *_lent(servers)]]


def _lent(servers: Sequence[str]) -> list[int]:
    """Where the devices of servers are."""
    if isinstance(servers, str):
        raise TypeError(f"servers is {servers!r}, expected a list of such")
    found: list[int] = []
    first, n = ffi.new("int32_t *"), ffi.new("int32_t *")
    for server in servers:
        if not isinstance(server, str) or "\0" in server:
            raise ValueError(f'server {server!r}, expected "host:port"')
        call(lib.slowar_server_devices, server.encode(), first, n)
        found += [i for i in range(first[0], first[0] + n[0]) if i not in found]
    return found


def device_at(i: int) -> Device:
    """Device ``i`` of libslowar, as it is now."""
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


def choose(
    backend: str, device: int | Sequence[int] | None = None, servers: Sequence[str] = ()
) -> list[int]:
    """Which of libslowar's devices a backend flag means.

    ``"auto"`` is the first GPU, with its own memory if there is one, else the CPU; with ``servers``
    it is ``"rpc"``: the devices that they lend. Any other name is a backend's, upper or lower case.
    ``device`` counts within it, one or several; None: the first, of servers all.

    Raises
    ------
    DeviceError
        The backend is not compiled in or has no such device; the message lists what there is. Or a
        server does not answer.
    """
    from ._arrays import as_int  # numpy comes with it, and a list of devices needs none

    if not isinstance(backend, str):
        raise TypeError(f"backend is {backend!r}, expected a str")
    name = _ALIASES.get(backend.lower(), backend.lower())
    lent = _lent(servers)
    if name == "rpc" or (name == "auto" and lent):
        if not lent:
            raise errors.DeviceError("backend 'rpc' needs servers=[\"host:port\", ...]")
        matching = lent
    elif lent:
        raise ValueError(f"backend is {backend!r}, expected 'rpc' with servers")
    else:
        found = devices()
        kinds = [d.type for d in found]
        best = next(kind for kind in ("gpu", "igpu", "cpu") if kind in kinds)
        matching = [
            i
            for i, d in enumerate(found)
            if (d.type == best if name == "auto" else d.backend.lower() == name)
            and d.type != "other"
        ]
    if device is None:
        wanted = list(range(len(matching))) if lent else [0]
    else:
        several = device if isinstance(device, Sequence) else [device]
        wanted = [as_int("device", i, 0, 2**31 - 1) for i in several]
    for i in wanted:
        if i >= len(matching):
            there = ", ".join(
                f"{d.backend.lower()} {d.index} ({d.description})" for d in devices(servers)
            )
            raise errors.DeviceError(f"backend {backend!r} has no device {i}; there is: {there}")
    if not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(f"device is {device!r}, expected devices that differ, at least one")
    return [matching[i] for i in wanted]


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
