"""Any shapes, strides, dtypes, offsets and list lengths through every public function: the reference's bits, and not a
byte beside the elements."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from bits import assert_all_same_bits
from canary import Guarded
from conditions import Conditions
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DTYPES, SHAPES, Layout, layouts
from optimizer_runs import held
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep.ops import backend, reference_torch

any_case = settings(max_examples=100, derandomize=True, deadline=None)


class Drawn(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    other_dtype: torch.dtype
    other: Layout  # of a second tensor of this shape; may be expanded

    def tensor(self, plain: bool, *, wild: bool = True) -> Guarded:
        return self._filled(self.layout, self.dtype, plain, wild)

    def second(self, plain: bool, *, wild: bool = True) -> Guarded:
        return self._filled(self.other, self.other_dtype, plain, wild)

    def gradient(self, plain: bool, t: int, *, wild: bool) -> Guarded:
        """Of the first tensor's dtype, with the second's layout; other values every step."""
        return self._filled(self.other._replace(seed=self.other.seed + t), self.dtype, plain, wild)

    def _filled(self, layout: Layout, dtype: torch.dtype, plain: bool, wild: bool) -> Guarded:
        buffer = layout.filled(self.shape, dtype, wild=wild)
        return Guarded(buffer.tensor.contiguous()) if plain else buffer


@st.composite
def drawn(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = SHAPES) -> Drawn:
    shape = draw(shapes)
    return Drawn(shape, draw(DTYPES), draw(layouts(shape)), draw(DTYPES), draw(layouts(shape, expand=True)))


# Sizes about whole units of 64K elements, between which threads divide a list
LONG = st.tuples(st.builds(lambda units, more: units * 2**16 + more, st.integers(1, 2), st.integers(-3, 3)))
# Some of them long: the same few tensors over and over, each with memory of its own
LISTS = st.tuples(st.lists(drawn(), max_size=5), st.sampled_from([1, 1, 1, 8])).map(lambda pair: pair[0] * pair[1])
# A long one, and small ones before and after it that move where its units begin
LONG_LISTS = st.tuples(st.lists(drawn(), max_size=2), drawn(LONG), st.lists(drawn(), max_size=2)).map(
    lambda parts: [*parts[0], parts[1], *parts[2]]
)


def assert_as_reference(run: Callable[[bool], tuple[Sequence[Guarded], Sequence[Tensor | None]]]) -> None:
    """`run` makes tensors, works on them, returns buffers and results: as the reference on plain, contiguous tensors.

    So neither a kernel nor the handling of strides, which both backends share, is its own judge.
    """
    buffers, results = run(False)
    with backend.override(reference_torch), Conditions("", 1).hold():
        expected_buffers, expected = run(True)
    assert_all_same_bits(results, expected, "result")
    assert_all_same_bits([b.tensor for b in buffers], [b.tensor for b in expected_buffers], "tensor")
    for i, buffer in enumerate(buffers):
        buffer.assert_intact(f"buffer {i}")


@any_case
@given(LISTS, st.sampled_from(["nearest", "stochastic"]), st.integers(0, 2**32 - 1))
def test_cast(tensors, rounding, seed):
    def run(plain: bool) -> tuple[list[Guarded], list[Tensor]]:
        dst, src = [d.tensor(plain) for d in tensors], [d.second(plain) for d in tensors]
        hs.cast_([b.tensor for b in dst], [b.tensor for b in src], rounding=rounding, seed=seed)
        return [*dst, *src], []

    assert_as_reference(run)


@any_case
@given(LISTS, st.floats(2.0**-100, 2.0**100, width=32), st.booleans())
def test_grad_stats(tensors, scale, wild):
    def run(plain: bool) -> tuple[list[Guarded], list[Tensor]]:
        grads = [d.second(plain, wild=wild) for d in tensors]
        return grads, [*hs.grad_stats([b.tensor for b in grads], scale), *hs.grad_stats([b.tensor for b in grads])]

    assert_as_reference(run)


@any_case
@given(LISTS, st.floats(2.0**-100, 2.0**100, width=32), st.booleans())
def test_unscale(tensors, inv_scale, wild):
    def run(plain: bool) -> tuple[list[Guarded], list[Tensor]]:
        grads, found_inf = [d.tensor(plain, wild=wild) for d in tensors], torch.zeros(())
        hs.unscale_([b.tensor for b in grads], inv_scale, found_inf)
        return grads, [found_inf]

    assert_as_reference(run)


@any_case
@given(LISTS, st.floats(0, 100), st.booleans())
def test_clip_grad_norm(tensors, max_norm, wild):
    def run(plain: bool) -> tuple[list[Guarded], list[Tensor]]:
        grads = [d.tensor(plain, wild=wild) for d in tensors]
        params = [Parameter(torch.zeros(d.shape, dtype=d.dtype)) for d in tensors]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.tensor
        return grads, [hs.clip_grad_norm_(params, max_norm)]

    assert_as_reference(run)


@any_case
@given(LISTS, st.booleans())
def test_l2_norms(tensors, wild):
    def run(plain: bool) -> tuple[list[Guarded], list[Tensor]]:
        found = [d.second(plain, wild=wild) for d in tensors]
        return found, [*hs.l2_norms([b.tensor for b in found])]

    assert_as_reference(run)


@any_case
@given(LISTS, st.booleans())
def test_accumulate(tensors, twice):
    """Also the sum of a tensor and itself."""

    def run(plain: bool) -> tuple[list[Guarded], list[Tensor]]:
        dst = [d._replace(dtype=torch.float32).tensor(plain) for d in tensors]
        src = dst if twice else [d.second(plain) for d in tensors]
        hs.accumulate_([b.tensor for b in dst], [b.tensor for b in src])
        return [*dst, *src], []

    assert_as_reference(run)


OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 0.5]),
        "betas": st.sampled_from([(0.9, 0.999), (0.3, 0.5), (0.0, 0.0)]),
        "eps": st.sampled_from([1e-8, 0.0]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
        "master": st.sampled_from(["auto", None]),
        "state_dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "stochastic_rounding": st.booleans(),
        "seed": st.integers(0, 2**32 - 1),
        "max_grad_norm": st.sampled_from([None, 0.5]),
        "skip_nonfinite": st.sampled_from([None, False]),
        "on_stale": st.sampled_from(["refresh", "ignore"]),
    }
)


OPTIMIZERS = st.sampled_from([hs.Adam, hs.AdamW])


@any_case
@given(LISTS, OPTIONS, OPTIMIZERS, st.booleans())
def test_step(tensors, options, optimizer_class, split):
    assert_steps_as_reference(tensors, options, optimizer_class, split)


@settings(any_case, max_examples=5)
@given(LONG_LISTS, OPTIONS, OPTIMIZERS, st.booleans())
def test_step_of_several_units(tensors, options, optimizer_class, split):
    assert_steps_as_reference(tensors, options, optimizer_class, split)


def assert_steps_as_reference(
    tensors: Sequence[Drawn], options: dict[str, Any], optimizer_class: type[hs.AdamW], split: bool
) -> None:
    """Three steps on different gradients, and between them somebody writes a weight; states lie among guard values."""

    def run(plain: bool) -> tuple[list[Guarded], list[Tensor]]:
        weights = [d.tensor(plain) for d in tensors]
        params = [Parameter(b.tensor) for b in weights]
        groups = [{"params": [p], **_master(p, split, options)} for p in params]
        optimizer = optimizer_class(groups or [{"params": []}], **options)
        grads = [[d.gradient(plain, t, wild=t == 0) for d in tensors] for t in range(3)]
        states: list[Guarded] = []
        for of_this_step in grads:
            for p, grad in zip(params, of_this_step, strict=True):
                p.grad = grad.tensor
            optimizer.step()
            for p in params[::3]:
                p.data.fill_(3.0)
            states = states or _guard_states(optimizer)
        found = [value for _, value in sorted(held(optimizer).items())]
        results = [optimizer.grad_norm, optimizer.skipped, optimizer.healed, *found]
        for buffer in states:
            buffer.assert_intact("a state")
        return [*weights, *itertools.chain(*grads)], results

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # updates lost without a master, steps skipped, masters healed: all meant
        assert_as_reference(run)


def _guard_states(optimizer: torch.optim.Optimizer) -> list[Guarded]:
    """Moves every state tensor, counters too, among guard values."""
    buffers = []
    for state in optimizer.state.values():
        for key, value in state.items():
            buffers.append(Guarded(value, value.stride()))
            state[key] = buffers[-1].tensor
    return buffers


def _master(param: Tensor, split: bool, options: dict[str, Any]) -> dict[str, Any]:
    return {"master": "split"} if split and param.dtype == torch.bfloat16 and options["master"] else {}
