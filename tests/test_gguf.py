"""Files that are no model of ours: each is refused in one line that names what is wrong with it.

ggml ends the process on much of what it dislikes, so every file is opened in a child, which prints
a line for each. It must live to the end, with an exit status of 0 and nothing on stderr.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_edit import (
    ARRAY,
    BOOL,
    F32,
    F64,
    LETTERS,
    NAMES,
    STRING,
    TYPES,
    U8,
    U32,
    Array,
    Gguf,
    Pair,
    Tensor,
    Value,
)

import pyggml_slowar as slowar
from pyggml_slowar.make_model import TINY, make_model

pytestmark = pytest.mark.sanitize

GOLDEN = Path(__file__).resolve().parent / "golden"

# No two lengths alike that a shape check could confuse, in 12 kB.
SMALL = replace(
    TINY,
    n_vocab=20,
    n_embd=8,
    n_ff=14,
    n_head=2,
    n_head_kv=1,
    head_dim=6,
    n_codebook=2,
    codebook_size=5,
    semantic_begin_id=10,
    semantic_end_id=14,
    tie_word_embeddings=False,
)

# One layer whose rows every type of tensor can hold.
WIDE = replace(SMALL, n_embd=256, n_ff=256, n_layer=1, head_dim=128)

KEYS = {
    "general.architecture": STRING,
    "fish-speech.context_length": U32,
    "fish-speech.vocab_size": U32,
    "fish-speech.embedding_length": U32,
    "fish-speech.feed_forward_length": U32,
    "fish-speech.block_count": U32,
    "fish-speech.attention.head_count": U32,
    "fish-speech.attention.head_count_kv": U32,
    "fish-speech.rope.freq_base": F32,
    "fish-speech.attention.layer_norm_rms_epsilon": F32,
    "fish_speech.num_codebooks": U32,
    "fish_speech.codebook_size": U32,
    "fish_speech.semantic_begin_id": U32,
    "fish_speech.semantic_end_id": U32,
    "fish_speech.tie_word_embeddings": BOOL,
    "fish_speech.attention_qk_norm": BOOL,
    "fish_speech.scale_codebook_embeddings": BOOL,
    "fish_speech.norm_fastlayer_input": BOOL,
}
OPTIONAL = "fish_speech.norm_fastlayer_input"

# What ends a line or moves the cursor of a terminal.
CONTROL = re.compile(r"[\x00-\x1f\x7f]")

# Opens each file it is told of; if it is a model, evaluates a text and a semantic position.
OPENER = """
import dataclasses, json, sys, warnings
import numpy as np
import pyggml_slowar as slowar

def evaluate(model):
    c = model.config
    prompt = np.zeros((1 + c.n_codebook, 2), np.int32)
    prompt[0, 1] = c.semantic_begin_id
    with model.session(2, n_threads=1) as session:
        out = session.prefill(prompt)
    shapes = [list(a.shape) for a in (out.hidden, out.logits)]
    assert shapes == [[c.n_embd], [c.n_vocab]], shapes
    return bool(np.isfinite(out.hidden).all() and np.isfinite(out.logits).all())

def attempt(path):
    out = {"path": path, "config": None, "finite": None, "kinds": [], "message": ""}
    try:
        with slowar.Model(path, backend="cpu") as model:
            out["config"] = dataclasses.asdict(model.config)
            out["finite"] = evaluate(model)
    except Exception as error:
        out["kinds"] = [kind.__name__ for kind in type(error).__mro__]
        out["message"] = str(error)
    return out

warnings.simplefilter("ignore")
for line in sys.stdin:
    print(json.dumps(attempt(json.loads(line))), flush=True)
"""

# For one file. The slowest takes some milliseconds; a file that is waited for takes for ever.
TIME_LIMIT = 60


@dataclass(frozen=True)
class Outcome:
    """What became of a file. `kinds`: the exception's class and its bases; empty without one."""

    path: str
    config: dict[str, Any] | None
    finite: bool | None
    kinds: list[str]
    message: str

    @property
    def opened(self) -> bool:
        return self.config is not None

    @property
    def words(self) -> str:
        """The message without the path, which holds names of tests."""
        return self.message.removeprefix(f"{self.path}: ")


@dataclass(frozen=True)
class Bad:
    """A file, and what its refusal must say."""

    what: str
    data: bytes
    says: Sequence[str] = ()


class Child:
    """A process that opens files. It must survive each of them and have nothing to say."""

    def __init__(self, program: str) -> None:
        self._resources = contextlib.ExitStack()
        enter = self._resources.enter_context
        self._stderr = enter(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self._process = enter(
            subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # which takes seconds
            )
        )

    def open(self, path: Path) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        clock = threading.Timer(TIME_LIMIT, self._process.kill)
        clock.start()
        try:
            self._process.stdin.write(json.dumps(str(path)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            clock.cancel()
        if not line.startswith("{") or self._words():
            status, rest, words = self.close()
            said = (line + rest + words).strip()
            raise AssertionError(f"at {path} the child ended with {status} and said: {said}")
        outcome = Outcome(**json.loads(line))
        assert outcome.path == str(path)
        return outcome

    def _words(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    @property
    def closed(self) -> bool:
        return self._stderr.closed

    def close(self) -> tuple[int, str, str]:
        """Exit status, what it still wrote to stdout, and all that it wrote to stderr."""
        with self._resources:
            rest, _ = self._process.communicate()
            return self._process.returncode, rest, self._words()


_children: list[Child] = []


@pytest.fixture(scope="module", autouse=True)
def last_child() -> Iterator[None]:
    yield
    for child in _children:
        if not child.closed:
            assert child.close() == (0, "", "")


def open_each(paths: Sequence[Path]) -> list[Outcome]:
    """Every file opened in one child after the other; it serves the next test too, if it lives."""
    if not _children or _children[-1].closed:
        _children.append(Child(OPENER))
    return [_children[-1].open(path) for path in paths]


def write_all(folder: Path, files: Sequence[bytes]) -> list[Path]:
    paths = [folder / f"{i}.gguf" for i in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    return paths


def complaint(bad: Bad, outcome: Outcome) -> str | None:
    if not outcome.kinds:
        return "was opened"
    if outcome.kinds[0] != "ModelFormatError" or "ValueError" not in outcome.kinds:
        return f"{outcome.kinds[0]}: {outcome.message}"
    if outcome.opened:
        return f"was refused after it was opened: {outcome.message}"
    if outcome.words == outcome.message:
        return f"does not begin with the path: {outcome.message}"
    if CONTROL.search(outcome.words):
        return f"is not one line of text: {outcome.words!r}"
    unsaid = [word for word in bad.says if word not in outcome.words]
    return f"does not say {unsaid}: {outcome.words}" if unsaid else None


def check_refused(folder: Path, files: Sequence[Bad]) -> None:
    outcomes = open_each(write_all(folder, [bad.data for bad in files]))
    pairs = zip(files, outcomes, strict=True)
    found = [(bad.what, complaint(bad, outcome)) for bad, outcome in pairs]
    wrong = [f"{what}: {words}" for what, words in found if words]
    assert not wrong, f"{len(wrong)} of {len(files)}:\n" + "\n".join(wrong)


def check_opened(folder: Path, files: dict[str, bytes]) -> list[Outcome]:
    outcomes = open_each(write_all(folder, list(files.values())))
    wrong = {w: o.message or "not finite" for w, o in zip(files, outcomes, strict=True) if o.kinds}
    assert not wrong
    return outcomes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model that opens; the tests say what they change in it."""
    path = tmp_path_factory.mktemp("base") / "small.gguf"
    make_model(path, SMALL, fast=None, seed=1)
    return path.read_bytes()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("base") / "wide.gguf"
    make_model(path, WIDE, fast=None, seed=1)
    return path.read_bytes()


# Edits


def edited(base: bytes, edit: Callable[[Gguf], None]) -> bytes:
    file = Gguf.parse(base)
    edit(file)
    return file.to_bytes()


def with_pair(base: bytes, of: str, **fields: Any) -> bytes:
    """Other fields (key, type, value) of a pair."""

    def edit(file: Gguf) -> None:
        at = file.pairs.index(file.pair(of))
        file.pairs[at] = replace(file.pairs[at], **fields)

    return edited(base, edit)


def with_tensor(base: bytes, of: str, **fields: Any) -> bytes:
    """Other fields (name, ne, type, data, offset) of a tensor."""

    def edit(file: Gguf) -> None:
        at = file.tensors.index(file.tensor(of))
        file.tensors[at] = replace(file.tensors[at], **fields)

    return edited(base, edit)


def with_more(base: bytes, *items: Pair | Tensor) -> bytes:
    """Pairs and tensors behind those there are."""

    def edit(file: Gguf) -> None:
        file.pairs += [item for item in items if isinstance(item, Pair)]
        file.tensors += [item for item in items if isinstance(item, Tensor)]

    return edited(base, edit)


def with_value(base: bytes, key: str, value: Value) -> bytes:
    return with_pair(base, key, value=value)


def with_values(base: bytes, values: dict[str, Value]) -> bytes:
    for key, value in values.items():
        base = with_value(base, key, value)
    return base


def without_key(base: bytes, key: str) -> bytes:
    return edited(base, lambda file: file.pairs.remove(file.pair(key)))


def without_tensor(base: bytes, name: str) -> bytes:
    return edited(base, lambda file: file.tensors.remove(file.tensor(name)))


def with_shape(base: bytes, name: str, shape: Sequence[int], type: str = "f32") -> bytes:
    """Another shape (numpy order) or type of a tensor, with as many bytes (0) as it needs."""

    def edit(file: Gguf) -> None:
        tensor = file.tensor(name)
        tensor.ne = list(reversed(shape))
        tensor.type = TYPES[type][0]
        tensor.data = bytes(tensor.n_bytes)

    return edited(base, edit)


def with_header(base: bytes, **fields: Any) -> bytes:
    return replace(Gguf.parse(base), **fields).to_bytes()


def replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


def names_of(base: bytes) -> list[str]:
    return [tensor.name for tensor in Gguf.parse(base).tensors]


def long(n: int) -> bytes:
    return struct.pack("<Q", n)


# The tools themselves


def test_the_editor_writes_back_what_it_read(small: bytes) -> None:
    files = [path.read_bytes() for path in sorted(GOLDEN.glob("*.gguf"))]
    assert len(files) == 5
    for data in [*files, small]:
        assert Gguf.parse(data).to_bytes() == data


def test_the_gguf_package_reads_what_the_editor_writes(small: bytes, tmp_path: Path) -> None:
    """Another reader finds an added key and tensor where they were put, at an odd alignment too."""

    def edit(file: Gguf) -> None:
        file.pairs.append(Pair("general.alignment", U32, 64))
        file.pairs.append(Pair("an.array", ARRAY, Array(STRING, [b"one", b"two"])))
        file.tensors.append(Tensor("added", [2, 3], TYPES["f32"][0], bytes(range(24))))

    path = tmp_path / "edited.gguf"
    path.write_bytes(edited(small, edit))
    read = gguf.GGUFReader(path)
    assert read.alignment == 64
    assert read.fields["an.array"].contents() == ["one", "two"]
    added = read.tensors[-1]
    assert added.name == "added"
    assert added.data.shape == (3, 2)
    assert added.data.tobytes() == bytes(range(24))
    assert added.data_offset % 64 == 0


def test_the_small_models_open(small: bytes, wide: bytes, tmp_path: Path) -> None:
    """What the other tests change was right before: a refusal is due to the change."""
    files = {"small": small, "wide": wide, "golden": (GOLDEN / "f32_plain.gguf").read_bytes()}
    outcomes = check_opened(tmp_path, files)
    assert [outcome.finite for outcome in outcomes] == [True] * 3
    keys = {pair.key: pair.type for pair in Gguf.parse(small).pairs}
    assert keys == KEYS


def test_a_child_that_dies_or_speaks_is_noticed(tmp_path: Path) -> None:
    child = Child("import os, sys; sys.stdin.readline(); os.abort()")
    with pytest.raises(AssertionError, match=r"at .*/0\.gguf the child ended with -6"):
        child.open(tmp_path / "0.gguf")
    answer = json.dumps(vars(Outcome(str(tmp_path), None, None, [], "")))
    child = Child(f"import sys; sys.stderr.write('oh'); sys.stderr.flush(); print({answer!r})")
    with pytest.raises(AssertionError, match=r"ended with 0 and said: .*\noh"):
        child.open(tmp_path)
    child = Child("print('oh')")
    with pytest.raises(AssertionError, match="ended with 0 and said: oh"):
        child.open(tmp_path)


# Not GGUF


def test_files_that_are_not_gguf(tmp_path: Path) -> None:
    check_refused(
        tmp_path,
        [
            Bad("empty", b"", ["empty"]),
            Bad("one byte", b"G", ["not a GGUF"]),
            Bad("three bytes", b"GGU", ["not a GGUF"]),
            Bad("text", b"This is a letter, not a model.\n" * 100, ["not a GGUF"]),
            Bad("zeros", bytes(4096), ["not a GGUF"]),
            Bad("ggml of old", b"lmgg" + bytes(4096), ["not a GGUF"]),
            Bad("lower case", b"gguf" + bytes(4096), ["not a GGUF"]),
            Bad("backwards", b"FUGG" + bytes(4096), ["not a GGUF"]),
            Bad("torch", b"PK\x03\x04" + bytes(4096), ["not a GGUF"]),
            Bad("magic only", b"GGUF", ["cut short"]),
            Bad("magic and version", b"GGUF\x03\0\0\0", ["cut short"]),
            Bad("magic and text", b"GGUF" + b"x" * 4096, ["version"]),
        ],
    )


def test_other_versions(small: bytes, tmp_path: Path) -> None:
    says = {0: "version: 0", 1: "GGUFv1", 4: "version 4", 2**31 - 1: "version 2147483647"}
    says |= {2**32 - 1: "version 4294967295", 3 << 16: "endianness"}
    check_refused(
        tmp_path,
        [Bad(f"version {n}", with_header(small, version=n), [word]) for n, word in says.items()],
    )


def test_version_2_opens(small: bytes, tmp_path: Path) -> None:
    """Versions 2 and 3 have one layout; 3 only added big-endian files."""
    old, new = check_opened(tmp_path, {"2": with_header(small, version=2), "3": small})
    assert old.config == new.config


def test_big_endian(small: bytes, tmp_path: Path) -> None:
    check_refused(tmp_path, [Bad("big-endian", with_header(small, order=">"), ["endianness"])])


# Cut short


def test_cut_at_every_byte_of_a_header(tmp_path: Path) -> None:
    """Whatever is left must not read as a whole header with a key missing."""
    file = Gguf(
        pairs=[
            Pair("general.architecture", STRING, b"fish-speech"),
            Pair("fish-speech.context_length", U32, 64),
            Pair("fish-speech.rope.freq_base", F32, 1e4),
            Pair("fish_speech.attention_qk_norm", BOOL, True),
            Pair("an.array", ARRAY, Array(STRING, [b"a", b"bc"])),
        ],
        tensors=[Tensor("norm.weight", [8], TYPES["f32"][0], bytes(32))],
    )
    whole = file.to_bytes()
    n = len(file.header())
    assert 288 <= n <= 320
    cuts = [Bad(f"{i} of {n}", whole[:i], ["cut short"]) for i in range(4, len(whole))]
    cuts += [Bad(f"{i} of {n}", whole[:i], ["GGUF"]) for i in range(4)]
    check_refused(tmp_path, [*cuts, Bad("whole", whole, ["fish-speech.vocab_size is missing"])])


def test_cut_at_20_places_of_the_data(small: bytes, tmp_path: Path) -> None:
    """The tensor named is the first in the file that does not fit; nothing of it was loaded."""
    file = Gguf.parse(small)
    start = len(file.header())
    places = np.linspace(start, len(small) - 1, 20).astype(int).tolist()
    cuts = []
    for place in places:
        end = start
        for tensor in file.tensors:
            end += -end % 32 + tensor.n_bytes
            if end > place:
                says = ["cut short", f"tensor {tensor.name} "]
                cuts.append(Bad(f"{place} of {len(small)}", small[:place], says))
                break
    assert len(cuts) == 20
    check_refused(tmp_path, cuts)


# Numbers in the header that cannot be


def test_counts_and_lengths_beyond_the_file(small: bytes, tmp_path: Path) -> None:
    n_tensors, n_pairs = len(names_of(small)), len(KEYS)
    key = b"fish-speech.block_count"
    architecture = long(11) + b"fish-speech" + long(len("fish-speech.context_length"))
    name = long(11) + b"norm.weight"
    array = with_more(small, Pair("a", ARRAY, Array(U8, [1, 2, 3])))
    strings = with_more(small, Pair("a", ARRAY, Array(STRING, [b"xyz"])))
    files = []
    for n in (2**62, 2**63, 2**64 - 1, 2**32, 2**57):
        files += [
            Bad(f"{n} tensors", with_header(small, n_tensors=n), ["GGUF header"]),
            Bad(f"{n} keys", with_header(small, n_pairs=n), ["GGUF header"]),
        ]
    files += [
        Bad("a tensor more", with_header(small, n_tensors=n_tensors + 1), ["GGUF header"]),
        Bad("a tensor fewer", with_header(small, n_tensors=n_tensors - 1), ["output.weight"]),
        Bad("a key more", with_header(small, n_pairs=n_pairs + 1), ["GGUF header"]),
        Bad("a key fewer", with_header(small, n_pairs=n_pairs - 1), ["GGUF header"]),
        Bad("no tensor", with_header(small, n_tensors=0), ["tensor", "missing"]),
        Bad("nothing", with_header(small, n_tensors=0, n_pairs=0), ["general.architecture"]),
    ]
    for n in (2**60, 2**64 - 1, 2**30, len(small)):
        says = ["string length"]
        key_length = replaced(small, long(len(key)) + key, long(n) + key)
        value_length = replaced(small, architecture, long(n) + architecture[8:])
        name_length = replaced(small, name, long(n) + name[8:])
        item_length = replaced(strings, long(3) + b"xyz", long(n) + b"xyz")
        files += [
            Bad(f"a key of {n}", key_length, says),
            Bad(f"a value of {n}", value_length, says),
            Bad(f"a name of {n}", name_length, says),
            Bad(f"an array of a string of {n}", item_length, says),
        ]
    for n in (2**60, 2**62, 2**64 - 1, 2**30, len(small)):
        for base, type in ((array, U8), (strings, STRING)):
            count = struct.pack("<II", ARRAY, type)
            item = struct.pack("<IIQ", ARRAY, type, 3 if type == U8 else 1)
            says = ["key-value pairs"]
            files.append(Bad(f"an array of {n}", replaced(base, item, count + long(n)), says))
    check_refused(tmp_path, files)


def test_types_that_do_not_exist(small: bytes, tmp_path: Path) -> None:
    """13 is the first number without a type; an array of arrays is not GGUF; 43 likewise."""
    files = []
    key = b"fish-speech.block_count"
    for n in (13, 255, 2**31, 2**32 - 1):
        retyped = replaced(small, key + struct.pack("<I", U32), key + struct.pack("<I", n))
        files.append(Bad(f"key of type {n}", retyped, [key.decode()]))
    nested = Pair("a.nested", ARRAY, Array(ARRAY, [Array(U8, [1])]))
    arrays = with_more(small, nested)
    files.append(Bad("array of arrays", arrays, ["a.nested"]))
    for n in (4, 5, 31, 32, 33, 36, 37, 38, 43, 255, 2**31, 2**32 - 1):
        wrong = with_tensor(small, "norm.weight", type=n)
        files.append(Bad(f"tensor of type {n}", wrong, ["norm.weight"]))
    check_refused(tmp_path, files)


# Keys


def test_duplicate_and_empty_names(small: bytes, tmp_path: Path) -> None:
    files = []
    for key in KEYS:
        again = with_more(small, Gguf.parse(small).pair(key))
        files.append(Bad(f"{key} twice", again, [f"duplicate key '{key}'"]))
    for name in names_of(small):
        again = with_more(small, Gguf.parse(small).tensor(name))
        files.append(Bad(f"{name} twice", again, ["duplicate tensor", f"'{name}'"]))
    empty_key = with_more(small, Pair("", U32, 1))
    files.append(Bad("empty key", empty_key, ["key 18 is empty"]))
    for key in KEYS:
        if key != OPTIONAL:
            renamed = with_pair(small, key, key=key + "x")
            files.append(Bad(f"{key} renamed", renamed, [f"key {key} is missing"]))
    for name in names_of(small):
        unnamed = with_tensor(small, name, name="")
        files.append(Bad(f"{name} unnamed", unnamed, [f"tensor {name} is missing"]))
    long_name = with_tensor(small, "norm.weight", name="n" * 64)
    files.append(Bad("a name of 64", long_name, ["too long: 64"]))
    check_refused(tmp_path, files)


def as_type(type: int, value: Value) -> Value:
    """The same value, as well as the other type can say it."""
    if type == STRING:
        return str(value).encode()
    number = 1 if isinstance(value, bytes | Array) else value
    if type in (F32, F64):
        return float(number)
    return bool(number) if type == BOOL else min(int(number), 100)


def test_every_key_as_every_other_type(small: bytes, tmp_path: Path) -> None:
    """The value would often convert; no key is converted, and an array of one is no number."""
    files = []
    for key, type in KEYS.items():
        value = Gguf.parse(small).pair(key).value
        for other in [*LETTERS, STRING]:
            says = [f"key {key} has type ", f"expected {NAMES[type]}"]
            if other != type:
                retyped = with_pair(small, key, type=other, value=as_type(other, value))
                one = [f"key {key} has type {NAMES[other]}, expected {NAMES[type]}"]
                files.append(Bad(f"{key} as {NAMES[other]}", retyped, one))
            items = Array(other, [as_type(other, value)])
            array = with_pair(small, key, type=ARRAY, value=items)
            files.append(Bad(f"{key} as array of {NAMES[other]}", array, says))
        empty = with_pair(small, key, type=ARRAY, value=Array(type, []))
        files.append(Bad(f"{key} as an empty array", empty, says))
    assert len(files) == len(KEYS) * (11 + 12 + 1)
    check_refused(tmp_path, files)


def test_every_key_removed(small: bytes, tmp_path: Path) -> None:
    files = [
        Bad(f"without {key}", without_key(small, key), [f"key {key} is missing"])
        for key in KEYS
        if key != OPTIONAL
    ]
    check_refused(tmp_path, files)


def out_of_range() -> Iterator[tuple[str, Value, str]]:
    """Key, value, and what the refusal names: the key, or the first tensor that does not agree."""
    counts = [key for key, type in KEYS.items() if type == U32]
    assert len(counts) == 11
    for key in counts:
        for n in (0, 2**31, 2**32 - 1):
            if n or key != "fish_speech.semantic_begin_id":  # which may be 0
                yield key, n, key
    for key in ("fish-speech.rope.freq_base", "fish-speech.attention.layer_norm_rms_epsilon"):
        for x in (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf):
            yield key, x, key
    for n in (19, 21, 2**31 - 1):
        yield "fish-speech.vocab_size", n, "embeddings.weight"
    for n in (1, 7, 9, 2**31 - 1):
        yield "fish-speech.embedding_length", n, "embeddings.weight"
    for n in (1, 13, 15, 2**31 - 1):
        yield "fish-speech.feed_forward_length", n, "layers.0.feed_forward.w1.weight"
    yield "fish-speech.block_count", 4, "layers.3."
    yield "fish-speech.block_count", 256, "layers.3."
    yield "fish-speech.block_count", 257, "fish-speech.block_count"
    # 12 columns of wo and a head of 6 leave two heads alone.
    for n in (1, 3, 4, 65536):
        yield "fish-speech.attention.head_count", n, "layers.0.attention.wo.weight"
    yield "fish-speech.attention.head_count", 65537, "fish-speech.attention.head_count"
    yield "fish-speech.attention.head_count_kv", 2, "layers.0.attention.wqkv.weight"
    yield "fish-speech.attention.head_count_kv", 3, "fish-speech.attention.head_count_kv"
    for n in (1, 3, 256):
        yield "fish_speech.num_codebooks", n, "codebook_embeddings.weight"
    yield "fish_speech.num_codebooks", 257, "fish_speech.num_codebooks"
    for n in (4, 6, (2**31 - 1) // 2):
        yield "fish_speech.codebook_size", n, "codebook_embeddings.weight"
    yield "fish_speech.codebook_size", 2**30, "fish_speech.codebook_size"
    yield "fish_speech.semantic_begin_id", 15, "fish_speech.semantic_end_id"
    yield "fish_speech.semantic_begin_id", 20, "fish_speech.semantic_begin_id"
    yield "fish_speech.semantic_end_id", 9, "fish_speech.semantic_end_id"
    yield "fish_speech.semantic_end_id", 20, "fish_speech.semantic_end_id"


def test_values_out_of_range(small: bytes, tmp_path: Path) -> None:
    files = [
        Bad(f"{key} = {value!r}", with_value(small, key, value), [word])
        for key, value, word in out_of_range()
    ]
    uneven: dict[str, Value] = {
        "fish-speech.attention.head_count": 3,
        "fish-speech.attention.head_count_kv": 2,
    }
    says = ["key fish-speech.attention.head_count is 3", "head_count_kv, 2"]
    files.append(Bad("3 heads on 2", with_values(small, uneven), says))
    check_refused(tmp_path, files)


def test_values_at_the_edge_of_the_range(small: bytes, tmp_path: Path) -> None:
    """The least and the greatest that are allowed: a check must not be off by one."""
    edges: list[tuple[str, Value]] = [
        ("fish-speech.context_length", 1),
        ("fish-speech.context_length", 2**31 - 1),
        ("fish-speech.rope.freq_base", 1e-38),
        ("fish-speech.rope.freq_base", 3e38),
        ("fish-speech.attention.layer_norm_rms_epsilon", 1e-38),
        ("fish-speech.attention.layer_norm_rms_epsilon", 3e38),
        ("fish_speech.semantic_begin_id", 0),
        ("fish_speech.semantic_begin_id", 14),
        ("fish_speech.semantic_end_id", 10),
        ("fish_speech.semantic_end_id", 19),
    ]
    check_opened(tmp_path, {f"{k} = {v!r}": with_value(small, k, v) for k, v in edges})


def test_other_architectures(small: bytes, tmp_path: Path) -> None:
    """A normal LLM's file, with its own keys, and ours under other names."""
    key = "general.architecture"
    llama = Gguf(
        pairs=[
            Pair(key, STRING, b"llama"),
            Pair("llama.context_length", U32, 4096),
            Pair("llama.embedding_length", U32, 8),
            Pair("llama.block_count", U32, 1),
            Pair("tokenizer.ggml.tokens", ARRAY, Array(STRING, [b"<s>", b"</s>"])),
        ],
        tensors=[Tensor("token_embd.weight", [8, 2], TYPES["f32"][0], bytes(64))],
    )
    files = [Bad("llama", llama.to_bytes(), [key, '"llama"'])]
    for name in (b"", b"Fish-Speech", b"fish_speech", b"fish-speech ", b"x" * 5000):
        said = [key, name[:900].decode()]
        files.append(Bad(f"{name[:20]!r}", with_value(small, key, name), said))
    check_refused(tmp_path, files)


def test_words_of_the_file_do_not_break_the_line(small: bytes, tmp_path: Path) -> None:
    """A message quotes the file; what would start a new line or move the cursor must not pass."""
    lines = "one\ntwo\r\x1b[2J\x07"

    f32 = TYPES["f32"][0]
    whole, beyond = Tensor(lines, [8], f32, bytes(32)), Tensor(lines, [10**6], f32, b"")
    check_refused(
        tmp_path,
        [
            Bad("architecture", with_value(small, "general.architecture", lines.encode())),
            Bad("not UTF-8", with_value(small, "general.architecture", b"\xff\xfe\x80")),
            Bad("a tensor cut short", with_more(small, beyond)),
            Bad("a tensor twice", with_more(small, whole, whole)),
            Bad("a key twice", with_more(small, *[Pair(lines, U32, 1)] * 2)),
        ],
    )


# Tensors


def test_every_tensor_removed(small: bytes, tmp_path: Path) -> None:
    names = names_of(small)
    assert len(names) == 3 + 3 * 9 + 1
    check_refused(
        tmp_path,
        [Bad(f"no {n}", without_tensor(small, n), [f"tensor {n} is missing"]) for n in names],
    )


def test_every_tensor_of_another_shape(small: bytes, tmp_path: Path) -> None:
    """One row or column more or less, no row, the sides swapped, a dimension more or fewer."""
    files = []
    for tensor in Gguf.parse(small).tensors:
        shape = tuple(reversed(tensor.ne))
        others = {(2, *shape), (shape[0], 0), (0, *shape[1:]), (math.prod(shape), 2), (1,)}
        others |= {(*shape[:-1], shape[-1] + 2), (*shape[:-1], shape[-1] - 2), (2, 2, *shape)}
        if len(shape) == 2:
            others |= {(shape[0] + 1, shape[1]), (shape[0] - 1, shape[1]), shape[::-1]}
            others |= {(math.prod(shape),), (shape[0], 2, shape[1] // 2)}
        for other in sorted(others - {shape}):
            says = [tensor.name]
            # The head size is read off these two, so one may be blamed for the other.
            if tensor.name.endswith(("q_norm.weight", "wo.weight")):
                says = ["layers." + tensor.name.split(".")[1]]
            bad = with_shape(small, tensor.name, other)
            files.append(Bad(f"{tensor.name} {other}", bad, says))
    assert len(files) > 300
    check_refused(tmp_path, files)


def test_shapes_are_told_in_the_order_of_numpy(small: bytes, tmp_path: Path) -> None:
    at = "layers.1.attention.wqkv.weight"
    w1, w2 = "layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w2.weight"

    def swap(file: Gguf) -> None:
        one, other = file.tensor(w1), file.tensor(w2)
        one.name, other.name = w2, w1

    check_refused(
        tmp_path,
        [
            Bad("a row short", with_shape(small, at, (23, 8)), [at, "(23, 8)", "(24, 8)"]),
            Bad("w1 and w2 swapped", edited(small, swap), [w1, "(8, 14)", "(14, 8)"]),
            Bad(
                "fewer rows than vocabulary",
                with_shape(small, "embeddings.weight", (19, 8)),
                ["embeddings.weight", "(19, 8)", "(20, 8)"],
            ),
        ],
    )


def test_a_dimension_of_1_at_the_end_is_no_dimension(small: bytes, tmp_path: Path) -> None:
    """Writers differ in whether they store it: (1, 12, 8) is (12, 8)."""
    file = Gguf.parse(small)
    for tensor in file.tensors:
        tensor.ne.append(1)
    one, same = check_opened(tmp_path, {"one more": file.to_bytes(), "as it was": small})
    assert one.config == same.config


def test_dimensions_that_ggml_cannot_count(small: bytes, tmp_path: Path) -> None:
    name = "layers.0.attention.wo.weight"
    many = [
        [12, 8, 1, 1, 1],
        [-12, 8],
        [12, -8],
        [2**62, 2],
        [2**31, 2**31, 2],
        [2**61, 1],
        [2**63 - 1],
        [2**40, 2**20],
        [12, 8, 2**40],
        [12, 8, 2**63],
    ]
    files = []
    for ne in many:
        files.append(Bad(str(ne), with_tensor(small, name, ne=ne), ["layers.0."]))
    # Nothing of these lies in the file, but their other side is beyond 32 or 62 bits.
    q_norm = "layers.0.attention.q_norm.weight"
    for ne in ([0, 2**62], [0, 2**33], [2**32 + 6, 0], [2**62, 0], [2**61 + 6, 0]):
        for tensor in (name, q_norm):
            says = ["layers.0.attention."]
            files.append(Bad(f"{tensor} {ne}", with_shape(small, tensor, ne[::-1]), says))
    no_norm = with_value(small, "fish_speech.attention_qk_norm", False)
    files.append(Bad("wo", with_shape(no_norm, name, (0, 2**62)), ["layers.0.attention."]))
    # No dimension at all is one weight, of a tensor that we do not use.
    scalar = with_more(small, Tensor("scalar", [], TYPES["f32"][0], bytes(4)))
    check_opened(tmp_path, {"scalar": scalar})
    check_refused(tmp_path, files)


def test_norms_for_q_and_k_with_the_flag_false(small: bytes, tmp_path: Path) -> None:
    key = "fish_speech.attention_qk_norm"
    off = with_value(small, key, False)
    files = [Bad("both", off, [key, "layers.0.attention.q_norm.weight"])]
    norms = [name for name in names_of(small) if name.endswith(("q_norm.weight", "k_norm.weight"))]
    assert len(norms) == 6
    bare = off
    for name in norms:
        bare = without_tensor(bare, name)
    for name in norms:
        one = with_more(bare, Gguf.parse(small).tensor(name))
        files.append(Bad(f"only {name}", one, [key, name]))
    check_refused(tmp_path, files)
    (outcome,) = check_opened(tmp_path, {"none": bare})
    assert outcome.finite


def test_norms_that_are_not_f32(wide: bytes, tmp_path: Path) -> None:
    norms = [tensor.name for tensor in Gguf.parse(wide).tensors if len(tensor.ne) == 1]
    assert len(norms) == 5
    files = []
    for name in norms:
        (n,) = Gguf.parse(wide).tensor(name).ne
        for type in ("f16", "bf16", "f64", "i32", "q8_0", "q4_0"):
            says = [f"tensor {name} has type {type}, expected f32"]
            files.append(Bad(f"{name} {type}", with_shape(wide, name, (n,), type), says))
    check_refused(tmp_path, files)


UNUSABLE = ("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K")


def test_matrices_of_types_that_cannot_be_multiplied(wide: bytes, tmp_path: Path) -> None:
    """q8_1 and q8_K are what ggml makes of activations; it cannot multiply weights of them."""
    matrices = [tensor.name for tensor in Gguf.parse(wide).tensors if len(tensor.ne) == 2]
    assert len(matrices) == 8
    files = []
    for name in matrices:
        shape = tuple(reversed(Gguf.parse(wide).tensor(name).ne))
        for type in UNUSABLE:
            says = [f"tensor {name} has type {type}, expected"]
            files.append(Bad(f"{name} {type}", with_shape(wide, name, shape, type), says))
    check_refused(tmp_path, files)


def test_matrices_of_every_other_type_do_not_end_the_process(wide: bytes, tmp_path: Path) -> None:
    """Types may be mixed, and each may be on any matrix: all zeros give zeros, never an abort."""
    matrices = [tensor.name for tensor in Gguf.parse(wide).tensors if len(tensor.ne) == 2]
    types = [type for type in TYPES if type not in UNUSABLE]
    assert len(types) == 28
    files = {}
    for type in types:
        data = wide
        for name in matrices:
            shape = tuple(reversed(Gguf.parse(wide).tensor(name).ne))
            data = with_shape(data, name, shape, type)
        files[type] = data
    outcomes = check_opened(tmp_path, files)
    assert [type for type, o in zip(types, outcomes, strict=True) if not o.finite] == []


def test_rows_that_are_no_whole_blocks(small: bytes, tmp_path: Path) -> None:
    files = []
    for name in ("embeddings.weight", "layers.2.attention.wqkv.weight"):
        for type in ("q4_0", "q8_0", "q4_K", "iq4_nl"):
            says = [f"'{name}'", type, "block size"]
            retyped = with_tensor(small, name, type=TYPES[type][0])
            files.append(Bad(f"{name} {type}", retyped, says))
    check_refused(tmp_path, files)


# Places


def test_offsets(small: bytes, tmp_path: Path) -> None:
    """Tensors lie one behind the other, so that an offset that overlaps or leaps is damage."""
    names = names_of(small)
    ends = {tensor.name: tensor for tensor in Gguf.parse(small).tensors}
    assert ends["norm.weight"].n_bytes == 32
    files = []
    for name in ("embeddings.weight", "norm.weight", names[-1]):
        for offset in (1, 33, 64, 2**20, 2**62, 2**63, 2**64 - 32, 2**64 - 1):
            moved = with_tensor(small, name, offset=offset)
            files.append(Bad(f"{name} at {offset}", moved, [f"tensor '{name}'", str(offset)]))

    def swap(file: Gguf) -> None:
        a, b = file.tensors[3:5]
        assert a.n_bytes == b.n_bytes == 32
        place = sum(-(-tensor.n_bytes // 32) * 32 for tensor in file.tensors[:3])
        a.offset, b.offset = place + 32, place

    files.append(Bad("misordered", edited(small, swap), [f"tensor '{names[3]}'"]))
    overlapping = with_tensor(small, "norm.weight", offset=0)
    files.append(Bad("overlapping", overlapping, ["tensor 'norm.weight'"]))
    check_refused(tmp_path, files)


def test_alignments(small: bytes, tmp_path: Path) -> None:
    """A power of two, whatever it is; its key is checked like any other."""
    key = "general.alignment"

    def aligned(type: int, value: Value) -> bytes:
        return with_more(small, Pair(key, type, value))

    check_refused(
        tmp_path,
        [
            Bad("0", aligned(U32, 0), ["alignment 0 "]),
            Bad("3", aligned(U32, 3), ["alignment 3 "]),
            Bad("2^32 - 1", replaced(aligned(U32, 48), b"\x30\0\0\0", b"\xff" * 4), ["alignment"]),
            *(
                Bad(NAMES[type], aligned(type, as_type(type, 32)), [key])
                for type in [*LETTERS, STRING]
                if type != U32
            ),
            Bad("array", aligned(ARRAY, Array(U32, [32])), [key]),
        ],
    )
    outcomes = check_opened(tmp_path, {str(n): aligned(U32, n) for n in (1, 2, 4, 8, 64, 4096)})
    assert all(outcome.finite for outcome in outcomes)


# Paths


def test_a_path_with_unicode_and_spaces(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "größe 模型 🐟.gguf"
    path.write_bytes(small)
    with slowar.Model(path, backend="cpu") as model:
        assert model.config.n_vocab == 20
        assert model.path == str(path)
    with slowar.Model(str(path), backend="cpu") as model:
        assert model.config.n_vocab == 20


def test_a_bad_file_with_unicode_in_its_path_is_named(tmp_path: Path) -> None:
    path = tmp_path / "größe 模型 🐟.gguf"
    path.write_bytes(b"text")
    with pytest.raises(slowar.ModelFormatError, match=f"^{re.escape(str(path))}: not a GGUF"):
        slowar.Model(path, backend="cpu")


def test_a_path_with_a_nul_byte_is_not_cut_there(small: bytes, tmp_path: Path) -> None:
    """`open` of Python says "embedded null byte"; C alone would open what stands before it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(small)
    with pytest.raises(ValueError, match="null"):
        slowar.Model(f"{path}\0.other", backend="cpu")


def test_a_path_that_is_not_utf8(small: bytes, tmp_path: Path) -> None:
    """Linux knows bytes; Python carries such a name as surrogates, back and forth."""
    good, bad = (tmp_path / os.fsdecode(name) for name in (b"\xff.gguf", b"\xfe.gguf"))
    try:
        good.write_bytes(small)
        bad.write_bytes(b"text")
    except OSError as error:
        pytest.skip(f"the file system refuses such a name: {error}")
    with slowar.Model(good, backend="cpu") as model:
        assert model.config.n_vocab == 20
    with pytest.raises(slowar.ModelFormatError) as caught:
        slowar.Model(bad, backend="cpu")
    assert str(caught.value).startswith(f"{bad}: not a GGUF")


def refusal(path: str | Path) -> OSError:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        slowar.Model(path, backend="cpu")
    assert not isinstance(caught.value, slowar.SlowARError)
    assert caught.value.filename == str(path)
    assert caught.value.strerror == os.strerror(caught.value.errno or 0)
    assert str(caught.value).isprintable()
    return caught.value


def test_paths_that_the_system_refuses(small: bytes, tmp_path: Path) -> None:
    """Python's own exceptions, as `open` would raise them."""
    (tmp_path / "file").write_bytes(small)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert isinstance(refusal(tmp_path), IsADirectoryError)
    assert isinstance(refusal(tmp_path / "missing"), FileNotFoundError)
    assert isinstance(refusal(tmp_path / "dangling"), FileNotFoundError)
    assert isinstance(refusal(""), FileNotFoundError)
    assert isinstance(refusal(tmp_path / "file" / "x"), NotADirectoryError)
    assert refusal(tmp_path / "loop").errno == errno.ELOOP
    assert refusal(tmp_path / ("n" * 300)).errno == errno.ENAMETOOLONG


def test_a_file_without_permission_to_read(small: bytes) -> None:
    # Not under tmp_path, where the folders above would refuse another user first.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(small)
        path.chmod(0)
        Path(folder).chmod(0o755)
        mine = os.geteuid()
        if mine == 0:  # who may read everything
            os.seteuid(65534)
        try:
            assert isinstance(refusal(path), PermissionError)
        finally:
            os.seteuid(mine)
        path.chmod(0o444)
        with slowar.Model(path, backend="cpu") as model:
            assert model.config.n_vocab == 20


def test_things_that_are_no_files(tmp_path: Path) -> None:
    """Opening a pipe without a writer would wait for ever, that is, for the time limit."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    outcomes = open_each([fifo, Path(os.devnull), Path("/dev/zero")])
    for outcome in outcomes:
        assert outcome.kinds[:1] == ["ModelFormatError"], outcome
        assert outcome.words == "not a regular file"
    with tempfile.TemporaryDirectory() as folder:  # a socket's path may have 107 bytes
        path = Path(folder) / "socket"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            assert refusal(path).errno in (errno.ENXIO, errno.EOPNOTSUPP)


def test_paths_of_other_types(tmp_path: Path) -> None:
    wrong: Any
    for wrong in (None, 3, 2.5, ["model.gguf"], object()):
        with pytest.raises(TypeError, match="PathLike"):
            slowar.Model(wrong, backend="cpu")


# Chance

EXPECTED = {"ModelFormatError", "DeviceMemoryError", "opened"}


def check_survived(folder: Path, files: Sequence[bytes]) -> Counter[str]:
    outcomes = open_each(write_all(folder, files))
    count = Counter(outcome.kinds[0] if outcome.kinds else "opened" for outcome in outcomes)
    assert set(count) <= EXPECTED, [o for o in outcomes if o.kinds and o.kinds[0] not in EXPECTED]
    assert [outcome.words for outcome in outcomes if CONTROL.search(outcome.message)] == []
    return count


def test_300_single_bytes_of_the_header_changed(small: bytes, tmp_path: Path) -> None:
    """Either it opens and two positions can be evaluated, or it is refused."""
    draw = np.random.default_rng(4)
    n = len(Gguf.parse(small).header())
    files = []
    for _ in range(300):
        data = bytearray(small)
        data[int(draw.integers(n))] ^= int(draw.integers(1, 256))
        files.append(bytes(data))
    count = check_survived(tmp_path, files)
    # Most of a header is names, and a name changed is a name missing; few values may change.
    assert count["ModelFormatError"] >= 250  # seen 292
    assert count["opened"] >= 5  # seen 8


def test_100_pieces_of_the_header_cut_out_or_put_in(small: bytes, tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    n = len(Gguf.parse(small).header())
    files = []
    for i in range(100):
        at, length = int(draw.integers(n)), int(draw.integers(1, 65))
        if i % 3 == 0:
            files.append(small[:at])
        elif i % 3 == 1:
            files.append(small[:at] + small[at + length :])
        else:
            files.append(small[:at] + draw.bytes(length) + small[at:])
    count = check_survived(tmp_path, files)
    assert count["ModelFormatError"] >= 95  # seen 100
