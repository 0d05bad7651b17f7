"""Hypothesis strategies: tensors of any shape, strides, offset and dtype, among guard values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from adversarial import FLOATS, awkward, ordinary
from canary import Guarded
from hypothesis import strategies as st

DTYPES = st.sampled_from(FLOATS)
# Mostly small, with room for more than one block of 512 elements and its tail
SHAPES = st.one_of(
    st.lists(st.integers(0, 6), max_size=4).map(tuple),
    st.tuples(st.integers(500, 1100)),
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
)


class Layout(NamedTuple):
    """Where the elements of a shape lie; `seed` picks their values."""

    strides: tuple[int, ...]
    shift: int
    seed: int

    def filled(self, shape: tuple[int, ...], dtype: torch.dtype, *, wild: bool) -> Guarded:
        size = math.prod(shape)
        values = awkward(size, dtype, self.seed).view(shape) if wild else ordinary(shape, dtype, self.seed)
        return Guarded(values, self.strides, self.shift)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], expand: bool = False) -> Layout:
    """Any order of the dimensions, any steps and gaps between elements; with `expand` also dimensions of stride 0."""
    strides = [0] * len(shape)
    span = 1
    plain = draw(st.booleans())
    order = range(len(shape) - 1, -1, -1) if plain else draw(st.permutations(range(len(shape))))
    for dim in order:
        if expand and draw(st.integers(0, 5)) == 0:
            continue
        step = 1 if plain else draw(st.integers(1, 3))
        strides[dim] = span * step + (0 if plain else draw(st.sampled_from([0, 0, 0, 1, 5])))
        span = strides[dim] * max(1, shape[dim])
    return Layout(tuple(strides), draw(st.integers(0, 3)), draw(st.integers(0, 40)))
