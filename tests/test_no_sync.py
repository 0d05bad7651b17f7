"""Nothing of a step waits for its device; what does is counted.

Guards: .item() and its relatives, branches on tensors, numbers sent to a device from unpinned memory, numbers of the
host among the device's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from no_sync import NeverReads, WholePlan, forbid_waits
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep.hyper import adam_group, groups_on
from halfstep.ops import backend
from halfstep.outcomes import HostCopy

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
DEVICES = ["cpu", "meta"]
pytestmark = pytest.mark.filterwarnings("ignore:.*plain PyTorch runs on meta")


# ---- the detector ---------------------------------------------------------------------------------------------------
ONE, MASK = torch.ones(1), torch.ones(3, dtype=torch.bool)
WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: ONE.item(), "tolist": lambda: MASK.tolist(), "float": lambda: float(ONE), "int": lambda: int(ONE),
    "bool": lambda: bool(ONE), "if": lambda: 1 if ONE else 0, "index": lambda: [0, 1][torch.tensor(1)],
    "complex": lambda: complex(ONE), "numpy": lambda: ONE.numpy(), "np.asarray": lambda: np.asarray(ONE),
    "cpu": lambda: ONE.cpu(), "to": lambda: ONE.to("cpu"), "to, by name": lambda: ONE.to(device="cpu"),
    "format": lambda: f"{ONE[0]:.2f}", "repr": lambda: repr(ONE), "Parameter": lambda: float(Parameter(ONE, False)),
    "==": lambda: ONE in [torch.zeros(1)], "any": lambda: any(MASK), "max": lambda: max(MASK),
    "is_nonzero": lambda: torch.is_nonzero(ONE), "equal": lambda: torch.equal(ONE, ONE.clone()),
    "mask": lambda: MASK[MASK], "masked write": lambda: torch.ones(3).index_put_((MASK,), torch.zeros(3)),
    "nonzero": lambda: MASK.nonzero(), "where": lambda: torch.where(MASK), "unique": lambda: ONE.unique(),
    "allclose": lambda: torch.allclose(ONE, ONE), "torch.tensor": lambda: torch.tensor(1.0, device=ONE.device),
    "as_tensor": lambda: torch.as_tensor(1.0, device=ONE.device), "synchronize": lambda: HostCopy(ONE).values(),
}  # fmt: skip


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_every_way_to_wait_is_found(wait):
    wait()
    with pytest.raises(AssertionError), forbid_waits():
        wait()
    wait()  # the methods are back


@pytest.mark.parametrize(
    "wait",
    [
        lambda on_host, away: away.copy_(on_host),
        lambda on_host, away: on_host.to(away.device),
        lambda on_host, away: on_host.to(away.device, non_blocking=True),
        lambda on_host, away: torch.tensor(1.0, device=away.device),
    ],
)
def test_what_is_sent_to_a_device_is_found(wait):
    with pytest.raises(AssertionError), forbid_waits("meta"):
        wait(torch.ones(1), torch.ones(1, device="meta"))


def test_a_caught_wait_counts():
    def swallow() -> None:
        with pytest.raises(AssertionError):
            ONE.item()

    with pytest.raises(AssertionError, match="item"), forbid_waits():
        swallow()


def test_what_does_not_wait_is_let_through():
    with forbid_waits("meta"):
        on_host, away = torch.tensor(2.0), torch.zeros((), device="meta")
        assert on_host.item() == 2
        away.mul_(on_host).add_(1.0).copy_(torch.full((), 3.0, device="meta"))
        HostCopy(away)
    with forbid_waits():
        ONE.to(ONE.device).to(torch.float64).to("cpu", non_blocking=True)


# ---- the public calls -----------------------------------------------------------------------------------------------
def params(device: str, dtype: torch.dtype = BFLOAT16) -> list[Parameter]:
    shapes = [(5,), (3, 4), (0,), ()]
    return [Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in shapes]


def give_grads(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)


def steps(
    device: str, dtype: torch.dtype = BFLOAT16, groups: list[dict[str, Any]] | None = None, **options: Any
) -> None:
    given = [{"params": params(device, dtype), **group} for group in groups or [{}]]
    for group in given:
        if isinstance(group.get("lr"), Tensor):
            group["lr"] = group["lr"].to(device)
    with forbid_waits(device):
        optimizer = hs.AdamW(given, **options)
        for _ in range(3):
            give_grads(optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step(lambda: None)
            optimizer.zero_grad()
            optimizer.step()  # without a gradient


RATES = [
    {"lr": torch.tensor(0.1)},
    {"lr": torch.tensor([0.1], dtype=torch.float64)},
    {"lr": torch.tensor(1)},
    {"lr": torch.tensor(0.1, dtype=FLOAT16)},
    {"lr": 0.1},
]
STEPS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": FLOAT32},
    "bfloat16": {},
    "float16": {"dtype": FLOAT16},
    "split": {"master": "split"},
    "amsgrad, maximize": {"amsgrad": True, "maximize": True},
    "stochastic": {"master": None, "stochastic_rounding": True, "state_dtype": BFLOAT16},
    "clipping": {"max_grad_norm": 1.0},
    "clipping float32": {"dtype": FLOAT32, "max_grad_norm": 1},
    "capturable, rates on the device": {"groups": RATES, "capturable": True},
    "nothing looked for": {"skip_nonfinite": False, "on_stale": "ignore"},
}


@pytest.fixture(params=[True, False], ids=["a step as one", "two halves"])
def never_reads(request):
    with backend.override(NeverReads(whole=request.param)) as counts:
        yield counts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_steps(never_reads, device, options):
    steps(device, **options)
    assert never_reads["AdamPlan.run"] + never_reads["AdamPlan.update"] == 6


@pytest.mark.parametrize("device", DEVICES)
def test_unusual_layouts(never_reads, device):
    """Staged parameters; gradients in another order, of another dtype or expanded, which are copied."""
    with forbid_waits(device):
        base = torch.ones(6, 8, device=device)
        weights = [Parameter(base[:, ::2]), Parameter(torch.ones(4, 6, device=device).t())]
        optimizer = hs.AdamW(weights, max_grad_norm=1.0)
        for grads in ([torch.ones(4, 6, device=device).t(), torch.ones((), device=device).expand(6, 4)], [None, None]):
            for p, grad in zip(weights, grads, strict=True):
                p.grad = grad
            optimizer.step()
            optimizer.step()
    # the norm is over logical elements, so the first pass reads the gradients as they were, in a call of its own
    assert (never_reads["AdamPlan.run"], never_reads["grad_stats"], never_reads["AdamPlan.update"]) == (0, 2, 2)


def scaled(scaler: hs.LossScaler, optimizer: torch.optim.Optimizer, unscale: bool) -> Tensor:
    loss = torch.stack([p.float().sum() for group in optimizer.param_groups for p in group["params"]]).sum()
    scaler.scale([loss, loss])
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    return scaler.step(optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"hysteresis": 2, "growth_interval": 2}, {"growth_factor": 1.0, "backoff_factor": 1.0}, {"enabled": False}],
    ids=str,
)
@pytest.mark.parametrize("where", [None, "device", "cpu"])
def test_the_loss_scaler(never_reads, device, unscale, options, where):
    home = device if where == "device" else where
    with forbid_waits(device):
        optimizer, scaler = hs.AdamW(params(device, FLOAT16)), hs.LossScaler(home, **options)
        second = hs.AdamW(params(device, FLOAT16))
        for _ in range(3):
            for one in (optimizer, second):
                assert scaled(scaler, one, unscale).device.type == device
            if device == "meta" and where == "cpu":
                return  # the scale learns on the host, for which it waits
            scaler.update()
        scaled(scaler, optimizer, unscale)
        scaler.update(512.0)
        scaled(scaler, optimizer, unscale)
        scaler.update(torch.full((1,), 256.0, device=device))


def test_a_scale_given_on_the_device():
    scaler = hs.LossScaler(max_scale=1000.0, init_scale=100.0)
    scaler.scale(torch.ones(()))
    with forbid_waits():
        scaler.update(torch.tensor(5000.0, dtype=torch.float64))
    assert scaler.get_scale() == 1000
    with forbid_waits():
        scaler.update(torch.tensor([0.1]))
    assert scaler.get_scale() == 1
    with forbid_waits():
        scaler.update(torch.tensor(float("nan")))
    assert scaler.get_scale() == 1
    assert scaler.state_dict()["scale"] == 1


@pytest.mark.parametrize("unscale", [False, True])
def test_other_optimizers_cost_one_wait(unscale):
    """For the answer alone, which comes right behind the unscaling, not for all that is queued."""
    optimizer, scaler = torch.optim.SGD(params("meta", FLOAT32), lr=0.1, foreach=False), hs.LossScaler()
    with backend.override(NeverReads()), forbid_waits("meta", but_for=2):
        for _ in range(2):
            scaled(scaler, optimizer, unscale)
            scaler.update()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FLOAT32, torch.float64, torch.bool, torch.int32])
@pytest.mark.parametrize("home", ["device", "host"])
def test_what_another_scaler_hands_over(never_reads, device, dtype, home):
    """As torch.amp.GradScaler does, whose tensors may be on the host."""
    where = device if home == "device" else "cpu"
    with forbid_waits(device):
        optimizer = hs.AdamW(params(device, FLOAT16))
        for _ in range(2):
            give_grads(optimizer)
            optimizer.grad_scale = torch.full((1,), 4.0, device=where)
            optimizer.found_inf = torch.zeros(1, dtype=dtype, device=where)
            optimizer.step()


def test_grad_scaler(never_reads):
    optimizer, scaler = hs.AdamW(params("cpu", FLOAT32)), torch.amp.GradScaler("cpu", init_scale=4.0)
    with forbid_waits():
        for _ in range(2):
            give_grads(optimizer)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()


FUNCTIONS: dict[str, Callable[[list[Tensor]], Any]] = {
    "grad_stats": lambda x: hs.grad_stats(x),
    "grad_stats, a number": lambda x: hs.grad_stats(x, 4.0),
    "grad_stats, a tensor": lambda x: hs.grad_stats(x, x[0].new_ones(1, dtype=torch.float64)),
    "grad_stats, the host's": lambda x: hs.grad_stats(x, torch.tensor(4.0)),
    "unscale_": lambda x: hs.unscale_(x, 0.5, x[0].new_zeros(())),
    "unscale_, a tensor": lambda x: hs.unscale_(x, x[0].new_ones(()), x[0].new_zeros(1, dtype=torch.float64)),
    "unscale_, the host's": lambda x: hs.unscale_(x, torch.tensor(0.5), x[0].new_zeros(())),
    "unscale_, nothing": lambda x: hs.unscale_([], 0.5, x[0].new_zeros(())),
    "clip_grad_norm_": lambda x: hs.clip_grad_norm_(_with_grads(x), 1.0),
    "l2_norms": lambda x: hs.l2_norms(x),
    "accumulate_": lambda x: hs.accumulate_([t.float() for t in x], x),
    "cast_": lambda x: hs.cast_([t.bfloat16() for t in x], x),
    "cast_, stochastic": lambda x: hs.cast_([t.half() for t in x], x, rounding="stochastic", seed=1),
}


def _with_grads(tensors: list[Tensor]) -> list[Tensor]:
    found = [Parameter(torch.empty_like(t)) for t in tensors]
    for p, t in zip(found, tensors, strict=True):
        p.grad = t
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_on_lists(never_reads, device, call):
    plain = [torch.ones(5, device=device), torch.ones(0, 3, device=device), torch.ones((), device=device)]
    with forbid_waits(device):
        for tensors in (plain, [*plain, torch.ones(4, 6, device=device)[:, ::2], torch.ones(3, 2, device=device).t()]):
            result = call(tensors)
            for t in result if isinstance(result, tuple) else () if result is None else (result,):
                assert t.device.type == device


def test_clipping_on_a_device_always_writes():
    """The host does not know the norm. On the CPU it does, and gradients below are left alone."""
    with backend.override(NeverReads()) as counts:
        hs.clip_grad_norm_(_with_grads([torch.ones(3)]), 1.0)
        assert counts["unscale_"] == 0
        with forbid_waits():
            hs.clip_grad_norm_(_with_grads([torch.ones(3)]), 1.0)
        assert counts["unscale_"] == 1


def test_a_rate_on_the_device_is_the_one_of_the_group():
    """Filled in place, perhaps between two replays, the next step must see it."""
    seen: list[Any] = []

    class Recording(WholePlan):
        def run(self, groups: Any, *rest: Any) -> Any:
            seen.append(groups)
            return super().run(groups, *rest)

    recording = NeverReads()
    recording.AdamPlan = Recording
    with backend.override(recording), forbid_waits():
        optimizer = hs.AdamW([{"params": params("cpu")}, {"params": params("cpu"), "lr": 0.5}], lr=torch.tensor([0.25]))
        for _ in range(2):
            give_grads(optimizer)
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.125
        optimizer.step()
        optimizer.param_groups[0]["lr"] = lr = torch.tensor(2.0)
        optimizer.step()
    rates = [groups[0].lr for groups in seen]
    assert rates[0].data_ptr() == rates[1].data_ptr()
    assert rates[2] == 0.125
    assert rates[3].data_ptr() == lr.data_ptr()
    assert {groups[1].lr for groups in seen} == {0.5}


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_rate_that_the_host_reads_is_checked(value):
    """One that lies on a device, for parameters on the host."""
    group = {"eps": 0.0, "weight_decay": 0.0, "betas": (0, 0), "decoupled_weight_decay": False, "maximize": False}
    with forbid_waits():
        given = adam_group({**group, "lr": torch.tensor(value)}, 0)
        assert groups_on([given], torch.device("cpu"))[0].lr is given.lr
    with pytest.raises(ValueError, match="parameter group 0: lr="):
        groups_on([given], torch.device("cpu"))
    assert groups_on([given._replace(lr=torch.tensor(0.5))], torch.device("cpu"))[0].lr == 0.5


def test_a_flag_too_small_for_float32_still_skips():
    optimizer = hs.AdamW(params("cpu", FLOAT32))
    give_grads(optimizer)
    optimizer.found_inf = torch.tensor(1e-300, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="found_inf was set"):
        optimizer.step()
    assert optimizer.skipped
