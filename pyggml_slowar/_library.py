"""Which file libslowar is.

A local build has one, for the processor of the build. A wheel for x86-64 has one for each level of
that architecture, and the best that this processor runs is taken.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

_LEVELS = {"v2": 2, "v3": 3, "v4": 4}
_PREFIX = "" if sys.platform == "win32" else "lib"
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def find(folder: Path, environment: Mapping[str, str]) -> str:
    """The path of the library in ``folder`` to load.

    ``SLOWAR_LIBRARY`` names another file, ``SLOWAR_CPU`` another level.

    Raises
    ------
    ImportError
        This processor is older than every level, or SLOWAR_CPU asks for what cannot be had.
    """
    if named := environment.get("SLOWAR_LIBRARY"):
        return named
    asked = environment.get("SLOWAR_CPU")
    of_level = {
        level: folder / f"{_PREFIX}slowar.x86-64-{name}{_SUFFIX}" for name, level in _LEVELS.items()
    }
    built = [level for level, path in of_level.items() if path.exists()]
    if not built:
        if asked:
            raise ImportError(
                f"SLOWAR_CPU is {asked!r}, but {folder} holds one library, not one for each "
                "x86-64 level: unset it."
            )
        return str(folder / f"{_PREFIX}slowar{_SUFFIX}")
    return str(of_level[choose(built, _level_of_this_cpu(folder), asked)])


def choose(built: Collection[int], runs: int, asked: str | None = None) -> int:
    """The level to load of those ``built``, where the processor ``runs`` that level and lower."""
    names = [name for name, level in _LEVELS.items() if level in built]
    if runs < min(built):
        raise ImportError(
            f"this CPU is older than x86-64-{names[0]}, the lowest level (SSE4.2, POPCNT: Intel "
            "since 2009, AMD since 2011) that this wheel of pyggml-slowar has code for: build it "
            "from source."
        )
    if not asked:
        return max(level for level in built if level <= runs)
    if asked not in names:
        raise ImportError(f"SLOWAR_CPU is {asked!r}, expected one of {', '.join(names)} or nothing")
    if _LEVELS[asked] > runs:
        raise ImportError(
            f"SLOWAR_CPU is {asked!r}, but this CPU runs x86-64-v{runs} at most"
            f"{' (v4 with VNNI and BF16)' if asked == 'v4' else ''}"
        )
    return _LEVELS[asked]


def _level_of_this_cpu(folder: Path) -> int:
    # Not /proc/cpuinfo: an emulator shows the host's there.
    library = ctypes.CDLL(str(folder / f"{_PREFIX}slowar_cpu{_SUFFIX}"))
    return int(library.slowar_cpu_level())
