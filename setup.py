"""Build libslowar with CMake and put it, with its declarations for cffi, into the package.

The metadata is in pyproject.toml. What is here is one command, ``libslowar``, that every way of
building runs: ``pip install .``, ``pip install -e .``, ``python -m build``, ``make lib``.

Environment: ``CMAKE_ARGS`` holds options for CMake (``-DGGML_CUDA=ON``), ``CC``, ``CXX``,
``CFLAGS``, ``CXXFLAGS`` and ``CMAKE_BUILD_PARALLEL_LEVEL`` mean what they mean everywhere,
``SLOWAR_GGML_DIR`` and ``SLOWAR_GGML_SDIST`` are described in cmake/ggml.cmake. ``SLOWAR_LEVELS``
("x86-64-v2 x86-64-v3") builds a library for each of these levels in place of one for this machine.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
PACKAGE = "pyggml_slowar"

# A CMake cache remembers the first value of each of these, so another value starts a new cache.
REMEMBERED = (
    "CMAKE_ARGS",
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "SLOWAR_GGML_DIR",
    "SLOWAR_GGML_SDIST",
)


class BinaryDistribution(Distribution):
    """A distribution that holds a compiled library although it has no Python extension."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3 of one platform: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class FreshBuild(build):
    """Stages into an empty folder, so that no file of an earlier build enters a wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildLibslowar(Command):
    """Configure, compile, and copy the libraries, the declarations and ggml's licence."""

    description = "build libslowar with CMake"
    user_options = [
        ("build-lib=", "d", "folder to copy into"),
        ("inplace", "i", "copy into the source tree instead"),
        ("sanitize", None, "build the sanitized library too (it stays in the build folder)"),
    ]
    boolean_options = ["inplace", "sanitize"]

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.inplace = False
        self.sanitize = False
        self.editable_mode = False  # set by setuptools

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        # Not under build_base: this folder outlives every build, so that the next one is quick.
        tree = ROOT / "build" / sysconfig.get_platform()
        levels = cpu_levels()
        for level in levels or [""]:
            (tree / level).mkdir(parents=True, exist_ok=True)
            options = [f"-DSLOWAR_LEVEL={level}", f"-DSLOWAR_GGML_CACHE={tree}"] if level else []
            configure(tree / level, options)
            names = ["slowar", "slowar_cpu"] if level else ["slowar"]
            compile_targets(tree / level, [*names, *(["slowar_asan"] if self.sanitize else [])])
        generate_declarations(tree / "_declarations.py")

        products = self.products(tree, levels)
        folder = self.folder()
        # Of an earlier build in place: those of one machine and those of levels exclude each other.
        for old in folder.glob(library_name("slowar*")):
            if old.name not in products:
                old.unlink()
        for name, source in products.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            replace_if_changed(source, folder / name)

    @staticmethod
    def products(tree: Path, levels: list[str]) -> dict[str, Path]:
        """What the build adds to the package, and where it lies before."""
        library = library_name()
        compiled = {
            library_name(f"slowar.{level}"): tree / level / "lib" / library for level in levels
        }
        if levels:
            name = library_name("slowar_cpu")
            compiled[name] = tree / levels[0] / "lib" / name
        else:
            compiled[library] = tree / "lib" / library
        return {
            **compiled,
            "_declarations.py": tree / "_declarations.py",
            "licenses/ggml.txt": tree / (levels or [""])[0] / "licenses" / "ggml.txt",
        }

    def folder(self) -> Path:
        in_source = self.inplace or self.editable_mode
        return (ROOT if in_source else Path(self.build_lib or "")) / PACKAGE

    # The rest is what setuptools asks of a step of a build.

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in names them

    def get_outputs(self) -> list[str]:
        names = [] if self.editable_mode else self.products(ROOT, cpu_levels())
        return [str(self.folder() / name) for name in names]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def library_name(stem: str = "slowar") -> str:
    if sys.platform == "win32":
        return f"{stem}.dll"
    return f"lib{stem}.dylib" if sys.platform == "darwin" else f"lib{stem}.so"


def cpu_levels() -> list[str]:
    return os.environ.get("SLOWAR_LEVELS", "").split()


def generate_declarations(path: Path) -> None:
    """Have cffi read the header now, so that importing the package parses no C."""
    try:
        from cffi import FFI
    except ImportError:
        raise ExecError(
            "cffi was not found: run `pip install cffi`, or build without --no-build-isolation, "
            "which installs it by itself."
        ) from None
    header = (ROOT / "csrc" / "slowar.h").read_text(encoding="utf-8")
    ffi = FFI()
    ffi.cdef(header.partition("/* cdef begin */")[2].partition("/* cdef end */")[0])
    ffi.set_source(f"{PACKAGE}.{path.stem}", None)
    ffi.emit_python_code(str(path))


def configure(tree: Path, options: Sequence[str] = ()) -> None:
    """Run CMake's first step in ``tree``, from scratch only when its inputs changed."""
    inputs = json.dumps({"source": str(ROOT), **{k: os.environ.get(k, "") for k in REMEMBERED}})
    record = tree / "slowar-inputs.json"
    known = record.exists() and record.read_text(encoding="utf-8") == inputs
    record.unlink(missing_ok=True)
    reason = tree / "slowar-error.txt"
    reason.unlink(missing_ok=True)

    # Under pip's build isolation ninja lies in a folder of another name each time: the cache must
    # be told where it is now.
    ninja = find_program("ninja", "BIN_DIR")
    command = [
        find_cmake(),
        "-S",
        str(ROOT),
        "-B",
        str(tree),
        *([] if known else ["--fresh"]),
        *(["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
        f"-DSLOWAR_PYTHON={sys.executable}",
        *options,
        *shlex.split(os.environ.get("CMAKE_ARGS", "")),
    ]
    if run(command) != 0:
        if reason.exists():
            raise ExecError(reason.read_text(encoding="utf-8").strip())
        raise ExecError(
            "CMake could not configure libslowar: its own words are above; if an option in "
            "CMAKE_ARGS asks for a backend, install that backend's toolkit or drop the option."
        )
    record.write_text(inputs, encoding="utf-8")


def compile_targets(tree: Path, targets: list[str]) -> None:
    if run([find_cmake(), "--build", str(tree), "--parallel", *jobs(), "--target", *targets]) != 0:
        raise ExecError(
            "libslowar did not compile: the compiler's first error is above; a C++17 compiler "
            "(gcc 9, clang 10 or newer) and about 2 GB of memory per job are needed "
            "(CMAKE_BUILD_PARALLEL_LEVEL=1 uses the least)."
        )


def jobs() -> list[str]:
    """The number of compilers to run, unless the environment says."""
    if "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ:
        return [os.environ["CMAKE_BUILD_PARALLEL_LEVEL"]]
    if hasattr(os, "sched_getaffinity"):
        return [str(len(os.sched_getaffinity(0)))]
    return [str(os.cpu_count() or 1)]


def find_cmake() -> str:
    cmake = find_program("cmake", "CMAKE_BIN_DIR")
    if cmake is None:
        raise ExecError(
            "CMake was not found: run `pip install cmake ninja`, or build without "
            "--no-build-isolation, which installs both by itself."
        )
    return cmake


def find_program(name: str, folder: str) -> str | None:
    """Find the program that this Python's package ``name`` carries, else the one on PATH.

    In that order, because two versions of CMake in turn on one build folder compile ggml anew.
    """
    with contextlib.suppress(ImportError):
        carried = getattr(importlib.import_module(name), folder, None)
        if carried and (found := shutil.which(name, path=carried)):
            return found
    return shutil.which(name)


def run(command: list[str]) -> int:
    print("+", shlex.join(command), flush=True)
    return subprocess.run(command, check=False).returncode


def replace_if_changed(source: Path, target: Path) -> None:
    """Copy by rename: a process that has the old library mapped keeps it."""
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    scratch = target.with_name(target.name + ".new")
    shutil.copyfile(source, scratch)
    scratch.replace(target)


FreshBuild.sub_commands = [*build.sub_commands, ("libslowar", None)]

if __name__ == "__main__":
    setup(
        distclass=BinaryDistribution,
        cmdclass={
            "bdist_wheel": PlatformWheel,
            "build": FreshBuild,
            "libslowar": BuildLibslowar,
        },
    )
