"""The Fast-AR in the files that `make_model` writes: keys, tensors, types, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import SMALL
from generation_reference import FastReference

import pyggml_slowar as slowar
from pyggml_slowar.make_model import (
    S2_PRO,
    TINY,
    TYPES,
    FastShape,
    fast_shape,
    fast_tensor_shapes,
    make_model,
    tensor_shapes,
)

GOLDEN = Path(__file__).parent / "golden"
PREFIX = "fish_speech.fast_"

# Another width and other heads than the Slow-AR's, with all that is optional.
ODD = FastShape(
    context_length=11,
    embedding_length=32,
    feed_forward_length=64,
    block_count=3,
    head_count=2,
    head_count_kv=1,
    head_dim=24,
    rope_freq_base=12345.0,
    layer_norm_rms_eps=1e-5,
    attention_qk_norm=True,
    project_in=True,
    project_in_bias=True,
)

Write = Callable[..., gguf.GGUFReader]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def read(*args: Any, **options: Any) -> gguf.GGUFReader:
        make_model(tmp_path / "model.gguf", *args, **options)
        return gguf.GGUFReader(tmp_path / "model.gguf")

    return read


def keys(reader: gguf.GGUFReader) -> dict[str, tuple[str, Any]]:
    return {
        name.removeprefix(PREFIX): (field.types[0].name, field.contents())
        for name, field in reader.fields.items()
        if name.startswith(PREFIX)
    }


def shapes(reader: gguf.GGUFReader) -> dict[str, tuple[int, ...]]:
    return {t.name: tuple(int(n) for n in t.shape[::-1]) for t in reader.tensors}


def fast_only(of: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in of.items() if name.startswith("fast_")}


@pytest.mark.parametrize("name", ["f32_plain", "f32_wide_heads", "q4_k_one_kv_head"])
def test_keys_and_tensors_are_those_of_the_golden_files(write: Write, name: str) -> None:
    """Names, types of keys, values, shapes and order, from a shape read out of the golden file."""
    golden = gguf.GGUFReader(GOLDEN / f"{name}.gguf")
    values = {key: value for key, (_, value) in keys(golden).items()}
    with slowar.Model(GOLDEN / f"{name}.gguf", load=False) as model:
        config = model.config
    seen = write(config, fast=FastShape(**values))
    assert keys(seen) == keys(golden)
    assert fast_only(shapes(seen)) == fast_only(shapes(golden))
    assert list(fast_only(shapes(seen))) == list(fast_only(shapes(golden)))


def test_everything_optional(write: Write) -> None:
    seen = write(SMALL, fast=ODD)
    stored = {key: value for key, (_, value) in keys(seen).items()}
    expected = asdict(ODD)
    del expected["project_in_bias"]
    expected["layer_norm_rms_eps"] = float(np.float32(1e-5))
    assert stored == expected
    assert fast_only(shapes(seen)) == dict(fast_tensor_shapes(SMALL, ODD))
    extra = {
        "fast_project_in.weight": (32, 64),
        "fast_project_in.bias": (32,),
        "fast_layers.2.attention.q_norm.weight": (24,),
        "fast_layers.2.attention.wqkv.weight": ((2 + 2 * 1) * 24, 32),
        "fast_layers.2.attention.wo.weight": (32, 2 * 24),
    }
    assert extra.items() <= shapes(seen).items()


def test_the_default_shape() -> None:
    """S2 Pro's Fast-AR: 4 layers of 101 million weights each and two tables of 10 million."""
    fast = fast_shape(S2_PRO)
    n = sum(int(np.prod(shape)) for _, shape in fast_tensor_shapes(S2_PRO, fast))
    layer = (32 + 2 * 8) * 128 * 2560 + 32 * 128 * 2560 + 3 * 9728 * 2560 + 2 * 2560
    assert n == 4 * layer + 2 * 4096 * 2560 + 2560
    assert (fast.block_count, fast.context_length, fast_shape(TINY).block_count) == (4, 11, 2)


def test_types(write: Write) -> None:
    seen = write(replace(SMALL, n_ff=64), "q8_0", fast_type="f16")
    types = {t.name: t.tensor_type.name for t in seen.tensors}
    matrices = {name for name, shape in shapes(seen).items() if len(shape) == 2}
    assert {types[name] for name in matrices if name.startswith("fast_")} == {"F16"}
    assert {types[name] for name in matrices if not name.startswith("fast_")} == {"Q8_0"}
    assert {types[name] for name in types.keys() - matrices} == {"F32"}
    same = write(replace(SMALL, n_ff=64), "q8_0")
    assert {t.tensor_type.name for t in same.tensors} == {"F32", "Q8_0"}


@pytest.mark.parametrize("fast", [None, ODD])
def test_the_slow_ar_does_not_depend_on_the_fast(write: Write, fast: FastShape | None) -> None:
    one = {t.name: t.data.tobytes() for t in write(SMALL, seed=3).tensors}
    other = {t.name: t.data.tobytes() for t in write(SMALL, seed=3, fast=fast).tensors}
    assert (
        other.keys()
        == dict([*tensor_shapes(SMALL), *(fast_tensor_shapes(SMALL, fast) if fast else ())]).keys()
    )
    assert all(one[name] == other[name] for name, _ in tensor_shapes(SMALL))


def test_no_fast_ar_no_keys(write: Write) -> None:
    assert keys(write(SMALL, fast=None)) == {}


def test_activations_stay_near_1(write: Write, tmp_path: Path) -> None:
    """Logits are sums of n_embd products with weights of variance 1 / n_embd and a normed vector:
    their spread is 1, give or take 1 / sqrt(2 * 9 * 16) = 6 % for each of them independent."""
    bias = {t.name: t.data for t in write(SMALL, fast=ODD, seed=1).tensors}["fast_project_in.bias"]
    assert np.abs(bias).max() < 0.5  # 32 normal numbers of spread 0.1: 5 sigma
    fast = FastReference(tmp_path / "model.gguf")
    hidden = np.random.default_rng(0).normal(size=SMALL.n_embd)
    logits = [fast.logits(hidden, range(n)) for n in range(1, 10)]
    assert 0.7 < np.std(logits) < 1.4


@pytest.mark.parametrize("name", ["type", "fast_type"])
def test_bad_types(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 'q9', expected one of {', '.join(TYPES)}$"):
        make_model(tmp_path / "model.gguf", SMALL, **{name: "q9"})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_fast_type_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^type q4_k needs rows of a multiple of 256, "):
        make_model(tmp_path / "model.gguf", SMALL, fast_type="q4_k")
    assert not list(tmp_path.iterdir())
