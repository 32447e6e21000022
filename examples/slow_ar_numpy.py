"""The Slow-AR alone: logits and hidden vectors as numpy arrays.

python examples/slow_ar_numpy.py [MODEL.gguf]
"""

from __future__ import annotations

import numpy as np
from _model import model_path, random_prompt

import pyggml_slowar as slowar

N_STEPS = 8


def top(out: slowar.Output, n: int = 5) -> str:
    """The likeliest tokens, with their probabilities among the semantic ones."""
    p = np.exp(out.logits - out.logits.max())
    p /= p.sum()
    best = np.argsort(-p)[:n]
    return ", ".join(f"{out.ids[i]} {p[i]:.3f}" for i in best)


def main() -> None:
    with model_path() as path, slowar.Model(path) as model:
        c = model.config
        prompt = random_prompt(c, n_text=24, n_semantic=16)
        codes = np.random.default_rng(1).integers(0, c.codebook_size, (N_STEPS, c.n_codebook))
        with model.session(prompt.shape[1] + N_STEPS, logits="semantic") as session:
            out = session.prefill(prompt)
            print(f"prompt     {prompt.shape}")
            print(f"logits     {out.logits.shape} {out.logits.dtype}, of tokens out.ids")
            print(f"hidden     {out.hidden.shape} {out.hidden.dtype}")
            print(f"prefill    {top(out)}")
            hidden = [out.hidden]
            for i, row in enumerate(codes):
                # The likeliest token with any codes; what follows its first code is the Fast-AR's.
                token = out.ids[out.logits.argmax()]
                frame = np.array([token, token - c.semantic_begin_id, *row[1:]])
                out = session.step(frame)
                hidden.append(out.hidden)
                print(f"step {i}     {top(out)}")

            vectors = np.stack(hidden)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            cosines = (vectors[1:] * vectors[:-1]).sum(axis=1)
            print("cosine of each hidden vector and the one before:", np.round(cosines, 3))

            # The past can be left: the same position, evaluated again, gives the same vector.
            session.rewind(session.n_past - 1)
            again = session.step(frame)
            print(f"again      the same hidden vector: {np.array_equal(again.hidden, out.hidden)}")


if __name__ == "__main__":
    main()
