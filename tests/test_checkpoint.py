"""`hs.checkpoint` changes no bit: outputs, gradients and random numbers, whatever is kept.

Guards: a mask drawn anew, a cast of autocast that is counted in one of two passes, a kept result that was written over,
a block that recomputes without need, a copy of a model that recomputes the original's blocks.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from checkpointed import POLICIES, WIDTH, Block, Stack, assert_same_run, inputs, keep_all, run, stack
from torch import Tensor, nn

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Any:
    return POLICIES[request.param]()


def forwards(model: nn.Module) -> list[int]:
    return [block.forwards for block in model.modules() if isinstance(block, Block)]


@pytest.mark.parametrize("needed", [True, False], ids=["input with gradient", "without"])
def test_every_bit_is_as_without(policy: Any, needed: bool) -> None:
    model, x = stack(), inputs(needed)
    plain = run(model, x)
    hs.checkpoint(model, policy)
    for _ in range(2):
        assert_same_run(run(model, x), plain)
    assert forwards(model) == [5, 5], "one forward without, two with a recomputation each"


def test_autocast_as_in_the_forward(policy: Any) -> None:
    model, x = stack(), inputs()
    model.blocks[1].attention.qkv.weight = model.blocks[0].attention.qkv.weight  # cast once in the forward, for both

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    plain = run(model, x, under_autocast)
    hs.checkpoint(model, policy)
    assert_same_run(run(model, x, under_autocast), plain)


def test_tied_and_frozen_weights_and_a_block_used_twice(policy: Any) -> None:
    model, x = stack(), inputs()
    model.blocks[0].attention.requires_grad_(False)
    model.blocks[1].mlp[0].bias.requires_grad_(False)
    model.blocks[1].attention.qkv.weight = model.head.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4)
    model.head.bias = None
    model.blocks.append(model.blocks[0])
    plain = run(model, x)
    assert len(hs.checkpoint(model, policy).blocks) == 2
    assert_same_run(run(model, x), plain)


def test_nothing_is_recomputed_without_gradients(policy: Any) -> None:
    model, x = stack(), inputs()
    hs.checkpoint(model, policy)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert forwards(model) == [2, 2]
    run(model.eval(), x)
    assert forwards(model) == [4, 4], "with gradients, in eval() too"


class Halved(nn.Module):
    """Writes in place and uses what it wrote to, not what the operator returned."""

    def forward(self, x: Tensor) -> Tensor:
        x[..., ::2].mul_(0.5)
        return x


@pytest.mark.parametrize("bias", [True, False], ids=["addmm", "mm and a view of it that counts writes on its own"])
@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Linear])
def test_what_is_kept_may_be_written_over(policy: Any, layer: Any, bias: bool) -> None:
    """In the block, as LeakyReLU(inplace=True) in it does (what ReLU does twice is done once), and behind it."""

    def product() -> nn.Module:
        return nn.Conv1d(5, 5, 3, padding=1, bias=bias) if layer is nn.Conv1d else nn.Linear(WIDTH, WIDTH, bias=bias)

    torch.manual_seed(0)
    model = nn.ModuleList()
    for _ in range(2):
        parts = [product(), Halved(), nn.LeakyReLU(0.5, inplace=True), nn.Softplus(), product(), Halved(), nn.Tanh()]
        model.append(nn.Sequential(*parts, product()))

    def forward(x: Tensor) -> Tensor:
        for block in model:
            x = block(x)
            x += 1
            x *= x.detach().sigmoid()
        return x

    plain = run(model, inputs(), forward)
    hs.checkpoint(model, policy)
    assert_same_run(run(model, inputs(), forward), plain)


def test_an_input_that_was_written_over_is_noticed() -> None:
    model, x = stack(), inputs(False)
    hs.checkpoint(model)
    out = model(x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_on_blocks_run_once_a_forward() -> None:
    model, x = stack(), inputs()
    seen: list[str] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    hs.checkpoint(model)
    model.blocks[0].register_forward_hook(lambda *_: seen.append("after"))
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    run(model, x)
    assert seen == ["before", "after", "backward"]


def test_the_model_looks_as_before() -> None:
    model = stack()
    before = (list(model.state_dict()), [id(p) for p in model.parameters()], [type(m) for m in model.modules()])
    handle = hs.checkpoint(model, "selective")
    assert before == (
        list(model.state_dict()), [id(p) for p in model.parameters()], [type(m) for m in model.modules()]
    )  # fmt: skip
    assert handle.blocks == ("blocks.0", "blocks.1")
    assert "blocks.0, blocks.1" in repr(handle)
    assert handle.plan is None
    handle.remove()
    assert all(not {"forward", "_halfstep_recomputed"} & {*m.__dict__} for m in model.modules())


@pytest.mark.parametrize("how", ["copy", "pickle"])
@pytest.mark.parametrize("policy", ["layer", "selective", keep_all])
def test_a_copy_recomputes_its_own_blocks(how: str, policy: Any) -> None:
    model, x = stack(), inputs()
    plain = run(model, x)
    hs.checkpoint(model, policy)
    run(model, x)
    if how == "copy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    before = forwards(model)
    assert_same_run(run(twin, x), plain)
    assert forwards(model) == before
    assert [a - b for a, b in zip(forwards(twin), before, strict=True)] == [2, 2]
    hs.checkpoint(twin, None)
    hs.checkpoint(model, None)
    assert "forward" not in twin.blocks[0].__dict__


def test_a_model_is_freed_with_its_last_reference() -> None:
    gc.disable()
    try:
        model = stack()
        hs.checkpoint(model, "selective")
        run(model, inputs())
        gone = weakref.ref(model.blocks[0])
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_second_call_replaces_the_first() -> None:
    model, x = stack(), inputs()
    first = hs.checkpoint(model, blocks=nn.Linear)
    second = hs.checkpoint(model, "selective")
    first.remove()  # undone already
    run(model, x)
    assert forwards(model) == [2, 2]
    assert "forward" not in model.head.__dict__
    second.remove()
    run(model, x)
    assert forwards(model) == [3, 3]


def test_a_checkpoint_within_a_block_is_left_to_the_outer_one() -> None:
    model, x = stack(), inputs()
    plain = run(model, x)
    calls: list[int] = []
    inner = model.blocks[1].mlp[0]
    inner.forward = lambda x: calls.append(1) or type(inner).forward(inner, x)
    hs.checkpoint(model)
    hs.checkpoint(model.blocks[1].mlp, blocks=nn.Linear)
    assert_same_run(run(model, x), plain)
    assert len(calls) == 2
    hs.checkpoint(model, None)
    assert [name for name, m in model.named_modules() if "forward" in m.__dict__] == ["blocks.1.mlp.0"]


def test_a_forward_that_somebody_replaced_stays() -> None:
    """As accelerate and others do it, before or after."""
    model, x = stack(), inputs()
    plain, calls = run(model, x), []
    block = model.blocks[0]
    for _ in range(2):
        inner = block.forward

        def forward(x: Tensor, inner: Any = inner) -> Tensor:
            calls.append(1)
            return inner(x)

        block.forward = forward
        handle = hs.checkpoint(model)
    outer = block.forward
    block.forward = lambda x: outer(x)  # over ours: it cannot be taken out, and only hands on
    del calls[:]
    assert_same_run(run(model, x), plain)
    assert len(calls) == 3, "the first stands below ours and is recomputed, the second stands above"
    handle.remove()
    assert_same_run(run(model, x), plain)
    assert len(calls) == 5
    hs.checkpoint(model, "layer")
    assert_same_run(run(model, x), plain)
    assert len(calls) == 8, "in force again, once"


def test_one_block() -> None:
    model: Stack = stack(layers=1)
    plain = run(model, inputs())
    assert hs.checkpoint(model).blocks == ("blocks.0",)
    assert_same_run(run(model, inputs()), plain)


class Drawn(nn.Module):
    """Keeps the output of the first layer alive behind the last saved tensor, where it is written over."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, (y + 0.0).sin()


def test_a_kept_result_that_the_caller_writes_over(policy: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Drawn(), Drawn()])

    def forward(x: Tensor) -> Tensor:
        for block in model:
            y, z = block(x)
            y += 1
            x = y + z
        return x

    plain = run(model, inputs(), forward)
    hs.checkpoint(model, policy)
    assert_same_run(run(model, inputs(), forward), plain)
