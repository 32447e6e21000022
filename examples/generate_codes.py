"""From a prompt to codes.npy, the file that the codec of the upstream project reads.

    python examples/generate_codes.py [MODEL.gguf [TOKENIZER.json TEXT]]

Without a text the prompt is random, and so is what is said.
"""

from __future__ import annotations

import sys

import numpy as np
from _model import end_token, model_path, random_prompt
from tqdm import tqdm

import pyggml_slowar as slowar
from pyggml_slowar.generation import FRAMES_PER_SECOND


def main() -> None:
    with model_path() as path, slowar.Model(path) as model:
        if len(sys.argv) > 3:
            tokenizer, text = sys.argv[2:4]
            prompt = slowar.prompt(text, tokenizer, config=model.config)
        else:
            prompt = random_prompt(model.config, n_text=40, n_semantic=0)
        max_frames = min(200, model.config.n_ctx - prompt.shape[1])
        with tqdm(unit="frame") as bar:
            made = slowar.generate(
                model,
                prompt,
                max_frames=max_frames,
                seed=1,
                im_end_id=end_token(model.config),
                on_frame=lambda _: bar.update(),
                on_interrupt="return",  # Ctrl-C: what there is is saved
            )
    np.save("codes.npy", made.codes)
    n = made.codes.shape[1]
    print(f"prompt     {prompt.shape}")
    print(f"codes.npy  {made.codes.shape} {made.codes.dtype}, {made.finished}")
    print(f"seed       {made.seed}, which gives the same codes again")
    t = made.timings
    print(f"audio      {n / FRAMES_PER_SECOND:.2f} s, of {n} frames")
    print(f"prefill    {t.prefill:.3f} s")
    print(
        f"frames     Slow-AR {t.slow_ar:.3f}, Fast-AR {t.fast_ar:.3f}, sampling {t.sampling:.3f} s"
    )


if __name__ == "__main__":
    main()
