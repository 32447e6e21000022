"""Which library of a wheel is loaded. What is in a wheel and how it runs: check_wheel*.py."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from test_build import IN_EVERY_WHEEL, run, source, tiny_ggml

import pyggml_slowar
from pyggml_slowar import _library, _native

__all__ = ["source", "tiny_ggml"]  # fixtures

elf_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="levels are of x86-64",
)

ALL = (2, 3, 4)


@pytest.mark.parametrize(
    ("built", "runs", "asked", "level"),
    [
        (ALL, 2, None, 2),
        (ALL, 3, None, 3),
        (ALL, 4, None, 4),
        (ALL, 4, "", 4),
        (ALL, 4, "v2", 2),
        (ALL, 3, "v3", 3),
        ((2, 3), 4, None, 3),
        ((2, 4), 3, None, 2),
    ],
)
def test_the_best_level_that_runs_is_taken(
    built: tuple[int, ...], runs: int, asked: str | None, level: int
) -> None:
    assert _library.choose(built, runs, asked) == level


@pytest.mark.parametrize(
    ("built", "runs", "asked", "message"),
    [
        (ALL, 1, None, r"^this CPU is older than x86-64-v2, the lowest level .*from source\.$"),
        (ALL, 1, "v2", r"^this CPU is older than x86-64-v2"),
        ((3, 4), 2, None, r"^this CPU is older than x86-64-v3"),
        (ALL, 3, "v4", r"^SLOWAR_CPU is 'v4', but this CPU runs x86-64-v3 at most \(v4 with VNNI"),
        (ALL, 2, "v3", r"^SLOWAR_CPU is 'v3', but this CPU runs x86-64-v2 at most$"),
        (ALL, 4, "V3", r"^SLOWAR_CPU is 'V3', expected one of v2, v3, v4 or nothing$"),
        ((2, 3), 4, "v4", r"^SLOWAR_CPU is 'v4', expected one of v2, v3 or nothing$"),
    ],
)
def test_what_cannot_be_had_is_said(
    built: tuple[int, ...], runs: int, asked: str | None, message: str
) -> None:
    with pytest.raises(ImportError, match=message):
        _library.choose(built, runs, asked)


def test_a_local_build_has_one_library(tmp_path: Path) -> None:
    (name,) = (Path(_library.find(tmp_path, {"SLOWAR_CPU": ""})).name,)
    assert name in ("libslowar.so", "libslowar.dylib", "slowar.dll")
    with pytest.raises(ImportError, match=r"^SLOWAR_CPU is 'v3', but .* holds one library, not"):
        _library.find(tmp_path, {"SLOWAR_CPU": "v3"})
    named = {"SLOWAR_CPU": "v3", "SLOWAR_LIBRARY": "/elsewhere/libslowar.so"}
    assert _library.find(tmp_path, named) == "/elsewhere/libslowar.so"


def test_the_command_says_what_is_wrong_in_a_sentence(tmp_path: Path) -> None:
    done = run(*[sys.executable, "-m", "pyggml_slowar", "devices"], cwd=tmp_path, SLOWAR_CPU="v3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("slowar: SLOWAR_CPU is 'v3', but ")
    assert len(done.stderr.splitlines()) == 1


def test_the_library_says_what_it_is_compiled_for() -> None:
    info = _native.text(_native.lib.slowar_build_info())
    assert ", CPU code: " in info
    assert info.split(", CPU code: ")[1].split(", ")[0] in ("native", "generic")


@elf_x86
def test_a_wheel_of_two_levels(source: Path, tiny_ggml: Path, tmp_path: Path) -> None:
    """Built with the toy ggml: each library is of its level, and this CPU gets one of them."""
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    levels = "x86-64-v2 x86-64-v3"
    done = run(*command, cwd=source, SLOWAR_GGML_DIR=tiny_ggml, SLOWAR_LEVELS=levels)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("pyggml_slowar/")}
        archive.extractall(tmp_path / "site")
    libraries = {
        f"pyggml_slowar/lib{name}.so"
        for name in ("slowar.x86-64-v2", "slowar.x86-64-v3", "slowar_cpu")
    }
    assert names == libraries | {n for n in IN_EVERY_WHEEL if n.startswith("pyggml_slowar/")}

    package = tmp_path / "site" / "pyggml_slowar"
    commands = (
        source / "build" / sysconfig.get_platform() / "x86-64-v2" / "compile_commands.json"
    ).read_text(encoding="utf-8")
    assert "-march=x86-64-v2" in next(
        line for line in commands.splitlines() if "slowar.cpp.o" in line
    )
    assert "-march" not in next(line for line in commands.splitlines() if "level.c.o" in line)
    runs = _library._level_of_this_cpu(package)
    assert runs in (2, 3, 4)  # numpy is in this process already
    assert Path(_library.find(package, {})).name == f"libslowar.x86-64-v{min(runs, 3)}.so"
    assert Path(_library.find(package, {"SLOWAR_CPU": "v2"})).name == "libslowar.x86-64-v2.so"

    # A build for this machine in the same place leaves nothing of it, and the other way round.
    in_place = [sys.executable, "setup.py", "-q", "libslowar", "--inplace"]
    for value, expected in (
        ("", {"libslowar.so"}),
        (levels, {Path(name).name for name in libraries}),
    ):
        done = run(*in_place, cwd=source, SLOWAR_GGML_DIR=tiny_ggml, SLOWAR_LEVELS=value)
        assert done.returncode == 0, done.stdout + done.stderr
        assert {path.name for path in (source / "pyggml_slowar").glob("*.so")} == expected


@elf_x86
@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="needs qemu-user")
@pytest.mark.parametrize(
    ("cpu", "level"), [("kvm64", 1), ("core2duo", 1), ("Nehalem", 2), ("Haswell", 3)]
)
def test_the_level_of_emulated_cpus(cpu: str, level: int, tmp_path: Path) -> None:
    root = Path(pyggml_slowar.__file__).parents[1]
    program = tmp_path / "program.c"
    program.write_text(
        "int slowar_cpu_level(void); int main(void) { return slowar_cpu_level(); }\n"
    )
    made = run("cc", program, root / "csrc" / "cpu" / "level.c", "-o", "level", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    done = subprocess.run(["qemu-x86_64", "-cpu", cpu, tmp_path / "level"], check=False)
    assert done.returncode == level


def test_an_unknown_level_is_refused(source: Path, tiny_ggml: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "libslowar", "--inplace"]
    done = run(*command, cwd=source, SLOWAR_GGML_DIR=tiny_ggml, SLOWAR_LEVELS="x86-64-v9")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: SLOWAR_LEVEL is 'x86-64-v9', expected x86-64-v2, x86-64-v3, x86-64-v4 or nothing."
    )
