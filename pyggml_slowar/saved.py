"""A session's past in a file; docs/sessions.md has the format."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import errors
from ._arrays import check_tokens

if TYPE_CHECKING:
    from .model import Model
    from .session import Session

_MAGIC = b"SLOWARKV"
_VERSION = 1
_FIXED = struct.Struct("<8sII32s")
_PAGE = 4096
_MOST_HEADER = 65536
_PIECE = 1 << 22  # bytes hashed or written at a time, so that Ctrl-C gets through

KV_TYPES = ("f16", "bf16", "f32", "q8_0")
KERNELS = ("reference", "flash", "ggml")

# What JSON of another shape ends in.
_UNUSABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

# Of every tensor this many pieces of this size, evenly spread, go into the fingerprint.
_SAMPLES = 16
_SAMPLE_BYTES = 64


@dataclass(frozen=True)
class Past:
    """What a session knows of its positions."""

    fingerprint: bytes
    kv_type: str
    attention: str
    max_seq_len: int
    tokens: npt.NDArray[np.int32]
    """(n_past, 1 + n_codebook)"""
    kv: npt.NDArray[np.uint8]
    """(2 * n_layer, n_past, bytes of a row)"""


def fingerprint(model: Model) -> bytes:
    """SHA-256 of hyper-parameters, tensor table and sampled weights, read from the file."""
    # A tied head in another place than the table is a copy: the same bytes.
    by_offset = {t.offset: t for t in reversed(model.tensors())}
    tensors = [by_offset[offset] for offset in sorted(by_offset)]
    table = [(t.name, t.type, t.shape) for t in tensors]
    digest = hashlib.sha256(json.dumps([asdict(model.config), table]).encode())
    with Path(model.path).open("rb") as file:
        if state_of(model.path) != model._file_state:
            raise errors.SessionStateError(f"{model.path} has changed since it was opened")
        for tensor in tensors:
            for i in range(_SAMPLES):
                file.seek(tensor.offset + max(tensor.nbytes - _SAMPLE_BYTES, 0) * i // _SAMPLES)
                digest.update(file.read(min(_SAMPLE_BYTES, tensor.nbytes)))
    return digest.digest()


def state_of(path: str) -> tuple[int, ...] | None:
    """What changes when a file does; None: it is not there."""
    try:
        s = Path(path).stat()
    except (OSError, ValueError):
        return None
    return (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)


def write(path: Path, past: Past) -> None:
    """To a temporary name in the same folder, then renamed."""
    header = json.dumps(
        {
            "fingerprint": past.fingerprint.hex(),
            "kv_type": past.kv_type,
            "attention": past.attention,
            "max_seq_len": past.max_seq_len,
            "tokens": past.tokens.shape,
            "kv": past.kv.shape,
        }
    ).encode()
    tokens = past.tokens.astype("<i4").tobytes()
    blocks = [header, _padding(_FIXED.size + len(header)), tokens, _padding(len(tokens))]
    checksum = hashlib.sha256(b"".join(blocks))
    for piece in _pieces(past.kv):
        checksum.update(piece)

    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "there is something that is not a file", str(path))
    temporary = path.with_name(f".slowar-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(_FIXED.pack(_MAGIC, _VERSION, len(header), checksum.digest()))
            file.writelines(blocks)
            file.writelines(_pieces(past.kv))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path) -> Past:
    """Map a file and check all of it."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _bad(path, "it is not a regular file")
        size = os.fstat(file.fileno()).st_size
        fixed = file.read(_FIXED.size)
        if len(fixed) < _FIXED.size or not fixed.startswith(_MAGIC):
            raise _bad(path, "it is not a saved session")
        _, version, n_header, checksum = _FIXED.unpack(fixed)
        if version != _VERSION:
            raise _bad(path, f"it has format version {version}, expected {_VERSION}")
        if n_header > _MOST_HEADER or _FIXED.size + n_header > size:
            raise _bad(path, f"its header of {n_header} bytes does not fit in {size} bytes")
        data = np.memmap(file, np.uint8, "r")
    found = hashlib.sha256()
    for piece in _pieces(data[_FIXED.size :]):
        found.update(piece)
    if found.digest() != checksum:
        raise _bad(path, "it was cut or altered: its checksum does not fit")
    try:
        return _parse(data, n_header)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise _bad(path, f"its header cannot be used: {error}") from None


def _parse(data: npt.NDArray[np.uint8], n_header: int) -> Past:
    head = json.loads(data[_FIXED.size : _FIXED.size + n_header].tobytes())
    n_past, n_row = (int(n) for n in head["tokens"])
    shape = tuple(int(n) for n in head["kv"])
    if len(shape) != 3 or shape[1] != n_past or min(n_past, n_row, *shape) < 0:
        raise ValueError(f"shapes {head['tokens']} and {head['kv']} do not belong together")
    if head["kv_type"] not in KV_TYPES or head["attention"] not in KERNELS:
        raise ValueError(f"KV type {head['kv_type']!r}, attention {head['attention']!r}")
    if not n_past <= head["max_seq_len"] < 2**30 or head["max_seq_len"] < 1:
        raise ValueError(f"max_seq_len {head['max_seq_len']!r} with {n_past} positions")
    begin = _padded(_FIXED.size + n_header)
    middle = begin + 4 * n_past * n_row
    kv = data[_padded(middle) :]
    if kv.size != np.prod(shape, dtype=object):
        raise ValueError(f"{kv.size} bytes of keys and values, expected {shape}")
    return Past(
        fingerprint=bytes.fromhex(head["fingerprint"]),
        kv_type=str(head["kv_type"]),
        attention=str(head["attention"]),
        max_seq_len=int(head["max_seq_len"]),
        tokens=data[begin:middle].view("<i4").reshape(n_past, n_row).astype(np.int32),
        kv=kv.reshape(shape),
    )


def load(model: Model, path: Path, options: dict[str, Any]) -> Session:
    """A session with the past of a file."""
    past = read(path)
    if past.fingerprint != model.fingerprint():
        raise _bad(path, "it was saved with another model")
    n = len(past.tokens)
    length = options.pop("max_seq_len", None)
    length = past.max_seq_len if length is None else length
    attention = options.pop("attention", past.attention)
    if options.setdefault("kv_type", past.kv_type) != past.kv_type:
        raise ValueError(f"kv_type is {options['kv_type']!r}, {path} has {past.kv_type!r}")
    session = model.session(length, attention=attention, **options)
    try:
        if session._kernel != past.attention:
            raise ValueError(f"attention is {attention!r}, {path} has {past.attention!r}")
        if n > session.max_seq_len:
            raise errors.ContextFullError(
                f"max_seq_len is {session.max_seq_len}, {path} has {n} positions"
            )
        expected = session._kv_shape(n)
        if past.kv.shape != expected or past.tokens.shape[1] != 1 + model.config.n_codebook:
            raise _bad(path, f"keys and values have shape {past.kv.shape}, expected {expected}")

        def fill(pointer: Any) -> None:
            if n > 0:
                check_tokens(pointer, past.tokens)
                session._write_kv(pointer, past.tokens, past.kv)

        session._locked(fill)
    except BaseException:
        session.close()
        raise
    return session


def _at_once(path: str, flags: int) -> int:
    """Opens a FIFO that nobody writes to as well, and does not wait for somebody."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _bad(path: Path, why: str) -> errors.ModelFormatError:
    return errors.ModelFormatError(f"{path}: {why}")


def _padded(n: int) -> int:
    return -(-n // _PAGE) * _PAGE


def _padding(n: int) -> bytes:
    return bytes(_padded(n) - n)


def _pieces(array: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
    flat = array.reshape(-1)
    return (flat[at : at + _PIECE].data for at in range(0, flat.size, _PIECE))
