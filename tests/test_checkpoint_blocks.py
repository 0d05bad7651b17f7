"""Which modules `hs.checkpoint` takes for the blocks of a model, and what it says where it cannot.

Guards: experts of a mixture taken for layers, single linear layers wrapped one by one, a container that is never called
(and so would recompute nothing), a shared module wrapped twice.
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from checkpointed import Block, Stack, inputs, stack
from torch import nn

import halfstep as hs


def found(model: nn.Module, **options: Any) -> tuple[str, ...]:
    handle = hs.checkpoint(model, **options)
    handle.remove()
    return handle.blocks


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(3))


class Other(Expert):
    pass


def group(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def test_stacks_of_every_kind() -> None:
    assert found(stack(3)) == ("blocks.0", "blocks.1", "blocks.2")
    layers = OrderedDict((f"layer{i}", Expert()) for i in range(2))
    assert found(nn.Sequential(layers)) == ("layer0", "layer1")
    assert found(group(layers=nn.ModuleDict(layers))) == ("layers.layer0", "layers.layer1")
    assert found(nn.Sequential(mlp(), mlp())) == ("0", "1")
    transformer = nn.Transformer(8, 2, 2, 3, 8, batch_first=True)
    assert found(transformer) == (
        "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1", "decoder.layers.2"
    )  # fmt: skip


def test_stages_of_several_depths_and_layers_of_two_kinds() -> None:
    stages = group(first=nn.Sequential(Expert(), Expert()), second=nn.Sequential(Other(), Other()))
    assert found(stages) == ("first.0", "first.1", "second.0", "second.1")
    hybrid = group(layers=nn.ModuleList([Expert(), Other(), Expert(), Other(), nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert found(hybrid) == ("layers.0", "layers.1", "layers.2", "layers.3")
    heads = group(
        embeddings=nn.ModuleDict({"a": nn.Embedding(2, 2), "b": nn.Embedding(2, 2)}), h=nn.ModuleList([Other()])
    )
    assert found(heads) == ("h.0",)


def test_a_shared_block_is_one() -> None:
    block = Expert()
    assert found(group(layers=nn.ModuleList([block, Expert(), block]))) == ("layers.0", "layers.1")
    assert found(nn.ModuleList([block, block, block])) == ("0",)


def test_a_choice() -> None:
    model = stack(2)
    assert found(model, blocks=nn.Linear) == (
        *(f"blocks.{i}.{name}" for i in range(2) for name in ("attention.qkv", "attention.out", "mlp.0", "mlp.2")),
        "head",
    )
    assert found(model, blocks=(Block, nn.Linear)) == ("blocks.0", "blocks.1", "head"), "the outermost ones"
    assert found(model, blocks=lambda name, module: name.endswith("mlp")) == ("blocks.0.mlp", "blocks.1.mlp")
    assert found(model, blocks=[model.blocks[1], model.blocks[0].mlp]) == ("blocks.0.mlp", "blocks.1")
    assert found(model, blocks=model.blocks) == ("blocks.0", "blocks.1"), "a ModuleList is a list of modules"
    assert found(model, blocks=[model, model.head]) == ("",), "the model itself, as one block"
    assert found(model, blocks=Stack) == ("",)


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        (
            nn.GRU,
            ValueError,
            "blocks= chose none of the 27 modules of Stack; it takes a class, a tuple of classes, a list",
        ),
        ([], ValueError, "chose none of the"),
        (
            "blocks",
            TypeError,
            "blocks= must be a class, a tuple of classes, a list of modules, a function of (name, mod",
        ),
        (nn.Linear(1, 1), TypeError, "or None; got Linear"),
        (int, TypeError, "classes in blocks= must be classes of modules; got <class 'int'>"),
        ((Block, "Block"), TypeError, "classes in blocks= must be classes of modules; got (<class"),
        (
            [nn.Linear(1, 1)],
            ValueError,
            "blocks[0] must be a module of the model; got a Linear that is not in Stack: take",
        ),
        (
            nn.ModuleList,
            ValueError,
            "blocks must be modules that are called; 'blocks' is a ModuleList, whose children are",
        ),
    ],
    ids=str,
)
def test_a_choice_that_cannot_be(blocks: Any, error: type[Exception], message: str) -> None:
    model = stack(2)
    with pytest.raises(error, match=re.escape(message)):
        hs.checkpoint(model, blocks=blocks)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_no_blocks() -> None:
    message = re.escape(
        "checkpoint found no blocks in Sequential: it looks for transformers' layers, and for a ModuleList, ModuleDict "
        "or Sequential that repeats a class with parameters (single layers of torch.nn do not count); pass blocks= a "
        "class, a list of modules, or a function of (name, module)"
    )
    with pytest.raises(ValueError, match=message):
        hs.checkpoint(mlp())


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (torch.zeros(3), TypeError, "checkpoint needs a torch.nn.Module; got Tensor: give it the whole model"),
        (Stack, TypeError, "checkpoint needs a torch.nn.Module; got type"),
        (nn.DataParallel(stack()), TypeError, "does not work under nn.DataParallel, whose copies of a block would run"),
    ],
    ids=["tensor", "class", "DataParallel"],
)
def test_what_is_no_model(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        hs.checkpoint(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
def test_a_scripted_block() -> None:
    scripted = nn.Sequential(torch.jit.script(mlp()), mlp())
    with pytest.raises(TypeError, match="a block must be a Python module; '0' is scripted: checkpoint it"):
        hs.checkpoint(scripted, blocks=torch.jit.ScriptModule)


@pytest.mark.parametrize("policy", ["layers", 3, nn.Linear, nn.Linear(1, 1), torch.zeros(1), hs.ByteBudget], ids=str)
def test_what_is_no_policy(policy: Any) -> None:
    message = (
        'policy must be "layer", "selective", a ByteBudget, a function (ctx, op, *args, **kwargs) that returns a '
        "torch.utils.checkpoint.CheckpointPolicy, or None to undo; got "
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        hs.checkpoint(stack(), policy)


OFFLOADS = [policy.name for policy in torch.utils.checkpoint.CheckpointPolicy if "OFFLOAD" in policy.name]


@pytest.mark.parametrize("said", OFFLOADS)  # none in torch 2.10
def test_an_offload_that_torch_would_recompute(said: str) -> None:
    model = stack()
    hs.checkpoint(model, lambda ctx, op, *args, **kwargs: torch.utils.checkpoint.CheckpointPolicy[said])
    message = (
        f"a policy function must say save or recompute; got {said} for aten.native_layer_norm.default, which torch "
        "recomputes in silence: use halfstep.offload_activations() around the forward"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        model(inputs())


def test_an_answer_that_is_none() -> None:
    model = stack()
    hs.checkpoint(model, lambda ctx, op, *args, **kwargs: None)
    message = (
        "a policy function must return a torch.utils.checkpoint.CheckpointPolicy (or True, False) for every operator"
    )
    with pytest.raises(TypeError, match=re.escape(f"{message}; got None for aten.")):
        model(inputs())


def test_a_failed_forward_leaves_the_block_as_it_was() -> None:
    model = stack()
    hs.checkpoint(model, "selective")
    with pytest.raises(RuntimeError, match="normalized_shape"):
        model(torch.ones(2, 5, 3))
    assert not hs.activations.recompute.inside_block()
    model(inputs()).sum().backward()


def test_the_signature_of_a_block_can_be_read() -> None:
    model = stack()
    hs.checkpoint(model)
    assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x"]
