"""The whole loop from a GGUF file to codes, in float64 and without anything of the package: the
Slow-AR of `reference.py`, a Fast-AR that recomputes its prefix for every code, the upstream
sampler, and the loop around them.

Shapes are numpy order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from reference import Reference

Floats = npt.NDArray[np.float64]

RAS_WINDOW = 10
RAS_DRAW = 2**32

Uniforms = Callable[[int, int, int], Floats]
"""(frame, draw, n) -> (n,) in (0, 1). Draw 0: the token; c: codebook c; RAS_DRAW: the second."""

_MASK = 2**64 - 1


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x64-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & _MASK, (a >> 64) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
    return [c0, c1, c2, c3]


def philox_uniforms(seed: int) -> Uniforms:
    """As docs/generation.md has them."""

    def uniforms(frame: int, draw: int, n: int) -> Floats:
        words = [
            word
            for block in range(1, 1 + (n + 7) // 8)
            for word in philox((block, draw, frame, 0), (seed, 0))
        ]
        halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
        return (np.array(halves[:n], np.float64) + 0.5) / 2**32

    return uniforms


def relative_error(seen: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(seen - expected) / np.linalg.norm(expected))


# Fast-AR


class FastReference:
    """A frame's codes from the hidden vector: nothing is kept from one code to the next."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        reader = gguf.GGUFReader(path)

        def value(key: str) -> Any:
            field = reader.get_field(f"fish_speech.fast_{key}")
            if field is None:
                raise KeyError(f"{path}: no metadata key fish_speech.fast_{key}")
            return field.contents()

        self.n_layer: int = value("block_count")
        self.n_head: int = value("head_count")
        self.n_head_kv: int = value("head_count_kv")
        self.head_dim: int = value("head_dim")
        self.rope_base: float = value("rope_freq_base")
        self.eps: float = value("layer_norm_rms_eps")
        self.qk_norm: bool = value("attention_qk_norm")
        self.project_in: bool = value("project_in")
        self._weights = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
            if tensor.name.startswith("fast_")
        }

    def logits(self, hidden: npt.ArrayLike, codes: Sequence[int]) -> Floats:
        """Of the next codebook, (codebook_size,), after `codes`, the semantic one first."""
        w = self._weights
        first = np.asarray(hidden, np.float64)
        if self.project_in:
            first = w["fast_project_in.weight"] @ first + w.get("fast_project_in.bias", 0.0)
        x = np.stack([first, *(w["fast_embeddings.weight"][code] for code in codes)])  # (n, dim)
        for il in range(self.n_layer):
            x = self._layer(x, f"fast_layers.{il}.")
        return np.asarray(w["fast_output.weight"] @ self._norm(x[-1], w["fast_norm.weight"]))

    def _layer(self, x: Floats, at: str) -> Floats:
        w = {
            name.removeprefix(at): value
            for name, value in self._weights.items()
            if name.startswith(at)
        }
        n, group = len(x), self.n_head // self.n_head_kv
        qkv = self._norm(x, w["attention_norm.weight"]) @ w["attention.wqkv.weight"].T
        q_size, kv_size = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        q, k, v = (
            part.reshape(n, -1, self.head_dim)
            for part in np.split(qkv, [q_size, q_size + kv_size], axis=1)
        )
        if self.qk_norm:
            q = self._norm(q, w["attention.q_norm.weight"])
            k = self._norm(k, w["attention.k_norm.weight"])
        q, k = self._rope(q), self._rope(k)
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)  # (n, n_head, head_dim)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(self.head_dim)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        attention = np.einsum("hij,jhd->ihd", softmax(scores), v).reshape(n, q_size)
        h = x + attention @ w["attention.wo.weight"].T
        f = self._norm(h, w["ffn_norm.weight"])
        gate = f @ w["feed_forward.w1.weight"].T
        up = f @ w["feed_forward.w3.weight"].T
        return np.asarray(h + (gate / (1 + np.exp(-gate)) * up) @ w["feed_forward.w2.weight"].T)

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        return np.asarray(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.eps) * weight)

    def _rope(self, x: Floats) -> Floats:
        """(n, heads, head_dim), pairs (x[2i], x[2i + 1])."""
        rates = self.rope_base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(
            1j * np.arange(len(x))[:, None, None] * rates
        )
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


# Sampler


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def ranking(x: Floats) -> list[int]:
    """Equal logits by index, 0 last."""
    return sorted(range(len(x)), key=lambda i: (-x[i], i == 0, i))


def kept(logits: npt.ArrayLike, top_p: float, top_k: int) -> list[int]:
    """As upstream, by a sort of all: the candidates that are not removed, best first."""
    x = np.asarray(logits, np.float64)
    order = np.array(ranking(x))
    cumulative = np.cumsum(softmax(x[order])).astype(np.float32)  # upstream's are float32
    removed = (cumulative > np.float32(top_p)) | (np.arange(len(x)) >= top_k)
    removed[0] = False
    return [int(i) for i in order[~removed]]


def probabilities(logits: npt.ArrayLike, temperature: float, top_p: float, top_k: int) -> Floats:
    """Of every candidate, (n,)."""
    x = np.full(np.shape(logits), -np.inf)
    stay = kept(logits, top_p, top_k)
    x[stay] = np.asarray(logits, np.float64)[stay]
    return softmax(x / max(temperature, 1e-5))


def choose(p: Floats, u: Floats) -> int:
    return int(np.argmax(p / -np.log(u)))


@dataclass(frozen=True)
class Settings:
    temperature: float = 0.8
    top_p: float = 0.8
    top_k: int = 30
    min_frames: int = 0


class ReferenceSampler:
    """Tokens and codes of one generation. Every draw is made and every candidate has a number."""

    def __init__(
        self, settings: Settings, uniforms: Uniforms, begin: int, end: int, im_end_id: int
    ) -> None:
        self.settings, self.uniforms = settings, uniforms
        self.candidates: list[int] = [*range(begin, end + 1), im_end_id]
        self.im_end_id = im_end_id
        self.window = [0] * RAS_WINDOW
        self.frame = -1

    def token(self, logits: npt.ArrayLike) -> int:
        """`logits` are of the whole vocabulary."""
        self.frame += 1
        s = self.settings
        x = np.asarray(logits, np.float64)[self.candidates]
        if self.frame < s.min_frames:
            x[-1] = -np.inf
        if s.temperature == 0:
            token: int = self.candidates[int(np.argmax(x))]
        else:
            draws: list[int] = []
            for draw, temperature, top_p in (
                (0, s.temperature, s.top_p),
                (RAS_DRAW, 1.0, 0.9),
            ):
                p = probabilities(x, temperature, top_p, s.top_k)
                draws.append(self.candidates[choose(p, self.uniforms(self.frame, draw, len(x)))])
            token, again = draws
            if self.frame > 0 and token != self.im_end_id and token in self.window:
                token = again
        if self.frame > 0:
            self.window = [*self.window[1:], token]
        return token

    def code(self, codebook: int, logits: npt.ArrayLike) -> int:
        s = self.settings
        x = np.asarray(logits, np.float64)
        if s.temperature == 0:
            return int(np.argmax(x))
        p = probabilities(x, s.temperature, s.top_p, s.top_k)
        return choose(p, self.uniforms(self.frame, codebook, len(x)))


# Loop


def generate(
    path: str | os.PathLike[str],
    prompt: npt.NDArray[np.int32],
    *,
    max_frames: int,
    im_end_id: int,
    uniforms: Uniforms,
    settings: Settings | None = None,
    cache: str = "exact",
    forced: npt.NDArray[np.int32] | None = None,
) -> npt.NDArray[np.int32]:
    """Codes int32 (n_codebook, T) from a prompt (1 + n_codebook, n), T at most `max_frames`.

    `cache` is one of `reference.CACHES`. With `forced`, (n_codebook, max_frames), what was chosen
    is given back and those codes are fed instead; the end token stands as -1 and ends nothing.
    """
    slow, fast = Reference(path, cache), FastReference(path)
    begin, end = int(slow.config["semantic_begin"]), int(slow.config["semantic_end"])
    n_codebook = int(slow.config["n_codebook"])
    sampler = ReferenceSampler(settings or Settings(), uniforms, begin, end, im_end_id)
    frames: list[list[int]] = []
    hidden, logits = slow.eval(prompt)
    while len(frames) < max_frames:
        token = sampler.token(logits)
        if token == im_end_id and forced is None:
            break
        given = None if forced is None else [int(code) for code in forced[:, len(frames)]]
        chosen = [-1 if token == im_end_id else token - begin]
        for codebook in range(1, n_codebook):
            prefix = chosen if given is None else given[:codebook]
            chosen.append(sampler.code(codebook, fast.logits(hidden, prefix)))
        frames.append(chosen)
        fed = chosen if given is None else given
        if len(frames) < max_frames:
            hidden, logits = slow.eval(np.array([[begin + fed[0], *fed]], np.int32).T)
    codes: npt.NDArray[np.int32] = np.array(frames, np.int32).reshape(-1, n_codebook).T
    return codes
