"""`hs.ByteBudget`: bytes and FLOPs are those that the plan says, to the byte and to the FLOP, and gradients are the
plain model's, to the bit."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example_runs import tiny
from gpt.matmul import Matmul
from gpt.model import GPT
from test_measure_activations import LlamaBlock
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import halfstep as hs
from halfstep.activations import budget as budget_module
from halfstep.activations.measure import flop_formulas

LOTS = 10**9


class Chain(nn.Module):
    """Blocks between an embedding and a loss, all of which take the same mask."""

    def __init__(self, blocks: list[nn.Module], width: int = 16, masked: bool = False) -> None:
        super().__init__()
        self.embedding, self.blocks, self.masked = nn.Embedding(50, width), nn.ModuleList(blocks), masked
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = (tokens > 5)[..., None] if self.masked else None
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask=mask)
        return x.mean() if self.masked else self.head(x).square().mean()  # a mean does not keep what it is taken of


class DroppedLlama(LlamaBlock):
    """With dropout behind both branches."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.2, self.training)), 0.2, self.training)


class Masked(nn.Module):
    """Saves its mask only where there is no checkpoint, and changes a result in place."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = F.relu(self.up(x), inplace=True)
        return torch.where(mask, x + F.dropout(self.down(y), 0.1, self.training), x).tanh()


def llama() -> nn.Module:
    return Chain([LlamaBlock(16, 2, 1, 24) for _ in range(3)])


def dropped() -> nn.Module:
    return Chain([DroppedLlama(16, 2, 1, 24) for _ in range(2)])


def masked() -> nn.Module:
    return Chain([Masked() for _ in range(3)], masked=True)


def gpt() -> nn.Module:
    config = tiny(layers=2, width=16)
    matmul = Matmul("native", "a test", "halfstep")

    class Loss(GPT):
        def forward(self, tokens: Tensor, targets: Any = None) -> Tensor:
            return super().forward(tokens, tokens)

    return Loss(50, config.width, config.layers, config.heads, matmul)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "dropout": dropped, "masks": masked, "gpt": gpt}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def tokens_of(length: int = 12, batch: int = 2) -> Tensor:
    return (torch.arange(batch * length) * 7 % 50).view(batch, length)


def budgeted(make: Callable[[], nn.Module], n: int, length: int = 12, **settings: Any) -> tuple[nn.Module, Any]:
    """A model under a budget, after the forward that measures it."""
    model = made(make)
    handle = hs.checkpoint(model, hs.ByteBudget(n, **settings))
    model(tokens_of(length)).backward()
    return model, handle


def gradients(model: nn.Module, tokens: Tensor | None = None) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(tokens_of() if tokens is None else tokens).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True)
    )


def bytes_of(model: nn.Module, tokens: Tensor | None = None) -> int:
    with hs.measure_activations() as measured:
        loss = model(tokens_of() if tokens is None else tokens)
    del loss
    return measured.bytes


def flops_of(model: nn.Module) -> int:
    with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counted:
        model(tokens_of()).backward()
    return counted.get_total_flops()


def budgets_between(make: Callable[[], nn.Module], steps: int) -> list[int]:
    plan = budgeted(make, LOTS)[1].plan
    return [plan.least + (plan.most - plan.least) * i // steps for i in range(steps + 1)]


@each_model
def test_bytes_flops_and_gradients_are_what_the_plan_says(make):
    plain = made(make)
    wanted, flops = gradients(plain), flops_of(plain)
    plain_bytes, costs, outside = bytes_of(plain), [], set()
    for n in budgets_between(make, 5):
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
    measured.clear()
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


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_autocast_with_its_copies_of_weights(steps):
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

    most, least = plan_for(LOTS).most, plan_for(LOTS).least
    plan = plan_for(least + (most - least) * steps // 3)
    (loss, size), (plain_loss, plain_size) = loss_of(model), loss_of(plain)
    assert plain_size - size == most - plan.bytes
    loss.backward()
    plain_loss.backward()
    for m in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            losses = [m(tokens_of()), m(tokens_of())]
        sum(losses).backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


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
