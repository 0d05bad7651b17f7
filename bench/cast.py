"""The list functions side by side with torch's own: casts, sums, unscaling, norms, clipping.

    halfstep bench cast [--quick] [--only "unscale_"]

The jobs are in gradient_jobs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.bench.command import run_bench
from halfstep.bench.gradient_jobs import comparisons


def main(arguments: Sequence[str] | None = None) -> None:
    about = "cast_, accumulate_, unscale_, norms and clipping of whole lists, halfstep against torch's own."
    run_bench("cast", about, comparisons, arguments)


if __name__ == "__main__":
    main()
