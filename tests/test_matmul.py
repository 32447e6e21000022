"""Products of quantized matrices with vectors, mapped and packed: csrc/matmul.cpp against numpy.

numpy rounds the vectors to 8 bits as ggml does and multiplies in float64, so that what is left is
the rounding of sums in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from conftest import has_products, make_prompt, rows_packed
from gguf_edit import U8, U32, Gguf, Pair
from test_parity import relative_error

import pyggml_slowar as slowar
from pyggml_slowar.make_model import TINY, make_model

Floats = npt.NDArray[np.float64]

# Rows of seventeen blocks of 256, one more than a tile has. The head has 316 rows: no multiple of a
# tile's 16 or 32, and the last ones fill a part of the tile's second register.
CONFIG = replace(
    TINY,
    n_ctx=256,
    n_vocab=316,
    n_embd=4352,
    n_ff=256,
    n_layer=2,
    n_head=12,
    n_head_kv=3,
    head_dim=64,
    codebook_size=16,
    semantic_begin_id=200,
    semantic_end_id=215,
)

# Vectors at once. Up to n_direct of a layout (2, 4 or 8, csrc/kernels.h) are multiplied by rows as
# these lie; for more of them rows are brought into tiles, which are multiplied by four at a time.
COUNTS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 24, 27, 40)

TYPES = ("q4_k", "q6_k", "q8_0")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("matmul")
    made = {type: folder / f"{type}.gguf" for type in TYPES}
    for type, path in made.items():
        make_model(path, CONFIG, type, seed=5, fast=None)
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["mapped", "packed"])
def repack(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=TYPES)
def model(
    request: pytest.FixtureRequest, paths: dict[str, Path], repack: bool
) -> Iterator[slowar.Model]:
    with slowar.Model(paths[request.param], backend="cpu", repack=repack) as opened:
        yield opened


@pytest.fixture
def ours(model: slowar.Model) -> slowar.Model:
    """A model whose products are the library's own."""
    if not has_products():
        pytest.skip("CPU code without AVX2, FMA or F16C, or not compiled for it: ggml multiplies")
    return model


@cache
def matrix(path: str, name: str) -> Floats:
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)


def rounded(model: slowar.Model, x: npt.NDArray[np.float32]) -> Floats:
    """(n, k) as the CPU's products read it. K-quants: 256 numbers to a factor, the largest becomes
    -127; Q8_0: 32 numbers, the largest becomes 127 or -127, and the factor is a float16."""
    if "q8_0" in model.path:
        blocks = x.reshape(len(x), -1, 32)
        d = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
        q = np.rint(blocks * (np.float32(1) / d))
        d = d.astype(np.float16)
    else:
        blocks = x.reshape(len(x), -1, 256)
        largest = np.abs(blocks).argmax(axis=2, keepdims=True)
        inverse = np.float32(-127) / np.take_along_axis(blocks, largest, axis=2)
        q = np.minimum(np.rint(blocks * inverse), 127)
        d = np.float32(1) / inverse
    return np.asarray(q.astype(np.float64) * d.astype(np.float64)).reshape(x.shape)


def products(
    model: slowar.Model, n: int, n_threads: int
) -> Iterator[tuple[npt.NDArray[np.float32], Floats]]:
    """Of wqkv with n vectors: those that were computed and those of numpy, row by row."""
    config = model.config
    with model.session(64, n_threads=n_threads) as session:
        _, seen = session.trace(make_prompt(config, n), ["attn_norm-0", "qkv-0"])
    weights = matrix(model.path, "layers.0.attention.wqkv.weight")
    return zip(seen["qkv-0"], rounded(model, seen["attn_norm-0"]) @ weights.T, strict=True)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("n_threads", [1, pytest.param(3, marks=pytest.mark.sanitize)])
def test_against_numpy(model: slowar.Model, n: int, n_threads: int) -> None:
    for found, expected in products(model, n, n_threads):
        assert relative_error(found, expected) <= 1e-6  # seen 3e-7: float32 sums of blocks


@pytest.mark.parametrize("n", [1, 4, 7, 40])
@pytest.mark.sanitize
def test_rows_that_end_within_a_block_of_a_vector(n: int, tmp_path: Path, repack: bool) -> None:
    """Q8_0 has blocks of 32: seventeen of 256 and one of 96 here."""
    config = replace(CONFIG, n_embd=4448, n_ff=96)
    make_model(tmp_path / "q8_0.gguf", config, "q8_0", seed=6, fast=None)
    with slowar.Model(tmp_path / "q8_0.gguf", backend="cpu", repack=repack) as odd:
        for found, expected in products(odd, n, 2):
            assert relative_error(found, expected) <= 1e-6


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("n", [1, 2, 4, 9, 40])
@pytest.mark.parametrize(
    ("head_dim", "n_rows"),
    [(8, 272), (4, 264), (2, 260)],
    ids=["17 sixteens", "33 eights", "32 eights and a half"],
)
@pytest.mark.sanitize
def test_rows_in_groups(type: str, n: int, head_dim: int, n_rows: int, tmp_path: Path) -> None:
    """Rows of wqkv that end with half a tile; where groups have no end they stay where they are."""
    heads = 256 // head_dim
    config = replace(CONFIG, n_embd=512, n_head=heads, n_head_kv=1, head_dim=head_dim)
    path = tmp_path / f"{type}.gguf"
    make_model(path, config, type, seed=6, fast=None)
    with slowar.Model(path, backend="cpu", repack=True) as odd:
        if has_products():
            where = {t.name: t.where for t in odd.tensors()}
            by_us = n_rows % rows_packed() == 0
            by_ggml = type == "q4_k" and n_rows % 8 == 0
            assert where["layers.0.attention.wqkv.weight"] == (
                "repacked" if by_us or by_ggml else "mapped"
            )
            assert where["layers.0.attention.wo.weight"] == "repacked"
        for found, expected in products(odd, n, 2):
            assert relative_error(found, expected) <= 1e-6


def test_packed_rows_give_the_bits_of_the_file_s(paths: dict[str, Path]) -> None:
    """On the documented path as well, which has no other way to multiply by them."""
    if not has_products():
        pytest.skip("CPU code without AVX2, FMA or F16C, or not compiled for it: ggml packs")
    prompt = make_prompt(CONFIG, 40)
    for path in paths.values():
        with (
            slowar.Model(path, backend="cpu") as mapped,
            slowar.Model(path, backend="cpu", repack=True) as packed,
        ):
            assert Counter(t.where for t in packed.tensors())["repacked"] == 5 * CONFIG.n_layer
            outs = [one.session(64).prefill(prompt) for one in (mapped, packed)]
            np.testing.assert_array_equal(outs[0].logits, outs[1].logits)
            np.testing.assert_array_equal(outs[0].hidden, outs[1].hidden)
            qkv = [
                one.session(64, attention="reference").trace(prompt, ["qkv-0"])[1]["qkv-0"]
                for one in (mapped, packed)
            ]
            assert relative_error(qkv[1], qkv[0]) <= 1e-6


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.sanitize
def test_packing_from_any_address(type: str, paths: dict[str, Path], tmp_path: Path) -> None:
    """A file may align its tensors to single bytes, and so their factors of 16 bits to odd ones."""
    path = tmp_path / f"{type}.gguf"
    file = Gguf.parse(paths[type].read_bytes())
    file.pairs.append(Pair("general.alignment", U32, 1))
    file.pairs.append(Pair("a" if len(file.header()) % 2 else "an", U8, 0))
    path.write_bytes(file.to_bytes())
    tensors = gguf.GGUFReader(paths[type]).tensors
    assert all(int(t.n_bytes) % 2 == 0 for t in tensors)
    assert len(file.header()) % 2 == 1
    with slowar.Model(path, backend="cpu", repack=True) as odd:
        for found, expected in products(odd, 4, 2):
            assert relative_error(found, expected) <= 1e-6


@pytest.mark.sanitize
def test_the_head_against_numpy(model: slowar.Model) -> None:
    """Rows in the middle of a matrix, by themselves and one alone."""
    with model.session(8, logits="semantic", extra_ids=(7,)) as session:
        out, seen = session.trace(make_prompt(CONFIG, 3), ["hidden"])
    x = rounded(model, seen["hidden"])
    expected = x[0] @ matrix(model.path, "embeddings.weight")[out.ids].T
    assert out.ids.tolist() == [*range(200, 216), 7]
    assert relative_error(out.logits, expected) <= 1e-6


def test_positions_together_are_positions_alone(ours: slowar.Model) -> None:
    """The bits of a product are those that it has alone."""
    prompt = make_prompt(CONFIG, 23)
    with ours.session(64, n_threads=2) as session:
        alone = []
        for i in range(23):
            session.reset()
            alone.append(session.trace(prompt[:, i : i + 1], ["qkv-0"])[1]["qkv-0"][0])
        for n in (2, 3, 4, 5, 8, 9, 23):  # on both sides of where one way to multiply ends
            session.reset()
            _, together = session.trace(prompt[:, :n], ["qkv-0"])
            np.testing.assert_array_equal(together["qkv-0"], alone[:n])


def test_sessions_together_are_sessions_alone(ours: slowar.Model) -> None:
    """However many there are, each has the bits that it has alone."""
    for ids in (None, (7,)):
        with ExitStack() as stack:
            together_is_alone(ours, ids, stack)


def together_is_alone(model: slowar.Model, ids: tuple[int, ...] | None, stack: ExitStack) -> None:
    """With ``ids``: of the head sixteen rows, and one by itself for each of these."""
    prompts = [make_prompt(CONFIG, 3 + i % 4, seed=i) for i in range(17)]
    options = {"logits": "full"} if ids is None else {"logits": "semantic", "extra_ids": ids}
    sessions = [
        stack.enter_context(model.session(16, n_threads=1, kv_type="f32", **options))
        for _ in prompts
    ]
    alone = []
    for session, prompt in zip(sessions, prompts, strict=True):
        session.prefill(prompt[:, :-1])
        alone.append(session.step(prompt[:, -1]))
    for n in (2, 3, 4, 6, 7, 17):
        for session, prompt in zip(sessions, prompts, strict=True):
            session.rewind(prompt.shape[1] - 1)
        rows = np.stack([prompt[:, -1] for prompt in prompts[:n]])
        together = model.step_batch(sessions[:n], rows)
        np.testing.assert_array_equal(together.hidden, [out.hidden for out in alone[:n]])
        np.testing.assert_array_equal(together.logits, [out.logits for out in alone[:n]])


def test_which_products_are_ours(ours: slowar.Model) -> None:
    """All of any number of positions; the reference's where nothing else can read the matrix."""
    n_layer = CONFIG.n_layer
    with ours.session(64, attention="reference") as session:
        n_packed = Counter(t.where for t in ours.tensors())["repacked"]
        n_ggml = Counter(node.op for node in session.graph(1))["MUL_MAT"]
        assert n_ggml == 7 * n_layer + 1 - n_packed
    with ours.session(64) as session:
        counts = {n: Counter(node.op for node in session.graph(n)) for n in (1, 4, 17)}
    # Per layer two of attention, five products and four roundings of vectors, w1 and w3 sharing
    # one; the head and its vector.
    assert [counts[n]["CUSTOM"] for n in (1, 4)] == [n_layer * (2 + 5 + 4) + 2] * 2
    assert [counts[n]["MUL_MAT"] for n in (1, 4, 17)] == [0, 0, 0]


def test_many_extra_ids(tmp_path: Path) -> None:
    """Each is a product of its own: the graph has room for as many as a session takes."""
    config = replace(CONFIG, n_layer=1, n_codebook=1, n_embd=256, n_head=4, n_head_kv=4)
    path = tmp_path / "ids.gguf"
    make_model(path, config, "q8_0", seed=6, fast=None)
    ids = tuple(i for i in range(316) if not 200 <= i <= 215)[:256]
    with slowar.Model(path, backend="cpu") as one:
        with one.session(80, extra_ids=ids, logits="semantic") as session:
            session.prefill(make_prompt(config, 64))
            few = session.step(make_prompt(config, 1)[:, 0])
        with one.session(80) as session:
            session.prefill(make_prompt(config, 64))
            all_ids = session.step(make_prompt(config, 1)[:, 0])
    np.testing.assert_array_equal(few.ids, [*range(200, 216), *ids])
    assert relative_error(few.logits, all_ids.logits[few.ids]) <= 1e-6


def halves(rng: np.random.Generator, n: int) -> npt.NDArray[np.uint8]:
    """(n, 2): float16 from -0.02 to 0.02 as bytes."""
    return rng.uniform(-0.02, 0.02, (n, 1)).astype("<f2").view(np.uint8)


@pytest.mark.parametrize("n", [4, 9, 40])
@pytest.mark.parametrize(
    ("type", "block_bytes", "d_at"),
    [("q4_k", 144, (0, 2)), ("q6_k", 210, (208,)), ("q8_0", 34, (0,))],
)
@pytest.mark.sanitize
def test_any_bytes(
    type: str,
    block_bytes: int,
    d_at: tuple[int, ...],
    n: int,
    paths: dict[str, Path],
    tmp_path: Path,
    repack: bool,
) -> None:
    """Scales and numbers at both ends of their ranges; no quantizer writes -128."""
    rng = np.random.default_rng(9)
    path = tmp_path / "any.gguf"
    content = bytearray(paths[type].read_bytes())
    tensor = next(
        t
        for t in gguf.GGUFReader(paths[type]).tensors
        if t.name == "layers.0.attention.wqkv.weight"
    )
    blocks = rng.integers(0, 256, (int(tensor.n_bytes) // block_bytes, block_bytes), np.uint8)
    blocks[::2] = rng.choice(np.array([0x00, 0x7F, 0x80, 0xFF], np.uint8), blocks[::2].shape)
    for at in d_at:
        blocks[:, at : at + 2] = halves(rng, len(blocks))
    first = int(tensor.data_offset)
    content[first : first + blocks.size] = blocks.tobytes()
    path.write_bytes(content)
    with slowar.Model(path, backend="cpu", repack=repack) as model:
        for found, expected in products(model, n, 2):
            assert relative_error(found, expected) <= 1e-6
