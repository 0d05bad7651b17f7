"""The forward of a block whose activations are computed again in backward, and the handle that undoes it."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from .block_state import BlockState, Changing
from .policies import ContextFn, Everything, Policy
from .transformers_layers import CACHE_LEFT_OUT, require_no_other_checkpointing, without_cache

_MARK = "_halfstep_recomputed"  # attribute of a block: found also when others have replaced its forward since
_running = threading.local()


def inside_block() -> bool:
    """Whether this thread is in the forward of a checkpointed block, or in its recomputation."""
    return getattr(_running, "depth", 0) > 0


@contextmanager
def _marked() -> Iterator[None]:
    _running.depth = getattr(_running, "depth", 0) + 1
    try:
        yield
    finally:
        _running.depth -= 1


class Shared:
    """What the blocks of one model have in common; copied and pickled with the model."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.warned = False


class Recomputed:
    """Stands as `forward` on a block. Hooks, which nn.Module calls around forward, stay outside and run once.

    Holds the block weakly: a model is freed when its last reference goes, as without. Copies and pickles refer to the
    copied block.
    """

    def __init__(self, module: nn.Module, name: str, shared: Shared):
        self.name, self.shared = name, shared
        self.active = True
        self.previous: Callable[..., Any] | None = module.__dict__.get("forward")
        self._module = weakref.ref(module)
        self._changing = Changing()

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_module": self._module()}
        del state["_changing"]  # goes by the identity of what the block holds
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=weakref.ref(state["_module"]), _changing=Changing())

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def _block(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the block called this"
        return module

    def _forward(self) -> Callable[..., Any]:
        if self.previous is not None:
            return self.previous
        module = self._block()
        return functools.partial(type(module).forward, module)  # looked up at each call: fully_shard changes the class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._forward()
        if not self.active or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._traced(forward, *self._checked(args, kwargs))
        if inside_block():  # of a block around this one, which recomputes this one too
            return forward(*args, **kwargs)
        args, kwargs = self._checked(args, kwargs)
        context_fn = self.shared.policy.contexts(self.name, self._block(), args, kwargs)
        if isinstance(context_fn, Everything):
            return forward(*args, **kwargs)
        call = _Call(forward, self._block(), self._changing)
        return _checkpointed(call, args, kwargs, context_fn or noop_context_fn)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module = self._block()
        if getattr(module, "gradient_checkpointing", False) is True:
            require_no_other_checkpointing(module)
        cacheless = without_cache(module, args, kwargs)
        if cacheless is None:
            return args, kwargs
        if not self.shared.warned and not torch.compiler.is_compiling():  # a warning would break the graph
            self.shared.warned = True
            warnings.warn(CACHE_LEFT_OUT, stacklevel=3)
        return cacheless

    def _traced(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under torch.compile, which makes one graph of forward and recomputation: what changes buffers is not
        repeated there, and random numbers are kept track of."""
        broken: list[_Call] = []

        def run(*args: Any) -> Any:  # kwargs of the block may have the names of torch's own
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            if not broken:  # the graph breaks inside of the block, which is left to Python
                broken.append(_Call(forward, self._block(), self._changing))
            return broken[0](*args, **kwargs)

        context_fn = self.shared.policy.traced_context_fn()
        if context_fn is None:
            return torch_checkpoint(run, *args, use_reentrant=False)
        return torch_checkpoint(run, *args, use_reentrant=False, context_fn=context_fn)


def _checkpointed(call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], context_fn: ContextFn) -> Any:
    """Hands every tensor among the arguments, however nested, to torch's checkpoint as an argument of its own: it is
    saved as autograd saves, so that a later write is noticed and hooks around the block see it.

    The forward gets the caller's own lists and dicts, into which it may write; recomputations get new ones each, with
    what these held before the forward."""
    leaves, spec = tree_flatten((args, kwargs))
    # Tensors of inference_mode cannot be saved.
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not leaf.is_inference()]
    tensors = [leaves[i] for i in where]
    for i in where:
        leaves[i] = None
    callers = [(args, kwargs)]  # until the forward, so that it keeps no tensor alive
    del args, kwargs

    def run(*tensors: Tensor) -> Any:
        if callers:
            args, kwargs = callers.pop()
            return call(*args, **kwargs)
        given = list(leaves)
        for i, tensor in zip(where, tensors, strict=True):
            given[i] = tensor
        args, kwargs = tree_unflatten(given, spec)
        return call(*args, **kwargs)

    return torch_checkpoint(run, *tensors, use_reentrant=False, context_fn=context_fn)


class _Call:
    """One forward of a block, which is the first call, and its recomputations."""

    def __init__(self, forward: Callable[..., Any], module: nn.Module, changing: Changing):
        self._forward, self._module, self._changing = forward, module, changing
        self._state: BlockState | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _marked():
            if self._state is None:
                state = BlockState(self._module, self._changing)
                output = self._forward(*args, **kwargs)
                state.after_forward()
                self._state = state
                return output
            with self._state.as_in_forward():
                return self._forward(*args, **kwargs)


class _ModelWatch:
    """Hooks around the forward of the whole model, for policies that want them."""

    def __init__(self, model: nn.Module, policy: Policy):
        self.policy = policy
        self.handles = [
            model.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self.after, always_call=True),
        ]

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.policy.begin(model, args, kwargs)

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        self.policy.end(model, completed=output is not None)  # None comes after an exception

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Recomputation:
    """What `checkpoint` did to a model: `blocks` are the names of its blocks, `remove()` undoes it.

    Holds the model weakly; whoever drops it changes nothing.
    """

    def __init__(self, policy: Policy | None, model: nn.Module, blocks: dict[str, nn.Module]):
        self._model = weakref.ref(model)
        self._policy = policy
        self.blocks = tuple(blocks)

    @property
    def plan(self) -> Any:
        """What a ByteBudget decided, after the first forward with gradients; None for other policies."""
        return getattr(self._policy, "plan", None)

    def remove(self) -> None:
        """Gives the model its own forwards back. Does nothing if that, or another `checkpoint`, has happened since."""
        model = self._model()
        if model is not None:
            _remove(model, self._policy)

    def __repr__(self) -> str:
        return f"Recomputation of {len(self.blocks)} blocks: {', '.join(self.blocks)}"


def install(model: nn.Module, policy: Policy, blocks: dict[str, nn.Module]) -> Recomputation:
    """Blocks run as the policy says from now on. What an earlier call did to the model is undone first."""
    _remove(model)
    policy = policy.bind(list(blocks))
    shared = Shared(policy)
    for name, module in blocks.items():
        there = module.__dict__.get(_MARK)
        if there is not None:  # switched off, but below another's forward
            there.name, there.shared, there.active = name, shared, True
            continue
        recomputed = Recomputed(module, name, shared)
        module.__dict__.update({"forward": recomputed, _MARK: recomputed})
    if policy.watches_model:
        _ModelWatch(model, policy)
    return Recomputation(policy, model, blocks)


def remove_all(model: nn.Module) -> Recomputation:
    """Undoes whatever was done to the model."""
    _remove(model)
    return Recomputation(None, model, {})


def _remove(model: nn.Module, policy: Policy | None = None) -> None:
    """Undoes what was done with this policy, None: with any."""
    for module in model.modules():
        there = module.__dict__.get(_MARK)
        if there is not None and (policy is None or there.shared.policy is policy):
            _restore(module, there)
        for hook in list(module._forward_pre_hooks.values()):
            watch = getattr(hook, "__self__", None)
            if isinstance(watch, _ModelWatch) and (policy is None or watch.policy is policy):
                watch.remove()


def _restore(module: nn.Module, recomputed: Recomputed) -> None:
    if module.__dict__.get("forward") is not recomputed:
        recomputed.active = False  # somebody's forward calls this one: it only hands on from now on
        return
    del module.__dict__[_MARK]
    if recomputed.previous is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = recomputed.previous
