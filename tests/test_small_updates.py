"""What keeps small updates from being lost: masters, stochastic rounding, wide enough states."""

from __future__ import annotations

import math

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, NARROW
from bits import assert_same_bits
from optimizer_runs import only, parameters, set_grads, train
from torch.nn import Parameter

import halfstep as hs
from halfstep.reference import join_master, round_to

ROUNDED = {"master": None, "stochastic_rounding": True}


# ---- tiny gradients --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    "options", [{}, {"state_dtype": BFLOAT16}, ROUNDED, {**ROUNDED, "state_dtype": BFLOAT16}], ids=str
)
@pytest.mark.parametrize("cls", [hs.AdamW, hs.Adam])
def test_zero_and_tiny_gradients_stay_finite(dtype, options, cls):
    """An eps of 1e-8 is 0 in float16: 0 / 0 there, or 1 / 0 if v vanishes before m."""
    tiny = torch.finfo(dtype).smallest_normal
    grads = torch.tensor([0.0, -0.0, tiny, -tiny, tiny * 2**-4, 2.0**-24, -(2.0**-14), 1e-3]).to(dtype)
    weight = Parameter(torch.ones(8, dtype=dtype))
    optimizer = cls([weight], lr=1e-3, weight_decay=0.0, **options)
    for t in range(30):
        weight.grad = grads if t < 20 else torch.zeros_like(grads)
        optimizer.step()
    state = optimizer.state[weight]
    assert all(x.isfinite().all() for x in (weight, state["exp_avg"], state["exp_avg_sq"]))
    # |m| / sqrt(v) <= 1 / sqrt(1 - beta2), so nothing moves further than that in 30 steps
    assert ((weight - 1).abs() <= 30 * 1e-3 / math.sqrt(1e-3)).all()
    assert (weight[:2] == 1).all()


def second_moment(optimizer: hs.AdamW, *, nearest: bool, steps: int) -> torch.Tensor:
    """exp_avg_sq after one large gradient and `steps` zero ones; `nearest` rounds it to bfloat16 after each step."""
    weight, _ = only(optimizer)
    for t in range(steps + 1):
        weight.grad = torch.full_like(weight, 0.0 if t else 4.0)
        optimizer.step()
        if nearest:
            moment = optimizer.state[weight]["exp_avg_sq"]
            moment.copy_(moment.bfloat16())
    return optimizer.state[weight]["exp_avg_sq"].float()


def test_a_bfloat16_second_moment_decays_as_the_float32_one():
    """Nearest rounding returns 0.999 v to v for ever; stochastic rounding is right on average."""
    size, steps = 4096, 1000
    build = lambda **options: hs.AdamW([Parameter(torch.zeros(size))], lr=0.0, **options)  # noqa: E731
    exact = second_moment(build(), nearest=False, steps=steps)
    stalled = second_moment(build(), nearest=True, steps=steps)
    ours = second_moment(build(state_dtype=BFLOAT16, seed=3), nearest=False, steps=steps)
    assert (exact / (1e-3 * 16)).allclose(torch.tensor(0.999**steps), rtol=steps * torch.finfo(FLOAT32).eps)
    assert (stalled >= 0.99 * 1e-3 * 16).all(), "if nearest did not stall this test would show nothing"
    # a step rounds with a relative standard deviation of at most half a spacing (eps), decorrelated between elements
    deviation = torch.finfo(BFLOAT16).eps / 2 * math.sqrt(steps / size)
    assert abs(ours.mean() / exact.mean() - 1) <= 5 * deviation


def loss_curve(*, nearest: bool = False, **options) -> list[float]:
    """A quadratic after 20 gradients of +-30 that cancel: v has to decay from there before the weights move well."""
    target = torch.linspace(1, 2, 128)
    weight = Parameter(torch.zeros(128))
    optimizer = hs.AdamW([weight], lr=1e-3, weight_decay=0.0, **options)
    losses = []
    for t in range(2000):
        error = weight.detach() - target
        losses.append(error.square().mean().item())
        weight.grad = error if t >= 20 else torch.full_like(error, 30.0 * (-1) ** t)
        optimizer.step()
        if nearest:
            for moment in (optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq")):
                moment.copy_(moment.bfloat16())
    return losses


def test_bfloat16_states_give_the_float32_loss_curve():
    exact, ours, stalled = loss_curve(), loss_curve(state_dtype=BFLOAT16), loss_curve(nearest=True)
    assert exact[-1] < exact[0] / 2
    assert stalled[-1] > 1.2 * exact[-1], "nearest rounding must cost something here, or there is nothing to show"
    apart = max(abs(a - b) for a, b in zip(ours, exact, strict=True))
    assert apart < (stalled[-1] - exact[-1]) / 10


# ---- updates below the spacing ---------------------------------------------------------------------------------------
def decayed(dtype: torch.dtype, **options) -> hs.AdamW:
    """1,000 steps with zero gradients; lr * weight_decay = 2**-17 is far below the spacing of 1.0 in 16 bits."""
    weight = Parameter(torch.ones(2048, dtype=dtype))
    optimizer = hs.AdamW([weight], lr=2.0**-10, weight_decay=2.0**-7, **options)
    weight.grad = torch.zeros_like(weight)
    for _ in range(1000):
        optimizer.step()
    return optimizer


EXPECTED_DECAY = (1 - 2.0**-17) ** 1000  # 0.9924


@pytest.mark.parametrize(("dtype", "master"), [(BFLOAT16, "fp32"), (BFLOAT16, "split"), (FLOAT16, "fp32")])
def test_decay_below_the_resolution_happens_on_the_master(dtype, master):
    weight, state = only(decayed(dtype, master=master))
    wide = join_master(weight.detach(), state["remainder"]) if master == "split" else state["master"]
    assert ((wide - EXPECTED_DECAY).abs() <= 1000 * torch.finfo(FLOAT32).eps / 2).all()
    assert ((weight - EXPECTED_DECAY).abs() <= torch.finfo(dtype).eps / 2).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_decay_below_the_resolution_is_lost_by_nearest_and_kept_on_average_by_stochastic(dtype):
    with pytest.warns(UserWarning, match="updates smaller than half its spacing are lost"):
        weight, _ = only(decayed(dtype, master=None))
    assert (weight == 1).all()
    weight, _ = only(decayed(dtype, **ROUNDED))
    # each step moves a weight by a spacing (at most eps) with a small probability p: variance eps**2 p = eps 2**-17
    deviation = math.sqrt(1000 * torch.finfo(dtype).eps * 2.0**-17 / weight.numel())
    assert abs(weight.double().mean() - EXPECTED_DECAY) <= 5 * deviation


def test_lost_updates_are_told_once():
    params = parameters(BFLOAT16)
    groups = [{"params": [p], "weight_decay": i / 10} for i, p in enumerate(params)]
    with pytest.warns(UserWarning, match="parameter group 0, parameter 0 is torch.bfloat16 with master=None") as told:
        optimizer = hs.AdamW(groups, master=None)
    optimizer.add_param_group({"params": parameters(FLOAT16)})  # from here on warnings are errors
    train(optimizer, range(3))
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(BFLOAT16, ROUNDED), (BFLOAT16, {}), (BFLOAT16, {"master": "split"}), (FLOAT32, {"master": None})],
)
def test_nothing_is_told_where_nothing_is_lost(dtype, options):
    train(hs.AdamW(parameters(dtype), **options), range(2))  # warnings are errors


def test_split_and_float32_masters_give_the_same_bits():
    """Given the same gradients: joined master and moments; the shown weights differ at most on exact ties."""
    fp32, split = (hs.AdamW(parameters(BFLOAT16, [(3000,)]), lr=1e-3, master=m) for m in ("fp32", "split"))
    train(fp32, range(20))
    train(split, range(20))
    (weight, state), (shown, halves) = only(fp32), only(split)
    assert_same_bits(join_master(shown.detach(), halves["remainder"]), state["master"], "master")
    assert_same_bits(weight.detach(), round_to(state["master"], BFLOAT16), "weight")
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert_same_bits(halves[key], state[key], key)


def test_groups_may_have_different_masters():
    params = parameters(BFLOAT16, [(4,), (4,), (4,)])
    groups = [{"params": [p], "master": m} for p, m in zip(params, ("fp32", "split", None), strict=True)]
    optimizer = hs.AdamW(groups, stochastic_rounding=True)
    train(optimizer, [1])
    assert [sorted(optimizer.state[p].keys() & {"master", "remainder"}) for p in params] == [
        ["master"],
        ["remainder"],
        [],
    ]


def test_random_words_depend_on_seed_position_and_step_alone():
    """Not on which other parameters had a gradient, nor on the groups they are in."""

    def run(seed: int = 5, *, first_has_gradients: bool = True, groups: bool = False) -> list[torch.Tensor]:
        params = parameters(BFLOAT16, [(500,), (500,)])
        given = [{"params": [p]} for p in params] if groups else params
        optimizer = hs.AdamW(given, lr=1e-3, seed=seed, state_dtype=BFLOAT16, **ROUNDED)
        for t in range(3):
            set_grads(params, t)
            if not first_has_gradients:
                params[0].grad = None
            optimizer.step()
        return [params[1].detach(), optimizer.state[params[1]]["exp_avg"], optimizer.state[params[1]]["exp_avg_sq"]]

    expected = run()
    for other in (run(), run(first_has_gradients=False), run(groups=True)):
        for got, want in zip(other, expected, strict=True):
            assert_same_bits(got, want, "other run")
    assert all((got != want).any() for got, want in zip(run(seed=6), expected, strict=True))


@pytest.mark.parametrize("options", [{"state_dtype": BFLOAT16}, ROUNDED], ids=["states", "weights"])
def test_random_words_follow_the_logical_order_of_a_transposed_weight(options):
    rows, columns = parameters(BFLOAT16, [(20, 30)]), parameters(BFLOAT16, [(20, 30)])
    columns[0].data = columns[0].t().contiguous().t()
    assert columns[0].stride() == (1, 20)
    for params in (rows, columns):
        train(hs.AdamW(params, lr=1e-3, seed=1, **options), range(3))
    assert_same_bits(columns[0].detach(), rows[0].detach(), "weight")
