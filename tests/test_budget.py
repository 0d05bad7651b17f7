"""`hs.ByteBudget`: bytes and FLOPs are those that the plan says, to the byte and to the FLOP, and gradients are the
plain model's, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from budget_models import (
    LOTS,
    MODELS,
    LlamaBlock,
    budgeted,
    budgets_between,
    bytes_of,
    flops_of,
    gradients,
    llama,
    made,
    same,
    tokens_of,
)
from torch import nn

import halfstep as hs

each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


@each_model
def test_bytes_flops_and_gradients_are_what_the_plan_says(make):
    plain = made(make)
    wanted, flops = gradients(plain), flops_of(plain)
    plain_bytes, costs, outside = bytes_of(plain), [], set()
    for n in budgets_between(make, 4):
        model, handle = budgeted(make, n)
        plan = handle.plan
        assert plan.bytes <= n
        outside.add(bytes_of(model) - plan.bytes)
        assert flops_of(model) - flops == plan.extra_flops
        assert same(gradients(model), wanted), f"with {n} bytes"
        costs.append(plan.extra_cost)
    assert len(outside) == 1, "what is kept outside of the blocks is the same under every plan"
    assert outside == {plain_bytes - plan.most}
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == plan.extra_flops == 0


@each_model
def test_flops_fall_as_the_budget_grows_if_bytes_cost_nothing(make):
    flops = [budgeted(make, n, flops_per_byte=0)[1].plan.extra_flops for n in budgets_between(make, 6)]
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > flops[-1] == 0


def test_the_least_is_policy_layer_and_the_most_is_no_checkpoint():
    plan = budgeted(llama, LOTS)[1].plan
    layer = made(llama)
    hs.checkpoint(layer, "layer")
    assert plan.most - plan.least == bytes_of(made(llama)) - bytes_of(layer)
    assert plan.bytes == plan.most
    assert [block.checkpointed for block in plan.blocks] == [False] * 3
    assert plan.extra_share == plan.transient_bytes == 0
    # Blocks in float32 keep their inputs in any case: the embeddings, and two results
    assert plan.least == 3 * 4 * 2 * 12 * 16
    least = budgeted(llama, plan.least)[1].plan
    assert least.bytes == least.least == plan.least
    assert all(block.checkpointed and not block.kept for block in least.blocks)
    assert least.transient_bytes > 0


@pytest.mark.parametrize(("n", "held", "transient"), [(639, 128, 1024), (1151, 640, 512), (1152, 1152, 0)])
def test_what_a_block_s_recomputation_makes_is_what_it_saves_and_does_not_hold(n, held, transient):
    """Saved: the input, 4 x 8, and what goes into GELU and what comes out of it, 4 x 32 each."""
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    model = nn.Sequential(nn.Linear(8, 8), block)
    handle = hs.checkpoint(model, hs.ByteBudget(n), blocks=[block])
    model(torch.ones(4, 8)).sum().backward()
    assert (handle.plan.bytes, handle.plan.transient_bytes) == (held, transient)


def test_of_plans_that_fit_the_one_for_the_smallest_shapes_is_used():
    """It keeps the most: here all, 20 rows of 8 + 32 + 32 numbers."""
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    model = nn.Sequential(nn.Linear(8, 8), block)
    handle = hs.checkpoint(model, hs.ByteBudget(6000), blocks=[block])
    for shape in ((2, 10), (6, 4), (2, 2)):
        model(torch.ones(*shape, 8)).sum().backward()
    assert handle.plan.bytes == handle.plan.most == 20 * (8 + 32 + 32) * 4


def test_less_than_the_least_is_refused_with_the_number():
    least = budgeted(llama, LOTS)[1].plan.least
    model = made(llama)
    handle = hs.checkpoint(model, hs.ByteBudget(least - 1))
    for _ in range(2):  # a forward that is tried again says it again
        with pytest.raises(ValueError, match=rf"too small: the blocks of this forward keep at least {least} bytes"):
            model(tokens_of())
    assert handle.plan is None
    handle.remove()
    model(tokens_of()).backward()
    shorter = made(llama)
    handle = hs.checkpoint(shorter, hs.ByteBudget(least - 1))
    shorter(tokens_of(11)).backward()
    assert handle.plan.least == least * 11 // 12


def test_the_plan_is_a_function_of_shapes():
    """Ranks of a job have different weights' gradients and data, and must recompute the same."""
    n = budgets_between(llama, 2)[1]
    torch.manual_seed(5)
    other = llama()
    handle = hs.checkpoint(other, hs.ByteBudget(n))
    other(tokens_of() * 0 + 3).backward()
    assert handle.plan == budgeted(llama, n)[1].plan


def test_the_model_s_own_inputs_do_not_count():
    blocks = nn.Sequential(*(LlamaBlock(16, 2, 1, 24) for _ in range(2)))
    handle = hs.checkpoint(blocks, hs.ByteBudget(LOTS))
    x = torch.randn(2, 12, 16, requires_grad=True)
    blocks(x).sum().backward()
    assert handle.plan.least == 4 * x.numel(), "the first block's result, which is the second's input"


# ---- what people see and give ----------------------------------------------------------------------------------------
def test_the_table():
    n = budgets_between(llama, 3)[1]
    _, handle = budgeted(llama, n)
    plan, lines = handle.plan, str(handle.plan).splitlines()
    assert lines[0].startswith(f"{plan.bytes / 1000:.1f} kB kept of a budget of {n / 1000:.1f} kB (least ")
    assert lines[1].startswith(f"{plan.extra_share:.1%} of the blocks' forward runs again; ")
    assert lines[2].split() == ["blocks", "each", "keeps", "bytes", "each", "GFLOP", "again"]
    assert lines[3].startswith("blocks.0")
    assert " of " in lines[3]
    assert all(line == line.rstrip() and len(line) <= 100 for line in lines)
    assert "blocks.0 to blocks.2  what autograd saves" in str(budgeted(llama, LOTS)[1].plan)
    assert "blocks.0 to blocks.2  inputs  " in str(budgeted(llama, plan.least)[1].plan)


def test_kept_and_recomputed_operators_are_named():
    n = budgets_between(llama, 2)[1]
    plan = budgeted(llama, n)[1].plan
    for block in plan.blocks:
        if block.checkpointed:
            assert len(block.kept) == len(block.kept_bytes) == len(block.keys)
            assert set(block.kept) | set(block.recomputed) >= {"mm", "rsqrt", "silu"}
    assert any(block.kept for block in plan.blocks)


def test_costs_of_bytes_move_the_choice():
    """If bytes cost nothing only products and attention are worth keeping."""
    n = budgets_between(llama, 4)[1]
    free = budgeted(llama, n, flops_per_byte=0)[1].plan
    dear = budgeted(llama, n, flops_per_byte=10_000)[1].plan
    names = set(itertools.chain(*(block.kept for block in free.blocks)))
    assert names <= {"mm", "_scaled_dot_product_flash_attention_for_cpu"}
    assert free.extra_flops < dear.extra_flops


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_a_wrong_price_of_bytes(wrong):
    with pytest.raises(ValueError, match=r"flops_per_byte must be a finite number, 0 or more; got "):
        hs.ByteBudget(1, flops_per_byte=wrong)


@pytest.mark.parametrize("wrong", [True, "3", None])
def test_a_price_of_another_type(wrong):
    with pytest.raises(TypeError, match=r"flops_per_byte must be a finite number, 0 or more; got "):
        hs.ByteBudget(1, flops_per_byte=wrong)


def test_a_wrong_number_of_bytes_is_named():
    with pytest.raises(ValueError, match=r"a ByteBudget's n must be a number of bytes, at least 1, such as"):
        hs.ByteBudget("1 gig")
