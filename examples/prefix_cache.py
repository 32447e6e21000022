"""One reference voice, several texts: what the prompts have in common is evaluated once.

python examples/prefix_cache.py [MODEL.gguf]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from _model import end_token, model_path, random_prompt

import pyggml_slowar as slowar

N_TEXTS, N_FRAMES = 4, 5


def main() -> None:
    with model_path() as path, slowar.Model(path) as model:
        # With a tokenizer: slowar.prompt(text, "tokenizer.json", [(what is said, codes)]).
        voice = random_prompt(model.config, n_text=40, n_semantic=300)
        texts = [random_prompt(model.config, 20 + i, 0, seed=1 + i) for i in range(N_TEXTS)]
        cache = model.prefix_cache(2**28)

        def speak(
            prompt: npt.NDArray[np.int32], known: slowar.PrefixCache | None
        ) -> slowar.Generation:
            return slowar.generate(
                model,
                prompt,
                max_frames=N_FRAMES,
                min_frames=N_FRAMES,
                seed=1,
                im_end_id=end_token(model.config),
                prefix_cache=known,
                kv_type="f32",  # how the prompt is cut then shows in the last bits alone
            )

        for i, text in enumerate(texts):
            prompt = np.concatenate([voice, text], axis=1)
            plain, cached = speak(prompt, None), speak(prompt, cache)
            print(
                f"text {i}     {prompt.shape[1]} positions, prefill {plain.timings.prefill:.4f} s "
                f"without the cache, {cached.timings.prefill:.4f} s with it, "
                f"same codes: {np.array_equal(plain.codes, cached.codes)}"
            )
        s = cache.stats
        print(f"cache      {s.hits} hits, {s.misses} miss, {s.positions_reused} positions reused")
        print(f"           {s.n_entries} entries, {s.nbytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
