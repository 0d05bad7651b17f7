"""The optimizer phase side by side with torch.optim and DeepSpeed, through the public step().

    halfstep bench optimizer [--quick] [--only "tensors: bf16"]

The jobs and providers are in phases.py, what they must give in jobs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.bench.command import run_bench
from halfstep.bench.jobs import comparisons


def main(arguments: Sequence[str] | None = None) -> None:
    about = "Optimizer phases (bf16, fp16 with a scaler) and the fp32 step, halfstep against torch.optim and DeepSpeed."
    run_bench("optimizer", about, comparisons, arguments)


if __name__ == "__main__":
    main()
