"""Two processes that run every check of accumulation_ranks.py, batch_norm_ranks.py and checkpoint_ranks.py: starting
them takes seconds.

python ranks_job.py RANK RANKS FOLDER DEVICE is one of them; it leaves in FOLDER/RANK.pt {check: what it returned,
or the text of its exception}.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

RANKS = 2


def started(folder: Path, device: str = "cpu") -> list[dict[str, Any]]:
    """Runs the job; what each rank found. On a GPU, which both use, it is the check of SyncBatchNorm alone."""
    arguments = [sys.executable, "-W", "error::RuntimeWarning", __file__]
    jobs = [
        subprocess.Popen([*arguments, str(rank), str(RANKS), str(folder), device], stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        said = [job.communicate(timeout=300)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * RANKS, "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def result(function: Callable[[int], Any], rank: int) -> Any:
    try:
        return function(rank)
    except (ValueError, TypeError, RuntimeError) as error:
        return "".join(traceback.format_exception(error))


def main(rank: int, ranks: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    import accumulation_ranks
    import batch_norm_ranks
    import checkpoint_ranks

    checks = {**accumulation_ranks.CHECKS, **batch_norm_ranks.CHECKS, **checkpoint_ranks.CHECKS}
    if device != "cpu":
        checks = {"sync_batch_norm": partial(batch_norm_ranks.sync_batch_norm, device=device)}
    torch.save({name: result(function, rank) for name, function in checks.items()}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
