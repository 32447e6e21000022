"""Frames as they are made, handed on in blocks as a codec would take them.

python examples/streaming.py [MODEL.gguf]
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing

import numpy as np
import numpy.typing as npt
from _model import end_token, model_path, random_prompt

import pyggml_slowar as slowar
from pyggml_slowar.generation import FRAMES_PER_SECOND

BLOCK = 8  # frames: 0.37 s of audio


def blocks(frames: Iterable[slowar.Frame], n: int) -> Iterator[npt.NDArray[np.int32]]:
    """(n_codebook, n) each; the last may be shorter."""
    held: list[npt.NDArray[np.int32]] = []
    for frame in frames:
        held.append(frame.codes)
        if len(held) == n:
            yield np.stack(held, axis=1)
            held = []
    if held:
        yield np.stack(held, axis=1)


def main() -> None:
    with model_path() as path, slowar.Model(path) as model:
        prompt = random_prompt(model.config, n_text=40, n_semantic=0)
        start = time.perf_counter()
        frames = slowar.stream(
            model, prompt, max_frames=60, min_frames=20, seed=1, im_end_id=end_token(model.config)
        )
        ready = 0  # frames that the listener has
        first: float | None = None
        with closing(frames):  # whoever stops early gives the cache back
            for block in blocks(frames, BLOCK):
                now = time.perf_counter() - start
                first = now if first is None else first
                ready += block.shape[1]
                # Here the codec would turn the block into sound.
                played = min((now - first) * FRAMES_PER_SECOND, ready)
                print(f"{now:7.3f} s  block {block.shape}, {ready - played:.1f} frames ahead")
        print(f"frames     {ready}")
        print(f"first      block after {first or 0.0:.3f} s")


if __name__ == "__main__":
    main()
