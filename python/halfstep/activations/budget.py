"""`hs.ByteBudget`: the policy of hs.checkpoint that keeps as much as fits into a number of bytes."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import kept
from .byte_size import format_bytes, parse_bytes
from .plan import Plan, make_plan
from .policies import EVERYTHING, ContextFn
from .recorded import OperatorKey, Recording, Storages

# An A100 does 312e12 16-bit FLOPs and moves 2.0e12 bytes in a second (NVIDIA's data sheet): 153 to a byte. Products get
# some two thirds of theirs, elementwise operators most of theirs. An H100: 295; CPUs: 5 to 20.
FLOPS_PER_BYTE = 100.0
# Private: what is called in a compiled function but not traced, as hooks of this kind, has no other way to know. No
# function around it, which dynamo would trace.
_dynamo_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback  # pyright: ignore[reportAttributeAccessIssue]
PLANS = 8  # the shapes for which a plan is remembered; the one used longest ago goes

Signature = tuple[tuple[Any, ...], tuple[torch.Size, ...]]  # what must be equal, and what may be smaller


class ByteBudget:
    """A policy of `hs.checkpoint`: the blocks keep at most `n` bytes between forward and backward, all together, and
    within that what makes recomputing cheapest.

    What operators make, what autograd would save and what recomputing costs is measured in the first forward with
    gradients, in which every block keeps its inputs only (policy "layer", the least memory). Then a multiple-choice
    knapsack is solved over all blocks: each runs without a checkpoint, or keeps its inputs and the results of any of
    its operators. The following forwards use that plan, also for inputs that are smaller in any dimension. Larger ones,
    another autocast or training mode are measured again; eight plans are remembered. Plans follow from shapes alone,
    so ranks with equal shapes have the same one, and nothing waits for a device.

    Counted are the storages that blocks keep, each once: inputs of blocks, kept results, and what autograd saves in
    blocks without a checkpoint. Not counted are parameters, buffers and the model's own inputs, what is kept outside
    of the blocks (embeddings, logits, loss), copies of buffers that a block changes, and what one block makes again
    while it is recomputed (`plan.transient_bytes`). `hs.measure_activations` shows all of it. Where values decide
    which operators run or how large results are (some experts' layers), gradients are right, and bytes are those of
    the forward that was measured.

    The handle that hs.checkpoint returns has the plan: `print(handle.plan)`. Only in eager mode: under torch.compile,
    torch.compile's own partitioner has a budget of that kind. Not for a model whose forward is inside another
    torch.utils.checkpoint(use_reentrant=False), which ends in its error about recomputed values after each measuring.

    Args:
        n: bytes; an integer, or a string with a unit: "512MB" (10^6), "1.5GiB" (2^30).
        flops_per_byte: what moving a byte costs, in FLOPs. The cost of an operator is its FLOPs and this many for each
            byte that it reads and writes; 0 or more. 100 suits GPUs; CPUs are nearer to 10. With 0, elementwise
            operators and norms cost nothing.

    Raises:
        TypeError, ValueError: `n` or `flops_per_byte` is not as above.
        ValueError: from the first forward with gradients, if keeping least takes more than `n` bytes; says how many.
        RuntimeError: under torch.compile.

    Source: selective recomputation: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models" (arXiv 2205.05198), section 5; optimal choice under a budget: Jain et al., "Checkmate" (arXiv 1910.02653).

    Example:
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))] * 1
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), *blocks)
        >>> handle = hs.checkpoint(model, hs.ByteBudget("1kB"), blocks=blocks)
        >>> x = torch.ones(4, 8)
        >>> model(x).sum().backward()  # measures
        >>> handle.plan.bytes, handle.plan.least, handle.plan.most
        (640, 128, 1152)
    """

    watches_model = True

    def __init__(self, n: int | str, *, flops_per_byte: float = FLOPS_PER_BYTE) -> None:
        self.n = parse_bytes(n, "a ByteBudget's n")
        number = isinstance(flops_per_byte, (int, float)) and not isinstance(flops_per_byte, bool)
        if not number or not 0 <= flops_per_byte < math.inf:
            raise (ValueError if number else TypeError)(
                f"flops_per_byte must be a finite number, 0 or more; got {flops_per_byte!r}"
            )
        self.flops_per_byte = flops_per_byte
        self._forget()

    def _forget(self) -> None:
        self._plans: list[_Remembered] = []  # the last used first
        self._run: _Forward | None = None
        self._measure_next = self._warned = False

    def __repr__(self) -> str:
        return f"ByteBudget({self.n}, flops_per_byte={self.flops_per_byte})"

    def __getstate__(self) -> dict[str, Any]:
        """Without plans: a copy measures anew."""
        return {"n": self.n, "flops_per_byte": self.flops_per_byte}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.n, self.flops_per_byte = state["n"], state["flops_per_byte"]
        self._forget()

    @property
    def plan(self) -> Plan | None:
        """The plan that was made or used last; None before the first forward with gradients is over."""
        return self._plans[0].plan if self._plans else None

    # ---- what hs.checkpoint asks (policies.Policy) -------------------------------------------------------------------
    def bind(self, names: Sequence[str]) -> ByteBudget:
        return ByteBudget(self.n, flops_per_byte=self.flops_per_byte)

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or _dynamo_callback() is not None:
            self.traced_context_fn()
        self._run = _Forward(Storages(model, (args, kwargs))) if torch.is_grad_enabled() else None

    def end(self, model: nn.Module, completed: bool) -> None:
        run, self._run = self._run, None
        if run is None or not completed:
            return
        if run.plan is not None:
            self._measure_next = run.outgrown
        elif run.recordings:
            self._measure_next = False
            self._remember(run)

    def contexts(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        if run is None:
            self._warn_of_call_outside(name)
            return None
        key = (name, run.count(name))
        signature = _signature(block, (args, kwargs))
        if not run.started:
            run.started = True
            run.plan = None if self._measure_next else self._find(key, signature)
        if run.plan is None:
            return run.record(key, signature, block, (args, kwargs))
        return run.planned(key, signature)

    def traced_context_fn(self) -> ContextFn:
        raise RuntimeError(
            "hs.ByteBudget measures and plans eager forwards and cannot run under torch.compile, whose own partitioner "
            "keeps what fits: undo with hs.checkpoint(model, None) and set "
            "torch._functorch.config.activation_memory_budget (0 to 1, the share of activations that is kept), or use "
            'hs.checkpoint(model, "selective")'
        )

    # ---- plans -------------------------------------------------------------------------------------------------------
    def _find(self, key: _CallKey, signature: Signature) -> _Remembered | None:
        """The plan for the smallest shapes that this first call of a forward fits into."""
        fitting = [p for p in self._plans if key in p.signatures and _covers(p.signatures[key], signature)]
        if not fitting:
            return None
        found = min(fitting, key=lambda plan: plan.size(key))
        self._plans.remove(found)
        self._plans.insert(0, found)
        return found

    def _remember(self, run: _Forward) -> None:
        calls = [recording.call for recording in run.recordings.values()]
        plan = make_plan(calls, run.storages.sizes, self.n, self.flops_per_byte)
        if isinstance(plan, int):
            raise ValueError(
                f"ByteBudget({self.n}) is too small: the blocks of this forward keep at least {plan} bytes "
                f"({format_bytes(plan)}), their inputs. Raise the budget, use a smaller batch or shorter sequences, or "
                "move the inputs to the host with hs.offload_activations()"
            )
        signatures = run.signatures
        replaced = [old for old in self._plans if all(
            key in signatures and _covers(signatures[key], old.signatures[key]) for key in old.signatures
        )]  # fmt: skip
        self._plans = [_Remembered(plan, signatures), *(old for old in self._plans if old not in replaced)][:PLANS]

    def _warn_of_call_outside(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"hs.ByteBudget plans within a forward of the model that was given to hs.checkpoint, but block {name!r}"
                " was called outside of one; it keeps its inputs only. Give the module that is called to hs.checkpoint",
                stacklevel=2,
            )


_CallKey = tuple[str, int]  # a block's name, and which of its calls in the forward


class _Remembered:
    """A plan, and the inputs that it is for."""

    def __init__(self, plan: Plan, signatures: dict[_CallKey, Signature]) -> None:
        self.plan, self.signatures = plan, signatures
        self.blocks = dict(zip(signatures, plan.blocks, strict=True))

    def size(self, key: _CallKey) -> int:
        return sum(shape.numel() for shape in self.signatures[key][1])


class _Forward:
    """One forward of the model: under a plan, or recorded for one."""

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self.started = False
        self.plan: _Remembered | None = None
        self.outgrown = False  # the plan did not cover a call, so the next forward is measured
        self.recordings: dict[_CallKey, Recording] = {}
        self.signatures: dict[_CallKey, Signature] = {}
        self._calls: Counter[str] = Counter()

    def count(self, name: str) -> int:
        self._calls[name] += 1
        return self._calls[name] - 1

    def record(self, key: _CallKey, signature: Signature, block: nn.Module, inputs: Any) -> ContextFn:
        recording = Recording(key[0], block, inputs, self.storages)
        self.recordings[key], self.signatures[key] = recording, signature
        return lambda: (recording, nullcontext())

    def planned(self, key: _CallKey, signature: Signature) -> Any:
        assert self.plan is not None
        planned = self.plan.blocks.get(key)
        if planned is None or not _covers(self.plan.signatures[key], signature):
            # Blocks that are left out at random are no reason to measure again, but more than there were are
            self.outgrown |= planned is not None or self._calls.total() > len(self.plan.blocks)
            return None
        if not planned.checkpointed:
            return EVERYTHING
        return (lambda: kept.contexts(_Chosen(planned.keys))) if planned.keys else None


class _Chosen:
    """Says of each operator of one forward, in order, whether its result is kept."""

    def __init__(self, keys: frozenset[OperatorKey]) -> None:
        self.keys = keys
        self._calls: Counter[Any] = Counter()

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        self._calls[op] += 1
        return (op, self._calls[op] - 1) in self.keys


def _signature(block: nn.Module, inputs: Any) -> Signature:
    """Of a call: what decides which operators run and what autograd saves, and the shapes."""
    leaves = tree_leaves(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    flags = tuple(leaf for leaf in leaves if leaf is None or isinstance(leaf, (bool, str)))
    kinds = tuple((t.dtype, t.device, t.requires_grad, t.dim()) for t in tensors)
    devices = [d for d in sorted({"cpu", *(t.device.type for t in tensors)}) if torch.amp.is_autocast_available(d)]
    autocast = tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in devices)
    trained = sum(p.requires_grad for p in block.parameters())
    return (len(leaves), flags, kinds, autocast, block.training, trained), tuple(t.shape for t in tensors)


def _covers(planned: Signature, signature: Signature) -> bool:
    """A plan for these inputs serves others that are no larger in any dimension: the operators are the same."""
    if planned[0] != signature[0]:
        return False
    pairs = zip(planned[1], signature[1], strict=True)
    return all(size <= most for larger, shape in pairs for most, size in zip(larger, shape, strict=True))
