"""Each example as a user starts it: on a model that it makes, and on one that it is given."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_prompt import trained

import pyggml_slowar as slowar
from pyggml_slowar.make_model import TINY, make_model

EXAMPLES = Path(__file__).parent.parent / "examples"

# None of its sizes is TINY's, so that an example that has one of those written in it fails.
OWN = dataclasses.replace(
    TINY,
    n_vocab=800,
    n_embd=128,
    n_ff=192,
    n_layer=2,
    n_codebook=8,
    codebook_size=32,
    semantic_begin_id=720,
    semantic_end_id=751,
)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.gguf"
    make_model(path, OWN, seed=5)
    return path


def run(name: str, cwd: Path, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("made       a model") == (not words)
    return done.stdout


def test_demo(tmp_path: Path) -> None:
    out = run("demo", tmp_path)
    error = re.search(r"relative error (\S+)", out)
    assert error is not None
    assert float(error[1]) < 1e-6  # float32's own, as test_parity has it


@pytest.mark.parametrize("given", [False, True])
def test_slow_ar_numpy(tmp_path: Path, own: Path, given: bool) -> None:
    out = run("slow_ar_numpy", tmp_path, *([own] if given else []))
    config = OWN if given else TINY
    assert f"logits     ({config.codebook_size},) float32" in out
    assert f"hidden     ({config.n_embd},) float32" in out
    lines = re.findall(r"^(?:prefill|step \d) +(.*)$", out, re.MULTILINE)
    assert len(lines) == 9
    for line in lines:
        pairs = [pair.split(" ") for pair in line.split(", ")]
        ids, p = [int(token) for token, _ in pairs], [float(p) for _, p in pairs]
        assert len(set(ids)) == 5
        assert all(config.semantic_begin_id <= i <= config.semantic_end_id for i in ids)
        assert p == sorted(p, reverse=True)
        assert 0 < sum(p) <= 1
    found = re.search(r"one before: \[(.*)\]", out)
    assert found is not None
    cosines = np.array(found[1].split(), float)
    assert cosines.shape == (8,)
    assert (abs(cosines) < 1).all()
    assert out.endswith("the same hidden vector: True\n")


@pytest.mark.parametrize("given", [False, True])
def test_generate_codes(tmp_path: Path, own: Path, given: bool) -> None:
    out = run("generate_codes", tmp_path, *([own] if given else []))
    config = OWN if given else TINY
    codes = np.load(tmp_path / "codes.npy")
    assert codes.dtype == np.int32
    assert codes.shape[0] == config.n_codebook
    assert codes.shape[1] > 0
    assert 0 <= codes.min() < codes.max() < config.codebook_size
    assert f"codes.npy  {codes.shape} int32" in out


def test_generate_codes_from_text(tmp_path: Path) -> None:
    config = dataclasses.replace(OWN, n_codebook=10)
    tokenizer = trained(config)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    make_model(tmp_path / "own.gguf", config, seed=5)
    run("generate_codes", tmp_path, "own.gguf", "tokenizer.json", "A quick fox.")
    with slowar.Model(tmp_path / "own.gguf") as model:
        prompt = slowar.prompt("A quick fox.", tokenizer, config=model.config)
        expected = slowar.generate(model, prompt, max_frames=200, seed=1, im_end_id=0)
    np.testing.assert_array_equal(np.load(tmp_path / "codes.npy"), expected.codes)


def test_streaming(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run("streaming", tmp_path)
    assert len(blocks_of(out, TINY)) >= 2

    monkeypatch.syspath_prepend(EXAMPLES)
    from _model import random_prompt

    with slowar.Model(own) as model:
        prompt = random_prompt(model.config, 40, 0)
        options: dict[str, Any] = {"max_frames": 60, "min_frames": 20, "seed": 1, "im_end_id": 0}
        n = slowar.generate(model, prompt, **options).codes.shape[1]
    assert sum(blocks_of(run("streaming", tmp_path, own), OWN)) == n


def blocks_of(out: str, config: slowar.Config) -> list[int]:
    """Frames of each block: 8, but for the last."""
    blocks = [tuple(map(int, b)) for b in re.findall(r"block \((\d+), (\d+)\)", out)]
    sizes = [n for _, n in blocks]
    assert {rows for rows, _ in blocks} == {config.n_codebook}
    assert set(sizes[:-1]) == {8}
    assert 1 <= sizes[-1] <= 8
    assert f"frames     {sum(sizes)}\n" in out
    return sizes


@pytest.mark.parametrize("given", [False, True])
def test_batched_service(tmp_path: Path, own: Path, given: bool) -> None:
    out = run("batched_service", tmp_path, *([own] if given else []))
    clients = {int(i): int(n) for i, n in re.findall(r"client (\d)   (\d+) frames", out)}
    assert sorted(clients) == [0, 1, 3, 4, 5, 6, 7]
    assert all(20 <= n <= 40 for n in clients.values())
    assert "client 2   left\n" in out
    assert "requests   7 finished, 1 cancelled, 0 failed\n" in out


@pytest.mark.parametrize("given", [False, True])
def test_prefix_cache(tmp_path: Path, own: Path, given: bool) -> None:
    out = run("prefix_cache", tmp_path, *([own] if given else []))
    assert out.count("same codes: True\n") == 4
    # The voice's 340 positions, for all texts but the first.
    assert "cache      3 hits, 1 miss, 1020 positions reused\n" in out
