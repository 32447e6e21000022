"""The figures of docs/performance.md: full-size random models, both attention paths.

python benchmarks/performance.py [--out docs/performance.md] [--repeats N]

The models (2.2 and 4.1 GiB) are made once and kept in the user's cache folder. Look at the load
first: nothing else should run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from pyggml_slowar import Model, bench
from pyggml_slowar.make_model import S2_PRO, make_model

PAST = (128, 640, 1700)
NOTES = "<!-- What follows is written by hand; make bench keeps it. -->"
OTHERS = """\
Measured elsewhere on a faster machine, quoted here, not run (`benchmarks/llama_cpp.py` runs
llama.cpp here; below is what it found): llama.cpp's own bench on a Qwen3-4B of the same shape takes
55.6 to 61.6 ms a step at depth 128 and prefills 60 tok/s; the best other ggml engine for this model
takes 69-73 / 84-86 / 123 ms a step at 130 / 650 / 1700 past positions when its cache is just long
enough, prefills 105 tok/s, opens in 4-24 s and peaks at 5.8 GB."""


def cached_model(type: str) -> Path:
    """The full-size random model of this type, made if it is not there."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyggml_slowar"
    path = root / f"s2-pro-{type}.gguf"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tqdm(desc=path.name, unit="", unit_scale=True) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            make_model(path, S2_PRO, type, progress=progress)
    return path


def measure(type: str, repack: tuple[bool, ...], repeats: int) -> bench.Report:
    plan = bench.Plan(
        model=cached_model(type),
        repack=repack,
        past=PAST,
        prefill=(128, 512),
        batch=(1, 2, 4, 8, 16),
        repeats=repeats,
        contended=True,
        frames=True,
    )
    with tqdm(bar_format="{desc} [{elapsed}]") as bar:
        return bench.run(plan, bar.set_description_str)


def growth(report: bench.Report) -> list[str]:
    """Microseconds that a step grows by for each cached position, per configuration."""
    lines = ["| growth of a step | us per cached position |", "| --- | --- |"]
    for configuration in dict.fromkeys(s.configuration for s in report.steps):
        steps = {s.past: s.median_ms for s in report.steps if s.configuration == configuration}
        first, last = min(steps), max(steps)
        slope = (steps[last] - steps[first]) / (last - first) * 1e3
        lines.append(f"| {configuration} | {slope:.1f} |")
    return lines


def reuse(type: str, n_voice: int = 512, n_text: int = 32) -> str:
    """Time to the first step of a request behind a reference voice, with and without its cache."""
    with Model(cached_model(type), backend="cpu") as model:
        tokens = bench.random_tokens(model, n_voice + 2 * n_text)
        voice, first, second = np.split(tokens, [n_voice, n_voice + n_text], axis=1)
        cache = model.prefix_cache(2**31)
        with model.session(n_voice + n_text + 1, logits="semantic") as session:
            session.prefill(np.hstack([voice, first]), cache=cache)
            prompt = np.hstack([voice, second])
            seconds = {}
            for how, used in (("evaluated", None), ("from the prefix cache", cache)):
                session.reset()
                start = time.perf_counter()
                session.prefill(prompt, cache=used)
                seconds[how] = time.perf_counter() - start
            start = time.perf_counter()
            session.step(tokens[:, 0])
            step = time.perf_counter() - start
        nbytes = cache.stats.nbytes / 2**20
    rows = [f"| {how} | {s:.2f} | {s / step:.1f} |" for how, s in seconds.items()]
    return "\n".join(
        [
            f"A request of {n_voice} positions of reference voice and {n_text} of text, after "
            f"another request with the same voice (an entry of {nbytes:.0f} MiB):",
            "",
            "| the voice is | s until the first logits | in steps |",
            "| --- | --- | --- |",
            *rows,
        ]
    )


def plot(reports: dict[str, bench.Report], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for type, report in reports.items():
        for configuration in dict.fromkeys(s.configuration for s in report.steps):
            steps = [s for s in report.steps if s.configuration == configuration]
            style = "--" if configuration.attention == "reference" else "-"
            label = f"{type} {configuration.attention}{', repack' if configuration.repack else ''}"
            ms = [s.median_ms for s in steps]
            axes.plot([s.past for s in steps], ms, style, marker="o", label=label)
    axes.axhline(1e3 / bench.REAL_TIME, color="grey", linewidth=0.8)
    axes.annotate("real time: 46.4 ms for all of a frame", (PAST[1], 48), color="grey")
    axes.set(xlabel="positions in the cache", ylabel="ms a step", yscale="log")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def page(reports: dict[str, bench.Report], image: str, voice: str) -> str:
    today = datetime.date.today().isoformat()
    intro = f"""\
Made by `{shlex.join(["python", *sys.argv])}` (`make bench`) on {today}. Random weights of S2 Pro's
shape; the time does not depend on their values. Each table is one run, in which the configurations
took turns step by step. *Of the floor*: the least time in which the memory could have delivered the
bytes that a step must read, divided by the step's median. The bandwidth is the median of looks
between the same steps: what the best of three ways of reading got in three passes each (one stream
to a thread, four, four that ask 512 bytes ahead)."""
    parts = ["# How fast it is", intro, f"![step time against position]({image})"]
    for type, report in reports.items():
        parts += [f"## {type}", bench.markdown(report), "\n".join(growth(report))]
    parts += ["## A reference voice, reused (q4_k)", voice, "## Beside others", OTHERS]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    mpl.use("Agg")
    print(f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} CPUs", file=sys.stderr)
    reports = {
        "q4_k": measure("q4_k", (False, True), options.repeats),
        "q8_0": measure("q8_0", (False,), options.repeats),
    }
    image = options.out.with_name("step-time.png")
    plot(reports, image)
    old = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
    notes = "".join(old.partition(NOTES)[1:])
    text = page(reports, image.name, reuse("q4_k"))
    options.out.write_text(f"{text}\n{notes}" if notes else text, encoding="utf-8")


if __name__ == "__main__":
    main()
