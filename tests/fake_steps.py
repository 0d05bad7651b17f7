"""Training steps under fake tensors, measured by torch's MemTracker: no memory is taken, nothing is computed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from halfstep.planner.job import Job

CPU = torch.device("cpu")
LOSS = 4  # bytes of the loss itself, which a tracker counts among the activations


@dataclass(frozen=True)
class Run:
    parameters: int  # elements
    activations: int  # bytes after forward, the loss left out
    gradients: int
    states: int
    peak: int  # of forward and backward, with the optimizer's states there
    step_peak: int


def autocast(job: Job) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if job.autocast else contextlib.nullcontext()


@contextlib.contextmanager
def fake() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*MemTracker|.*weakref", category=UserWarning)
        yield


def run(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Tensor], Tensor], vocabulary: int, job: Job
) -> Run:
    """Two optimizer steps, the second one measured: states exist. Every window has `job.accumulation` micro-batches."""
    with fake():
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=job.step == "foreach")
        ids = torch.randint(0, vocabulary, (job.micro_batch, job.sequence))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(model, optimizer, ids)

        def bytes_of(which: str) -> dict[str, int]:
            found = tracker.get_tracker_snapshot(which)[CPU]
            return {getattr(part, "value", part): size for part, size in found.items()}

        with tracker:
            for _ in range(job.accumulation):
                tracker.reset_mod_stats()
                with autocast(job):
                    loss = loss_of(model, ids)
                activations = bytes_of("current")["Activation"]
                loss.backward()
                del loss
            peak, gradients = bytes_of("peak")["Total"], bytes_of("current")["Gradient"]
        tracker = MemTracker()
        tracker.track_external(model, optimizer, ids)
        with tracker:
            optimizer.step()
        after, step_peak = bytes_of("current"), bytes_of("peak")["Total"]
        count = sum(p.numel() for p in model.parameters())
        # Each parameter's step is a float32 on the CPU.
        states = after["Optstate"] - 4 * len(list(model.parameters()))
    return Run(count, activations - LOSS, gradients, states, peak, step_peak)
