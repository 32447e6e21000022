"""Models, prompts and child processes for every test file."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest

from pyggml_slowar import Config, Model, Output
from pyggml_slowar.device import build_info
from pyggml_slowar.make_model import TINY, make_model

# A shell that starts this in the background has SIGINT ignored, and Python then leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, and no database left behind in the checkout.
hypothesis.settings.register_profile("here", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("here")

# A tenth of TINY's weights, with the same traits, for tests that evaluate thousands of times.
SMALL = dataclasses.replace(
    TINY,
    n_ctx=256,
    n_vocab=300,
    n_embd=64,
    n_ff=96,
    n_layer=2,
    head_dim=32,
    codebook_size=16,
    semantic_begin_id=200,
    semantic_end_id=215,
)

Tokens = npt.NDArray[np.int32]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    make_model(path, TINY, seed=1)
    return path


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Iterator[Model]:
    with Model(tiny_path, backend="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    make_model(path, SMALL, seed=2)
    return path


@pytest.fixture(scope="session")
def small(small_path: Path) -> Iterator[Model]:
    with Model(small_path, backend="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """SMALL with other weights."""
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    make_model(path, SMALL, seed=3)
    with Model(path, backend="cpu") as model:
        yield model


def has_products() -> bool:
    """Whether the library under test has them: code for a level, or for the CPU it was built on."""
    return has_code(("x86-64-v3", "x86-64-v4"), {"avx2", "fma", "f16c"})


def rows_packed() -> int:
    """How many rows lie side by side: a register's numbers of 32 bits (csrc/kernels.h)."""
    extensions = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    return 16 if has_code(("x86-64-v4",), extensions) else 8


def has_code(levels: tuple[str, ...], extensions: set[str]) -> bool:
    code = build_info().split("CPU code: ")[1].split(",")[0]
    if code != "native":
        return code in levels
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and extensions <= set(cpus.read_text().split())


def make_prompt(config: Config, n: int, *, seed: int = 0) -> Tokens:
    """(1 + n_codebook, n) with text on even columns and semantic positions on odd ones."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.codebook_size, (1 + config.n_codebook, n), np.int32)
    tokens[0] = rng.integers(0, config.semantic_begin_id, n)
    tokens[0, 1::2] = rng.integers(config.semantic_begin_id, config.semantic_end_id + 1, n // 2)
    return tokens


def same_bits(a: Output, b: Output) -> bool:
    return np.array_equal(a.ids, b.ids) and all(
        x.dtype == y.dtype == np.float32 and x.tobytes() == y.tobytes()
        for x, y in ((a.hidden, b.hidden), (a.logits, b.logits))
    )


def run_child(
    code: str, *args: object, options: tuple[str, ...] = (), timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """A Python snippet in a process of its own. ``args`` are its ``sys.argv[1:]``."""
    command: list[Any] = [sys.executable, "-X", "faulthandler", *options, "-c", code]
    return subprocess.run(
        [*command, *map(str, args)], capture_output=True, text=True, timeout=timeout, check=False
    )


def assert_clean(child: subprocess.CompletedProcess[str], stdout: str = "") -> None:
    """The child ended by itself, with status 0, and wrote ``stdout`` and nothing else."""
    seen = (child.returncode, child.stdout, child.stderr)
    assert seen == (0, stdout, "")
