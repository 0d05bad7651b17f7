"""Which views of one buffer a call may write: exactly those that share no byte, in whatever strides they lie."""

from __future__ import annotations

import itertools
from operator import mul
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import halfstep as hs
from halfstep.ops.overlap import check_writable

BUFFER = torch.zeros(4096)
any_case = settings(max_examples=300, derandomize=True, deadline=None)


class View(NamedTuple):
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self) -> Tensor:
        return BUFFER.as_strided(self.shape, self.strides, self.offset)

    def elements(self) -> list[int]:
        """The index in the buffer of every element, repeated where elements share it."""
        indices = itertools.product(*map(range, self.shape))
        return [self.offset + sum(map(mul, index, self.strides)) for index in indices]


@st.composite
def views(draw: st.DrawFn, nested: bool) -> View:
    """Nested: each dimension steps over all that the smaller ones span, as slices and transposes do; else anything."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides, span = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = span * draw(st.integers(1, 3)) + draw(st.integers(0, 2)) if nested else draw(st.integers(0, 12))
        span = max(span, strides[dim] * max(1, shape[dim]))
    return View(draw(st.integers(0, 40)), tuple(shape), tuple(strides))


def check(writes: list[View], reads: list[View]) -> None:
    tensors = [[view.tensor() for view in views] for views in (writes, reads)]
    names = [[f"{kind} {i}" for i in range(10)][: len(t)] for kind, t in zip(("write", "read"), tensors, strict=True)]
    check_writable(tensors[0], names[0], tensors[1], names[1])


def collide(writes: list[View], reads: list[View]) -> bool:
    written = [index for w in writes for index in w.elements()]
    return len(set(written)) < len(written) or not set(written).isdisjoint(i for r in reads for i in r.elements())


@any_case
@given(st.lists(views(nested=True), max_size=4), st.lists(views(nested=False), max_size=3))
def test_slices_are_refused_if_and_only_if_they_collide(writes, reads):
    """What is only read may be expanded, and read twice."""
    if collide(writes, reads):
        with pytest.raises(ValueError, match=r"(write|read) \d"):
            check(writes, reads)
    else:
        check(writes, reads)


@any_case
@given(st.lists(views(nested=False), min_size=1, max_size=3))
def test_no_collision_of_any_strides_is_overlooked(writes):
    if collide(writes, []):
        with pytest.raises(ValueError, match=r"write \d"):
            check(writes, [])


@pytest.mark.parametrize("columns", [(slice(0, 100), slice(100, 200)), (slice(0, 200, 2), slice(1, 200, 2))])
def test_large_interleaved_columns_are_seen_to_be_apart(columns):
    """Without listing a million addresses."""
    matrix = torch.zeros(5000, 200)
    first, second = (matrix[:, c] for c in columns)
    hs.unscale_([first, second], 1.0, torch.zeros(()))
    hs.cast_([first], [second])
    with pytest.raises(ValueError, match=r"grads\[0\] and grads\[1\] share memory"):
        hs.unscale_([first, matrix[:, 50:150]], 1.0, torch.zeros(()))


def test_a_source_that_is_a_destination():
    """Of its own pair it may be, of another's not: the one would be read after it is written."""
    a, b = torch.zeros(3), torch.ones(3)
    hs.cast_([a, b], [a, b])
    with pytest.raises(ValueError, match=r"(dst|src)_list\[\d\] and (dst|src)_list\[\d\] share"):
        hs.cast_([a, b], [b, a])
    assert a.tolist() == [0, 0, 0]
    assert b.tolist() == [1, 1, 1]
