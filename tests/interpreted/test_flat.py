"""The entry points for one tensor: the bits of the native kernels, guarded buffers, and what they refuse."""

from __future__ import annotations

import re

import pytest
import torch
from adam_rows import WEIGHT_IDS, WEIGHTS, Case, assert_same_step, run
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS, awkward
from bits import assert_same_bits
from canary import Guarded
from optimizer_cases import GROUPS, awkward_cases

from halfstep.ops import native_cpu
from halfstep.reference.step import StepInputs
from halfstep.triton_kernels import flat

SIZES = [0, 1, 1027, 20_001]  # less than a tile, tiles and a rest, more than one program
STATES = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")


def stepped(case: Case, inputs: StepInputs) -> tuple[dict[str, torch.Tensor], int]:
    """The row's tensors after one step, each in a guarded buffer, and how many elements healed."""
    group = GROUPS[case.row.group]
    held = {name: Guarded(t) for name in STATES if (t := getattr(case.row, name)) is not None}
    tensors = {name: guarded.tensor for name, guarded in held.items()}
    must = [tensors.pop(name) for name in STATES[:3]]
    assert isinstance(group.lr, float)
    healed = flat.adam_(
        must[0], case.grad, must[1], must[2], t=int(case.row.step) + 1, lr=group.lr, betas=(group.beta1, group.beta2),
        eps=group.eps, weight_decay=group.weight_decay, decoupled=group.decoupled, maximize=group.maximize, **tensors,
        scale=inputs.scale, found_inf=inputs.found_inf, heal=inputs.heal, stochastic=inputs.stochastic_weight,
        seed=inputs.seed, param_id=case.row.param_id, first_index=case.row.first_index,
    )  # fmt: skip
    for name, guarded in held.items():
        guarded.assert_intact(f"{name} of {case.name}")
    return {name: guarded.tensor for name, guarded in held.items()}, int(healed)


@pytest.mark.parametrize("weight", WEIGHTS, ids=WEIGHT_IDS)
@pytest.mark.parametrize("state", [FLOAT32, *(pytest.param(s, marks=pytest.mark.newest) for s in FLOATS[1:])], ids=str)
def test_adam(weight, state):
    """Three of the awkward rows in each mode, others for each kind: the share of a tensor is the optimizers' own."""
    offset = WEIGHTS.index(weight) + FLOATS.index(state)
    for first, (stochastic, heal) in enumerate([(True, False), (False, True)]):
        cases = awkward_cases(weight, state)[(offset + 4 * first) % 8 :: 8]
        inputs = StepInputs(scale=torch.tensor(1.5), seed=2**32 - 5, stochastic_weight=stochastic, heal=heal)
        expected = run(native_cpu, cases, GROUPS, inputs)
        results = [stepped(case, inputs) for case in cases]
        rows = [
            case.row._replace(step=case.row.step + 1, **tensors)
            for case, (tensors, _) in zip(cases, results, strict=True)
        ]
        healed = torch.tensor(sum(count for _, count in results))
        got = expected._replace(rows=rows, result=expected.result._replace(healed=healed))
        assert_same_step(got, expected, cases, (stochastic, heal))


def test_adam_changes_nothing_where_somebody_found_an_infinity():
    case = awkward_cases(WEIGHTS[2], BFLOAT16)[5]
    tensors, healed = stepped(case, StepInputs(found_inf=torch.tensor(1.0)))
    assert healed == 0
    for name, tensor in tensors.items():
        assert_same_bits(tensor, getattr(case.row, name), name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unscale(dtype):
    for size in SIZES:
        for factor in (0.37, 3e4):
            guarded, expected = Guarded(awkward(size, dtype, size).nan_to_num(0, 1, 1)), awkward(size, dtype, size)
            expected = expected.nan_to_num(0, 1, 1)
            found = torch.zeros(())
            flat.unscale_(guarded.tensor, torch.tensor(factor), found)
            bad = native_cpu.unscale_([expected], torch.tensor(factor)) >= 0
            assert_same_bits(guarded.tensor, expected, f"{size} times {factor}")
            assert_same_bits(found, bad.float(), f"found_inf of {size} times {factor}")
            guarded.assert_intact(f"{size}")
    kept = torch.ones(())
    flat.unscale_(torch.ones(5, dtype=dtype), torch.tensor(1.0), kept)
    assert kept == 1, "who found an infinity before is not contradicted"


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dst", FLOATS, ids=str)
@pytest.mark.parametrize("src", FLOATS, ids=str)
def test_cast(dst, src, stochastic):
    for size in SIZES:
        source = awkward(size, src, size)
        guarded, expected = Guarded(torch.zeros(size, dtype=dst)), torch.zeros(size, dtype=dst)
        flat.cast_(guarded.tensor, source, stochastic=stochastic, seed=2**32 - 1)
        native_cpu.cast_([expected], [source], stochastic=stochastic, seed=2**32 - 1)
        assert_same_bits(guarded.tensor, expected, f"{size}")
        guarded.assert_intact(f"{size}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [None, pytest.param(3.0, marks=pytest.mark.newest)])
def test_sum_of_squares(dtype, scale):
    at = None if scale is None else torch.tensor(scale)
    for size in [*SIZES[:3], 65536, 70_001]:  # and whole chunks
        x = awkward(size, dtype, size)
        finite = x.nan_to_num(1.0, 1.0, 1.0) if size != 1027 else x
        assert_same_bits(flat.sum_of_squares(finite, at), native_cpu.grad_stats([finite], at)[0], f"{size}")


def test_autograd_hears_of_what_is_written():
    written = [torch.ones(4) for _ in range(3)]
    flat.adam_(written[0], torch.ones(4), *written[1:], t=1, lr=0.1)
    flat.unscale_(written[1], torch.tensor(1.0), torch.zeros(()))
    flat.cast_(written[2], torch.ones(4))
    assert [t._version for t in written] == [1, 2, 2]


@pytest.mark.newest
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_calls_them_between_graphs():
    """Or graphs would hold kernels that write where no graph sees it."""

    def step(weights, grads, exp_avg, exp_avg_sq, copy, found):
        flat.unscale_(grads, found + 0.5, found)
        flat.adam_(weights, grads, exp_avg, exp_avg_sq, t=1, lr=0.1)
        flat.cast_(copy, weights)
        return flat.sum_of_squares(copy) * 2

    runs = []
    for function in (step, torch.compile(step, backend="eager")):
        tensors = [*four(), torch.zeros(6, dtype=BFLOAT16), torch.zeros(())]
        runs.append([function(*tensors), *tensors])
    for mine, theirs in zip(*runs, strict=True):
        assert_same_bits(mine, theirs, "compiled")
    (reason,) = torch._dynamo.utils.counters["graph_break"]  # nothing else ended a graph
    assert "call them outside of the compiled function" in reason
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call them outside of the compiled function"):
        torch.compile(flat.cast_, backend="eager", fullgraph=True)(torch.zeros(6), torch.ones(6))


def test_the_readme_calls_them_right(root):
    example = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), re.DOTALL)[-1]
    weights, master = awkward(300, BFLOAT16, 1), awkward(300, FLOAT32, 1)
    given = {"weights": weights, "master": master, "grads": torch.ones(300, dtype=BFLOAT16)}
    given |= {"exp_avg": torch.zeros(300), "exp_avg_sq": torch.zeros(300), "bf16_copy": torch.empty_like(weights)}
    exec(example, given)
    assert given["norm"] == 300**0.5
    assert given["healed"].shape == ()
    assert_same_bits(given["bf16_copy"], given["weights"], "a bfloat16 weight, rounded to itself")


def four(dtype: torch.dtype = FLOAT32, size: int = 6) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=dtype) for _ in range(4)]


def adam(*tensors: torch.Tensor, **options: object) -> None:
    flat.adam_(*tensors, **{"t": 1, "lr": 0.1, **options})


REFUSED = [
    (
        lambda: adam(*four(torch.float64)),
        TypeError,
        "param: expected a float32, bfloat16 or float16 tensor, got torch.f",
    ),
    (lambda: adam(*four()[:3], torch.ones(7)), ValueError, "exp_avg_sq has 7 elements on cpu, param has 6 on cpu"),
    (lambda: adam(torch.ones(2, 6).t()[:3], *four()[:3]), ValueError, "param is not contiguous"),
    (lambda: adam(*four()[:3], torch.ones(6, dtype=BFLOAT16)), TypeError, "exp_avg_sq, max_exp_avg_sq: expected one"),
    (lambda: adam(*four(), t=0), ValueError, "t=0: expected an integer from 1 to 9223372036854775807"),
    (lambda: adam(*four(), seed=-1), ValueError, "seed=-1: expected an integer from 0 to 4294967295"),
    (lambda: adam(*four(), t=torch.tensor(1)), TypeError, "t: expected an int, got Tensor"),
    (
        lambda: adam(*four(), param_id=2**32),
        ValueError,
        "param_id=4294967296: expected an integer from 0 to 4294967295",
    ),
    (lambda: adam(*four(), first_index=-4), ValueError, "first_index=-4: expected an integer from 0 to 92"),
    (lambda: adam(*four(), first_index=2**63 - 6), ValueError, "first_index=9223372036854775802: expected an integer"),
    (
        lambda: adam(*four(), lr=torch.tensor(0.1)),
        TypeError,
        r"lr: expected a number of the host, .*; pass float\(lr\)",
    ),
    (lambda: adam(*four(), eps="1"), TypeError, "eps: expected a number of the host, got str"),
    (lambda: adam(*four(), lr=float("nan")), ValueError, "lr=nan: expected a finite number >= 0"),
    (lambda: adam(*four(), betas=(0.9, 1.0)), ValueError, r"betas\[1\]=1.0: expected a number in \[0, 1\)"),
    (lambda: adam(*four(), betas=(0.9,)), ValueError, r"betas=\(0.9,\): expected two numbers"),
    (lambda: adam(*four(BFLOAT16), master=[1.0]), TypeError, "master: expected a tensor or None, got list"),
    (lambda: adam(*four(), master=torch.ones(6)), TypeError, "master: torch.float32 for a param of torch.float32"),
    (
        lambda: adam(*four(FLOAT16), master=torch.ones(6, dtype=torch.int16)),
        TypeError,
        "master: torch.int16 for a param of torch.float16; expected float32",
    ),
    (lambda: adam(*four(BFLOAT16), master=torch.ones(5)), ValueError, "master has 5 elements on cpu, param has 6"),
    (lambda: adam(*four(), scale=torch.ones(2)), ValueError, r"scale: expected one float32 number on cpu, got \(2,\)"),
    (
        lambda: adam(*four(), scale=2.0),
        TypeError,
        r"scale: expected a float32 tensor of one element, got float; pass torch.full\(\(\), scale, device='cpu'\)",
    ),
    (lambda: flat.cast_(torch.ones(3), torch.ones(3), seed=1.5), TypeError, "seed: expected an int, got float"),
    (lambda: flat.cast_(torch.ones(3), torch.ones(4)), ValueError, "src has 4 elements on cpu, dst has 3"),
    (lambda: flat.cast_(torch.ones(3), [1.0]), TypeError, "src: expected a float32, .* tensor, got list"),
    (lambda: flat.unscale_(torch.ones(3), torch.ones((), dtype=FLOAT16), torch.zeros(())), ValueError, "factor: exp"),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_is_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_tensors_of_the_host_are_refused_where_nothing_is_interpreted(monkeypatch):
    monkeypatch.setattr(flat, "INTERPRETED", False)
    with pytest.raises(ValueError, match="x is on cpu: Triton kernels run on GPUs; use halfstep's own functions"):
        flat.sum_of_squares(torch.ones(3))
