"""Activations on the host between forward and backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from ..ops import devices
from ..transfers import Transfers, transfers_of
from .byte_size import parse_bytes
from .recompute import inside_block
from .saved import Moves, Stays, refuse_capture
from .tape import Counts, Limits, Tape

MIB = 2**20
_SHARE = 16  # of its storage that a tensor must reach over to take it along


def offload_activations(
    min_bytes: int | str = MIB,
    *,
    keep_last_bytes: int | str = 256 * MIB,
    prefetch_bytes: int | str = 256 * MIB,
    in_flight_bytes: int | str = 512 * MIB,
    transfers: Transfers | None = None,
) -> ActivationOffload:
    """Keeps what autograd saves inside on the host until backward needs it. A context manager around forward.

    While forward goes on, saved tensors are copied to pinned host memory on a stream of their own; in backward they
    come back in reverse order, ahead of the operators that need them. Every gradient has the bits that it has without.
    A storage is copied once, whole, whichever and how many views of it are saved.

    What stays where it is: parameters and their views, leaves that require a gradient, tensors on the host already,
    tensor subclasses (DTensor), sparse tensors, small ones, and views over less than a sixteenth of their storage,
    which is then part of something that lives anyway (a data set, a cache). On a machine without a GPU nothing moves.

    The device holds, at the end of forward, at most keep_last_bytes + in_flight_bytes of what moves, and in backward
    prefetch_bytes (and one tensor more) besides what operators work on. The host holds the rest, in memory that is
    pinned in exact size, goes round from step to step, and never takes more than at the worst moment so far. Bytes
    moved are each storage's, once out and once back.

    Put it around the model. With `checkpoint`, or torch.utils.checkpoint(use_reentrant=False), it is the inputs of
    blocks that move; what a policy keeps besides stays. Of contexts inside each other, and other users of
    saved_tensors_hooks, the innermost has its way. Hooks belong to the thread that enters the context: forward passes
    in others (DataParallel) are not seen. Compiled models work inside; a context in a compiled function ends its graph.

    Args (bytes are integers, or strings with a unit: "64MB", "1.5GiB"):
        min_bytes: of a storage, from which on it moves; 1 or more.
        keep_last_bytes: what was saved last is needed first: so much of it stays on the device. 0 or more.
        prefetch_bytes: in backward copies are begun so far ahead. 0: when an operator asks.
        in_flight_bytes: device memory that unfinished copies to the host may hold. When there would be more, the device
            waits (not the host), so a slow link slows forward down rather than fill the memory.
        transfers: what copies; None: the device's own. For tests, see halfstep.transfers.host.

    Returns:
        A context manager, also a decorator, which may be entered again and again. It knows what it did: `bytes`,
        `storages` and `tensors` that moved, `fetched_bytes` that came back, `in_flight_bytes` now and
        `peak_in_flight_bytes`, `stayed` (how many tensors stayed, by reason); all are in its str().

    Raises:
        TypeError, ValueError: a number of bytes that is none.
        RuntimeError: it is entered twice at once or inside a block of `checkpoint`; a CUDA graph is captured; in
            backward, a saved tensor was written in place meanwhile (as torch raises; writes through `.data` are not
            seen, as ever).

    Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design"
    (MICRO 2016), section III: offload during forward, prefetch during backward, each on a stream beside the compute.

    Example:
        >>> import halfstep as hs
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> with hs.offload_activations() as moved:
        ...     loss = model(torch.ones(4, 8)).sum()
        >>> loss.backward()
        >>> print(moved)  # here, without a GPU
        nothing moved; stayed: on the host (3), parameters (1)
    """
    return ActivationOffload(min_bytes, keep_last_bytes, prefetch_bytes, in_flight_bytes, transfers)


class ActivationOffload(ContextDecorator):
    """See offload_activations."""

    def __init__(
        self,
        min_bytes: int | str,
        keep_last_bytes: int | str,
        prefetch_bytes: int | str,
        in_flight_bytes: int | str,
        transfers: Transfers | None,
    ) -> None:
        self._min_bytes = parse_bytes(min_bytes, "min_bytes")
        self._limits = Limits(
            keep_last=parse_bytes(keep_last_bytes, "keep_last_bytes", least=0),
            prefetch=parse_bytes(prefetch_bytes, "prefetch_bytes", least=0),
            in_flight=parse_bytes(in_flight_bytes, "in_flight_bytes", least=0),
        )
        self._transfers = transfers
        self._counts: defaultdict[torch.device, Counts] = defaultdict(Counts)
        self._tapes: dict[torch.device, Tape] = {}
        self._hooks: Any = None
        self.tensors = 0
        self.stayed: Counter[str] = Counter()

    def __enter__(self) -> ActivationOffload:
        if torch.compiler.is_compiling():
            from ..untraced import call

            return call(self._open)
        return self._open()

    def _open(self) -> ActivationOffload:
        if self._hooks is not None:
            raise RuntimeError(
                "offload_activations: this context is open already; make another one, or leave the inner `with` out"
            )
        if inside_block():
            raise RuntimeError(
                "offload_activations: entered inside a block that checkpoint recomputes, where it would keep on the "
                "host what is to be computed again; put it around the model, and the blocks' inputs move"
            )
        self._tapes = {}
        # A compiled function with a graph break has its Python between the graphs traced, these too
        untraced: Any = torch.compiler.disable
        hooks = saved_tensors_hooks(untraced(self._pack), untraced(_unpack))
        hooks.__enter__()
        self._hooks = hooks
        return self

    def __exit__(self, *raised: Any) -> None:
        if torch.compiler.is_compiling():
            from ..untraced import call

            return call(self._close, *raised)
        return self._close(*raised)

    def _close(self, *raised: Any) -> None:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*raised)

    @property
    def bytes(self) -> int:
        """Bytes that were copied to the host so far."""
        return sum(counts.bytes for counts in self._counts.values())

    @property
    def storages(self) -> int:
        return sum(counts.storages for counts in self._counts.values())

    @property
    def fetched_bytes(self) -> int:
        return sum(counts.fetched_bytes for counts in self._counts.values())

    @property
    def peak_in_flight_bytes(self) -> int:
        """The most on one device."""
        return max((counts.peak_in_flight for counts in self._counts.values()), default=0)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of device memory that copies to the host hold; those that are done let go of theirs."""
        for tape in self._tapes.values():
            with tape.lock:
                tape.let_go_of_done()
        return sum(counts.in_flight for counts in self._counts.values())

    def __str__(self) -> str:
        stayed = ", ".join(f"{why} ({number})" for why, number in self.stayed.most_common())
        moved = (
            f"{self.bytes:,} bytes moved to the host (storages: {self.storages}, saved tensors: {self.tensors}); "
            f"{self.fetched_bytes:,} came back; at most {self.peak_in_flight_bytes:,} in flight"
            if self.storages
            else "nothing moved"
        )
        return f"{moved}; stayed: {stayed or 'none'}"

    def _pack(self, tensor: Tensor) -> Stays | Moves:
        why = self._why_it_stays(tensor)
        if why is not None:
            self.stayed[why] += 1
            return Stays(tensor)
        refuse_capture(tensor.device)
        self.tensors += 1
        plain = tensor.detach().resolve_conj().resolve_neg()  # lazy signs are no part of the memory
        tape = self._tape(tensor.device)
        with tape.lock:
            return Moves(tensor, plain, tape.store(plain, tensor._version))

    def _tape(self, device: torch.device) -> Tape:
        if device not in self._tapes:
            transfers = self._transfers or transfers_of(device)
            assert transfers is not None
            self._tapes[device] = Tape(transfers, self._limits, self._counts[device])
        return self._tapes[device]

    def _why_it_stays(self, tensor: Tensor) -> str | None:
        if isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter):
            return "parameters"
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor._is_zerotensor():
            return "of other kinds"
        if self._transfers is None and devices.is_host(tensor.device):
            return "on the host"
        if not self._reaches(tensor.device):
            return "on other devices"
        if tensor.is_inference() or (tensor.is_leaf and tensor.requires_grad):
            return "held by others"
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes < self._min_bytes:
            return "small"
        if _reach(tensor) * _SHARE < nbytes:
            return "parts of something large"
        return None

    def _reaches(self, device: torch.device) -> bool:
        if self._transfers is not None:
            return self._transfers.device == device
        return transfers_of(device) is not None


def _reach(tensor: Tensor) -> int:
    """Bytes of the storage from the first element to the last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _unpack(saved: Stays | Moves) -> Tensor:
    return saved.restored()
