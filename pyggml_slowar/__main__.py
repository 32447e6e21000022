"""The ``slowar`` command as it is installed: ``slowar`` or ``python -m pyggml_slowar``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command, if there is code for this CPU."""
    try:
        # Before the rest: on a CPU that is too old numpy ends the process without a word.
        from . import _native  # noqa: F401
    except ImportError as error:
        print(f"slowar: {error}", file=sys.stderr)
        return 1
    from .cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
