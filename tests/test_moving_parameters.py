"""Parameters and groups that change between two steps in any way: read from C++ and from Python, both see it.

Guards: a step through a pointer, size, dtype or sign of the step before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, ordinary
from memoryless import SHAPES, forgetful, grads_for, inside_a_buffer, optimizer_of, step_both, strided, transposed
from optimizer_runs import assert_same, held, params_of
from torch.nn import Parameter

import halfstep as hs

pytestmark = pytest.mark.usefixtures("either_reader")


def moved(p: Parameter) -> None:
    p.data = p.data.clone()


def into_a_buffer(p: Parameter) -> None:
    p.data = inside_a_buffer(p.data)


def spread_out(p: Parameter) -> None:
    p.data = strided(p.data)


def turned(p: Parameter) -> None:
    p.data = transposed(p.data)


def turned_in_place(p: Parameter) -> None:
    """No pointer, size or dtype changes, only the strides (of a square matrix)."""
    p.data = p.data.t() if p.ndim == 2 and p.numel() else p.data


def seen_negated(p: Parameter) -> None:
    """The same memory, whose numbers now count with the other sign."""
    p.data = torch._neg_view(p.data)


def in_shared_memory(p: Parameter) -> None:
    p.data.share_memory_()


def another_storage(p: Parameter) -> None:
    p.data.set_(p.data.clone())


def swapped(p: Parameter) -> None:
    p.grad = None
    torch.utils.swap_tensors(p, Parameter(p.detach() + 1))


def lazily_cloned(p: Parameter) -> None:
    """What was copied lazily keeps its numbers: the step writes elsewhere."""
    p.snapshot, p.expected = torch._lazy_clone(p.data), p.detach() + 0  # type: ignore[attr-defined]


def frozen(p: Parameter) -> None:
    p.requires_grad_(not p.requires_grad)


MOVES: list[Callable[[Parameter], None]] = [
    moved, into_a_buffer, spread_out, turned, turned_in_place, seen_negated, in_shared_memory, another_storage, swapped,
    lazily_cloned, frozen,
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_parameters_that_move(move, shape):
    """One of three, the two around it stay; back and forth, with many quiet steps between."""
    optimizer = optimizer_of(torch.ones(3), ordinary(shape, FLOAT32, 1), torch.ones(3))
    p = params_of(optimizer)[1]
    for t in range(10):
        if t in (3, 4, 7):
            move(p)
        step_both(optimizer, grads_for(optimizer, t))
        if hasattr(p, "snapshot"):
            assert torch.equal(p.snapshot, p.expected)


@pytest.mark.parametrize("dtypes", [[FLOAT32, BFLOAT16], [BFLOAT16, FLOAT16]], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_parameters_that_change_their_dtype(dtypes, in_place):
    """Also where the memory and the number of elements stay (16-bit formats)."""
    optimizer = optimizer_of(
        torch.ones(4, 4, dtype=dtypes[0]), on_stale="ignore", master=None, stochastic_rounding=True
    )
    (p,) = params_of(optimizer)
    for t in range(8):
        if t % 3 == 2:
            dtype = dtypes[(t // 3 + 1) % 2]
            p.grad = None
            p.data = p.data.view(dtype) if in_place and p.element_size() == 2 == dtype.itemsize else p.data.to(dtype)
            p.grad_dtype = dtype
        other = forgetful(optimizer)
        for changed in (optimizer, other):
            (q,) = params_of(changed)
            q.grad_dtype = p.dtype
            q.grad = ordinary((4, 4), p.dtype, t)
            changed.step()
        assert_same(held(optimizer), held(other))


def test_a_parameter_without_memory_is_refused():
    optimizer = optimizer_of(torch.ones(3), torch.ones(3))
    for t in range(3):
        step_both(optimizer, grads_for(optimizer, t))
    p = params_of(optimizer)[1]
    size = p.untyped_storage().nbytes()
    p.untyped_storage().resize_(0)
    before = params_of(optimizer)[0].detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="lacks param"):
            optimizer.step()
    assert torch.equal(params_of(optimizer)[0], before)
    p.untyped_storage().resize_(size)
    with torch.no_grad():
        p.fill_(1.0)
    step_both(optimizer, grads_for(optimizer, 5))


@pytest.mark.parametrize("size", [3, 8])
def test_a_parameter_that_shrinks_or_grows_where_it_is(size):
    """The same pointer with fewer or more elements behind it: refused, and nothing beyond them is written."""
    buffer = torch.arange(10.0)
    optimizer = optimizer_of(torch.ones(2), buffer[:5])
    for t in range(3):
        step_both(optimizer, grads_for(optimizer, t))
    first, p = params_of(optimizer)
    p.data, p.grad = buffer[:size], None
    before, untouched = buffer.clone(), first.detach().clone()
    for _ in range(2):
        first.grad, p.grad = torch.ones(2), torch.ones(size)
        with pytest.raises(RuntimeError, match=rf"has shape \({size},\) but a state of shape \(5,\)"):
            optimizer.step()
        assert torch.equal(buffer, before)
        assert torch.equal(first, untouched)


def test_parameters_freed_and_made_anew_at_the_same_place():
    optimizer = optimizer_of(torch.ones(64), torch.ones(64))
    for t in range(30):
        params = optimizer.param_groups[0]["params"]
        gone = params.pop(0)
        optimizer.state.pop(gone, None)
        del gone
        gc.collect(0)
        params.append(Parameter(ordinary(64, FLOAT32, t)))
        step_both(optimizer, grads_for(optimizer, t))
        step_both(optimizer, grads_for(optimizer, t))
        assert int(optimizer.state[params[1]]["step"]) == 2


# ---- lists of parameters ---------------------------------------------------------------------------------------------
def test_groups_that_are_edited_in_place():
    a, b, c, d = (Parameter(ordinary((3, 3), FLOAT32, i)) for i in range(4))
    optimizer = hs.AdamW([{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.01}])
    groups = optimizer.param_groups
    edits: list[Callable[[], object]] = [
        lambda: groups[0]["params"].reverse(),
        lambda: groups[1]["params"].append(groups[0]["params"].pop()),
        lambda: groups[1]["params"].insert(0, groups[0]["params"].pop()),  # the first group is empty
        lambda: groups[0].update(params=(d, groups[1]["params"].pop())),  # a tuple
        lambda: groups[0].update(params=list(groups[0]["params"])),
        lambda: groups.reverse(),
        lambda: groups.append({**groups.pop(0), "weight_decay": 0.5}),
        lambda: groups[0].update(params=[*groups[0]["params"], *groups.pop(1)["params"]]),
        lambda: groups[0]["params"].sort(key=id),
        lambda: groups[0].update(amsgrad=True),
        lambda: groups[0].update(lr=0.5),
    ]
    for t, edit in enumerate(edits):
        for k in range(3):
            step_both(optimizer, grads_for(optimizer, 10 * t + k))
        edit()
    step_both(optimizer, grads_for(optimizer, 999))
    assert [int(optimizer.state[p]["step"]) for p in (a, b, c, d)] == [34, 34, 34, 22]
