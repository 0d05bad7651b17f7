"""Prints the version of the installed torch; fails with one sentence if there is none or it is too old.

Used by the Makefile before halfstep exists in the environment.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

OLDEST = (2, 10)


def main() -> int:
    try:
        found = version("torch")
    except PackageNotFoundError:
        print("torch is not installed", file=sys.stderr)
        return 1
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        print(f"torch {found} is installed, halfstep needs {oldest} or newer: upgrade it yourself", file=sys.stderr)
        return 1
    print(f"torch {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
