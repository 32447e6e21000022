"""GGUF files taken apart and put together again, right or wrong, for the loader's tests.

Written from the format's description with `struct` alone, so that it shares no mistake with ggml's
reader or with the `gguf` package. `Gguf.parse(data).to_bytes() == data` for a file whose tensors
lie one after the other; between the two, anything can be changed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

# Types of a value -> struct's letter. Strings and arrays are written by hand.
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LETTERS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?"} | {
    U64: "Q",
    I64: "q",
    F64: "d",
}
# As ggml spells them in its messages.
NAMES = ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "arr", "u64", "i64", "f64"]

# Types of a tensor, by ggml's name: code, weights in a block, bytes of a block.
TYPES = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q4_1": (3, 32, 20),
    "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34),
    "q8_1": (9, 32, 36),
    "q2_K": (10, 256, 84),
    "q3_K": (11, 256, 110),
    "q4_K": (12, 256, 144),
    "q5_K": (13, 256, 176),
    "q6_K": (14, 256, 210),
    "q8_K": (15, 256, 292),
    "iq2_xxs": (16, 256, 66),
    "iq2_xs": (17, 256, 74),
    "iq3_xxs": (18, 256, 98),
    "iq1_s": (19, 256, 50),
    "iq4_nl": (20, 32, 18),
    "iq3_s": (21, 256, 110),
    "iq2_s": (22, 256, 82),
    "iq4_xs": (23, 256, 136),
    "i8": (24, 1, 1),
    "i16": (25, 1, 2),
    "i32": (26, 1, 4),
    "i64": (27, 1, 8),
    "f64": (28, 1, 8),
    "iq1_m": (29, 256, 56),
    "bf16": (30, 1, 2),
    "tq1_0": (34, 256, 54),
    "tq2_0": (35, 256, 66),
    "mxfp4": (39, 32, 17),
    "nvfp4": (40, 64, 36),
    "q1_0": (41, 128, 18),
    "q2_0": (42, 64, 18),
}
_SIZES = {code: (block, size) for code, block, size in TYPES.values()}


@dataclass
class Array:
    type: int
    items: list[Value]


Value = bool | int | float | bytes | Array


@dataclass
class Pair:
    key: str
    type: int
    value: Value


@dataclass
class Tensor:
    """`ne` is ggml order. `offset` None: where its data comes to lie."""

    name: str
    ne: list[int]
    type: int
    data: bytes
    offset: int | None = None

    @property
    def n_bytes(self) -> int:
        block, size = _SIZES[self.type]
        n = size
        for i, length in enumerate(self.ne):
            n *= length // block if i == 0 else length
        return n


@dataclass
class Gguf:
    """`n_pairs` and `n_tensors`: what the header says where it lies, None for the truth."""

    pairs: list[Pair] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    order: str = "<"
    n_pairs: int | None = None
    n_tensors: int | None = None
    tail: bytes = b""

    # Finding

    def pair(self, key: str) -> Pair:
        return next(pair for pair in self.pairs if pair.key == key)

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    @property
    def alignment(self) -> int:
        for pair in self.pairs:
            if pair.key == "general.alignment" and isinstance(pair.value, int) and pair.value > 0:
                return pair.value
        return 32

    # Writing

    def header(self) -> bytes:
        """Everything before the data, its padding too."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        out = self.magic + self._pack("IQQ", self.version, n_tensors, n_pairs)
        for pair in self.pairs:
            out += self._value(STRING, pair.key.encode()) + self._pack("I", pair.type)
            out += self._value(pair.type, pair.value)
        place = 0
        for tensor in self.tensors:
            out += self._value(STRING, tensor.name.encode())
            out += self._pack("I", len(tensor.ne))
            out += self._pack("Q" * len(tensor.ne), *(n % 2**64 for n in tensor.ne))
            offset = place if tensor.offset is None else tensor.offset
            out += self._pack("IQ", tensor.type, offset)
            place += self._padded(len(tensor.data))
        return out.ljust(self._padded(len(out)), b"\0")

    def to_bytes(self) -> bytes:
        out = self.header()
        for i, tensor in enumerate(self.tensors):
            last = i == len(self.tensors) - 1
            n = len(tensor.data)
            out += tensor.data if last else tensor.data.ljust(self._padded(n), b"\0")
        return out + self.tail

    def _padded(self, n: int) -> int:
        return n + -n % self.alignment

    def _pack(self, letters: str, *values: bool | int | float) -> bytes:
        return struct.pack(self.order + letters, *values)

    def _value(self, type: int, value: Value) -> bytes:
        if isinstance(value, Array):
            out = self._pack("IQ", value.type, len(value.items))
            return out + b"".join(self._value(value.type, item) for item in value.items)
        if isinstance(value, bytes):
            return self._pack("Q", len(value)) + value
        return self._pack(LETTERS[type], value)

    # Reading

    @classmethod
    def parse(cls, data: bytes) -> Gguf:
        """A valid little-endian file."""
        at = _Cursor(data)
        out = cls(magic=at.take(4), version=at.number("I"))
        n_tensors, n_pairs = at.number("Q"), at.number("Q")
        for _ in range(n_pairs):
            key, type = at.string().decode(), at.number("I")
            out.pairs.append(Pair(key, type, at.value(type)))
        for _ in range(n_tensors):
            name = at.string().decode()
            ne = [at.number("Q") for _ in range(at.number("I"))]
            out.tensors.append(Tensor(name, ne, at.number("I"), b"", at.number("Q")))
        start = end = out._padded(at.place)
        place = 0
        for tensor in out.tensors:
            assert tensor.offset is not None
            end = start + tensor.offset + tensor.n_bytes
            tensor.data = data[start + tensor.offset : end]
            if tensor.offset == place:
                tensor.offset = None
            place += out._padded(tensor.n_bytes)
        out.tail = data[end:]
        return out


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def take(self, n: int) -> bytes:
        self.place += n
        return self.data[self.place - n : self.place]

    def number(self, letter: str) -> int:
        (value,) = struct.unpack("<" + letter, self.take(struct.calcsize(letter)))
        assert isinstance(value, int)
        return value

    def string(self) -> bytes:
        return self.take(self.number("Q"))

    def value(self, type: int) -> Value:
        if type == STRING:
            return self.string()
        if type == ARRAY:
            item_type = self.number("I")
            return Array(item_type, [self.value(item_type) for _ in range(self.number("Q"))])
        letter = LETTERS[type]
        value: Value = struct.unpack("<" + letter, self.take(struct.calcsize(letter)))[0]
        return value
