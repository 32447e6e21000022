"""The wheel that `make wheel` made, in an environment with nothing else and under emulated CPUs.

`make test-wheel` runs this file, `make test` does not. qemu-user has no AVX-512, so that the code
of x86-64-v4 runs nowhere here but on a CPU that has it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "wheel"

# What each model of qemu can run of the wheel: 2008, SSE4.2 and no AVX; 2013, AVX2.
EMULATED = {"Nehalem": "x86-64-v2", "Haswell": "x86-64-v3"}
TOO_OLD = ("core2duo", "kvm64")

GOLDEN = [
    "test_parity.py::test_golden",
    "test_parity.py::test_golden_upstream",
    "test_flash.py::test_golden",
]


class Bare:
    """A fresh virtual environment that holds the wheel and what it depends on, seen from a shell
    with an empty home and the system's programs."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        (folder / "home").mkdir()
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self._install(wheel)
        # Beside the environment, for the runs of this repository's tests.
        self.tools = folder / "tools"
        self._install("--target", self.tools, "pytest>=8", "hypothesis")

    def _install(self, *words: str | Path) -> None:
        pip = [str(self.bin / "python"), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--disable-pip-version-check", *words], check=True)

    def run(
        self, *command: object, cpu: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        emulator = ["qemu-x86_64", "-cpu", cpu] if cpu else []
        return subprocess.run(
            [*emulator, *map(str, command)],
            cwd=self.folder,
            env={"HOME": str(self.folder / "home"), "PATH": "/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def python(self, *words: object, **options: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.bin / "python", *words, **options)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    (wheel,) = FOLDER.glob("*.whl")
    return Bare(tmp_path_factory.mktemp("bare"), wheel)


def test_demo_and_command(bare: Bare) -> None:
    """`make demo` and the commands of the README, on the small model."""
    done = bare.python(ROOT / "examples" / "demo.py")
    assert done.returncode == 0, done.stderr
    error = re.search(r"embeddings @ hidden == logits: relative error (\S+)", done.stdout)
    assert error is not None
    assert float(error[1]) < 1e-6  # float32's own, as test_parity has it

    np.save(bare.folder / "prompt.npy", np.zeros((11, 20), np.int32))
    np.save(bare.folder / "steps.npy", np.zeros((11, 4), np.int32))
    for words in (
        "make-model model.gguf --preset tiny --type q8_0",
        "info model.gguf",
        "devices",
        "eval model.gguf prompt.npy --steps steps.npy --out out.npz",
        "--version",
    ):
        done = bare.run("venv/bin/slowar", *words.split())
        assert done.returncode == 0, done.stderr
        if words in ("info model.gguf", "devices", "--version"):
            # The best that this machine has.
            assert re.search(r"CPU code: x86-64-v[234], backends: CPU$", done.stdout, re.MULTILINE)
    assert (bare.folder / "out.npz").exists()
    installed = bare.python("-c", "import pyggml_slowar; print(pyggml_slowar.__file__)").stdout
    assert Path(installed.strip()).is_relative_to(bare.folder)


@pytest.mark.parametrize(("cpu", "level"), EMULATED.items())
def test_an_emulated_cpu_gets_its_level_and_the_golden_values(
    bare: Bare, cpu: str, level: str
) -> None:
    done = bare.python("-m", "pyggml_slowar", "devices", cpu=cpu)
    assert f"CPU code: {level}, backends" in done.stdout, done.stderr
    done = bare.python(
        *["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        *["-c", ROOT / "pyproject.toml", "--rootdir", ROOT],
        *(ROOT / "tests" / test for test in GOLDEN),
        cpu=cpu,
        PYTHONPATH=str(bare.tools),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert re.search(r"^10 passed", done.stdout, re.MULTILINE), done.stdout + done.stderr


@pytest.mark.parametrize("cpu", TOO_OLD)
@pytest.mark.parametrize("asked", ["", "v2"])
def test_an_older_cpu_is_refused_in_a_sentence(bare: Bare, cpu: str, asked: str) -> None:
    sentence = "this CPU is older than x86-64-v2, the lowest level"
    variables = {"SLOWAR_CPU": asked} if asked else {}
    done = bare.run(bare.bin / "python", bare.bin / "slowar", "devices", cpu=cpu, **variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"slowar: {sentence}")
    assert len(done.stderr.splitlines()) == 1
    done = bare.python("-c", "from pyggml_slowar import Model", cpu=cpu, **variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {sentence}")


def test_a_level_can_be_asked_for(bare: Bare) -> None:
    for cpu, asked, says in (
        ("Haswell", "v2", "CPU code: x86-64-v2, backends"),
        ("Haswell", "v3", "CPU code: x86-64-v3, backends"),
        ("Haswell", "v4", "slowar: SLOWAR_CPU is 'v4', but this CPU runs x86-64-v3 at most"),
        ("Nehalem", "v3", "slowar: SLOWAR_CPU is 'v3', but this CPU runs x86-64-v2 at most"),
        ("Haswell", "avx2", "slowar: SLOWAR_CPU is 'avx2', expected one of v2, v3, v4 or nothing"),
    ):
        done = bare.python("-m", "pyggml_slowar", "devices", cpu=cpu, SLOWAR_CPU=asked)
        assert says in done.stdout + done.stderr
        assert done.returncode == (0 if says.startswith("CPU") else 1)
