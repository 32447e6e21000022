"""Random models in the public file layout, for demos, tests and benchmarks without weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ._native import call, ffi, lib
from .device import default_threads
from .model import Config

TYPES = ("f32", "f16", "q8_0", "q4_k")
"""What ``make_model`` writes matrices as; norms are always f32."""

S2_PRO = Config(
    n_ctx=32768,
    n_vocab=155776,
    n_embd=2560,
    n_ff=9728,
    n_layer=36,
    n_head=32,
    n_head_kv=8,
    head_dim=128,
    n_codebook=10,
    codebook_size=4096,
    semantic_begin_id=151678,
    semantic_end_id=155773,
    rope_freq_base=1e6,
    norm_rms_eps=1e-6,
    attention_qk_norm=True,
    scale_codebook_embeddings=True,
    tie_word_embeddings=True,
    norm_fastlayer_input=True,
)
"""The released model's hyper-parameters."""

TINY = replace(
    S2_PRO,
    n_ctx=2048,
    n_vocab=1000,
    n_embd=256,
    n_ff=512,
    n_layer=3,
    n_head=4,
    n_head_kv=2,
    codebook_size=64,
    semantic_begin_id=900,
    semantic_end_id=963,
)
"""Small enough for a test, with the traits that are easy to get wrong: head size 128 where n_embd /
n_head is 64, two query heads to a KV head, rows that every ggml type can hold."""

PRESETS = {"tiny": TINY, "s2-pro": S2_PRO}

_CHUNK = 1 << 22  # weights drawn and quantised at a time: 16 MiB of float32

Progress = Callable[[int, int], object]


def make_model(
    path: str | os.PathLike[str],
    config: Config,
    type: str = "f32",
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file with random weights.

    Matrices are normal with variance 1 / columns, norms 1 with a spread of 0.1, so that activations
    stay near 1 through any number of layers. The same config, type and seed give the same file.

    Parameters
    ----------
    path
        Written under a temporary name beside it and renamed when complete.
    type
        Of every matrix: one of ``TYPES``. Rows must be a multiple of its block (32 for q8_0, 256
        for q4_k).
    progress
        Called with (weights written, weights in all).

    Raises
    ------
    ValueError
        ``type`` is unknown or does not fit the shapes.
    """
    if type not in TYPES:
        raise ValueError(f"type is {type!r}, expected one of {', '.join(TYPES)}")
    shapes = dict(tensor_shapes(config))
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(partial, "fish-speech")
    try:
        _add_keys(writer, config)
        for name, shape in shapes.items():
            _add_info(writer, name, shape, type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        with ThreadPoolExecutor(default_threads()) as pool:
            for i, shape in enumerate(shapes.values()):
                writer.write_tensor_data(_random_tensor(pool, shape, type, (seed, i)))
                done += int(np.prod(shape))
                if progress is not None:
                    progress(done, total)
        writer.close()
        partial.replace(target)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def tensor_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The Slow-AR's tensors and their shapes, numpy order, as the public files lay them out."""
    c = config
    q_size, kv_size = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
    yield "embeddings.weight", (c.n_vocab, c.n_embd)
    yield "codebook_embeddings.weight", (c.n_codebook * c.codebook_size, c.n_embd)
    yield "norm.weight", (c.n_embd,)
    for il in range(c.n_layer):
        at = f"layers.{il}."
        yield at + "attention_norm.weight", (c.n_embd,)
        yield at + "ffn_norm.weight", (c.n_embd,)
        yield at + "attention.wqkv.weight", (q_size + 2 * kv_size, c.n_embd)
        yield at + "attention.wo.weight", (c.n_embd, q_size)
        if c.attention_qk_norm:
            yield at + "attention.q_norm.weight", (c.head_dim,)
            yield at + "attention.k_norm.weight", (c.head_dim,)
        yield at + "feed_forward.w1.weight", (c.n_ff, c.n_embd)
        yield at + "feed_forward.w3.weight", (c.n_ff, c.n_embd)
        yield at + "feed_forward.w2.weight", (c.n_embd, c.n_ff)
    if not c.tie_word_embeddings:
        yield "output.weight", (c.n_vocab, c.n_embd)


def _add_keys(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_uint32("fish-speech.context_length", c.n_ctx)
    writer.add_uint32("fish-speech.vocab_size", c.n_vocab)
    writer.add_uint32("fish-speech.embedding_length", c.n_embd)
    writer.add_uint32("fish-speech.feed_forward_length", c.n_ff)
    writer.add_uint32("fish-speech.block_count", c.n_layer)
    writer.add_uint32("fish-speech.attention.head_count", c.n_head)
    writer.add_uint32("fish-speech.attention.head_count_kv", c.n_head_kv)
    writer.add_float32("fish-speech.rope.freq_base", c.rope_freq_base)
    writer.add_float32("fish-speech.attention.layer_norm_rms_epsilon", c.norm_rms_eps)
    writer.add_uint32("fish_speech.num_codebooks", c.n_codebook)
    writer.add_uint32("fish_speech.codebook_size", c.codebook_size)
    writer.add_uint32("fish_speech.semantic_begin_id", c.semantic_begin_id)
    writer.add_uint32("fish_speech.semantic_end_id", c.semantic_end_id)
    writer.add_bool("fish_speech.tie_word_embeddings", c.tie_word_embeddings)
    writer.add_bool("fish_speech.attention_qk_norm", c.attention_qk_norm)
    writer.add_bool("fish_speech.scale_codebook_embeddings", c.scale_codebook_embeddings)
    writer.add_bool("fish_speech.norm_fastlayer_input", c.norm_fastlayer_input)


def _ggml_type(shape: tuple[int, ...], type: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[type.upper() if len(shape) == 2 else "F32"]


def _row_bytes(shape: tuple[int, ...], type: str) -> int:
    block, size = gguf.GGML_QUANT_SIZES[_ggml_type(shape, type)]
    if shape[-1] % block:
        raise ValueError(
            f"type {type} needs rows of a multiple of {block}, a tensor has {shape[-1]} columns"
        )
    return shape[-1] // block * size


def _add_info(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], type: str) -> None:
    n_bytes = _row_bytes(shape, type)
    # For raw bytes the writer takes the shape in bytes and works out the shape in weights.
    stored = (*shape[:-1], n_bytes)
    writer.add_tensor_info(
        name,
        stored,
        np.dtype(np.uint8),
        int(np.prod(stored)),
        raw_dtype=_ggml_type(shape, type),
    )


def _random_tensor(
    pool: ThreadPoolExecutor, shape: tuple[int, ...], type: str, seed: tuple[int, int]
) -> npt.NDArray[np.uint8]:
    rows, columns = (1, *shape)[-2:]
    out = np.empty((rows, _row_bytes(shape, type)), np.uint8)
    per_chunk = max(1, _CHUNK // columns)

    def fill(start: int) -> None:
        n = min(per_chunk, rows - start)
        values = np.random.default_rng((*seed, start)).standard_normal((n, columns), np.float32)
        if len(shape) == 1:
            values = 1 + values * np.float32(0.1)
        else:
            values *= np.float32(columns**-0.5)
        _quantize(values, _ggml_type(shape, type).name, out[start : start + n])

    list(pool.map(fill, range(0, rows, per_chunk)))
    return out


def _quantize(values: npt.NDArray[np.float32], type: str, out: npt.NDArray[np.uint8]) -> None:
    rows, columns = values.shape
    name = type.lower().replace("_k", "_K").encode()  # ggml's spelling: "q4_K"
    source: Any = ffi.from_buffer("float[]", values)
    target: Any = ffi.from_buffer(out)
    call(lib.slowar_quantize, name, source, rows, columns, target, out.nbytes)
