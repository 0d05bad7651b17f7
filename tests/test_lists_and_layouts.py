"""Lists of any length and tensors of any layout through the public functions, guard values around every buffer.

Guards: an entry past the table, a tensor without elements that shifts the others, a whole SIMD block left out, a
gradient read in the parameter's order though its strides differ, a neighbour in the same buffer overwritten.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS, NARROW, ordinary
from bits import assert_all_same_bits, bits
from canary import Guarded
from conditions import Conditions
from optimizer_runs import assert_same, held
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep.ops import backend, reference_torch

MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FLOAT32, {"amsgrad": True}),
    "float32, bfloat16 states": (FLOAT32, {"state_dtype": BFLOAT16}),
    "bfloat16, float32 master": (BFLOAT16, {}),
    "bfloat16, split master": (BFLOAT16, {"master": "split"}),
    "bfloat16, stochastic": (BFLOAT16, {"master": None, "stochastic_rounding": True}),
    "float16, bfloat16 states": (FLOAT16, {"state_dtype": BFLOAT16, "amsgrad": True}),
}


def stepped(params: list[Tensor], grads: list[Tensor], steps: int = 2, **options: Any) -> hs.AdamW:
    optimizer = hs.AdamW([Parameter(p) for p in params], **{"lr": 0.1, "max_grad_norm": 1.0, **options})
    for p, g in zip(optimizer.param_groups[0]["params"], grads, strict=True):
        p.grad = g
    for _ in range(steps):
        optimizer.step()
    return optimizer


# ---- lists -----------------------------------------------------------------------------------------------------------
def sizes_with_gaps(count: int) -> list[int]:
    """An empty tensor first, last, and at every third place."""
    return [0 if i % 3 == 0 or i == count - 1 else 1 + i * 7 % 29 for i in range(count)]


LISTS = {
    "alone and empty": [0],
    "all empty": [0] * 30,
    "one": [1],
    "empty last": [5, 3, 0],
    "30": sizes_with_gaps(30),
    "31, empty at both ends": sizes_with_gaps(31),
    "600": sizes_with_gaps(600),
    "chunks": [1, 65535, 0, 65536, 65537, 3],
}


@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS)
def test_lists(sizes):
    """Each function updates every tensor of the list as the reference does, and nothing beside them."""
    dtypes = [FLOATS[i % 3] for i in range(len(sizes))]
    shapes = [(n,) if i % 2 else (n, 1) for i, n in enumerate(sizes)]
    values = [ordinary(shape, dtype, i) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    others = [ordinary(shape, dtypes[i - 1], i + 5) for i, shape in enumerate(shapes)]

    def outcome() -> tuple[list[Guarded], list[Tensor | None]]:
        written, read = [Guarded(v, shift=i % 3) for i, v in enumerate(values)], [Guarded(o) for o in others]
        tensors, sources = [b.tensor for b in written], [b.tensor for b in read]
        results: list[Tensor | None] = [*hs.grad_stats(sources, 3.0)]
        results.append(found_inf := torch.zeros(()))
        hs.unscale_(tensors, 0.37, found_inf)
        results += [t.clone() for t in tensors]
        hs.cast_(tensors, sources)
        hs.cast_(tensors[::2], sources[::2], rounding="stochastic", seed=9)
        results += [t.clone() for t in tensors]
        results += [*hs.l2_norms(tensors)]
        sums = [t.float() for t in tensors]
        hs.accumulate_(sums, sources)
        results += sums
        optimizer = stepped(tensors, values)
        results += [optimizer.grad_norm, *(optimizer.state[p]["step"] for p in optimizer.param_groups[0]["params"])]
        results += [t.clone() for t in tensors]
        params = [Parameter(torch.zeros_like(o)) for o in sources]
        for p, o in zip(params, sources, strict=True):
            p.grad = o
        results.append(hs.clip_grad_norm_(params, 0.5))
        return [*written, *read], results + sources

    buffers, got = outcome()
    with backend.override(reference_torch), Conditions("", 1).hold():
        _, expected = outcome()
    assert_all_same_bits(got, expected, "list")
    for i, buffer in enumerate(buffers):
        buffer.assert_intact(f"buffer {i}")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_element_of_every_size_is_updated(dtype):
    """Around every multiple of a SIMD width and of a block: a peer left out the full blocks of 16-bit tensors."""
    sizes = [*range(130), *(n + d for n in (256, 512, 1024, 1536) for d in (-1, 0, 1))]
    buffers = [Guarded(torch.ones(n, dtype=dtype), shift=n % 2) for n in sizes]
    stepped([b.tensor for b in buffers], [torch.ones(n, dtype=dtype) for n in sizes], steps=1)
    # lr 0.1, and a sixth of that at least survives the rounding to 16 bits
    updated = [bool((b.tensor < 0.95).all()) for b in buffers]
    hs.cast_([b.tensor for b in buffers], [torch.full((n,), 3.0) for n in sizes])
    cast = [bool((b.tensor == 3).all()) for b in buffers]
    hs.unscale_([b.tensor for b in buffers], 0.5, torch.zeros(()))
    unscaled = [bool((b.tensor == 1.5).all()) for b in buffers]
    assert all(updated)
    assert all(cast)
    assert all(unscaled)
    for size, buffer in zip(sizes, buffers, strict=True):
        buffer.assert_intact(f"size {size}")


def test_mixed_dtypes_in_one_group():
    """Each of them gets what it gets alone."""
    values = [ordinary((3, 5), dtype, i) for i, dtype in enumerate(FLOATS * 3)]
    grads = [ordinary((3, 5), v.dtype, 20 + i) for i, v in enumerate(values)]
    together = held(stepped([v.clone() for v in values], grads, max_grad_norm=None))
    for i, (value, grad) in enumerate(zip(values, grads, strict=True)):
        alone = held(stepped([value], [grad], max_grad_norm=None))
        assert_same(
            {k: v for k, v in together.items() if k.startswith(f"{i}.")}, {f"{i}{k[1:]}": v for k, v in alone.items()}
        )


@pytest.mark.parametrize("grad_dtype", NARROW, ids=str)
def test_float32_parameter_with_a_16_bit_gradient(grad_dtype):
    """The step reads it as the float32 numbers it holds."""
    grad = ordinary((4, 5), grad_dtype, 1)
    results = []
    for given in (grad, grad.float()):
        param = Parameter(ordinary((4, 5), FLOAT32, 0))
        param.grad_dtype = given.dtype
        param.grad = given
        optimizer = hs.AdamW([param], max_grad_norm=1.0)
        optimizer.step()
        results.append(held(optimizer))
    assert_same(*results)


# ---- layouts ---------------------------------------------------------------------------------------------------------
SHAPE = (6, 35)
# Strides, in elements, and how far the first element is moved
LAYOUTS: dict[str, tuple[tuple[int, int], int]] = {
    "contiguous": ((35, 1), 0),
    "aligned to one element": ((35, 1), 1),
    "transposed": ((1, 6), 0),
    "transposed, aligned to one element": ((1, 6), 3),
    "column slice": ((41, 1), 2),
    "row slice with a step": ((70, 1), 0),
    "column step": ((70, 2), 0),
    "transposed slice": ((1, 9), 0),
}
EXPANDED = {"rows expanded": (0, 1), "columns expanded": (1, 0), "one number": (0, 0)}


def gradient(name: str, dtype: torch.dtype) -> Guarded:
    strides, shift = (EXPANDED[name], 0) if name in EXPANDED else LAYOUTS[name]
    return Guarded(ordinary(SHAPE, dtype, 7), strides, shift)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_does_not_depend_on_strides(mode, layout):
    """Parameter and gradient of any two layouts: the logical elements get the bits that contiguous tensors get."""
    dtype, options = MODES[mode]
    for name in [*LAYOUTS, *EXPANDED]:
        grad = gradient(name, dtype)
        expected = held(stepped([ordinary(SHAPE, dtype, 3)], [grad.tensor.contiguous()], **options))
        param = Guarded(ordinary(SHAPE, dtype, 3), *LAYOUTS[layout])
        assert_same(held(stepped([param.tensor], [grad.tensor], **options)), expected)
        param.assert_intact(f"parameter {layout}, gradient {name}")
        grad.assert_intact(f"parameter {layout}, gradient {name}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_functions_do_not_depend_on_strides(layout):
    values, source = ordinary(SHAPE, BFLOAT16, 1), ordinary(SHAPE, FLOAT32, 2)
    for name, rounding in itertools.product([*LAYOUTS, *EXPANDED], ("nearest", "stochastic")):
        given = gradient(name, FLOAT32)
        target, plain = Guarded(values, *LAYOUTS[layout]), [values.clone()]
        hs.cast_([target.tensor], [given.tensor], rounding=rounding, seed=3)
        hs.cast_(plain, [given.tensor.contiguous()], rounding=rounding, seed=3)
        assert_all_same_bits([target.tensor], plain, f"cast from {name}")
        target.assert_intact(f"cast from {name}")
        given.assert_intact(f"cast from {name}")
        assert_all_same_bits(
            hs.grad_stats([given.tensor, target.tensor]), hs.grad_stats([given.tensor.contiguous(), *plain]), name
        )
        assert_all_same_bits(
            hs.l2_norms([given.tensor, target.tensor]), hs.l2_norms([given.tensor.contiguous(), *plain]), name
        )
        total, plain_total = Guarded(source, *LAYOUTS[layout]), source.clone()
        hs.accumulate_([total.tensor], [given.tensor])
        hs.accumulate_([plain_total], [given.tensor.contiguous()])
        assert_all_same_bits([total.tensor], [plain_total], f"accumulated from {name}")
        total.assert_intact(f"accumulated from {name}")
    for write in (lambda t: hs.unscale_([t], 0.3, torch.zeros(())), lambda t: hs.clip_grad_norm_(with_grad(t), 0.1)):
        target, plain = Guarded(source, *LAYOUTS[layout]), source.clone()
        write(target.tensor)
        write(plain)
        assert_all_same_bits([target.tensor], [plain], layout)
        target.assert_intact(layout)


def with_grad(grad: Tensor) -> Parameter:
    param = Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


def test_the_norm_adds_in_logical_order():
    """Past 1,024 elements the order of the sum shows in its last bits, and so in every clipped step."""
    shape = (70, 65)
    norms = []
    for order in (lambda t: t, lambda t: t.t().contiguous().t()):
        param, grad = order(ordinary(shape, FLOAT32, 0)), order(ordinary(shape, FLOAT32, 1))
        by_hand = with_grad(grad.clone(memory_format=torch.preserve_format))
        norms.append([stepped([param], [grad]).grad_norm, hs.grad_stats([grad])[0], hs.clip_grad_norm_(by_hand, 0.1)])
    assert_all_same_bits(*norms, "norm")
    assert_all_same_bits(norms[0][:1] * 2, norms[0][1:], "norm")


@pytest.mark.parametrize("mode", MODES)
def test_channels_last(mode):
    dtype, options = MODES[mode]
    shape = (4, 3, 5, 2)
    expected = held(stepped([ordinary(shape, dtype, 0)], [ordinary(shape, dtype, 1)], **options))
    for formats in itertools.product((torch.contiguous_format, torch.channels_last), repeat=2):
        param, grad = (ordinary(shape, dtype, i).to(memory_format=f) for i, f in enumerate(formats))
        optimizer = stepped([param], [grad], **options)
        assert_same(held(optimizer), expected)
        assert param.is_contiguous(memory_format=formats[0])


def test_slices_of_one_buffer_are_parameters_of_their_own():
    """Interleaved columns of one matrix, each a parameter: a peer's kernel overwrote the neighbours."""
    whole = ordinary((8, 12), BFLOAT16, 0)
    slices = [whole[:, 0:5], whole[:, 5:6], whole[:, 8:12]]
    plain, untouched = [s.clone() for s in slices], whole[:, 6:8].clone()
    grads = [ordinary(tuple(s.shape), BFLOAT16, i) for i, s in enumerate(slices)]
    assert_same(held(stepped(slices, grads)), held(stepped(plain, grads)))
    assert torch.equal(bits(whole[:, 6:8]), bits(untouched))


@pytest.mark.parametrize("size", [1, 4])
def test_lazily_negated_views(size):
    """The imaginary part of a conjugate: its memory holds the other sign, which no pointer says."""

    def negated(seed: int) -> Tensor:
        view = torch.complex(torch.zeros(size), ordinary(size, FLOAT32, seed)).conj().imag
        assert view.is_neg()
        return view

    results = []
    for make in (negated, lambda seed: negated(seed).clone()):
        read, scaled, rounded, weight = torch.zeros(size), make(1), make(2), make(3)
        hs.cast_([read, rounded], [make(4), torch.full((size,), 0.1)])
        hs.unscale_([scaled], 0.3, torch.zeros(()))
        total = make(9)
        hs.accumulate_([total, read], [make(10), make(11)])
        param = Parameter(make(5))
        param.grad = make(6)
        hs.clip_grad_norm_(param, 0.1)
        steps = [stepped([weight], [make(7)]), stepped([torch.ones(size)], [make(8)])]
        states = [value for optimizer in steps for value in held(optimizer).values()]
        results.append([read, scaled, rounded, weight, total, *hs.l2_norms([make(12)]), param.grad, *states])
    assert_all_same_bits(*results, "negated")


def test_a_negated_gradient_out_of_autograd():
    """A real scalar inside a complex computation gets one: torch.optim steps against it, and so must halfstep."""
    moved = []
    for make in (hs.Adam, torch.optim.Adam):
        x = Parameter(torch.tensor([2.0]))
        optimizer = make([x], lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (torch.complex(torch.ones(1), x).conj() * torch.tensor([3 + 4j])).real.sum().backward()
            optimizer.step()
        moved.append(x.item())
    assert moved[0] == pytest.approx(moved[1])
    assert moved[0] < 2
