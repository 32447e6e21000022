"""The ``slowar`` command as a user types it: in a process of its own, by exit status and output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import make_prompt

from pyggml_slowar import Model, bench, generate
from pyggml_slowar.make_model import TINY, make_model

N_PROMPT, N_STEPS = 20, 4
COST = r"Slow-AR (\S+), Fast-AR (\S+), sampling (\S+) ms"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    make_model(folder / "tiny.gguf", TINY, seed=1)
    tokens = make_prompt(TINY, N_PROMPT + N_STEPS)
    np.save(folder / "prompt.npy", tokens[:, :N_PROMPT])
    np.save(folder / "frames.npy", tokens[:, N_PROMPT:])
    np.save(folder / "bad.npy", tokens * 1000)
    np.save(folder / "flat.npy", tokens[0])
    np.save(folder / "objects.npy", np.array([{}]), allow_pickle=True)
    (folder / "text.npy").write_text("not an array")
    return folder


def slowar(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyggml_slowar.cli", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_eval_equals_the_library(folder: Path) -> None:
    words = ("eval", "tiny.gguf", "prompt.npy", "--steps", "frames.npy", "--out", "out.npz")
    done = slowar(*words, "--chunk", 8, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"position   {N_PROMPT + N_STEPS} of {N_PROMPT + N_STEPS}" in done.stdout
    for word in ("prefill", "steps", "tok/s", "KV cache", "RSS"):
        assert word in done.stdout
    prompt, frames = np.load(folder / "prompt.npy"), np.load(folder / "frames.npy")
    with Model(folder / "tiny.gguf") as model, model.session(N_PROMPT + N_STEPS) as session:
        outputs = [session.prefill(prompt, chunk=8), *(session.step(f) for f in frames.T)]
    with np.load(folder / "out.npz") as out:
        assert out["hidden"].shape == (1 + N_STEPS, TINY.n_embd)
        np.testing.assert_array_equal(out["logits"], np.stack([o.logits for o in outputs]))
        np.testing.assert_array_equal(out["hidden"], np.stack([o.hidden for o in outputs]))
        np.testing.assert_array_equal(out["ids"], np.arange(TINY.n_vocab))
    assert not list(folder.glob("*.partial"))


def test_generate_equals_the_library(folder: Path) -> None:
    words = ("generate", "tiny.gguf", "prompt.npy", "--out", "codes.npy", "--max-frames", 8)
    done = slowar(*words, "--min-frames", 8, "--seed", 3, "--im-end-id", 7, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "codes.npy: 8 frames, 0.4 s of audio, length\nseed       3\n" in done.stdout
    parts = re.search(COST, done.stdout)
    rate = re.search(r"real time  (\S+) s for a second of audio, without prefill", done.stdout)
    assert parts is not None
    assert rate is not None
    # 44100 / 2048 frames of those milliseconds; 0.05 of each part and 0.005 are rounded away.
    seconds = sum(map(float, parts.groups())) / 1e3 * 44100 / 2048
    assert float(rate[1]) == pytest.approx(seconds, abs=0.15e-3 * 44100 / 2048 + 0.005)
    # Text mode: a carriage return ends a line; a shorter bar is filled up with spaces.
    lines = [line.rstrip() for line in done.stderr.splitlines()]
    prompt_bar, frames_bar = (
        [line for line in lines if line.startswith(name)][-1] for name in ("prefill", "frames")
    )
    assert re.match(rf"prefill: 100%.* {N_PROMPT}/{N_PROMPT} \[", prompt_bar)
    last = rf"frames: 8frame \[.*, 0\.4 s of audio, real time {rate[1]}, {re.escape(parts[0])}\]"
    assert re.fullmatch(last, frames_bar)
    with Model(folder / "tiny.gguf") as model:
        prompt = np.load(folder / "prompt.npy")
        expected = generate(model, prompt, max_frames=8, min_frames=8, seed=3, im_end_id=7)
    found = np.load(folder / "codes.npy")
    np.testing.assert_array_equal(found, expected.codes)
    assert found.dtype == np.int32
    done = slowar(*words, "--top-k", 0, "--im-end-id", 7, cwd=folder)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        f"slowar: top_k is 0, expected 1 to {2**31 - 1}",
    )
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    "words",
    [
        ("--attention", "reference"),
        ("--attention", "ggml", "--kv-type", "q8_0"),
        ("--logits", "semantic"),
        ("--repack", "--no-mmap", "--threads", "1"),
    ],
)
def test_eval_options(folder: Path, words: tuple[str, ...]) -> None:
    done = slowar("eval", "tiny.gguf", "prompt.npy", "--out", "o.npz", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "o.npz") as out:
        n_semantic = TINY.semantic_end_id - TINY.semantic_begin_id + 1
        assert out["logits"].shape == (1, n_semantic if "semantic" in words else TINY.n_vocab)


def test_info(folder: Path) -> None:
    done = slowar("info", "tiny.gguf", "--json", cwd=folder)
    facts = json.loads(done.stdout)
    assert facts["config"]["head_dim"] == TINY.head_dim
    # K and V of every layer, two bytes a number.
    assert facts["kv_cache_bytes_per_position"] == 4 * TINY.n_layer * TINY.n_head_kv * TINY.head_dim
    assert facts["weight_bytes"] == sum(facts["weight_bytes_by_type"].values())
    words = slowar("info", "tiny.gguf", cwd=folder)
    assert words.returncode == 0
    assert "2.8 M parameters, 30 tensors" in words.stdout


def test_devices(folder: Path) -> None:
    found = json.loads(slowar("devices", "--json", cwd=folder).stdout)
    assert [d["backend"] for d in found].count("CPU") == 1
    assert slowar("devices", cwd=folder).stdout.count("cpu 0") == 1


@pytest.mark.parametrize("type", ["f16", "q8_0", "q4_k"])
def test_make_model(folder: Path, type: str) -> None:
    words = ("make-model", f"made-{type}.gguf", "--preset", "tiny", "--type", type, "--seed", 3)
    assert slowar(*words, cwd=folder).returncode == 0
    with Model(folder / f"made-{type}.gguf") as model:
        # The file holds the epsilon as float32.
        eps = float(np.float32(TINY.norm_rms_eps))
        assert model.config == replace(TINY, norm_rms_eps=eps)
        assert {t.type.lower() for t in model.tensors()} == {"f32", type}


def test_bench(folder: Path) -> None:
    words = ("bench", "tiny.gguf", "--past", "8,16", "--prefill", "8,16", "--repeats", "1")
    more = ("--batch", "1,3", "--contended", "--threads", 1)
    done = slowar(*words, "--json", *more, cwd=folder)
    report = json.loads(done.stdout)
    # Two paths at two positions; two lengths and the longer behind the shorter.
    assert len(report["steps"]) == 4
    assert len(report["prefills"]) == 6
    assert len(report["contended"]) == 4
    assert [b["n_sessions"] for b in report["batches"]] == [1, 3]
    for b in report["batches"]:
        assert b["tokens_per_second"] == pytest.approx(b["n_sessions"] * 1e3 / b["median_ms"])
    assert all(step["low_ms"] <= step["median_ms"] <= step["high_ms"] for step in report["steps"])
    table = slowar(*words, "--repack", "both", "--threads", 1, cwd=folder).stdout
    assert "21.53 steps a second" in table
    assert "no real-time factor" in table
    assert "flash, semantic, repack" in table


def test_bench_without_steps(folder: Path) -> None:
    """Prefills alone, and the bandwidth all the same."""
    plan = bench.Plan(folder / "tiny.gguf", past=(), prefill=(8,), repeats=1, n_threads=1)
    report = bench.run(plan)
    assert (report.steps, len(report.prefills)) == ([], 2)
    assert report.machine["bandwidth_gb_per_s"] > 0


def test_bench_of_frames(folder: Path) -> None:
    words = ("bench", "tiny.gguf", "--past", "8", "--prefill", "8", "--repeats", "2", "--frames")
    report = json.loads(slowar(*words, "--json", "--threads", "1", cwd=folder).stdout)
    (frame,) = report["frames"]
    parts = [frame[f"{name}_ms"] for name in ("slow_ar", "fast_ar", "sampling", "python")]
    assert min(parts) > 0
    # Medians of each: their sum is not quite the median of the sums.
    assert sum(parts) == pytest.approx(frame["whole_ms"], rel=0.5)
    assert frame["reference_fast_ar_ms"] > 0
    assert "A frame of a generation" in slowar(*words, cwd=folder).stdout
    assert "\n| 8, repack | " in slowar(*words, "--repack", "on", cwd=folder).stdout
    both = json.loads(slowar(*words, "--repack", "both", "--json", cwd=folder).stdout)["frames"]
    assert [frame["repack"] for frame in both] == [False, True]
    assert both[0]["reference_slow_ar_ms"] == both[1]["reference_slow_ar_ms"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("info", "none.gguf"), "none.gguf: No such file or directory"),
        (("info", "."), ".: Is a directory"),
        (("info", "text.npy"), 'text.npy: not a GGUF file: it does not begin with "GGUF"'),
        (("info", "tiny.gguf", "--backend", "cuda"), "backend 'cuda' has no device 0"),
        (("info", "tiny.gguf", "--device", "3"), "backend 'auto' has no device 3"),
        (("eval", "tiny.gguf", "none.npy", "--out", "o.npz"), "none.npy: No such file"),
        (("eval", "tiny.gguf", "text.npy", "--out", "o.npz"), "text.npy: not an array file"),
        (("eval", "tiny.gguf", "objects.npy", "--out", "o.npz"), "objects.npy: not an array file"),
        (("eval", "tiny.gguf", "flat.npy", "--out", "o.npz"), "flat.npy: expected one array of"),
        (("eval", "tiny.gguf", "bad.npy", "--out", "o.npz"), "token id at row 0, column"),
        (("eval", "tiny.gguf", "prompt.npy", "--out", "no/o.npz"), "no/o.npz.partial: No such"),
        (("eval", "tiny.gguf", "prompt.npy", "--out", "o.npz", "--chunk", "0"), "chunk is 0"),
        (("eval", "tiny.gguf", "prompt.npy", "--out", "o.npz", "--threads", "0"), "n_threads is 0"),
        (("make-model", "no/m.gguf"), "no/m.gguf.partial: No such file"),
        (("bench", "none.gguf"), "none.gguf: No such file"),
    ],
)
def test_errors_are_one_line(folder: Path, words: tuple[str, ...], message: str) -> None:
    done = slowar(*words, cwd=folder)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"slowar: {message}")
    assert "Traceback" not in done.stderr
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nonsense",),
        ("info",),
        ("eval", "tiny.gguf", "prompt.npy"),
        ("bench", "m", "--past", "0"),
    ],
)
def test_a_wrong_command_line_is_status_2(folder: Path, words: tuple[str, ...]) -> None:
    done = slowar(*words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: slowar")


def test_a_reader_that_leaves_ends_it_quietly(folder: Path) -> None:
    command = f"{sys.executable} -m pyggml_slowar.cli info tiny.gguf | true"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_the_version_names_ggml(folder: Path) -> None:
    assert "ggml" in slowar("--version", cwd=folder).stdout
