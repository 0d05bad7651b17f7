"""The reference's Adam: bit for bit against the formula in numpy; over many steps against torch.optim in float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from halfstep.reference import AdamGroup, adam_scalars, optimizer, power, update_

ADAMW = AdamGroup(1e-3, 0.9, 0.999, 1e-8, 1e-2, decoupled=True, maximize=False)
GROUPS = {
    "adamw": ADAMW,
    "adam": ADAMW._replace(decoupled=False),
    "no_decay": ADAMW._replace(weight_decay=0.0),
    "no_decay_l2": ADAMW._replace(weight_decay=0.0, decoupled=False),  # an Inf weight must not turn 0 * p into NaN
    "maximize": ADAMW._replace(maximize=True),
    "maximize_l2": ADAMW._replace(maximize=True, decoupled=False),
    "far_lerp": ADAMW._replace(beta1=0.3, beta2=0.4),  # 1 - beta1 >= 0.5: lerp's other form
    "half_lerp": ADAMW._replace(beta1=0.5),
    "no_memory": ADAMW._replace(beta1=0.0, beta2=0.0),
    "large": ADAMW._replace(lr=0.3, eps=1e-2, weight_decay=0.5),
}
SPECIALS = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e-19, 1.0, 65504.0, 1e19, 3.4e38, np.inf]


def adversarial(rng: np.random.Generator, size: int) -> np.ndarray:
    """Float32: a quarter each ordinary, any pattern, any exponent near 1, and special values; all signs."""
    choice = rng.integers(0, 4, size)
    patterns = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    close = np.exp2(rng.uniform(-30, 30, size)).astype(np.float32)
    special = rng.choice(np.array([*SPECIALS, np.nan], dtype=np.float32), size)
    sign = np.where(rng.integers(0, 2, size) == 1, np.float32(1), np.float32(-1))
    ordinary = rng.normal(size=size).astype(np.float32)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        return np.select([choice == 0, choice == 1, choice == 2], [ordinary, patterns, close], special) * sign


def power_by_squares(b: float, t: int) -> float:
    """Product of b**(2**k) over the set bits k of t, lowest first."""
    squares = [b]
    for _ in range(t.bit_length()):
        squares.append(squares[-1] * squares[-1])
    return math.prod((squares[k] for k in range(t.bit_length()) if t >> k & 1), start=1.0)


def numpy_adam(p, g, m, v, vm, group: AdamGroup, t: int, factor: float | None):
    """The arithmetic contract in numpy float32: independent of torch and of the reference."""
    f = np.float32
    b1, omb1, b2, omb2 = f(group.beta1), f(1 - group.beta1), f(group.beta2), f(1 - group.beta2)
    step_size = f(group.lr / (1 - power_by_squares(group.beta1, t)))
    sqrt_bc2 = f(np.sqrt(np.float64(1 - power_by_squares(group.beta2, t))))
    if factor is not None:
        g = g * f(factor)
    if group.maximize:
        g = -g
    if group.weight_decay != 0 and group.decoupled:
        p = p * f(1 - group.lr * group.weight_decay)
    if group.weight_decay != 0 and not group.decoupled:
        g = g + f(group.weight_decay) * p
    m = m + omb1 * (g - m) if omb1 < f(0.5) else g - (g - m) * b1
    v = b2 * v + (omb2 * g) * g
    denominator = v
    if vm is not None:
        denominator = vm = np.where(np.isnan(vm) | (vm > v), vm, v)
    p = p - (step_size * m) / (np.sqrt(denominator) / sqrt_bc2 + f(group.eps))
    return p, m, v, vm


def assert_same_bits(got: torch.Tensor, expected: np.ndarray) -> None:
    """Equal patterns, all NaNs alike; -0 is not 0."""
    assert expected.dtype == np.float32
    bits = np.where(np.isnan(expected), np.uint32(0x7FC00000), expected.view(np.uint32))
    assert np.array_equal(np.where(got.isnan(), np.uint32(0x7FC00000), got.numpy().view(np.uint32)), bits)


def check_bits(group: AdamGroup, t: int, amsgrad: bool, factor: float | None = None) -> None:
    rng = np.random.default_rng(t)
    p, g, m = (adversarial(rng, 20_000) for _ in range(3))
    v, vm = (np.abs(adversarial(rng, 20_000)) for _ in range(2))
    vm[:5000] *= np.float32(-1)  # only a loaded state has these: -0 against 0, below any v
    tensors = [torch.from_numpy(x.copy()) for x in (p, g, m, v, vm)]
    with np.errstate(all="ignore"):
        expected = numpy_adam(p, g, m, v, vm if amsgrad else None, group, t, factor)
    top = tensors[4] if amsgrad else None
    healed = update_(*tensors[:4], top, None, group=group, t=t, grad_factor=factor)
    assert (healed.dtype, healed.item()) == (torch.int64, 0)
    assert_same_bits(tensors[1], g)
    for got, want in zip((tensors[0], tensors[2], tensors[3], top), expected, strict=True):
        if got is not None:
            assert_same_bits(got, want)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("t", [1, 7, 100_000])
def test_bits_are_the_contracts(group, amsgrad, t):
    check_bits(group, t, amsgrad)


@pytest.mark.parametrize("factor", [1.0, 2.0**-16, float(np.float32(0.3)), float("inf"), float("nan")])
def test_the_gradient_factor_comes_first(factor):
    check_bits(ADAMW._replace(decoupled=False), 3, amsgrad=False, factor=factor)


@pytest.mark.parametrize("b", [0.0, 0.9, 0.999, 0.9999999, 1 - 2.0**-53])
@pytest.mark.parametrize("t", [1, 2, 3, 10, 255, 1000])
def test_power_is_accurate(b, t):
    """At most 2 log2(t) products, of which b**(2**k) carries 2**k - 1 roundings: fewer than t in all."""
    truth = Fraction(b) ** t
    assert abs(Fraction(power(b, t)) - truth) <= (t - 1) * Fraction(1, 2**53) * truth * (1 + Fraction(t, 2**50))
    assert power(b, 0) == 1.0


def test_power_counts_past_32_bits():
    b, t = 1 - 2.0**-40, 2**41 + 1
    truth = math.exp(t * math.log1p(-(2.0**-40)))
    assert abs(power(b, t) - truth) <= t * 2.0**-53 * truth  # the bound above; exp and log1p are far closer
    assert power(b, t) == power_by_squares(b, t)
    assert power(0.999, 2**40 + 1) == 0.0


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_scalars_are_rounded_once(group):
    for t in (1, 2, 1000, 2**33):
        bc1, bc2 = 1 - power_by_squares(group.beta1, t), 1 - power_by_squares(group.beta2, t)
        expected = [group.beta1, 1 - group.beta1, group.beta2, 1 - group.beta2, group.eps, group.weight_decay]
        expected += [1 - group.lr * group.weight_decay, group.lr / bc1, math.sqrt(bc2)]
        assert list(adam_scalars(group, t)) == [float(np.float32(x)) for x in expected]


class Run:
    """The same gradients through the reference, torch.optim in float32 (naive) and in float64 (truth)."""

    def __init__(self, group: AdamGroup, amsgrad: bool, steps: int):
        generator = torch.Generator().manual_seed(0)
        size = 1024
        start = torch.randn(size, generator=generator)
        drift = torch.randn(size, generator=generator)
        scale = torch.logspace(-6, 2, size)
        self.state = {name: torch.zeros(size) for name in ("exp_avg", "exp_avg_sq")}
        if amsgrad:
            self.state["max_exp_avg_sq"] = torch.zeros(size)
        self.param = start.clone()
        self.naive, self.truth = (self._torch(start.to(d), group, amsgrad) for d in (torch.float32, torch.float64))
        for t in range(1, steps + 1):
            grad = (drift + torch.randn(size, generator=generator)) * scale
            top = self.state.get("max_exp_avg_sq")
            moments = (self.state["exp_avg"], self.state["exp_avg_sq"], top)
            update_(self.param, grad, *moments, None, group=group, t=t, grad_factor=None)
            for peer in (self.naive, self.truth):
                param = peer.param_groups[0]["params"][0]
                param.grad = grad.to(param.dtype)
                peer.step()

    @staticmethod
    def _torch(start, group, amsgrad):
        kind = torch.optim.AdamW if group.decoupled else torch.optim.Adam
        options = {"betas": (group.beta1, group.beta2), "eps": group.eps, "weight_decay": group.weight_decay}
        param = torch.nn.Parameter(start.clone())
        return kind([param], group.lr, amsgrad=amsgrad, maximize=group.maximize, foreach=False, **options)

    def check(self):
        """Max error <= 2 x naive + 2 x the rounding floor, mean error <= 1.5 x naive + the floor."""
        truth, naive = (peer.param_groups[0]["params"][0] for peer in (self.truth, self.naive))
        for name, ours in [("param", self.param), *self.state.items()]:
            exact = truth.detach() if name == "param" else self.truth.state[truth][name]
            peer = naive.detach() if name == "param" else self.naive.state[naive][name]
            floor = torch.finfo(torch.float32).eps / 2 * exact.abs()
            error, naive_error = (ours - exact).abs(), (peer - exact).abs()
            assert error.max() <= 2 * naive_error.max() + 2 * floor.max(), name
            assert error.mean() <= 1.5 * naive_error.mean() + floor.mean(), name


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_trajectory_is_torchs(group, amsgrad):
    Run(group, amsgrad, steps=150).check()


PLANTED = {
    "_lerp": lambda right: lambda m, g, scalars: right(m, g, scalars) * 1.0001,
    "_sqrt": lambda right: lambda x: right(x) * 1.0001,
    "_maximum": lambda right: lambda stored, v: v,
    "power": lambda right: lambda b, t: right(b, t + 1),
    "adam_scalars": lambda right: lambda group, t: right(group._replace(weight_decay=0.0), t),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_seen(monkeypatch, name):
    monkeypatch.setattr(optimizer, name, PLANTED[name](getattr(optimizer, name)))
    run = Run(ADAMW, amsgrad=True, steps=150)
    with pytest.raises(AssertionError):
        run.check()
    with pytest.raises(AssertionError):
        check_bits(ADAMW, 7, amsgrad=True)


OTHER_BITS = {
    "_maximum": torch.fmax,  # forgets a NaN
    "_lerp": lambda m, g, scalars: scalars.beta1 * m + scalars.one_minus_beta1 * g,
}


@pytest.mark.parametrize("name", OTHER_BITS)
def test_other_bits_are_seen(monkeypatch, name):
    monkeypatch.setattr(optimizer, name, OTHER_BITS[name])
    with pytest.raises(AssertionError):
        check_bits(ADAMW, 7, amsgrad=True)
