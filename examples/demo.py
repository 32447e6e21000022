"""Run a prompt and some steps through a small random model and check the result.

    python examples/demo.py [MODEL.gguf]

With a model of your own, that one is run instead.
"""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from _model import model_path, random_prompt
from tqdm import tqdm

import pyggml_slowar as slowar

N_TEXT, N_SEMANTIC, N_STEPS, CHUNK = 96, 160, 64, 32


def next_frame(
    config: slowar.Config, logits: npt.NDArray[np.float32], rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    """The likeliest semantic id and random codes, where a speech pipeline asks the Fast-AR."""
    frame = rng.integers(0, config.codebook_size, 1 + config.n_codebook, dtype=np.int32)
    semantic = logits[config.semantic_begin_id : config.semantic_end_id + 1]
    frame[0] = config.semantic_begin_id + int(np.argmax(semantic))
    return frame


def prefill_and_steps(session: slowar.Session, rng: np.random.Generator) -> slowar.Output:
    config = session.model.config
    prompt = random_prompt(config, N_TEXT, N_SEMANTIC)
    n = prompt.shape[1]
    with tqdm(total=n, desc="prefill", unit="tok") as bar:
        start = time.perf_counter()
        out = session.prefill(
            prompt, chunk=CHUNK, progress=lambda done, _: bar.update(done - bar.n)
        )
        prefill_ms = (time.perf_counter() - start) * 1e3

    start = time.perf_counter()
    for _ in tqdm(range(N_STEPS), desc="steps", unit="tok"):
        out = session.step(next_frame(config, out.logits, rng))
    step_ms = (time.perf_counter() - start) * 1e3 / N_STEPS

    print(f"prefill    {prompt.shape} in {prefill_ms:.1f} ms, {n / prefill_ms * 1e3:.0f} tok/s")
    print(f"step       {prompt[:, 0].shape} in {step_ms:.2f} ms, {session.n_threads} threads")
    return out


def head_error(path: Path, out: slowar.Output) -> float:
    """Relative error of logits against embeddings @ hidden, computed by numpy."""
    table = next(t for t in gguf.GGUFReader(path).tensors if t.name == "embeddings.weight")
    expected = gguf.quants.dequantize(table.data, table.tensor_type) @ out.hidden
    return float(np.linalg.norm(expected - out.logits) / np.linalg.norm(expected))


def run(path: Path) -> None:
    start = time.perf_counter()
    with slowar.Model(path) as model:
        opened_ms = (time.perf_counter() - start) * 1e3
        c = model.config
        print(
            f"model      {c.n_layer} layers of {c.n_embd}, {model.n_params / 1e6:.1f} M parameters"
        )
        print(f"device     {model.device.name} ({model.device.description})")
        print(f"opened     in {opened_ms:.1f} ms")
        with model.session(max_seq_len=N_TEXT + N_SEMANTIC + N_STEPS) as session:
            out = prefill_and_steps(session, np.random.default_rng(0))
            print(f"logits     {out.logits.shape} {out.logits.dtype}")
            print(f"hidden     {out.hidden.shape} {out.hidden.dtype}")
            position = f"position {session.n_past} of {session.max_seq_len}"
            print(f"KV cache   {session.nbytes / 2**20:.1f} MiB, {position}")
    if c.tie_word_embeddings and c.norm_fastlayer_input:
        error = head_error(path, out)
        print(f"check      embeddings @ hidden == logits: relative error {error:.1e}")


def main() -> None:
    with model_path() as path:
        run(path)


if __name__ == "__main__":
    main()
