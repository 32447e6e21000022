"""What ``import pyggml_slowar`` loads, which is next to nothing, and what its names are."""

from __future__ import annotations

import sys

import pytest
from conftest import assert_clean, run_child

import pyggml_slowar as slowar

# Half a second of imports, and a library that looks for devices: each comes with the first use.
HEAVY = (
    "_cffi_backend asyncio cffi concurrent.futures ctypes gguf hashlib numpy psutil tqdm "
    "pyggml_slowar._native pyggml_slowar.session"
)


def test_a_bare_import_loads_nothing_heavy() -> None:
    # -I -S: what `site` and its .pth files load is not ours.
    code = """
import sys
sys.path[:0] = sys.argv[2:]
import pyggml_slowar
print([name for name in sys.argv[1].split() if name in sys.modules])
print("libslowar" in open("/proc/self/maps").read() if sys.platform == "linux" else False)
"""
    child = run_child(code, HEAVY, *sys.path[1:], options=("-I", "-S"))
    assert_clean(child, "[]\nFalse\n")


def test_the_first_use_loads_it() -> None:
    code = """
import sys
import pyggml_slowar
pyggml_slowar.devices
print("pyggml_slowar._native" in sys.modules, "numpy" in sys.modules, "cffi" in sys.modules)
from pyggml_slowar import Model
print(pyggml_slowar.Model is Model, "numpy" in sys.modules)
"""
    assert_clean(run_child(code), "True False False\nTrue True\n")


def test_every_name_is_there() -> None:
    code = """
import pyggml_slowar
print(set(pyggml_slowar.__all__) - set(dir(pyggml_slowar)))
from pyggml_slowar import *
print([name for name in pyggml_slowar.__all__ if globals()[name] is None])
"""
    assert_clean(run_child(code), "set()\n[]\n")
    for name in slowar.__all__:
        assert getattr(slowar, name).__module__.startswith(("pyggml_slowar.", "typing"))


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="module 'pyggml_slowar' has no attribute 'Modle'"):
        slowar.Modle  # type: ignore[attr-defined]  # noqa: B018
