"""What importing costs, and a step outside its C call, at S2 Pro's vocabulary.

python benchmarks/overhead.py [--rounds N]

The model has one narrow layer, so that the C call is short; the vocabulary, and with it the arrays
that a step hands out, has full size. C's share is measured inside the same calls.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import pyggml_slowar as slowar
from pyggml_slowar import session as session_module
from pyggml_slowar.make_model import S2_PRO, make_model

NARROW = replace(S2_PRO, n_embd=32, n_ff=32, n_layer=1, n_head=1, n_head_kv=1, head_dim=32)
BOUND_MS = 0.3
IMPORT_BOUND_MS = 100

# Beyond a bare Python: the package alone, and with it all that a model needs.
IMPORTS = ("import pyggml_slowar", "from pyggml_slowar import Model")


class TimedLibrary:
    """The C library, with the time spent in it added up."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def measure(path: Path, rounds: int) -> list[float]:
    """Seconds outside C of each of ``rounds`` steps."""
    names = vars(session_module)
    library = names["lib"] = TimedLibrary(names["lib"])
    frame = np.zeros(1 + NARROW.n_codebook, np.int64)
    seconds = []
    with slowar.Model(path, backend="cpu") as model, model.session(rounds, n_threads=1) as session:
        for _ in range(rounds):
            library.seconds = 0.0
            start = time.perf_counter()
            session.step(frame)
            seconds.append(time.perf_counter() - start - library.seconds)
    return seconds


def import_ms(rounds: int = 10) -> list[float]:
    """Median milliseconds of each of IMPORTS beyond a Python that does nothing, in turn."""
    seconds: dict[str, list[float]] = {code: [] for code in ("", *IMPORTS)}
    for i in range(1 + rounds):
        for code, taken in seconds.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            if i > 0:  # the first one reads from disk
                taken.append(time.perf_counter() - start)
    bare, *others = (1e3 * statistics.median(taken) for taken in seconds.values())
    return [ms - bare for ms in others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    print(f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} CPUs")
    for code, took in zip(IMPORTS, import_ms(), strict=True):
        print(f"{code}: {took:.0f} ms")
    print(f"bound of the first: {IMPORT_BOUND_MS} ms")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "narrow.gguf"
        make_model(path, NARROW, "f32")
        ms = sorted(1e3 * s for s in measure(path, rounds)[10:])
    p95 = ms[int(0.95 * len(ms))]
    print(f"outside C: median {statistics.median(ms):.3f} ms, 95th percentile {p95:.3f} ms")
    print(f"bound: {BOUND_MS} ms")


if __name__ == "__main__":
    main()
