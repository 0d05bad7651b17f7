"""Which forwards a ByteBudget measures, and what else may happen in one: gradients stay those of the plain model."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget_models import (
    LOTS,
    Chain,
    DroppedLlama,
    LlamaBlock,
    budgeted,
    budgets_between,
    bytes_of,
    dropped,
    flops_of,
    gradients,
    llama,
    made,
    same,
    tokens_of,
)
from no_sync import forbid_waits
from torch import Tensor, nn

import halfstep as hs
from halfstep.activations import budget as budget_module


# ---- which forwards are measured -------------------------------------------------------------------------------------
@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """Names of the blocks whose forwards were recorded."""
    names: list[str] = []

    class Counted(budget_module.Recording):
        def __init__(self, name: str, *rest: Any) -> None:
            names.append(name)
            super().__init__(name, *rest)

    monkeypatch.setattr(budget_module, "Recording", Counted)
    return names


def test_inputs_that_are_no_larger_reuse_the_plan(measured):
    n = budgets_between(llama, 2)[1]
    measured.clear()  # of the forward that says what is least and most
    model, handle = budgeted(llama, n)
    assert measured == [f"blocks.{i}" for i in range(3)]
    plain = made(llama)
    outside = bytes_of(model) - handle.plan.bytes
    for length in (12, 5, 1, 11):
        tokens = tokens_of(length)
        assert same(gradients(model, tokens), gradients(plain, tokens))
        assert bytes_of(model, tokens) - outside <= n
    assert same(gradients(model, tokens_of(12, batch=1)), gradients(plain, tokens_of(12, batch=1)))
    assert len(measured) == 3
    model(tokens_of(13)).backward()
    assert len(measured) == 6, "a longer one is measured"
    assert handle.plan.budget == n
    model(tokens_of(13)).backward()
    model(tokens_of(12)).backward()
    assert len(measured) == 6


def test_a_shape_that_is_smaller_in_one_dimension_and_larger_in_another_is_measured(measured):
    model, _ = budgeted(llama, LOTS)
    model(tokens_of(24, batch=1)).backward()
    assert len(measured) == 6
    model(tokens_of(12)).backward()
    model(tokens_of(24, batch=1)).backward()
    assert len(measured) == 6, "both plans are remembered"


def test_training_mode_autocast_and_frozen_weights_are_measured(measured):
    model, _ = budgeted(llama, LOTS)
    model.eval()
    model(tokens_of()).backward()
    assert len(measured) == 6
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens_of()).backward()
    assert len(measured) == 9
    model.train().blocks[0].requires_grad_(False)
    model(tokens_of()).backward()
    assert len(measured) == 12
    model.train().blocks[0].requires_grad_(True)
    model(tokens_of()).backward()
    with torch.no_grad():
        model(tokens_of(40))
    assert len(measured) == 12


def test_only_so_many_plans_are_remembered(measured):
    model, _ = budgeted(llama, LOTS, length=1)
    for length in (2, 3, 4):
        model(tokens_of(length)).backward()
    policy = model.blocks[0].forward.shared.policy
    assert len(policy._plans) == 1, "a plan for larger inputs takes the place of those for smaller ones"
    for batch in range(3, 5 + budget_module.PLANS):
        model(tokens_of(20 - batch, batch)).backward()
    assert len(policy._plans) == budget_module.PLANS


def test_a_forward_that_fails_is_not_planned(measured):
    model = made(llama)
    handle = hs.checkpoint(model, hs.ByteBudget(LOTS))
    hook = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens_of())
    assert handle.plan is None
    hook.remove()
    model(tokens_of()).backward()
    assert [block.name for block in handle.plan.blocks] == ["blocks.0", "blocks.1", "blocks.2"]


def test_later_inputs_that_outgrow_the_plan_keep_their_inputs_and_are_measured_next(measured):
    """As the decoder's length of a translation, which does not show in the encoder's."""

    class Two(Chain):
        def forward(self, tokens: Tensor, longer: int) -> Tensor:
            return self.blocks[1](self.blocks[0](self.embedding(tokens)).repeat(1, longer, 1)).square().mean()

    torch.manual_seed(0)
    model = Two([LlamaBlock(16, 2, 1, 24) for _ in range(2)])
    plain = copy.deepcopy(model)
    handle = hs.checkpoint(model, hs.ByteBudget(LOTS))
    for longer, count in ((1, 2), (2, 2), (2, 4), (2, 4), (1, 4)):
        got = [torch.autograd.grad(m(tokens_of(), longer), list(m.blocks.parameters())) for m in (model, plain)]
        assert same(list(got[0]), list(got[1]))
        assert len(measured) == count
    assert handle.plan.blocks[1].bytes > handle.plan.blocks[0].bytes


# ---- what else may happen in a forward -------------------------------------------------------------------------------
def test_a_block_that_runs_twice_is_planned_twice():
    class Twice(Chain):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(x).square().mean()

    def make() -> nn.Module:
        return Twice([LlamaBlock(16, 2, 1, 24) for _ in range(2)])

    n = budgets_between(make, 2)[1]
    model, handle = budgeted(make, n)
    plain = made(make)
    assert [block.name for block in handle.plan.blocks] == ["blocks.0", "blocks.1"] * 2
    assert flops_of(model) - flops_of(plain) == handle.plan.extra_flops
    assert bytes_of(plain) - bytes_of(model) == handle.plan.most - handle.plan.bytes
    assert same(gradients(model), gradients(plain))


def test_blocks_that_are_left_out_at_random(measured):
    class Some(Chain):
        skipped: int | None = None

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for i, block in enumerate(self.blocks):
                x = x if i == self.skipped else block(x)
            return self.head(x).square().mean()

    def make() -> nn.Module:
        return Some([LlamaBlock(16, 2, 1, 24) for _ in range(3)])

    n = budgets_between(make, 2)[1]
    measured.clear()
    model, plain = made(make), made(make)
    hs.checkpoint(model, hs.ByteBudget(n))
    for skipped, count in ((2, 2), (1, 2), (None, 2), (None, 5), (1, 5), (None, 5), (0, 5)):
        model.skipped = plain.skipped = skipped
        assert same(gradients(model), gradients(plain))
        assert len(measured) == count, f"without {skipped}"


def test_operators_that_are_not_the_recorded_ones_are_recomputed():
    """Values decide what runs: more operators, fewer, other ones, some in place on what was kept."""

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, mood: int = 0) -> Tensor:
            y = self.a(x)
            if mood == 1:
                y = F.relu_(y)
            if mood == 2:
                y = self.b(y).exp()
            return self.b(y.tanh()) * y.sigmoid() if mood < 3 else y.tanh()

    class Moods(Chain):
        mood = 0

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, self.mood)
            return self.head(x).square().mean()

    def make() -> nn.Module:
        return Moods([Moody() for _ in range(2)])

    for n in budgets_between(make, 4):
        model, _ = budgeted(make, n)
        plain = made(make)
        for mood in (1, 2, 3, 0):
            model.mood = plain.mood = mood
            assert same(gradients(model), gradients(plain))


def test_several_forwards_before_backward_and_several_backwards():
    n = budgets_between(dropped, 2)[1]
    model, _ = budgeted(dropped, n)
    plain = made(dropped)
    got = []
    for m in (model, plain):
        m.zero_grad()
        torch.manual_seed(3)
        losses = [m(tokens_of()), m(tokens_of(7))]
        losses[1].backward(retain_graph=True)
        sum(losses).backward()
        got.append([p.grad for p in m.parameters()])
    assert same(*got)


@pytest.mark.parametrize("part", [0, 0.4, 1])
def test_autocast_with_its_copies_of_weights(part):
    """Without a checkpoint autograd keeps the 16-bit copies of weights; a recomputation makes them again, even if there
    was none to make in the forward, because autocast remembered it."""
    model, plain = made(llama), made(llama)

    def loss_of(m: nn.Module) -> tuple[Tensor, int]:
        with hs.measure_activations() as bytes_kept, torch.autocast("cpu", torch.bfloat16):
            loss = m(tokens_of())
        return loss, bytes_kept.bytes

    def plan_for(n: int) -> Any:
        handle = hs.checkpoint(model, hs.ByteBudget(n))
        loss_of(model)[0].backward()
        model.zero_grad()
        return handle.plan

    all_of_it = plan_for(LOTS)
    least, most = all_of_it.least, all_of_it.most
    plan = plan_for(least + int((most - least) * part))
    (loss, size), (plain_loss, plain_size) = loss_of(model), loss_of(plain)
    assert plain_size - size == most - plan.bytes
    loss.backward()
    plain_loss.backward()
    for m in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            losses = [m(tokens_of()), m(tokens_of())]
        sum(losses).backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("step", [0, 1, 2])
def test_what_blocks_save_moves_to_the_host_as_well(step):
    """offload_activations sees inputs of blocks, and all of a block without a checkpoint; results that a policy keeps
    stay where they are."""
    n = budgets_between(dropped, 2)[step]
    model, plain = made(dropped), made(dropped)
    hs.checkpoint(model, hs.ByteBudget(n))
    for _ in range(2):
        got = []
        for m in (model, plain):
            m.zero_grad()
            torch.manual_seed(2)
            with hs.offload_activations(min_bytes=1):
                loss = m(tokens_of())
            loss.backward()
            got.append([p.grad for p in m.parameters()])
        assert same(*got)


def test_nothing_waits_for_the_device():
    """Neither the forward that measures, nor the plan, nor a forward under it, nor its backward."""
    with torch.device("meta"):
        model = nn.Sequential(*(DroppedLlama(16, 2, 1, 24) for _ in range(2)))
        x = torch.empty(2, 12, 16, requires_grad=True)
    probe = hs.checkpoint(model, hs.ByteBudget(LOTS))
    model(x)
    handle = hs.checkpoint(model, hs.ByteBudget(probe.plan.most * 2 // 3))
    with forbid_waits("meta"):
        model(x).sum().backward()
        model(x).sum().backward()
    assert handle.plan.extra_flops > 0
    assert any(block.kept for block in handle.plan.blocks)


class Counting(nn.Module):
    """Changes buffers in its forward, has one that it does not change, and makes copies of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.batch = nn.BatchNorm1d(12)
        self.register_buffer("constant", torch.full((12, 16), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch(self.normed(x.clone().tanh()))
        return x.transpose(1, 2).contiguous().exp().transpose(1, 2).clone() * self.constant


@pytest.mark.parametrize("step", [0, 2, "everything"])
def test_copies_of_changed_buffers_are_none_of_the_block_s_operators(step):
    """They must not be taken for its own copies, nor kept: a recomputation writes into its copies, and may be the first
    of several."""

    def make() -> nn.Module:
        return Chain([Counting() for _ in range(2)])

    model, plain = made(make), made(make)
    everything = step == "everything"
    n = LOTS if everything else budgets_between(make, 4)[step]
    hs.checkpoint(model, (lambda *_, **__: True) if everything else hs.ByteBudget(n))
    for _ in range(2):
        got = []
        for m in (model, plain):
            m.zero_grad()
            loss = m(tokens_of())
            for again in (True, True, False):
                loss.backward(retain_graph=again)
            got.append([p.grad for p in m.parameters()] + [b for b in m.buffers() if b.is_floating_point()])
        assert same(*got)


def test_copies_measure_anew_and_budgets_are_not_shared():
    policy = hs.ByteBudget("6kB", flops_per_byte=7)
    first, second = made(llama), made(llama)
    handles = [hs.checkpoint(m, policy) for m in (first, second)]
    first(tokens_of()).backward()
    assert handles[0].plan is not None
    assert handles[1].plan is None
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    for copied in (copy.deepcopy(first), torch.load(file, weights_only=False)):
        bound = copied.blocks[0].forward.shared.policy
        assert (bound.n, bound.flops_per_byte, bound.plan) == (6000, 7, None)
        assert same(gradients(copied), gradients(first))
        assert bound.plan == handles[0].plan
    assert repr(policy) == "ByteBudget(6000, flops_per_byte=7)"


def test_a_block_that_is_called_by_itself_says_so_once():
    model, _ = budgeted(llama, LOTS)
    x = torch.randn(2, 5, 16)
    with pytest.warns(UserWarning, match=r"block 'blocks.1' was called outside of one; it keeps its inputs only"):
        model.blocks[1](x).sum().backward()
    model.blocks[1](x).sum().backward()


@pytest.mark.parametrize("whole", [True, False])
def test_torch_compile_is_refused_with_what_it_has_itself(whole):
    model, handle = budgeted(llama, LOTS)
    compiled = torch.compile(model if whole else lambda tokens: model(tokens) + 1, backend="eager")
    with pytest.raises(RuntimeError, match=r"cannot run under torch.compile, .*activation_memory_budget"):
        compiled(tokens_of())
    model(tokens_of()).backward()
    handle.remove()
    compiled(tokens_of()).backward()


def test_a_compiled_part_of_a_block_is_no_obstacle():
    plain, wanted = made(llama), []
    wanted = gradients(plain)
    for n in budgets_between(llama, 2):
        model = made(llama)
        for block in model.blocks:
            block.gate.compile(backend="eager")
        hs.checkpoint(model, hs.ByteBudget(n))
        assert same(gradients(model), wanted)
        assert same(gradients(model), wanted)
