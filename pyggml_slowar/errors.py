"""One exception class for each way a call can fail; each is also the builtin it resembles."""

from __future__ import annotations


class SlowARError(Exception):
    """Base of everything this package raises of its own."""


class ModelFormatError(SlowARError, ValueError):
    """The file is not a GGUF, is cut short, or lacks or mistypes a key or a tensor."""


class DeviceError(SlowARError, RuntimeError):
    """The backend is not compiled in, or there is no such device, or it cannot be opened."""


class DeviceMemoryError(SlowARError, MemoryError):
    """No memory for weights, KV cache or compute."""


class ContextFullError(SlowARError, ValueError):
    """n_past + n_tokens would exceed max_seq_len."""


class SessionStateError(SlowARError, RuntimeError):
    """No KV cache yet, the object is closed or busy, or it belongs to another process."""


class ComputeError(SlowARError, RuntimeError):
    """The device failed while evaluating."""


class QueueFullError(SlowARError, RuntimeError):
    """As many requests wait as may."""
