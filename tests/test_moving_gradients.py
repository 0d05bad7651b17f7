"""Gradients of any kind at every step: read from C++ and from Python, both see what they are.

Guards: a step through a pointer, size, dtype or sign of the step before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, ordinary
from memoryless import SHAPES, forgetful, grads_for, inside_a_buffer, optimizer_of, step_both, strided, transposed
from optimizer_runs import assert_same, held, params_of
from torch import Tensor

pytestmark = pytest.mark.usefixtures("either_reader")


def negated(grad: Tensor) -> Tensor:
    return torch._neg_view(-grad)


def imaginary_part(grad: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(grad, dtype=FLOAT32), -grad.float()).conj().imag


def of_a_class(grad: Tensor) -> Tensor:
    class Grad(torch.Tensor):
        pass

    return grad.as_subclass(Grad)


def with_a_graph(grad: Tensor) -> Tensor:
    return grad.clone().requires_grad_() * 1


def shared(grad: Tensor) -> Tensor:
    return torch._lazy_clone(grad)


GRADS: list[Callable[[Tensor], Tensor]] = [
    Tensor.clone, inside_a_buffer, strided, transposed, negated, imaginary_part, of_a_class, with_a_graph, shared
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("make", GRADS, ids=lambda make: make.__name__)
def test_gradients_of_every_kind(make, shape):
    """Alternating with plain ones, and many times in a row."""
    optimizer = optimizer_of(ordinary((5,), FLOAT32, 0), ordinary(shape, FLOAT32, 1))
    for t, special in enumerate([False, False, True, True, False, True, False, False]):
        plain = grads_for(optimizer, t)
        given = [make(g.clone()) if special else g.clone() for g in plain]
        step_both(optimizer, given, plain)


def test_zeros_without_memory():
    optimizer = optimizer_of(ordinary((4, 4), FLOAT32, 0), ordinary((3,), FLOAT32, 1), max_grad_norm=1.0)
    for t in range(6):
        plain = grads_for(optimizer, t)
        if t % 3:
            plain[1] = torch.zeros(3)
        given = [plain[0].clone(), torch._efficientzerotensor(3) if t % 3 else plain[1].clone()]
        step_both(optimizer, given, plain)


@pytest.mark.parametrize("weight", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_gradients_of_other_dtypes(weight):
    optimizer = optimizer_of(ordinary((4, 4), weight, 0), ordinary((3,), weight, 1))
    for p in params_of(optimizer):
        p.grad_dtype = None  # any
    for t, dtype in enumerate([weight, weight, FLOAT32, BFLOAT16, FLOAT16, FLOAT16, weight, weight]):
        grads = [g.to(dtype) for g in grads_for(optimizer, t)]
        other = forgetful(optimizer)
        for p, q, grad in zip(params_of(optimizer), params_of(other), grads, strict=True):
            q.grad_dtype = None
            p.grad, q.grad = grad.clone(), grad.clone()
        optimizer.step()
        other.step()
        assert_same(held(optimizer), held(other))


def test_gradients_that_come_and_go():
    """Every pattern of four parameters, in an order where most follow another, far more than there are tables."""
    optimizer = optimizer_of(*(ordinary((3, i + 1), FLOAT32, i) for i in range(4)))
    patterns = list(itertools.product([True, False], repeat=4))
    for t in range(64):
        present = patterns[(t * 7 + t // 16) % 16]
        grads = [g if there else None for g, there in zip(grads_for(optimizer, t), present, strict=True)]
        step_both(optimizer, grads)
        step_both(optimizer, grads)
        if t % 5 == 0:  # one that has no gradient moves meanwhile
            for p, there in zip(params_of(optimizer), present, strict=True):
                if not there:
                    p.data = p.data.clone()


@pytest.mark.parametrize("bad", ["sparse", "float64"])
def test_gradients_that_are_refused_every_time(bad):
    optimizer = optimizer_of(torch.ones(4, 4))
    (p,) = params_of(optimizer)
    p.grad_dtype = None
    for t in range(3):
        step_both(optimizer, grads_for(optimizer, t))
    before = held(optimizer)
    for _ in range(3):
        p.grad = torch.ones(4, 4).to_sparse() if bad == "sparse" else torch.ones(4, 4).double()
        with pytest.raises(TypeError, match="the gradient of parameter 0 of group 0"):
            optimizer.step()
        assert_same(held(optimizer), before)
    step_both(optimizer, grads_for(optimizer, 5))
