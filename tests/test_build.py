"""What CMakeLists.txt and setup.py promise.

The library that is tested is the one the package loads. The build itself is tested on a copy of the
build files with a ggml of three lines and a csrc of one function, so that it takes seconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import assert_clean, run_child

import pyggml_slowar

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(pyggml_slowar.__file__).parent
SUFFIX = "dylib" if sys.platform == "darwin" else "so"
LIBRARY = PACKAGE / f"libslowar.{SUFFIX}"
SCRIPTS = [file for file in PACKAGE.glob("*.py") if file.name != "_declarations.py"]

elf = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF symbol tables")

# Nothing that this machine sets for its own builds may decide how these end.
BUILD_VARIABLES = re.compile(r"CMAKE_|SLOWAR_|PIP_|(CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|LD_PRELOAD)$")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not BUILD_VARIABLES.match(k)}

TINY_GGML = {
    "CMakeLists.txt": """
        project(ggml C)
        option(GGML_TOY "an option to pass through" OFF)
        add_library(ggml STATIC src/ggml.c)
        target_include_directories(ggml PUBLIC include)
    """,
    "include/ggml.h": '#ifdef __cplusplus\nextern "C"\n#endif\nint ggml_toy(void);\n',
    "src/ggml.c": '#include "ggml.h"\nint ggml_toy(void) { return 42; }\n',
    "src/ggml-rpc/ggml-rpc.cpp": "int rpc_toy() { return 43; }\n",
    "LICENSE": "the licence of the toy ggml\n",
}
TINY_CSRC = {
    "slowar.h": """
        #ifdef __cplusplus
        extern "C" {
        #endif
        #pragma GCC visibility push(default)
        /* cdef begin */
        int slowar_toy(void);
        /* cdef end */
        #pragma GCC visibility pop
        #ifdef __cplusplus
        }
        #endif
    """,
    "slowar.cpp": """
        #include "slowar.h"
        #include "ggml.h"
        int slowar_toy() { return ggml_toy(); }
    """,
}


def write_all(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture
def tiny_ggml(tmp_path: Path) -> Path:
    write_all(tmp_path / "toy ggml", TINY_GGML)
    return tmp_path / "toy ggml"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The build files of this project, in a folder whose name is neither one word nor ASCII."""
    folder = tmp_path / "schräge Größe 語"
    shutil.copytree(ROOT / "cmake", folder / "cmake")
    (folder / "pyggml_slowar").mkdir()
    for file in SCRIPTS:
        shutil.copy(file, folder / "pyggml_slowar")
    for name in ["CMakeLists.txt", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"]:
        shutil.copy(ROOT / name, folder)
    shutil.copy(PACKAGE / "py.typed", folder / "pyggml_slowar")
    shutil.copy(ROOT / "setup.py", folder)
    shutil.copytree(ROOT / "csrc" / "cpu", folder / "csrc" / "cpu")
    write_all(folder / "csrc", TINY_CSRC)
    return folder


def load_setup(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("setup_under_test", folder / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: object, cwd: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    env = {**ENVIRONMENT, **{k: str(v) for k, v in variables.items()}}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=180,
        check=False,
    )


def symbols(*options: str) -> list[tuple[str, str]]:
    """(kind, name) of each line that nm prints about the library."""
    out = subprocess.run(["nm", *options, LIBRARY], capture_output=True, text=True, check=True)
    lines = [line.split() for line in out.stdout.splitlines() if line]
    return [(fields[-2], fields[-1]) for fields in lines]


# ---- the library --------------------------------------------------------------------------------


def declared_functions(header: str) -> set[str]:
    code = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.DOTALL)
    return set(re.findall(r"\b(slowar_\w+)\s*\(", code))


def test_the_library_exports_what_the_header_declares_and_nothing_else() -> None:
    options = ["-gU"] if sys.platform == "darwin" else ["-D", "--defined-only"]
    exported = [name.removeprefix("_") for _, name in symbols(*options) if "slowar" in name]
    declared = declared_functions((ROOT / "csrc" / "slowar.h").read_text(encoding="utf-8"))
    assert len(symbols(*options)) == len(exported) == len(declared) >= 20
    assert set(exported) == declared


def test_the_declarations_are_those_of_the_header(tmp_path: Path) -> None:
    load_setup(ROOT).generate_declarations(tmp_path / "_declarations.py")
    found = (PACKAGE / "_declarations.py").read_bytes()
    assert found == (tmp_path / "_declarations.py").read_bytes()


@elf
def test_the_library_asks_nobody_for_ggml_or_openmp() -> None:
    wanted = [name for _, name in symbols("-D", "--undefined-only")]
    assert [name for name in wanted if re.match("ggml|gguf|GOMP|omp_", name)] == []
    dynamic = subprocess.run(
        ["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True, env=ENVIRONMENT
    ).stdout
    assert re.findall(r"NEEDED.*\[(lib(?:ggml|gomp|omp)[^]]*)\]", dynamic) == []
    assert str(ROOT) not in "".join(re.findall(r"(?:RPATH|RUNPATH).*", dynamic))


@elf
def test_another_ggml_in_the_process_changes_nothing(tmp_path: Path, small_path: Path) -> None:
    """A library that defines every function of ggml to abort, loaded first and for everyone."""
    names = {name for kind, name in symbols("--defined-only") if kind in "tT"}
    decoys = sorted(name for name in names if re.fullmatch(r"(ggml|gguf)_\w+", name))
    assert len(decoys) > 500  # 914 of ggml 0.25.3, CPU alone
    text = "void abort(void);\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in decoys)
    write_all(tmp_path, {"decoy.c": text})
    compiler = os.environ.get("CC", "cc")
    made = run(compiler, "-shared", "-fPIC", "decoy.c", "-o", "libdecoy.so", cwd=tmp_path)
    assert made.returncode == 0, made.stderr

    code = """
import ctypes, sys
if sys.argv[2]:
    ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)
    assert ctypes.CDLL(None).ggml_init
import numpy as np, pyggml_slowar as slowar
with slowar.Model(sys.argv[1], backend="cpu") as model, model.session(max_seq_len=8) as session:
    out = session.prefill(np.zeros((11, 8), np.int32))
print(out.logits.tobytes().hex()[:4000])
"""
    alone = run_child(code, small_path, "")
    assert_clean(alone, alone.stdout)
    assert_clean(run_child(code, small_path, tmp_path / "libdecoy.so"), alone.stdout)


# ---- sdist and wheel ----------------------------------------------------------------------------


METADATA = ["METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"]
ADDED = ["py.typed", "_declarations.py", "licenses/ggml.txt"]
IN_EVERY_WHEEL = {
    *(f"pyggml_slowar/{name}" for name in [*(file.name for file in SCRIPTS), *ADDED]),
    *(f"pyggml_slowar.dist-info/{name}" for name in METADATA),
}


def build_tools(folder: Path) -> Path:
    """A PATH with a compiler and what it calls: no git, no patch, no ccache."""
    folder.mkdir()
    for tool in ["cc", "c++", "gcc", "g++", "clang", "as", "ld", "ar", "ranlib", "nm", "strip"]:
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return folder


def test_sdist_and_wheel(source: Path, tiny_ggml: Path, tmp_path: Path) -> None:
    done = run(
        *[sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"],
        cwd=source,
        SLOWAR_GGML_DIR=tiny_ggml,
        PATH=build_tools(tmp_path / "bin"),
        TMPDIR=source,  # where the sdist is unpacked to build the wheel
    )
    assert done.returncode == 0, done.stdout + done.stderr

    (sdist,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {Path(*Path(m.name).parts[1:]).as_posix() for m in archive if m.isfile()}
    kept = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()}
    kept = {name for name in kept if not re.match(r"build/|dist/|pyggml_slowar.egg-info/", name)}
    assert kept <= inside
    assert {n for n in inside - kept if "egg-info" not in n} <= {"PKG-INFO", "setup.cfg"}

    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    (wheel,) = (source / "dist").glob("*.whl")
    assert re.fullmatch(rf"pyggml_slowar-[\d.]+-py3-none-{platform}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = {re.sub(r"-[\d.]+\.dist-info", ".dist-info", name) for name in archive.namelist()}
        licence = archive.read("pyggml_slowar/licenses/ggml.txt").decode()
    assert licence == TINY_GGML["LICENSE"]
    assert names == {*IN_EVERY_WHEEL, f"pyggml_slowar/libslowar.{SUFFIX}"}

    # The library of the wheel works when all that it was built from is gone.
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(f"pyggml_slowar/libslowar.{SUFFIX}", tmp_path / "site"))
    shutil.rmtree(source)
    shutil.rmtree(tiny_ggml)
    call = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).slowar_toy())"
    assert_clean(run_child(call, library), "42\n")


def test_a_wheel_holds_no_file_of_an_earlier_build(source: Path, tiny_ggml: Path) -> None:
    stale = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    write_all(stale, {"pyggml_slowar/gone.py": "raise RuntimeError\n"})
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    done = run(*command, cwd=source, SLOWAR_GGML_DIR=tiny_ggml)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "pyggml_slowar/gone.py" not in archive.namelist()


# ---- building again -----------------------------------------------------------------------------


def test_only_what_changed_is_compiled_again(
    source: Path,
    tiny_ggml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in set(os.environ) - set(ENVIRONMENT):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLOWAR_GGML_DIR", str(tiny_ggml))
    module = load_setup(source)
    tree = source / "build" / sysconfig.get_platform()
    tree.mkdir(parents=True)
    real = {"cmake": module.find_cmake(), "ninja": module.find_program("ninja", "BIN_DIR")}

    def compiled(environment: str) -> list[str]:
        """Build with cmake and ninja in a folder of that name; return the files compiled."""
        folder = tmp_path / environment
        folder.mkdir()
        for name, program in real.items():
            (folder / name).symlink_to(program)
        monkeypatch.setattr(module, "find_program", lambda name, _: str(folder / name))
        start = time.monotonic()
        module.configure(tree)
        module.compile_targets(tree, ["slowar"])
        assert time.monotonic() - start < 30  # about 1 s
        shutil.rmtree(folder)  # as pip's build isolation does
        return sorted(re.findall(r"Building CX?X? object \S*/(\S+)\.o", capfd.readouterr().out))

    assert compiled("first") == ["ggml-rpc.cpp", "ggml.c", "slowar.cpp"]
    assert compiled("second") == []
    (source / "csrc" / "slowar.cpp").write_text(TINY_CSRC["slowar.cpp"] + "// changed\n")
    assert compiled("third") == ["slowar.cpp"]
    (source / "csrc" / "more.cpp").write_text("// a new file\n")
    assert compiled("fourth") == ["more.cpp"]

    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_TOY=ON '-DSLOWAR_NOTE=two words'")
    compiled("fifth")
    cache = (tree / "CMakeCache.txt").read_text(encoding="utf-8")
    assert "GGML_TOY:BOOL=ON\n" in cache
    assert "=two words\n" in cache
    monkeypatch.delenv("CMAKE_ARGS")
    compiled("sixth")
    assert "GGML_TOY:BOOL=OFF\n" in (tree / "CMakeCache.txt").read_text(encoding="utf-8")


# ---- what cannot work says what to do -----------------------------------------------------------

COMPILER = "No working C and C++17 compiler was found: install one"
OFFLINE = "set SLOWAR_GGML_SDIST to a copy of llama_cpp_python-"
FAILURES: dict[str, tuple[dict[str, object], str]] = {
    "no C++ compiler": ({"CXX": "/nowhere/c++"}, COMPILER),
    "no C compiler": ({"CC": "/nowhere/cc"}, COMPILER),
    "a compiler that fails": ({"CXX": shutil.which("false")}, COMPILER),
    "wrong hash": ({"SLOWAR_GGML_SDIST": "{other archive}"}, "is pinned: get llama_cpp_python-"),
    "no archive": ({"SLOWAR_GGML_SDIST": "/nowhere/a.tar.gz"}, "correct the path, or unset it"),
    "no ggml": ({"SLOWAR_GGML_DIR": "/"}, "point it at the one that holds ggml's CMakeLists.txt"),
    "no network": (
        {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": 0},
        f"check the network and pip's index settings and build again, or {OFFLINE}",
    ),
    "wrong hash in the index": (
        {"PIP_NO_INDEX": 1, "PIP_FIND_LINKS": "{index}"},
        "whose hash is not the pinned one, so it was not used: check the index",
    ),
}


@pytest.fixture
def other_archive(tmp_path: Path) -> Path:
    """An archive of the pinned one's name and other content, in a folder that pip can search."""
    pin = (ROOT / "cmake" / "ggml.cmake").read_text(encoding="utf-8")
    (release,) = re.findall(r"set\(SLOWAR_GGML_RELEASE +([\d.]+)\)", pin)
    path = tmp_path / "an index" / f"llama_cpp_python-{release}.tar.gz"
    path.parent.mkdir()
    path.write_bytes(b"not what was pinned")
    return path


@pytest.mark.parametrize("way", ["cmake", "setup.py"])
@pytest.mark.parametrize("failure", FAILURES)
def test_failures_end_in_a_sentence(
    failure: str, way: str, source: Path, other_archive: Path, tmp_path: Path
) -> None:
    values, sentence = FAILURES[failure]
    places = {"{other archive}": other_archive, "{index}": other_archive.parent.as_uri()}
    variables = {name: places.get(str(value), value) for name, value in values.items()}
    cmake = load_setup(source).find_cmake()
    command = {
        "cmake": [cmake, "-S", source, "-B", tmp_path / "b", f"-DSLOWAR_PYTHON={sys.executable}"],
        "setup.py": [sys.executable, "setup.py", "-q", "libslowar", "--inplace"],
    }[way]

    start = time.monotonic()
    # A pip.conf could name an index that has the archive.
    done = run(*command, cwd=source, PIP_CONFIG_FILE=os.devnull, **variables)
    assert time.monotonic() - start < 60  # 1 s to 4 s when the machine is quiet
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    said = [line.strip() for line in done.stderr.splitlines() if sentence in line]
    if way == "setup.py":
        assert said[-1] == done.stderr.splitlines()[-1] == "error: " + said[0]
    else:
        assert len(said) == 1
    assert re.search(r"[^.]\.$", said[-1])


def test_python_without_pip(source: Path, tmp_path: Path) -> None:
    cmake = load_setup(source).find_cmake()
    done = run(cmake, "-S", ".", "-B", tmp_path / "b", cwd=source, SLOWAR_PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "fetched with pip, and '/nowhere/python' has none: install pip there" in done.stderr


def test_pip_ends_in_the_sentence(source: Path, tmp_path: Path) -> None:
    done = run(
        *[sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"],
        *["--target", tmp_path / "site", "."],
        cwd=source,
        CXX="/nowhere/c++",
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert f"error: {COMPILER}" in said
    assert "Traceback" not in said


def test_code_that_does_not_compile(source: Path, tiny_ggml: Path) -> None:
    (source / "csrc" / "slowar.cpp").write_text("int slowar_toy( { }\n")
    done = run(
        *[sys.executable, "setup.py", "-q", "libslowar", "--inplace"],
        cwd=source,
        SLOWAR_GGML_DIR=tiny_ggml,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: libslowar did not compile: the compiler's first error is above"
    )
    assert "Traceback" not in done.stderr


def test_no_cmake(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_setup(source)
    monkeypatch.setattr(module.shutil, "which", lambda name, path=None: None)
    with pytest.raises(module.ExecError, match=r"^CMake was not found: run `pip install cmake"):
        module.find_cmake()
