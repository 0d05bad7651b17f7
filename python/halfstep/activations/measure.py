"""What operators allocate and compute: bytes of storages while they live, FLOPs, bytes moved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .byte_size import format_bytes


def plain_tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors in nested containers; of a wrapper such as DTensor the ones it holds, which have the memory."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            if is_traceable_wrapper_subclass(leaf):
                yield from plain_tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
            else:
                yield leaf


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Storages of the strided tensors in nested containers."""
    for tensor in plain_tensors(tree):
        if tensor.layout is torch.strided:
            yield tensor.untyped_storage()


class measure_activations(TorchDispatchMode):  # noqa: N801 - used like a function, as torch.no_grad is
    """Measures what a block of code allocates and what of that still lives when it ends. Around a forward, that is
    what stays until backward: what autograd saved, what a checkpoint or a policy keeps, and the results you hold.

    Bytes are those of storages that operators make inside the block, each once, however many views it has. Parameters,
    buffers and inputs that were there before are not counted, nor are mapped files. Not seen: what a kernel allocates
    inside itself and frees again, what a compiled region allocates, and what other threads do. Nothing waits for a
    device. Every operator costs some microseconds of host time more, so measure a step, do not train inside.

    Attributes:
        bytes: allocated inside and alive, now or, after the block, when it ended.
        peak: the highest that `bytes` has been.
        by_dtype: `bytes` by the dtype with which the storage was made.
        by_device: `bytes` by device; what `hs.offload_activations` moved is under "cpu".

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        >>> x = torch.ones(4, 8)
        >>> with hs.measure_activations() as measured:
        ...     loss = model(x).sum()
        >>> measured.bytes  # 2 x [4, 32] for backward, and the loss
        1028
        >>> print(measured)
        1.0 kB kept (float32), 1.0 kB at most
    """

    supports_higher_order_operators = True  # flex_attention, and others that take functions

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._ended = False
        # A storage's Python object lives as long as its memory, whoever holds it.
        self._live: dict[weakref.ref[Any], tuple[int, torch.dtype, str]] = {}
        self._split: dict[tuple[torch.dtype, str], int] | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Functions that are compiled stay so inside the block (torch asks)."""
        return True

    @property
    def by_dtype(self) -> dict[torch.dtype, int]:
        return self._sums(0)

    @property
    def by_device(self) -> dict[str, int]:
        return self._sums(1)

    def __enter__(self) -> measure_activations:
        if self._ended:
            raise RuntimeError("a measure_activations() measures one block; make a new one for the next block")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._split = self._splits()
        self._ended = True
        self._live.clear()

    def __str__(self) -> str:
        dtypes = {str(dtype).removeprefix("torch."): size for dtype, size in self.by_dtype.items() if size}
        split = ", ".join(dtypes if len(dtypes) == 1 else (f"{name} {format_bytes(n)}" for name, n in dtypes.items()))
        return f"{format_bytes(self.bytes)} kept{split and f' ({split})'}, {format_bytes(self.peak)} at most"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for tensor in plain_tensors(result):
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in given:
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if weakref.ref(storage) not in self._live:
            size = storage.nbytes()
            self._live[weakref.ref(storage, self._freed)] = (size, tensor.dtype, str(tensor.device))
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def _freed(self, reference: weakref.ref[Any]) -> None:
        if not self._ended:
            self.bytes -= self._live.pop(reference)[0]

    def _splits(self) -> dict[tuple[torch.dtype, str], int]:
        split: dict[tuple[torch.dtype, str], int] = {}
        for size, dtype, device in self._live.values():
            split[dtype, device] = split.get((dtype, device), 0) + size
        return split

    def _sums(self, place: int) -> dict[Any, int]:
        sums: dict[Any, int] = {}
        for kind, size in (self._splits() if self._split is None else self._split).items():
            sums[kind[place]] = sums.get(kind[place], 0) + size
        return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


# ---- FLOPs and bytes moved -------------------------------------------------------------------------------------------
Shape = Sequence[int]


def attention_flops(q: Shape, k: Shape, v: Shape, *rest: Any, **more: Any) -> int:
    """Of torch.ops.halfstep.attention: two products of every query with every key, as torch counts its own attention
    (what a mask, a window or segments leave out is counted too: their extent is only known on the device)."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


def attention_backward_flops(d_out: Shape, d_lse: Any, out: Any, lse: Any, log_sum: Any, needs: Any, *call: Any,
                             **more: Any) -> int:  # fmt: skip
    """Five products: scores, dV and dP, dQ and dK."""
    q, k, v = call[:3]
    return 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])


def _sdpa_backward_flops(d_out: Shape, *call: Any, **more: Any) -> int:
    return attention_backward_flops(d_out, None, None, None, None, None, *call)


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for halfstep's operators and for torch's attention on CPUs, which torch counts as nothing, as
    `torch.utils.flop_counter.FlopCounterMode(custom_mapping=...)` takes them."""
    ours, aten = torch.ops.halfstep, torch.ops.aten
    return {
        ours.attention: attention_flops,
        ours.attention_backward: attention_backward_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward_flops,
    }


@lru_cache(maxsize=1)
def _formulas() -> dict[Any, Callable[..., int]]:
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, so not at the top

    return FlopCounterMode(display=False, custom_mapping=flop_formulas()).flop_registry


def flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of one operator; 0 for all that torch has no formula for (elementwise operators, norms, sums)."""
    formula = _formulas().get(getattr(func, "_overloadpacket", func))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def bytes_moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes of the elements that an operator reads and writes, each tensor once; 0 for those that only allocate."""
    name = getattr(func, "__name__", "")
    if name.startswith(("empty", "new_empty")):
        return 0
    return sum(prod(t.shape) * t.element_size() for t in plain_tensors((args, kwargs, result)))
