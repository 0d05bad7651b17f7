"""Results of chosen operators, kept from a block's forward for its recomputation.

torch.utils.checkpoint.create_selective_checkpoint_contexts does the same. What is different here: a result that is
written to after it was kept is recomputed instead of raising an error; random numbers that a kept operator drew are
skipped in the recomputation too, so that the operators behind it draw the same ones again; a graph can be gone through
more than once; and results that no recomputation would get to are not kept.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

# Compiled parts of a block call what is marked so. Private: torch.compiler.disable imports dynamo at once.
untraced = torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
Decide = Callable[..., Any]
_KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
# torch 2.10 has none of these two.
_OFFLOAD = tuple(policy for policy in CheckpointPolicy if policy.name.endswith("_CPU_OFFLOAD"))


def contexts(decide: Decide) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for a forward of a block and for its recomputations. Results of operators for which `decide(ctx, op,
    *args, **kwargs)` returns True, MUST_SAVE or PREFER_SAVE are kept; it is called once for each operator of the
    forward, in order, after it ran (`ctx.op_output`). Views, and what operators wrote in place, are made again whatever
    it says: that takes no memory."""
    store = _Store()
    return _Keep(decide, store), _Reuse(store)


def traced_contexts(decide: Decide) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The same under torch.compile. What it traces is marked for its partitioner by torch's own contexts; a block that
    it leaves to Python after all (a graph break inside) gets those above."""
    if not torch.compiler.is_compiling():
        return contexts(decide)
    return create_selective_checkpoint_contexts(functools.partial(checked_decision, decide))


def checked_decision(decide: Decide, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What `decide` says about an operator, or an error that names what it may say."""
    said = decide(ctx, op, *args, **kwargs)
    if isinstance(said, bool):
        return CheckpointPolicy.MUST_SAVE if said else CheckpointPolicy.PREFER_RECOMPUTE
    if not isinstance(said, CheckpointPolicy):
        raise TypeError(
            f"a policy function must return a torch.utils.checkpoint.CheckpointPolicy (or True, False) for every "
            f"operator; got {said!r} for {op}"
        )
    if said in _OFFLOAD:
        raise ValueError(
            f"a policy function must say save or recompute; got {said.name} for {op}, which torch recomputes in "
            "silence: use halfstep.offload_activations() around the forward to move what is saved to the host"
        )
    return said


@contextmanager
def saved_tensors_seen(seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `seen` with every tensor that autograd saves inside, and leaves what is done with it to the hooks around
    (those of the checkpoint): of hooks in torch, only the innermost ones are called."""
    # Private: there is no public way to ask for the hooks in force.
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    pack, unpack = top or (lambda x: x, lambda x: x)

    with torch.autograd.graph.saved_tensors_hooks(functools.partial(_look, seen, pack), unpack):
        yield


@untraced
def _look(seen: Callable[[Tensor], None], pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    seen(tensor)
    return pack(tensor)


@dataclass
class _Result:
    output: Any  # as the operator returned it, tensors as aliases
    position: int  # of the operator, among those of the forward
    device: torch.device | None  # whose random numbers the operator drew
    random_state: Tensor | None  # ... and where their sequence was behind it
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def watch(self, output: Any) -> None:
        """From now on a write to these tensors is noticed."""
        self.versions += [(t, t._version) for t in _tensors(output) if not t.is_inference()]

    def unchanged(self) -> bool:
        return all(tensor._version == version for tensor, version in self.versions)


@dataclass
class _Store:
    """Results by operator and its number among the calls of that operator."""

    results: dict[tuple[Any, int], _Result] = field(default_factory=dict)

    def drop(self, unwanted: Callable[[_Result], bool]) -> None:
        self.results = {key: result for key, result in self.results.items() if not unwanted(result)}


class _Keep(TorchDispatchMode):
    """Around the forward."""

    supports_higher_order_operators = True  # flex_attention, compiled regions: each is one operator here

    def __init__(self, decide: Decide, store: _Store):
        super().__init__()
        self.decide, self.store = decide, store
        self.calls: dict[Any, int] = defaultdict(int)
        self.position = self.saved_at = 0
        self.by_storage: dict[int, list[_Result]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Functions that are compiled by themselves stay so inside a block (torch asks)."""
        return True

    def __enter__(self) -> Any:
        self._watching = saved_tensors_seen(self._saved)
        self._watching.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watching.__exit__(*error)
        # A recomputation stops once it has all that was saved; what was written to is no longer the result.
        self.store.drop(lambda result: result.position > self.saved_at or not result.unchanged())
        self.by_storage.clear()

    def _saved(self, _: Tensor) -> None:
        self.saved_at = self.position

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = op(*args, **kwargs)
        if uncounted(op, args):
            return output
        self.position += 1
        key = _key(op, args)
        number = self.calls[key]
        self.calls[key] += 1
        ctx = SelectiveCheckpointContext(is_recompute=False)
        ctx.op_output = output
        wanted = checked_decision(self.decide, ctx, op, *args, **kwargs) in _KEEP
        if _gives_alias(op):  # a view counts its writes with what it shows
            return output
        if self.by_storage:  # some operators share memory unseen: aten::_unsafe_view, behind most products
            for tensor in _tensors(output):
                for result in self.by_storage.get(_storage(tensor), ()):
                    result.watch(_alias(tensor))
        if wanted:
            device = _random_device(op, output)
            state = None if device is None else _random_state(device)
            result = _Result(tree_map_only(Tensor, _alias, output), self.position, device, state)
            result.watch(result.output)
            self.store.results[key, number] = result
            for tensor in _tensors(output):
                self.by_storage.setdefault(_storage(tensor), []).append(result)
        return output


class _Reuse(TorchDispatchMode):
    """Around each recomputation."""

    supports_higher_order_operators = True

    def __init__(self, store: _Store):
        super().__init__()
        self.store = store
        self.calls: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self.calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if uncounted(op, args):
            return op(*args, **(kwargs or {}))
        key = _key(op, args)
        result = self.store.results.get((key, self.calls[key]))
        self.calls[key] += 1
        if result is None or not result.unchanged():
            return op(*args, **(kwargs or {}))
        if result.device is not None and result.random_state is not None:
            _set_random_state(result.device, result.random_state)
        return tree_map_only(Tensor, _alias, result.output)  # aliases again: autograd will set their graph


def _key(op: Any, args: tuple[Any, ...]) -> Any:
    """What a call is counted under: compiled regions are one operator, told apart by what they call."""
    if type(op) is not torch._ops.OpOverload and getattr(op, "__name__", "") == "inductor_compiled_code":
        return (op, id(args[0]))
    return op


_CAST = torch.ops.aten._to_copy.default
_thread = threading.local()


@contextmanager
def bookkeeping() -> Iterator[None]:
    """What runs inside is no part of the block, though inside its contexts: it is not counted and never kept."""
    before, _thread.bookkeeping = is_bookkeeping(), True
    try:
        yield
    finally:
        _thread.bookkeeping = before


def is_bookkeeping() -> bool:
    return getattr(_thread, "bookkeeping", False)


def uncounted(op: Any, args: tuple[Any, ...]) -> bool:
    """Operators whose number may differ between a forward and its recomputation: those of the checkpoint itself, and
    autocast's casts of weights, of which it keeps a copy until its context ends."""
    if is_bookkeeping():
        return True
    if op is _CAST:
        return bool(args) and isinstance(args[0], Tensor) and args[0].requires_grad and args[0].is_leaf
    return op in SAC_IGNORED_OPS


def writes(op: Any) -> bool:
    """Whether the operator writes into its arguments."""
    schema = getattr(op, "_schema", None)  # private, as everywhere in torch that asks this: OpOverload has no other
    return schema is not None and schema.is_mutable


@functools.cache
def _gives_alias(op: Any) -> bool:
    """Whether the operator returns (a view of) one of its arguments."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory without a graph, which shares the version counter."""
    # Private, as in torch's own selective checkpoint, whose helper has another name in each version: below this key
    # detach() would make a counter of its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [t for t in tree_leaves(output) if isinstance(t, Tensor)]


def _storage(tensor: Tensor) -> int:
    """What two tensors have in common that share memory; a kept one cannot be reused while it is kept."""
    try:
        return tensor.untyped_storage()._cdata  # private: data_ptr() is the same for all fake and empty tensors
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
        return id(tensor)


def _random_device(op: Any, output: Any) -> torch.device | None:
    """The device whose random numbers the operator may have drawn."""
    return next((t.device for t in _tensors(output)), None) if _draws(op) else None


@functools.cache
def _draws(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _random_state(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    return module.get_rng_state(device) if hasattr(module, "get_rng_state") else None


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
