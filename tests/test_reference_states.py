"""The reference's update with masters, healing, 16-bit weights and states, strides and shards; and cast_."""

from __future__ import annotations

import pytest
import torch

from halfstep.reference import (
    AdamGroup,
    cast_,
    join_master,
    optimizer,
    philox_words,
    round_stochastic,
    round_to,
    split_master,
    update_,
)

NARROW = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *NARROW]
ADAMW = AdamGroup(1e-2, 0.9, 0.999, 1e-8, 1e-2, decoupled=True, maximize=False)
PLAIN = ADAMW._replace(weight_decay=0.0)


def normal(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Integer view with every NaN the same."""
    integers = x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)
    return torch.where(x.isnan(), torch.iinfo(integers.dtype).max, integers) if x.is_floating_point() else integers


def assert_same(got, expected) -> None:
    for x, y in zip(got, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(bits(x), bits(y))


def moments(size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)]


def step(p, g, states, master, t=1, top=None, group=ADAMW, **options) -> int:
    healed = update_(p, g, *states, top, master, group=group, t=t, grad_factor=None, **options)
    assert (healed.dtype, healed.shape) == (torch.int64, ())
    return int(healed)


def awkward(size: int) -> torch.Tensor:
    """Weights with special values among them, and ties of both 16-bit formats."""
    x = normal(size, 0)
    x[:6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38])
    x[6:12] = torch.tensor([1e-45, -1e-40, 65519.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-11])
    return x


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("grad_dtype", FLOATS)
def test_float32_master_follows_a_float32_parameter(dtype, grad_dtype):
    """The same bits as training in float32 on the same gradients; the weight is the rounded master at every step."""
    wide = awkward(500)
    master, weight = wide.clone(), round_to(wide, dtype)
    states, wide_states = moments(500), moments(500)
    for t in range(1, 20):
        grad = normal(500, t).to(grad_dtype)
        assert step(weight, grad, states, master, t) == 0
        step(wide, grad, wide_states, None, t)
        assert_same([master, *states, weight], [wide, *wide_states, round_to(wide, dtype)])


def test_split_and_float32_masters_follow_the_same_bits():
    """20,000 weights for 30 steps: the visible weights differ on some exact ties, and only there."""
    master = awkward(20_000)
    weight, (visible, remainder) = round_to(master, torch.bfloat16), split_master(master)
    states, split_states = moments(20_000), moments(20_000)
    ties = 0
    for t in range(1, 31):
        grad = normal(20_000, t).bfloat16()
        step(weight, grad, states, master, t)
        step(visible, grad, split_states, remainder, t)
        assert_same([join_master(visible, remainder), *split_states], [master, *states])
        differ = bits(visible) != bits(weight)
        assert ((master.view(torch.int32)[differ] & 0xFFFF) == 0x8000).all()
        ties += int(differ.sum())
    assert ties > 0


@pytest.mark.parametrize("master_kind", ["fp32", "split"])
def test_a_weight_with_a_master_is_never_rounded_stochastically(master_kind):
    results = []
    for stochastic in (False, True):
        weight, remainder = split_master(normal(300, 0))
        master = join_master(weight, remainder) if master_kind == "fp32" else remainder
        weight = round_to(master, torch.bfloat16) if master_kind == "fp32" else weight
        states = moments(300)
        step(weight, normal(300, 1), states, master, stochastic=stochastic, seed=3)
        results.append([weight, master, *states])
    assert_same(*results)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_written_weight_heals_its_master(dtype):
    """Element by element: where somebody wrote the weight the step goes on from it, elsewhere from the master."""
    master = awkward(400)
    weight = round_to(master, dtype)
    written = torch.arange(400) % 3 == 0
    written[4] = False
    weight.view(torch.int16)[4] = -1  # another NaN for a NaN is no change
    new = normal(400, 5).to(dtype)
    new[0], new[3] = -0.0, float("nan")  # -0 for 0 is a change, and so is NaN
    weight[written] = new[written]
    expected = torch.where(written, weight.float(), master)
    expected_states, states = moments(400), moments(400)
    ignoring = master.clone()
    step(expected, normal(400, 1), expected_states, None)
    ignored_weight, ignored_states, untouched = weight.clone(), moments(400), master.clone()

    assert step(weight, normal(400, 1), states, master) == int(written.sum())
    assert_same([master, weight, *states], [expected, round_to(expected, dtype), *expected_states])

    assert step(ignored_weight, normal(400, 1), ignored_states, ignoring, heal=False) == 0
    step(untouched, normal(400, 1), moments(400), None)
    assert_same([ignoring, ignored_weight], [untouched, round_to(untouched, dtype)])


def test_a_planted_missing_heal_is_seen(monkeypatch):
    load = optimizer._load_weight
    monkeypatch.setattr(optimizer, "_load_weight", lambda param, master, heal: load(param, master, False))
    with pytest.raises(AssertionError):
        test_a_written_weight_heals_its_master(torch.bfloat16)


@pytest.mark.parametrize("dtype", NARROW)
def test_weights_without_master_round_as_asked(dtype):
    start, grad = normal(1000, 0).to(dtype), normal(1000, 1)
    wide, nearest, stochastic = start.float(), start.clone(), start.clone()
    step(wide, grad, moments(1000), None)
    step(nearest, grad, moments(1000), None)
    step(stochastic, grad, moments(1000), None, stochastic=True, seed=7, param_id=3, first_index=5)
    words = philox_words(7, 1, 3, 0, 5, 1000, "cpu")
    assert_same([nearest, stochastic], [round_to(wide, dtype), round_stochastic(wide, dtype, words)])
    assert not torch.equal(nearest, stochastic)


def test_updates_below_the_resolution_are_lost_only_by_nearest():
    """50 steps of lr 1e-3 on bfloat16 weights in [1, 1.5], whose spacing is 2**-7: nearest stands still."""
    size, steps, group = 4096, 50, PLAIN._replace(lr=1e-3)
    start = torch.linspace(1.01, 1.5, size).bfloat16()
    nearest, stochastic, wide = start.clone(), start.clone(), start.float()
    runs = [(nearest, moments(size)), (stochastic, moments(size)), (wide, moments(size))]
    for t in range(1, steps + 1):
        for param, states in runs:
            step(param, torch.ones(size), states, None, t, group=group, stochastic=param is stochastic)
    assert torch.equal(nearest, start)
    moved, truth = (stochastic.double() - start.double()).mean(), (wide.double() - start.double()).mean()
    # one rounding has a standard deviation of at most half the spacing; six of those of the mean: odds of 1 in 10**9
    assert (moved - truth).abs() < 6 * 2.0**-8 * (steps / size) ** 0.5 < -truth / 2


@pytest.mark.parametrize("dtype", NARROW)
def test_16_bit_states_round_stochastically_after_use(dtype):
    """Each state has a stream of its own; the step itself uses the moments as they were before rounding."""
    grad = normal(1000, 1)
    old = [normal(1000, 2).to(dtype), normal(1000, 3).abs().to(dtype), normal(1000, 4).abs().to(dtype)]
    wide, wide_states = normal(1000, 0), [x.float() for x in old]
    param, states = wide.clone(), [x.clone() for x in old]
    step(wide, grad, wide_states[:2], None, t=9, top=wide_states[2])
    step(param, grad, states[:2], None, t=9, top=states[2], seed=11, param_id=2, first_index=1)
    expected = []
    for stream, value in enumerate(wide_states, start=1):
        expected.append(round_stochastic(value, dtype, philox_words(11, 9, 2, stream, 1, 1000, "cpu")))
    assert_same([param, *states], [wide, *expected])


def test_bfloat16_second_moment_does_not_stall():
    """v decays by 0.1 % a step, less than bfloat16's spacing: to nearest it would stay where it is."""
    size, steps = 4096, 100
    v = torch.ones(size, dtype=torch.bfloat16)
    assert torch.equal(round_to(v.float() * 0.999, torch.bfloat16), v)
    param, m = torch.zeros(size), torch.zeros(size)
    for t in range(1, steps + 1):
        step(param, torch.zeros(size), [m, v], None, t, group=PLAIN)
    # below 1 the spacing is 2**-8 and half of it bounds the standard deviation of one rounding
    assert (v.double().mean() - 0.999**steps).abs() < 6 * 2.0**-9 * (steps / size) ** 0.5 < (1 - 0.999**steps) / 2


@pytest.mark.parametrize("cut", [0, 1, 3, 500, 998, 999, 1000])
def test_shards_draw_and_step_as_the_whole(cut):
    whole = [normal(1000, 0).bfloat16(), normal(1000, 1), *moments(1000, torch.bfloat16)]
    shards = [x.clone() for x in whole]
    step(whole[0], whole[1], whole[2:], None, stochastic=True, seed=1, param_id=4)
    for begin, end in ((0, cut), (cut, 1000)):
        p, g, *states = (x[begin:end] for x in shards)
        step(p, g, states, None, stochastic=True, seed=1, param_id=4, first_index=begin)
    assert_same(shards, whole)


VIEWS = {
    "transposed": lambda x: x.view(40, 50).t(),
    "columns": lambda x: x.view(40, 50)[:, 7:20],
    "every_third": lambda x: x[1::3],
    "channels_last": lambda x: x.view(2, 10, 10, 10).permute(0, 3, 1, 2),
    "empty": lambda x: x.view(40, 50)[:, :0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dense_names", ["", "grad", "grad states", "param"])
@pytest.mark.parametrize("master_kind", ["fp32", "split", "none"])
def test_strides_do_not_matter_and_neighbours_stay(view, dense_names, master_kind):
    """Tensors are views of larger buffers, but for those named dense; elements count in logical order."""
    buffers = {"param": normal(2000, 0).bfloat16(), "grad": normal(2000, 1)}
    buffers |= dict(zip(("m states", "v states"), moments(2000, torch.bfloat16), strict=True))
    if master_kind != "none":
        master = buffers["param"].float() if master_kind == "fp32" else split_master(normal(2000, 2))[1]
        buffers["master"] = master
    before = [x.clone() for x in buffers.values()]
    views = [view(x) for x in buffers.values()]
    dense = [x.contiguous().clone() for x in views]
    for i, name in enumerate(buffers):
        if name.split()[-1] in dense_names.split():
            views[i] = dense[i].clone()
    for p, g, m, v, *master in (views, dense):
        step(p, g, [m, v], master[0] if master else None, stochastic=True, seed=5)
    assert_same(views, dense)
    for buffer, old in zip(buffers.values(), before, strict=True):
        view(buffer).zero_()
        view(old).zero_()
    assert_same(buffers.values(), before)


def test_a_leaf_parameter_is_updated_in_place():
    param = torch.nn.Parameter(normal(10, 0))
    data = param.data_ptr()
    step(param, torch.ones(10), moments(10), None)
    assert param.data_ptr() == data
    assert param.is_leaf
    assert not torch.equal(param, normal(10, 0))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_cast_is_torchs_and_exact_where_it_widens(target, source):
    src = [awkward(500).to(source), torch.empty(0, 3, dtype=source), normal(12, 1).to(source).view(3, 4)]
    for stochastic in (False, True):
        dst = [torch.full_like(x, 7, dtype=target) for x in src]
        cast_(dst, src, stochastic=stochastic, seed=3)
        expected = [x.to(target) for x in src]
        if stochastic and target != torch.float32:
            expected = []
            for index, x in enumerate(src):
                words = philox_words(3, 0, index, 0, 0, x.numel(), "cpu")
                expected.append(round_stochastic(x.float(), target, words))
        assert_same(dst, expected)


def test_cast_writes_through_strides():
    buffer, src = torch.zeros(4, 6, dtype=torch.bfloat16), normal(12, 1).view(4, 3).t()
    for stochastic in (False, True):
        cast_([buffer[:, 1:4].t()], [src], stochastic=stochastic, seed=1)
        dense = torch.empty(3, 4, dtype=torch.bfloat16)
        cast_([dense], [src.contiguous()], stochastic=stochastic, seed=1)
        assert torch.equal(buffer[:, 1:4].t(), dense)
    assert not buffer[:, [0, 4, 5]].any()


def test_cast_refuses_lists_of_different_length():
    with pytest.raises(ValueError, match="zip"):
        cast_([torch.empty(1)], [])
