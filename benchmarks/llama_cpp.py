"""Steps and prefill beside llama.cpp's, in turns in one run, over the same quantized matrices.

python benchmarks/llama_cpp.py MODEL.gguf [--past 128] [--prefill 512] [--rounds 3] [--threads 2]

Needs ``pip install xllamacpp``, a prebuilt llama.cpp, which nothing else here needs. It gets the
Slow-AR's matrices under the names of a Qwen3, which has the same shape; RoPE turns other pairs
there, and codebooks are left out. It chooses the likeliest of all ids after each step, and so do
sessions here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import xllamacpp

from pyggml_slowar import Model, bench

N_STEPS = 16
NAMES = {
    "attention_norm": "attn_norm",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}


def write_qwen(model: Model, source: Path, to: Path) -> None:
    c = model.config
    tensors = {t.name: t for t in gguf.GGUFReader(source).tensors}
    writer = gguf.GGUFWriter(to, "qwen3")
    writer.add_context_length(c.n_ctx)
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(c.n_ff)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head_kv)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_freq_base)
    writer.add_layer_norm_rms_eps(c.norm_rms_eps)
    writer.add_vocab_size(c.n_vocab)
    # A vocabulary to be loaded, of words that nothing is made of: bytes have to be among them.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + i) for i in range(256 - len(printable)))
    words = [chr(b) if b in printable else next(others) for b in range(256)]
    words += [f"word{i}" for i in range(256, c.n_vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * c.n_vocab)
    writer.add_token_merges(["w o"])

    def add(name: str, tensor: gguf.ReaderTensor, first: int = 0, last: int | None = None) -> None:
        writer.add_tensor(f"{name}.weight", tensor.data[first:last], raw_dtype=tensor.tensor_type)

    add("token_embd", tensors["embeddings.weight"])
    add("output_norm", tensors["norm.weight"])
    for i in range(c.n_layer):
        for ours, theirs in NAMES.items():
            add(f"blk.{i}.{theirs}", tensors[f"layers.{i}.{ours}.weight"])
        wqkv = tensors[f"layers.{i}.attention.wqkv.weight"]
        ends = [0, *(c.head_dim * n for n in (c.n_head, c.n_head + c.n_head_kv))]
        for letter, first, last in zip("qkv", ends, [*ends[1:], None], strict=True):
            add(f"blk.{i}.attn_{letter}", wqkv, first, last)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Times = tuple[float, float]  # ms for the prompt, ms of a step
Run = Callable[[int, int], Times]  # of a prompt's positions and of steps behind it


def llama_cpp(path: Path, n_ctx: int, n_threads: int, repack: bool) -> Run:
    p = xllamacpp.CommonParams()
    p.model.path = str(path)
    p.n_gpu_layers = 0
    p.n_ctx = n_ctx
    p.n_parallel = 1
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = n_threads
    p.no_extra_bufts = not repack
    p.fit_params = p.cache_prompt = p.cache_idle_slots = False
    p.cache_ram_mib = p.n_ctx_checkpoints = 0
    p.verbosity = 0
    server = xllamacpp.Server(p)

    def run(past: int, n_steps: int) -> Times:
        answers: list[dict[str, Any]] = []

        def take(chunk: Any) -> None:
            read = json.loads(chunk) if isinstance(chunk, (str, bytes)) else chunk
            answers.extend(read if isinstance(read, list) else [read])

        ids = [7919 * i % 256 for i in range(past)]  # bytes, which every vocabulary has
        wish = {"prompt": ids, "max_tokens": n_steps + 1, "stream": True, "temperature": 0}
        wish |= {"timings_per_token": True, "ignore_eos": True, "cache_prompt": False}
        server.handle_completions(wish | {"top_k": 1, "samplers": ["top_k"]}, take)
        timings = [answer["timings"] for answer in answers if "timings" in answer]
        at = {t["predicted_n"]: t["predicted_ms"] for t in timings}
        steps = [at[n + 1] - at[n] for n in at if n + 1 in at]
        if not timings or (n_steps and not steps):
            raise RuntimeError(f"expected timings of {n_steps} steps, llama.cpp answered {answers}")
        return timings[-1]["prompt_ms"], statistics.median(steps) if steps else 0.0

    return run


def ours(model: Model, n_ctx: int, n_threads: int) -> Run:
    session = model.session(n_ctx, n_threads=n_threads)
    tokens = bench.random_tokens(model, n_ctx)

    def run(past: int, n_steps: int) -> Times:
        session.reset()
        clock = [time.perf_counter()]
        session.prefill(tokens[:, :past])
        clock.append(time.perf_counter())
        for i in range(past, past + n_steps):
            session.step(tokens[:, i]).logits.argmax()
            clock.append(time.perf_counter())
        prompt, *steps = (1e3 * (b - a) for a, b in pairwise(clock))
        return prompt, statistics.median(steps) if steps else 0.0

    return run


def rounds(
    n: int, engines: dict[str, Run], past: int, prefill: int
) -> Iterator[tuple[str, float, float]]:
    for _ in range(n):
        for name, run in engines.items():
            step = run(past, N_STEPS)[1]
            time.sleep(0.5)  # for threads that wait busily
            yield name, step, 1e3 * prefill / run(prefill, 0)[0]
            time.sleep(0.5)


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--past", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    o = parser.parse_args()
    n_ctx = max(o.past + N_STEPS, o.prefill) + 64
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=o.model.parent))
        mapped, packed = (
            stack.enter_context(Model(o.model, backend="cpu", repack=repack))
            for repack in (False, True)
        )
        qwen = Path(folder) / "qwen3.gguf"
        write_qwen(mapped, o.model, qwen)
        engines = {
            "llama.cpp": llama_cpp(qwen, n_ctx, o.threads, True),
            "llama.cpp, no repack": llama_cpp(qwen, n_ctx, o.threads, False),
            "mapped": ours(mapped, n_ctx, o.threads),
            "packed": ours(packed, n_ctx, o.threads),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for name, step, rate in rounds(o.rounds, engines, o.past, o.prefill):
            found[name].append((step, rate))
    print(f"xllamacpp {xllamacpp.__version__}: {xllamacpp.get_system_info()}")
    print(f"| | step ms at {o.past} | prefill tok/s, {o.prefill} |\n| --- | --- | --- |")
    for name, times in found.items():
        steps, rates = (sorted(column) for column in zip(*times, strict=True))
        print(
            f"| {name} | {statistics.median(steps):.1f} ({steps[0]:.1f} - {steps[-1]:.1f}) "
            f"| {statistics.median(rates):.1f} ({rates[0]:.1f} - {rates[-1]:.1f}) |"
        )


if __name__ == "__main__":
    main()
