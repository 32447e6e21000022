"""What is in the wheel that `make wheel` made; that target runs this file, `make test` does not."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from test_build import IN_EVERY_WHEEL

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")


@pytest.fixture(scope="module")
def wheel() -> Path:
    (path,) = (ROOT / "build" / "wheel").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def package(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "pyggml_slowar"


def tool(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_listing(wheel: Path) -> None:
    assert re.fullmatch(r"pyggml_slowar-[\d.]+-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)
    assert wheel.stat().st_size < 25 * 10**6
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/")]
    names = {re.sub(r"-[\d.]+\.dist-info", ".dist-info", name) for name in files}
    libraries = [*(f"slowar.{level}" for level in LEVELS), "slowar_cpu"]
    assert names == {
        *IN_EVERY_WHEEL,
        *(f"pyggml_slowar/lib{name}.so" for name in libraries),
    }


@pytest.mark.parametrize("name", [*(f"slowar.{level}" for level in LEVELS), "slowar_cpu"])
def test_a_library_is_stripped_and_needs_only_the_system(package: Path, name: str) -> None:
    library = package / f"lib{name}.so"
    sections = tool("readelf", "--wide", "--sections", library)
    assert re.findall(r"\.(?:debug_\w+|symtab) ", sections) == []
    needed = re.findall(r"NEEDED.*\[(.*)\]", tool("readelf", "-d", library))
    assert set(needed) <= SYSTEM
    exported = re.findall(r" [A-Z] (\w+)", tool("nm", "-D", "--defined-only", library))
    assert exported
    assert [symbol for symbol in exported if not symbol.startswith("slowar_")] == []


# In the order of the levels: what only a higher one has, and what shows that it is used.
ENCODED = {"v2": r"\tv(?!er[rw]\b)[a-z]", "v3": r"%ymm", "v4": r"%zmm"}


def instructions(library: Path) -> dict[str, int]:
    """How many instructions have a VEX or EVEX name, 256 bits, 512 bits."""
    code = tool("objdump", "--disassemble", "--no-show-raw-insn", library)
    return {level: len(re.findall(pattern, code)) for level, pattern in ENCODED.items()}


def test_no_library_has_code_above_its_level(package: Path) -> None:
    v2, v3, v4 = (instructions(package / f"libslowar.{level}.so") for level in LEVELS)
    none = instructions(package / "libslowar_cpu.so")
    assert set(none.values()) == set(v2.values()) == {0}
    assert v3["v3"] > 1000
    assert v3["v4"] == 0
    assert v4["v4"] > 1000
    code = tool(
        "objdump", "--disassemble", "--no-show-raw-insn", package / "libslowar.x86-64-v4.so"
    )
    for extension in ("vpdpbusd", "vdpbf16ps"):  # VNNI, BF16
        assert extension in code
