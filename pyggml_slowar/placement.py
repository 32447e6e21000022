"""Which tensor goes to which device, decided before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

TABLES = ("embeddings.weight", "codebook_embeddings.weight")
ENDS = ("norm.weight", "output.weight")

HOST = -1
"""The place beside the CPU."""


@dataclass(frozen=True)
class Placed:
    """A group of tensors, a cache or compute memory, and where it is.

    Attributes
    ----------
    what
        ``"embeddings"``, ``"layers 0-17"``, ``"head"``, ``"KV cache"``, ``"compute"``.
    device
        Name of the device: ``"CPU"``, ``"CUDA0"``, ``"RPC0"``, ...
    nbytes
        Bytes there.
    note
        Why it is not where it was asked for; empty: it is.
    """

    what: str
    device: str
    nbytes: int
    note: str = ""


def split_layers(n_layer: int, n_gpu_layers: int, free: Sequence[int]) -> list[int]:
    """The device of each layer: the first ``n_gpu_layers`` in proportion to free memory.

    Parameters
    ----------
    free
        Bytes of each device; all 0: nobody says, equal parts.

    Returns
    -------
    list of int
        Positions in ``free``, ascending, then ``HOST`` for the layers behind.
    """
    shares = [max(f, 0) for f in free] if any(free) else [1] * len(free)
    ends = [round(n_gpu_layers * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    places = [next(i for i, end in enumerate(ends) if il < end) for il in range(n_gpu_layers)]
    return places + [HOST] * (n_layer - n_gpu_layers)


def default_places(layers: Sequence[int], *, tables: bool) -> dict[str, int]:
    """Where the tensors go that belong to no layer.

    When all layers are on devices, the last norm and the head are beside the last of them, and the
    tables (if ``tables``) beside the first.
    """
    everything = bool(layers) and HOST not in layers
    first = layers[0] if everything and tables else HOST
    last = layers[-1] if everything else HOST
    return dict.fromkeys(TABLES, first) | dict.fromkeys(ENDS, last)


def overridden(
    places: Mapping[str, int], rules: Mapping[str, str | int], devices: Sequence[str]
) -> dict[str, int]:
    """``places`` after rules of the form {pattern: device}; the first that matches a name wins.

    Raises
    ------
    ValueError
        A pattern matches no tensor, or a device is not one of ``devices``.
    """
    out = dict(places)
    done: set[str] = set()
    for pattern, device in rules.items():
        place = _place(device, devices)
        names = [name for name in places if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"tensor_placement: no tensor is named like {pattern!r}")
        out.update({name: place for name in names if name not in done})
        done.update(names)
    return out


def _place(device: str | int, devices: Sequence[str]) -> int:
    if isinstance(device, str) and device.lower() == "cpu":
        return HOST
    names = [name.lower() for name in devices]
    if isinstance(device, str) and device.lower() in names:
        return names.index(device.lower())
    if isinstance(device, int) and not isinstance(device, bool) and 0 <= device < len(devices):
        return device
    there = ", ".join(["cpu", *devices])
    raise ValueError(f"tensor_placement: device {device!r}, expected one of {there}, or a position")


def groups(rows: Iterable[tuple[str, int, str, int, str]]) -> list[Placed]:
    """Tensors (name, layer, device, nbytes, note) of a model, runs of one kind in one place."""

    def kind(row: tuple[str, int, str, int, str]) -> tuple[str, str, str]:
        name, layer, device, _, note = row
        noun = "layers" if layer >= 0 else "embeddings" if name in TABLES else "head"
        return noun, device, note

    out = []
    for (noun, device, note), run in groupby(rows, kind):
        members = list(run)
        layers = [layer for _, layer, *_ in members]
        span = f" {layers[0]}-{layers[-1]}" if noun == "layers" else ""
        out.append(Placed(noun + span, device, sum(n for *_, n, _ in members), note))
    return out


def placed_memory(memory: Any, devices: Sequence[str]) -> list[Placed]:
    """A session's cache and compute memory (``slowar_session_memory``), device by device."""
    return [
        Placed(what, device, n)
        for what, taken in (("KV cache", memory.kv), ("compute", memory.compute))
        for device, n in zip(
            [*devices, "CPU"], [*taken.device[0 : len(devices)], taken.host], strict=True
        )
        if n > 0
    ]


def fitting_layers(layers: Sequence[int], free: Sequence[int], reserve: int) -> int:
    """How many layers, fewer than all, fit where ``split_layers`` would put them.

    Parameters
    ----------
    layers
        Bytes of each.
    free
        Bytes of each device, of which ``reserve`` are wanted for something else.
    """
    room = [max(f - reserve, 0) for f in free]
    for n in reversed(range(len(layers))):
        places = split_layers(n, n, free)
        taken = [
            sum(size for size, at in zip(layers[:n], places, strict=True) if at == i)
            for i in range(len(free))
        ]
        if all(t <= r for t, r in zip(taken, room, strict=True)):
            return n
    return 0
