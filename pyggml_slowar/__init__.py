"""The Slow-AR transformer of Fish Audio's S2 Pro text-to-speech model on ggml.

>>> import pyggml_slowar as slowar
>>> with slowar.Model("s2-pro-q8_0.gguf") as model, model.session(max_seq_len=1500) as session:
...     out = session.prefill(prompt)   # integers (11, n): row 0 token ids, rows 1-10 codes
...     out = session.step(frame)       # integers (11,)
...     out.logits, out.hidden          # float32 (155776,), (2560,)

Importing the package loads next to nothing: libslowar and numpy come with the first name that is
used.
"""

from __future__ import annotations

import logging  # noqa: F401  its hooks for fork have to be there before those below
import os
import threading
from typing import TYPE_CHECKING, Any

from .errors import (
    ComputeError,
    ContextFullError,
    DeviceError,
    DeviceMemoryError,
    ModelFormatError,
    QueueFullError,
    SessionStateError,
    SlowARError,
)

if TYPE_CHECKING:
    from .device import Device, default_threads, devices
    from .fast_ar import FastAR, FastConfig
    from .generation import Frame, Generation, Timings, generate, generate_batch, stream
    from .model import Config, Estimate, Model, TensorInfo
    from .placement import Placed
    from .prefix_cache import PrefixCache, PrefixStats
    from .prompts import prompt
    from .runner import BatchRunner, Result, RunnerStats
    from .sampler import Sampler
    from .server import DeviceServer
    from .session import Fallback, Logits, Node, Output, Session, prefill_chunk

__version__ = "0.1.0"

__all__ = [
    "BatchRunner",
    "ComputeError",
    "Config",
    "ContextFullError",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "DeviceServer",
    "Estimate",
    "Fallback",
    "FastAR",
    "FastConfig",
    "Frame",
    "Generation",
    "Logits",
    "Model",
    "ModelFormatError",
    "Node",
    "Output",
    "Placed",
    "PrefixCache",
    "PrefixStats",
    "QueueFullError",
    "Result",
    "RunnerStats",
    "Sampler",
    "Session",
    "SessionStateError",
    "SlowARError",
    "TensorInfo",
    "Timings",
    "default_threads",
    "devices",
    "generate",
    "generate_batch",
    "prefill_chunk",
    "prompt",
    "stream",
]

# The file of each name that is not there yet.
_HOMES = {
    name: home
    for home, names in {
        "device": ("Device", "default_threads", "devices"),
        "fast_ar": ("FastAR", "FastConfig"),
        "generation": (
            "Frame",
            "Generation",
            "Timings",
            "generate",
            "generate_batch",
            "stream",
        ),
        "model": ("Config", "Estimate", "Model", "TensorInfo"),
        "placement": ("Placed",),
        "prefix_cache": ("PrefixCache", "PrefixStats"),
        "prompts": ("prompt",),
        "runner": ("BatchRunner", "Result", "RunnerStats"),
        "sampler": ("Sampler",),
        "server": ("DeviceServer",),
        "session": ("Fallback", "Logits", "Node", "Output", "Session", "prefill_chunk"),
    }.items()
    for name in names
}

# Held while a name is loaded, and by fork: what another thread had begun to import, a child would
# wait for without end.
_loading = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_loading.acquire,
        after_in_parent=_loading.release,
        after_in_child=_loading.release,
    )

if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        with _loading:
            # libslowar before all else: where this CPU is too old, it says so and numpy does not.
            import_module("._native", __name__)
            value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
            globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
