"""What the examples share: a model, and a prompt for it where there is no tokenizer."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

import pyggml_slowar as slowar
from pyggml_slowar.make_model import TINY, make_model
from pyggml_slowar.sampler import IM_END_ID


@contextmanager
def model_path() -> Iterator[Path]:
    """The first argument of the command, or a small model of random weights that is made now."""
    if len(sys.argv) > 1:
        yield Path(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        make_model(path, TINY, "f32")
        print(f"made       a model of random weights, {path.stat().st_size / 2**20:.1f} MiB")
        yield path


def random_prompt(
    config: slowar.Config, n_text: int, n_semantic: int, seed: int = 0
) -> npt.NDArray[np.int32]:
    """(1 + n_codebook, n_text + n_semantic): text positions, then a stretch of audio."""
    rng = np.random.default_rng(seed)
    shape = 1 + config.n_codebook, n_text + n_semantic
    prompt = rng.integers(0, config.codebook_size, shape, dtype=np.int32)
    prompt[0, :n_text] = rng.integers(0, config.semantic_begin_id, n_text)
    prompt[1:, :n_text] = 0
    prompt[0, n_text:] = config.semantic_begin_id + prompt[1, n_text:]  # as slowar.prompt has it
    return prompt


def end_token(config: slowar.Config) -> int:
    # The vocabulary of a small random model does not reach the released end token's id, so there
    # another token that is not semantic ends the speech.
    return IM_END_ID if config.n_vocab > IM_END_ID else 0
