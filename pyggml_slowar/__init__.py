"""The Slow-AR transformer of Fish Audio's S2 Pro text-to-speech model on ggml.

>>> import pyggml_slowar as slowar
>>> with slowar.Model("s2-pro-q8_0.gguf") as model, model.session(max_seq_len=1500) as session:
...     out = session.prefill(prompt)   # integers (11, n): row 0 token ids, rows 1-10 codes
...     out = session.step(frame)       # integers (11,)
...     out.logits, out.hidden          # float32 (155776,), (2560,)
"""

from __future__ import annotations

from .device import Device, default_threads, devices
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
from .model import Config, Estimate, Model, TensorInfo
from .placement import Placed
from .prefix_cache import PrefixCache, PrefixStats
from .runner import BatchRunner, Result, RunnerStats
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
    "Session",
    "SessionStateError",
    "SlowARError",
    "TensorInfo",
    "default_threads",
    "devices",
    "prefill_chunk",
]
