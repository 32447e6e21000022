"""Lending a device of this machine to models that are evaluated on others."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from ipaddress import ip_address

from ._arrays import as_int
from ._native import Handle, call, ffi, lib
from .device import choose, device_at
from .session import as_threads


class DeviceServer:
    """A device served at a port of this machine: ``Model(..., servers=["host:port"])`` elsewhere.

    Clients are neither authenticated nor is anything encrypted: whoever can connect can read what
    is computed, take the device's memory, and end the process. So it listens at the loopback
    address unless told otherwise, and then warns. It serves one process after the other: while one
    is connected, others are not answered.

    Parameters
    ----------
    host
        Address of this machine to listen at.
    port
        0: any that is free.
    backend, device
        As ``Model`` has them.
    n_threads
        CPU threads of an evaluation, 1 to 512; None: ``default_threads()``.
    memory
        Bytes that a client may take; None: what there is.
    max_buffer
        Bytes of one allocation; None: as the device has it.

    Raises
    ------
    OSError
        The address cannot be listened at.
    DeviceError
        There is no such device.
    SessionStateError
        This process has a server already.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 50052,
        *,
        backend: str = "auto",
        device: int | Sequence[int] | None = None,
        n_threads: int | None = None,
        memory: int | None = None,
        max_buffer: int | None = None,
    ) -> None:
        if not isinstance(host, str) or "\0" in host:
            raise ValueError(f"host is {host!r}, expected an address")
        chosen = choose(backend, device)
        if len(chosen) > 1:
            raise ValueError(f"device is {device!r}, expected one")
        self.device = device_at(chosen[0])
        self.host = host
        params = ffi.new("slowar_server_params *")
        address = ffi.new("char[]", host.encode())
        params.device = chosen[0]
        params.host = address
        params.port = as_int("port", port, 0, 65535)
        params.n_threads = as_threads(n_threads)
        params.memory = 0 if memory is None else as_int("memory", memory, 1, 2**62)
        params.max_buffer = 0 if max_buffer is None else as_int("max_buffer", max_buffer, 1, 2**62)
        out, bound = ffi.new("slowar_server **"), ffi.new("int32_t *")
        call(lib.slowar_server_open, out, params, bound)
        self._handle = Handle(out[0], lib.slowar_server_close, "server")
        self.port: int = bound[0]
        if not _is_loopback(host):
            warnings.warn(
                f"anybody who can reach {host}:{self.port} can use this device, read what is "
                f"computed and end this process: nothing is authenticated or encrypted",
                stacklevel=2,
            )

    def run(self) -> None:
        """Serve until the process ends. Ctrl-C raises here, and what is served goes on.

        Raises
        ------
        ComputeError
            It cannot listen any more.
        """
        failure: list[BaseException] = []

        def serve() -> None:
            try:
                self._handle.run(lambda pointer: call(lib.slowar_server_run, pointer))
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=serve, name="slowar-device-server", daemon=True)
        thread.start()
        thread.join()
        raise failure[0]


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
