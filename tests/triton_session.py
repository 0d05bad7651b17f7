"""Which tests a pytest process runs where Triton is concerned, and on which Triton.

Triton's language is bound to the compiler or to the interpreter when it is imported: a process has one of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent / "interpreted"


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def left_out(path: Path, arguments: Sequence[str]) -> bool:
    """Whether this path is not collected.

    Without TRITON_INTERPRET=1 that is tests/interpreted, with it everything else; but for what an argument names, other
    than a folder that holds both.
    """
    places = [Path(argument.split("::")[0]).resolve() for argument in arguments]
    named = [place for place in places if place == FOLDER or not FOLDER.is_relative_to(place)]
    if any(path.is_relative_to(place) or place.is_relative_to(path) for place in named):
        return False
    inside = path.is_relative_to(FOLDER)
    return not inside and not FOLDER.is_relative_to(path) if interpreting() else inside


def require(version: str) -> None:
    """pytest.UsageError if another Triton is imported here."""
    import triton

    if triton.__version__ != version:
        raise pytest.UsageError(
            f"expected triton {version}, got {triton.__version__} from {triton.__file__}: put a folder with the right "
            "one first in PYTHONPATH, as `make test` does"
        )
