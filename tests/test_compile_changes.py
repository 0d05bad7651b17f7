"""What a compiled function changes around step(), and scalers: in the graph, between graphs, or refused in words.

torch.compile writes Python's changes back when the graph is done, and may work on copies of tensors until then. Guards:
a step that reads the old learning rate, setting, gradient or state, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_twins import BACKENDS, Function, breaks, compiled, graphs, run_both, two_groups
from loops import assert_same_tree, batch, tiny_model
from optimizer_runs import assert_same, held, params_of, set_grads
from torch.nn import Parameter

import halfstep as hs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OLD = torch.__version__.startswith("2.10.")
Params = list[Parameter]


# ---- tensors: part of the graph --------------------------------------------------------------------------------------
def scaled_gradients(optimizer: hs.Adam, params: Params) -> None:
    for p in params:
        p.grad.mul_(0.5)
    optimizer.step()


def made_gradients(optimizer: hs.Adam, params: Params) -> None:
    for p in params:
        p.grad = p.detach() * 2
    optimizer.step()


def one_gradient_less(optimizer: hs.Adam, params: Params) -> None:
    params[1].grad = None
    optimizer.step()


def all_gradients_gone(optimizer: hs.Adam, params: Params) -> None:
    optimizer.step()
    for p in params:
        p.grad = None


def clipped_by_hand(optimizer: hs.Adam, params: Params) -> torch.Tensor:
    norm = hs.clip_grad_norm_(params[:3], 0.5)
    optimizer.step()
    return norm


def written_weights(optimizer: hs.Adam, params: Params) -> list[torch.Tensor]:
    """Also of a 16-bit weight, whose master heals."""
    with torch.no_grad():
        for p in params:
            p.mul_(1.5)
    before = [p * 2 for p in params]
    optimizer.step()
    with torch.no_grad():
        params[0].add_(1)
    return before + [p * 2 for p in params]


def two_steps(optimizer: hs.Adam, params: Params) -> list[torch.Tensor]:
    optimizer.step()
    between = [optimizer.grad_norm * 2, *(p * 2 for p in params)]
    optimizer.step()
    return [*between, optimizer.grad_norm * 2]


def filled_rate(optimizer: hs.Adam, params: Params) -> torch.Tensor:
    rate = optimizer.rates[0]
    rate.fill_(0.5)
    optimizer.step()
    rate.mul_(0.5)
    return rate * 2


IN_THE_GRAPH = [
    scaled_gradients, made_gradients, one_gradient_less, all_gradients_gone, clipped_by_hand, written_weights,
    two_steps, filled_rate,
]  # fmt: skip


def with_rates() -> hs.Adam:
    """Learning rates as tensors, which a region reaches by another way than the groups."""
    optimizer = two_groups(lr=torch.tensor(0.1), max_grad_norm=1.0)
    optimizer.rates = [group["lr"] for group in optimizer.param_groups]
    return optimizer


@pytest.mark.filterwarnings("ignore:halfstep. .* weights? w.* written by someone else:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", IN_THE_GRAPH)
def test_tensors_that_change_in_the_graph(function: Function, backend: str) -> None:
    run_both(function, backend, make=with_rates, steps=3)
    assert breaks() == 0
    assert graphs() <= 2  # the second where a gradient is there for the first time, or no more


# ---- the rest: changed between graphs --------------------------------------------------------------------------------
def a_rate(optimizer: hs.Adam, params: Params) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def a_setting(optimizer: hs.Adam, params: Params) -> None:
    optimizer.max_grad_norm = 0.1
    optimizer.step()


def no_setting(optimizer: hs.Adam, params: Params) -> None:
    optimizer.found_inf = torch.ones(())
    del optimizer.found_inf
    optimizer.step()


def a_parameter_less(optimizer: hs.Adam, params: Params) -> None:
    del optimizer.param_groups[1]["params"][1:]
    optimizer.step()


def a_state(optimizer: hs.Adam, params: Params) -> torch.Tensor:
    optimizer.state[params[0]]["exp_avg"].mul_(2)
    optimizer.step()
    return optimizer.state[params[0]]["exp_avg"] * 2


def a_state_from_elsewhere(optimizer: hs.Adam, params: Params) -> None:
    optimizer.moments[0].mul_(2)
    optimizer.step()


def with_states() -> hs.Adam:
    optimizer = two_groups()
    set_grads(params_of(optimizer), 9)
    optimizer.step()
    optimizer.moments = [optimizer.state[p]["exp_avg"] for p in params_of(optimizer)]
    return optimizer


NOT_ON_2_10 = pytest.mark.skipif(OLD, reason="torch 2.10 cannot set attributes of an optimizer in compiled code")
BETWEEN_GRAPHS = [
    pytest.param(a_rate, "reads the parameter groups when the compiled graph runs", id="a rate"),
    pytest.param(a_setting, "halfstep keeps books in Python", id="a setting", marks=NOT_ON_2_10),
    pytest.param(no_setting, "halfstep keeps books in Python", id="no setting", marks=NOT_ON_2_10),
    pytest.param(a_parameter_less, "reads the parameter groups .* make the change outside", id="a parameter less"),
    pytest.param(
        a_state, "reads or writes of states; take them out of the optimizer outside of the comp", id="a state"
    ),
    pytest.param(a_state_from_elsewhere, "reads the optimizer's states and settings", id="a state from elsewhere"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("function", "message"), BETWEEN_GRAPHS)
def test_changes_that_end_the_graph(function: Function, message: str, backend: str) -> None:
    run_both(function, backend, make=with_states, steps=3, fullgraph=False)
    assert breaks() > 0


@pytest.mark.parametrize(("function", "message"), BETWEEN_GRAPHS)
def test_they_are_refused_in_words_where_one_graph_is_asked_for(function: Function, message: str) -> None:
    optimizer = with_states()
    before = held(optimizer)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"(?s){message}"):
        compiled(function, "eager")(optimizer, params_of(optimizer))
    assert_same(held(optimizer), before)


def test_a_setting_that_dynamo_has_not_written_yet_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever way it was set."""
    if OLD:
        pytest.skip("torch 2.10 cannot set attributes of an optimizer in compiled code")

    def past_the_descriptor(optimizer: hs.Adam, params: Params) -> None:
        vars(optimizer)["max_grad_norm"] = 0.1
        optimizer.step()

    optimizer = two_groups()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"reads the optimizer's max_grad_norm when the compiled"):
        compiled(past_the_descriptor, "eager")(optimizer, params_of(optimizer))


# ---- scalers ---------------------------------------------------------------------------------------------------------
Loop = Callable[[torch.nn.Module, hs.AdamW, Any, Any, torch.Tensor], torch.Tensor]


BATCH = batch(0)  # made outside of the compiled functions: it takes a generator


def loss(model: torch.nn.Module, factor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(BATCH[0]), BATCH[1]) * factor


def scaled(model: torch.nn.Module, optimizer: hs.AdamW, scaler: Any, schedule: Any, factor: torch.Tensor) -> Any:
    value = loss(model, factor)
    scaler.scale(value).backward()
    scaler.advance(schedule)
    skipped = scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return value.detach(), skipped.int() * 2


def unscaled_by_hand(
    model: torch.nn.Module, optimizer: hs.AdamW, scaler: Any, schedule: Any, factor: torch.Tensor
) -> Any:
    scaler.scale(loss(model, factor)).backward()
    scaler.unscale_(optimizer)
    norm = hs.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm * scaler.get_scale()


def of_torch(model: torch.nn.Module, optimizer: hs.AdamW, scaler: Any, schedule: Any, factor: torch.Tensor) -> Any:
    scaler.scale(loss(model, factor)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return optimizer.grad_norm * 2


@pytest.mark.filterwarnings("ignore:halfstep. a step was skipped:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo asks
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loop", [scaled, unscaled_by_hand, of_torch])
def test_a_whole_training_step(loop: Loop, backend: str) -> None:
    """Loss, backward pass, scaler, step and schedule in one compiled function; the third of its steps overflows."""
    runs = []
    for step in (loop, torch.compile(loop, backend=backend)):
        model = tiny_model()
        optimizer = hs.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        scaler = torch.amp.GradScaler("cpu") if loop is of_torch else hs.LossScaler()
        factors = [torch.tensor(factor) for factor in (1.0, 0.5, float("inf"), 1.0, 2.0)]
        results = [step(model, optimizer, scaler, schedule, factor) for factor in factors]
        runs.append(
            {"results": results, "scaler": scaler.state_dict(), "lr": schedule.get_last_lr(), **held(optimizer)}
        )
    assert_same_tree(runs[1], runs[0])
    assert runs[0]["scaler"]["scale"] == 2.0**15


@pytest.mark.parametrize("method", ["step", "unscale_", "update", "advance"])
def test_a_scaler_is_refused_in_words_where_one_graph_is_asked_for(method: str) -> None:
    optimizer, scaler = two_groups(), hs.LossScaler()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    args = {"step": [optimizer], "unscale_": [optimizer], "update": [], "advance": [schedule]}[method]
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="keeps books in Python here; call this outside of the comp"
    ):
        compiled(lambda optimizer, params: getattr(scaler, method)(*args), "eager")(optimizer, [])
