"""The way to libslowar: cffi in ABI mode, and the only file that uses it.

setup.py has cffi read the header and write ``_declarations.py``, so that nothing is parsed here.

``call`` runs a C function and turns its status into an exception; ``Handle`` owns a C object and
lets one caller at a time use it. The GIL is released while C runs.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from . import _library, errors
from ._declarations import ffi as _ffi

T = TypeVar("T")
C = TypeVar("C", bound="Closing")

ABI = 6
"""The ``slowar_abi`` this package was written against."""

_LOG_BYTES = 8192

_log = logging.getLogger("pyggml_slowar")

# slowar_status -> what to raise. SLOWAR_OS has no row: it becomes the OSError of its errno.
_EXCEPTIONS: dict[int, type[Exception]] = {
    1: ValueError,
    3: errors.ModelFormatError,
    4: errors.DeviceError,
    5: errors.DeviceMemoryError,
    6: errors.ContextFullError,
    7: errors.SessionStateError,
    8: errors.ComputeError,
}
_OS = 2

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _load() -> Any:
    path = _library.find(Path(__file__).parent, os.environ)
    try:
        library = ffi.dlopen(path)
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded: {error}. Reinstall pyggml-slowar.") from error
    found = library.slowar_abi()
    if found != ABI:
        raise ImportError(
            f"{path} has ABI {found}, this package needs {ABI}. Reinstall pyggml-slowar."
        )
    return library


ffi: Any = _ffi
lib = _load()

# cffi looks functions and types up once: here, and not while another thread forks.
for _name in dir(lib):
    getattr(lib, _name)
for _struct in ffi.list_types()[1]:
    try:
        ffi.sizeof(_struct)
    except ffi.error:
        continue  # an opaque one
    ffi.typeof(f"{_struct} *")
    ffi.typeof(f"{_struct}[]")
for _type in (
    "slowar_model **",
    "slowar_session **",
    "slowar_batch **",
    "slowar_server **",
    "char *[]",
    "char[]",
    "double *",
    "float[]",
    "int32_t *",
    "int32_t[]",
    "int64_t[4]",
):
    ffi.typeof(_type)


def text(array: Any) -> str:
    """A NUL-terminated C string as ``str``."""
    words: str = ffi.string(array).decode("utf-8", "replace")
    return words


def call(function: Callable[..., int], *args: Any, path: str | None = None) -> None:
    """Call a C function that takes ``slowar_error *`` last, and raise what its status reports.

    ``path`` is the file the call is about: it opens the message.
    """
    error = ffi.new("slowar_error *")
    status = function(*args, error)
    _pass_on_log()
    if status == 0:
        return
    message = text(error.message)
    if status == _OS:
        raise OSError(error.os_errno, message, path)
    if path is not None:
        message = f"{_CONTROL.sub('?', path)}: {message}"
    raise _EXCEPTIONS.get(status, errors.SlowARError)(message)


def _pass_on_log() -> None:
    """Hand ggml's own words to ``logging``."""
    if not lib.slowar_log_take(ffi.NULL, 0):
        return
    buffer = ffi.new("char[]", _LOG_BYTES)
    lib.slowar_log_take(buffer, _LOG_BYTES)
    for line in text(buffer).splitlines():
        _log.info("%s", line)


class Handle:
    """A C object of this process: closed once, used by one caller at a time.

    Parameters
    ----------
    pointer
        What the opening function wrote.
    close
        The C function that gives it back; also called when nobody refers to the handle any more.
    noun
        How messages call it.
    """

    def __init__(self, pointer: Any, close: Callable[[Any], None], noun: str) -> None:
        self._pointer = ffi.gc(pointer, close)
        self._noun = noun
        self._process = os.getpid()
        self._lock: Any = threading.RLock()

    @property
    def closed(self) -> bool:
        return self._pointer is None

    def check(self) -> None:
        """Raise SessionStateError unless the object can be used here and now."""
        # Before the lock: a child process may have inherited it locked, with nobody left to open
        # it.
        if os.getpid() != self._process:
            raise errors.SessionStateError(
                f"the {self._noun} belongs to process {self._process}, this is process "
                f"{os.getpid()}: open it after fork, not before"
            )
        if self._pointer is None:
            raise errors.SessionStateError(f"the {self._noun} is closed")

    def run(self, body: Callable[[Any], T]) -> T:
        """Call ``body`` with the C pointer, which is this thread's alone until it returns."""
        self.check()
        self._check_not_inside()
        # A bare `with` on the lock, in a plain function: between the parts of a context manager
        # written in Python, Ctrl-C could leave it taken.
        with self._lock:
            self.check()
            return body(self._pointer)

    def _check_not_inside(self) -> None:
        # A callback or a signal handler inside a call of this thread. threading.Condition asks the
        # lock the same way; a note of our own could be out of date when a signal comes.
        if self._lock._is_owned():
            raise errors.SessionStateError(
                f"the {self._noun} is busy: it was called again from inside its own call"
            )

    def close(self) -> None:
        """Give the object back; twice is fine. In another process than its own: only forget it."""
        if os.getpid() != self._process:
            self._pointer = None  # the destructor does nothing in this process
        else:
            self._check_not_inside()
            with self._lock:
                pointer, self._pointer = self._pointer, None
                if pointer is not None:
                    ffi.release(pointer)


def together(handles: Sequence[Handle], body: Callable[[list[Any]], T]) -> T:
    """Call ``body`` with the C pointers of all, which are this thread's alone until it returns."""
    # In one order everywhere, so that no two callers wait for each other. Each lock has its own
    # call, for the reason that Handle.run gives.
    order = sorted(handles, key=id)
    return _take(order, lambda: body([h._pointer for h in handles]))


def _take(handles: Sequence[Handle], body: Callable[[], T]) -> T:
    # A function that called itself as a closure would keep all of them alive until the next
    # garbage collection.
    if not handles:
        return body()
    return handles[0].run(lambda _: _take(handles[1:], body))


class Closing:
    """``with`` for an object that owns a handle: closed at the end of the block."""

    _handle: Handle

    def close(self) -> None:
        """Give the object and its memory back; twice is fine."""
        self._handle.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
