"""What must not change a bit: the instruction set, the number of threads, the caller's denormal mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from halfstep import _cpu
from halfstep.ops import native_cpu

ISAS: list[str] = _cpu.supported_isas()


class Conditions(NamedTuple):
    isa: str
    threads: int
    flush_denormal: bool = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The native backend runs under these conditions; afterwards everything is as before."""
        before = native_cpu.isa, torch.get_num_threads()
        native_cpu.isa = self.isa
        torch.set_num_threads(self.threads)
        if self.flush_denormal:
            assert torch.set_flush_denormal(True), "this CPU cannot flush denormals"
        try:
            yield
        finally:
            torch.set_flush_denormal(False)
            native_cpu.isa = before[0]
            torch.set_num_threads(before[1])


EVERY_ISA = [Conditions(isa, 1) for isa in ISAS]
ALL = [Conditions(isa, threads, flush) for isa in ISAS for threads in (1, 2, 3) for flush in (False, True)]
