"""Lets a new virtual environment see the packages of the interpreter that made it, if that is one's own as well.

`python -m venv --system-site-packages` reaches only the packages of the interpreter below both. Used by the Makefile:
python tests/lend_packages.py FOLDER, run by the interpreter that lends.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main() -> int:
    if sys.prefix == sys.base_prefix:  # no virtual environment: the option has done it
        return 0
    (site,) = Path(sys.argv[1]).glob("lib/python*/site-packages")
    lent = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "lent.pth").write_text("".join(f"{folder}\n" for folder in lent), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
