"""A Triton plan's gradients, read from C++ or from Python: at each step its kernels find them where they are.

No kernel runs: what would be launched is looked at. Guards: a step through the addresses or dtypes of the step before.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT32
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep.ops import backend, devices, native_cpu, triton_gpu, triton_plan
from halfstep.ops.layout import PlainList
from halfstep.ops.triton_gpu import TritonBackend
from halfstep.ops.triton_tables import Words

pytest.importorskip("triton", reason="Triton is not installed")
CODES = {FLOAT32: 0, BFLOAT16: 1}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Of each pass that would be launched: the addresses of its gradients, and the dtypes it is launched for."""
    launch, seen = triton_plan.kernels(), []

    def grad_stats(grads: Tensor, numels: Tensor, firsts: Tensor, tasks: Any, *_: Any) -> None:
        seen.append((grads.tolist(), [dtype for (dtype,), _ in tasks]))

    def update(rows: Tensor, grads: Tensor, n: int, tasks: Any, *_: Any, lanes: int) -> None:
        seen.append((grads.tolist(), [pattern[1] for pattern, _ in tasks]))

    def prologue(*tensors: Any, lanes: int) -> None:
        tensors[10].zero_()  # the results: nothing is skipped

    for function in (grad_stats, update, prologue):
        monkeypatch.setattr(launch, function.__name__, function)
    return seen


@pytest.fixture(params=["C++", "Python"])
def looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[int]]:
    """Who reads the gradients, and a list that grows with every closer look that Python takes at them."""
    if request.param == "Python":

        def missing() -> Any:
            raise ImportError

        monkeypatch.setattr(native_cpu, "_native", missing)
    else:
        pytest.importorskip("halfstep._cpu", reason="it is what reads")
    looks: list[int] = []
    set_grads = triton_plan.AdamPlan.set_grads

    def looking(plan: Any, grads: Any) -> None:
        looks.append(len(grads))
        set_grads(plan, grads)

    monkeypatch.setattr(triton_plan.AdamPlan, "set_grads", looking)
    return request.param, looks


def test_every_step_finds_its_gradients(passes: Any, looked_at: tuple[str, list[int]]) -> None:
    params = [Parameter(torch.ones(n, dtype=BFLOAT16)) for n in (3, 40, 1, 7)]
    for p in params:
        p.grad_dtype = None  # any
        p.grad = torch.ones_like(p)
    optimizer = hs.AdamW(params, max_grad_norm=1.0)
    others = [torch.ones_like(p) for p in params]

    def moved() -> None:
        for p, other in zip(params, others, strict=True):
            p.grad = other

    def other_dtype() -> None:
        params[1].grad = torch.ones(40)

    def same_place_other_dtype() -> None:
        grad = params[1].grad
        assert grad is not None
        params[1].grad = grad.view(BFLOAT16)[:40]

    def one_less() -> None:
        params[2].grad = None

    def odd() -> None:
        class Grad(torch.Tensor):
            pass

        params[0].grad = torch.ones(3, dtype=BFLOAT16).as_subclass(Grad)

    def nothing() -> None:
        pass

    reader, looks = looked_at
    usual = [nothing, nothing, moved, other_dtype, nothing, same_place_other_dtype, moved]
    with backend.override(TritonBackend(torch.device("cpu"))):
        for change in [*usual, one_less, nothing, moved, odd, moved, nothing]:
            change()
            before = len(looks)
            optimizer.step()
            active = [p.grad for p in params if p.grad is not None]
            where = [g.data_ptr() for g in active]
            dtypes = list(dict.fromkeys(CODES[g.dtype] for g in active))
            assert passes[-2:] == [(where, dtypes), (where, dtypes)], change.__name__
            if reader == "Python":
                assert len(looks) == before + 1, change.__name__
            elif change in usual and len(passes) > 2:
                assert len(looks) == before, change.__name__
    assert len(passes) == 2 * 13


def test_lists_are_read_alike() -> None:
    """From C++ and from Python: views, scalars and empty tensors of several dtypes."""
    pytest.importorskip("halfstep._cpu", reason="it is what reads")
    base = torch.ones(4, 6)
    tensors = [base, base[1:], base[0, 0], torch.zeros(3, 0, dtype=BFLOAT16), torch.ones(5, dtype=torch.float16)]
    read = TritonBackend(torch.device("cpu")).read_list(tensors)
    assert triton_gpu._columns(PlainList(tensors, read)) == triton_gpu._columns(tensors)
    assert triton_gpu._columns(tensors)[1:] == ([24, 18, 1, 0, 5], [0, 0, 0, 1, 2])


@pytest.mark.parametrize("by_cpp", [True, False])
def test_lists_share_a_table_only_if_they_are_the_same(by_cpp: bool) -> None:
    pytest.importorskip("halfstep._cpu", reason="it is what reads")
    theirs = TritonBackend(torch.device("cpu"))

    def table(*tensors: Tensor) -> Any:
        given = PlainList(tensors, theirs.read_list([*tensors])) if by_cpp else list(tensors)
        return theirs._table([given], 8)

    a, b = torch.ones(4, 2), torch.ones(4, 2)
    first = table(a, b)
    assert table(a, b) is first
    assert table(a.view(8), b) is first
    others = [table(b, a), table(a), table(a, b[1:]), table(a, b[:2]), table(a, b.view(BFLOAT16).view(-1)[:8])]
    assert len({id(one) for one in [first, *others]}) == 6
    assert table(a, b) is first


def test_a_refused_gradient_is_not_read(passes: Any, looked_at: tuple[str, list[int]]) -> None:
    """Nor is what lay there before: no kernel is launched."""
    p = Parameter(torch.ones(4))
    p.grad_dtype = None
    optimizer = hs.AdamW([p])
    with backend.override(TritonBackend(torch.device("cpu"))):
        for _ in range(2):
            p.grad = torch.ones(4)
            optimizer.step()
        launched = len(passes)
        p.grad = torch.ones(4).double()
        for _ in range(2):
            with pytest.raises(TypeError, match="the gradient of parameter 0 of group 0"):
                optimizer.step()
        assert len(passes) == launched
        p.grad = torch.ones(4)
        optimizer.step()
    assert passes[-1] == ([p.grad.data_ptr()], [0])


def test_no_table_is_freed_in_a_capture(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph of backward and step makes gradients of its own: their table takes the place of an eager step's."""
    made: list[weakref.ref[Words]] = []

    def recorded(*args: Any) -> Words:
        words = Words(*args)
        made.append(weakref.ref(words))
        return words

    monkeypatch.setattr(triton_plan, "Words", recorded)
    p = Parameter(torch.ones(4))
    optimizer = hs.AdamW([p], capturable=True)
    with backend.override(TritonBackend(torch.device("cpu"))):
        for capturing, alive in (
            (False, [True, True]),
            (False, [True, False, True]),
            (True, [True, False, True, True]),
        ):
            monkeypatch.setattr(devices, "is_capturing", lambda device, capturing=capturing: capturing)
            p.grad = torch.ones(4) if p.grad is None else p.grad.clone()
            optimizer.step()
            assert [ref() is not None for ref in made] == alive
