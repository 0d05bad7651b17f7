"""Which modules of a model are its blocks: what a Transformer, or a residual network, repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import transformer as torch_transformer

from .transformers_layers import is_known_layer

Chosen = type[nn.Module] | tuple[type[nn.Module], ...] | list[nn.Module] | nn.ModuleList
Blocks = Callable[[str, nn.Module], bool] | Chosen | None
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(model: nn.Module, blocks: Blocks = None) -> dict[str, nn.Module]:
    """Blocks by their names in the model: those that `blocks` chooses, outermost ones only, each module once."""
    found = _repeated(model) if blocks is None else _chosen(model, blocks)
    for name, module in found.items():
        if isinstance(module, _NEVER_CALLED):
            raise ValueError(
                f"blocks must be modules that are called; {name!r} is a {type(module).__name__}, whose children are "
                "called one by one: choose these"
            )
    if found:
        return found
    if blocks is None:
        raise ValueError(
            f"checkpoint found no blocks in {type(model).__name__}: it looks for transformers' layers, and for a "
            "ModuleList, ModuleDict or Sequential that repeats a class with parameters (single layers of torch.nn "
            "do not count); pass blocks= a class, a list of modules, or a function of (name, module)"
        )
    count = sum(1 for _ in model.modules())
    raise ValueError(
        f"blocks= chose none of the {count} modules of {type(model).__name__}; it takes a class, a tuple of classes, "
        f"a list of modules of the model, or a function of (name, module); got {blocks!r}"
    )


def _chosen(model: nn.Module, blocks: Any) -> dict[str, nn.Module]:
    if isinstance(blocks, (list, nn.ModuleList)):
        return _outermost(model, _one_of(model, list(blocks)))
    if isinstance(blocks, (type, tuple)):
        classes: tuple[Any, ...] = blocks if isinstance(blocks, tuple) else (blocks,)
        if not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            raise TypeError(f"classes in blocks= must be classes of modules; got {blocks!r}")
        return _outermost(model, lambda _, module: isinstance(module, classes))
    if callable(blocks) and not isinstance(blocks, nn.Module):
        return _outermost(model, lambda name, module: bool(blocks(name, module)))
    raise TypeError(
        "blocks= must be a class, a tuple of classes, a list of modules, a function of (name, module), or None; "
        f"got {type(blocks).__name__}"
    )


def _one_of(model: nn.Module, blocks: list[Any]) -> Callable[[str, nn.Module], bool]:
    wanted = {id(module) for module in blocks}
    there = {id(module) for module in model.modules()}
    for number, module in enumerate(blocks):
        if id(module) not in there:
            raise ValueError(
                f"blocks[{number}] must be a module of the model; got a {type(module).__name__} that is not in "
                f"{type(model).__name__}: take it from the model after it was wrapped or converted"
            )
    return lambda name, module: id(module) in wanted


def _outermost(model: nn.Module, wanted: Callable[[str, nn.Module], bool]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # each module once, parents first
        inner = any(name == "" or outer == "" or name.startswith(outer + ".") for outer in found)
        if not inner and wanted(name, module):
            found[name] = module
    return found


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in _walk("", model):
        if all(module is not other for other in found.values()):
            found[name] = module
    return found


def _walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks at and below a module. Inside a block nothing is looked at: a list there holds experts or branches."""
    if is_known_layer(module):
        yield name, module
        return
    repeated = _repeated_classes(module) if isinstance(module, _LISTS) else set()
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if type(child) in repeated and not any(map(is_known_layer, child.modules())):
            yield path, child
        else:
            yield from _walk(path, child)


def _repeated_classes(container: nn.Module) -> set[type[nn.Module]]:
    """Classes of children that make the container a stack of blocks; a ModuleList of one is one of depth 1."""
    # Not children(), which leaves out repetitions of one module.
    children: Any = container.values() if isinstance(container, nn.ModuleDict) else container
    count = Counter(type(child) for child in children if _may_be_block(child))
    alone = isinstance(container, nn.ModuleList) and len(container) == 1
    return {kind for kind, n in count.items() if n > 1 or alone}


def _may_be_block(module: nn.Module) -> bool:
    own = type(module).__module__
    if own.startswith("torch.nn.") and own != torch_transformer.__name__ and not isinstance(module, nn.Sequential):
        return False  # a single layer, from which nothing can be saved, or a container
    return not isinstance(module, _NEVER_CALLED) and any(True for _ in module.parameters())
