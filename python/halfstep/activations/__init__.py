"""Memory of activations: what is kept between forward and backward, what is computed again, what moves to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .blocks import Blocks, find_blocks
from .budget import ByteBudget
from .measure import measure_activations
from .offload import offload_activations
from .policies import resolve
from .recompute import Recomputation, install, remove_all
from .transformers_layers import require_no_other_checkpointing

__all__ = ["ByteBudget", "Recomputation", "checkpoint", "measure_activations", "offload_activations"]


def checkpoint(model: nn.Module, policy: Any = "layer", *, blocks: Blocks = None) -> Recomputation:
    """Makes the blocks of a model compute their activations again in backward, instead of keeping them. In place.

    Results, gradients and random numbers are those without it, bit for bit (of deterministic operators), with dropout,
    autocast, tied and frozen weights. Parameters, state_dict, hooks on the blocks, copies and pickles of the
    model stay as they are. Forwards without gradients recompute nothing and are not changed.

    Args:
        model: the whole model; a call replaces what an earlier one did to it. Before or after DistributedDataParallel,
            fully_shard and torch.compile.
        policy: what a block keeps between forward and backward.
            "layer": its inputs. One more forward of the blocks in backward, about a third more computation; what lies
            behind the last result that backward needs is left out.
            "selective": its inputs, and results of matrix products, convolutions and fused attention. Norms, activation
            functions and other elementwise operators are computed again. A batched product that is larger than both
            its operands is, too: the scores of attention written out, quadratic in the length.
            ByteBudget(n): what fits in n bytes at the least cost.
            A function (ctx, op, *args, **kwargs) that returns a torch.utils.checkpoint.CheckpointPolicy, as torch's
            selective checkpointing takes it. It is asked about every operator that runs in a block.
            None: the model is as before.
        blocks: which modules are the blocks. None: the layers of transformers' models; otherwise the children of a
            ModuleList, ModuleDict or Sequential that repeats a class with parameters. Or a class, a tuple of classes,
            a list of modules or a ModuleList, a function (name, module) -> bool. Of nested ones the outermost is taken.

    Returns:
        A handle: `.blocks` (names), `.plan` (of a ByteBudget), `.remove()`.

    Kept until a block's backward is over: with "layer" the bytes of all tensors among its arguments that nobody else
    keeps; with "selective" those of the results besides, but for results that are written to in place, which are
    computed again. offload_activations moves the former to the host, but does not see the latter. Buffers that a
    block's forward changes (batch statistics, vectors of a spectral norm) are kept as they were before it, so that they
    change once and each recomputation sees what the forward saw; to learn which, its first forward copies all.

    Each operator costs some microseconds more of host time in a recomputation, with "selective" some 15 in the forward
    and as many in the recomputation: where operators are tiny, "layer" is the faster of both.

    Hooks on modules inside a block run again in each recomputation. nn.DataParallel, which copies modules in its own
    way, is refused. While gradients are recorded, a cache of keys and values is left out with a warning. Under
    torch.compile the compiler recomputes; with a backend that does not compile backward ("eager") torch draws other
    random numbers.

    Raises:
        TypeError: model, policy or blocks is of another type.
        ValueError: no blocks were found; transformers' own checkpointing is on as well; a policy function asks for an
            offload to the host, which torch would recompute in silence.
        RuntimeError, in backward: a parameter was written to since the forward.

    Source:
        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; "selective" after
        Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, 5.

    Example:
        >>> layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
        >>> model = torch.nn.Sequential(*layers)
        >>> handle = hs.checkpoint(model, "selective")
        >>> handle.blocks
        ('0', '1')
        >>> model(torch.randn(4, 8, 16)).sum().backward()
        >>> handle.remove()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"checkpoint needs a torch.nn.Module; got {type(model).__name__}: give it the whole model")
    if policy is None:
        return remove_all(model)
    chosen = resolve(policy)
    require_no_other_checkpointing(model)
    found = find_blocks(model, blocks)
    _require_usable(model, found)
    return install(model, chosen, found)


def _require_usable(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel):
            raise TypeError(
                "checkpoint does not work under nn.DataParallel, whose copies of a block would run the original's "
                f"forward; got one at {name or 'the top'!r}: use DistributedDataParallel"
            )
    for name, module in blocks.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"a block must be a Python module; {name!r} is scripted: checkpoint it before torch.jit")
