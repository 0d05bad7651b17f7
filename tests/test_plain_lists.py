"""Lists that C++ reads at once: they give what the checks of each tensor give, and nothing else is accepted.

Guards: a tensor read in an order or with a sign that its memory does not have, a subclass taken for a tensor, memory
that two writes share, a path that differs from the other by a bit. Lifetimes are in test_concurrency.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS, ordinary
from bits import assert_all_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep.ops import backend, lists, native, native_cpu, reference_torch


class Subclass(Tensor):
    pass


def negated(seed: int) -> Tensor:
    return torch.complex(torch.zeros(4), ordinary(4, FLOAT32, seed)).conj().imag


PLAIN: dict[str, Callable[[int], Tensor]] = {
    "float32": lambda seed: ordinary((3, 5), FLOAT32, seed),
    "bfloat16": lambda seed: ordinary((7,), BFLOAT16, seed),
    "float16": lambda seed: ordinary((2, 3, 4, 2, 3), FLOAT16, seed),
    "one element": lambda seed: ordinary((1,), FLOAT32, seed),
    "0-d": lambda seed: ordinary((), BFLOAT16, seed),
    "empty": lambda seed: torch.zeros(3, 0),
    "row of a buffer": lambda seed: ordinary((4, 6), FLOAT32, seed)[2],
    "parameter": lambda seed: Parameter(ordinary((3,), FLOAT32, seed)),
}
NOT_PLAIN: dict[str, Callable[[int], Tensor]] = {
    "six dimensions": lambda seed: ordinary((2, 1, 2, 1, 2, 3), FLOAT32, seed),
    "transposed": lambda seed: ordinary((3, 5), BFLOAT16, seed).t(),
    "columns": lambda seed: ordinary((4, 6), FLOAT32, seed)[:, 1:3],
    "negated": negated,
    "subclass": lambda seed: ordinary((5,), FLOAT32, seed).as_subclass(Subclass),
}
LISTS = {"all plain": list(PLAIN), **{f"{odd} among them": [*PLAIN, odd, *PLAIN] for odd in NOT_PLAIN}}


def made(kinds: list[str], seed: int) -> list[Tensor]:
    return [{**PLAIN, **NOT_PLAIN}[kind](seed + i) for i, kind in enumerate(kinds)]


def outcome(kinds: list[str]) -> list[Tensor]:
    """What every list function makes of such lists: returned and written."""
    grads, targets, scaled, clipped = (made(kinds, seed) for seed in (0, 100, 200, 300))
    found_inf, params = torch.zeros(()), [Parameter(torch.zeros_like(g)) for g in clipped]
    for param, grad in zip(params, clipped, strict=True):
        param.grad_dtype = None  # anything
        param.grad = grad.detach()
    returned = [*hs.grad_stats(grads, 3.0), hs.clip_grad_norm_(params, 0.1)]
    hs.unscale_(scaled, 0.3, found_inf)
    hs.cast_(targets, [g.to(FLOATS[i % 3]) for i, g in enumerate(grads)])
    rounded = [t.clone() for t in targets]
    hs.cast_(targets, grads, rounding="stochastic", seed=3)
    sums = [t.float() for t in made(kinds, 400)]
    hs.accumulate_(sums, grads)
    returned += [*hs.l2_norms(grads), *sums]
    return [*returned, found_inf, *scaled, *rounded, *targets, *(p.grad for p in params if p.grad is not None)]


@pytest.fixture
def nothing_is_read(monkeypatch):
    """As on a torch that C++ cannot read."""
    monkeypatch.setattr(native_cpu, "tensor_reader", lambda: None)


@pytest.mark.parametrize("kinds", LISTS.values(), ids=LISTS)
def test_every_list_gives_the_bits_of_the_reference(kinds, monkeypatch):
    """Read by C++, looked at from Python, and the reference."""
    with backend.override(reference_torch):
        expected = outcome(kinds)
    assert_all_same_bits(outcome(kinds), expected, "as it is")
    monkeypatch.setattr(native_cpu, "tensor_reader", lambda: None)
    assert_all_same_bits(outcome(kinds), expected, "nothing read")


def test_what_is_read_and_what_is_not():
    """So that the lists above do take both ways."""
    assert lists.read(made(list(PLAIN), 0)) is not None
    for odd in NOT_PLAIN:
        assert lists.read(made([odd], 0)) is None, odd
        assert lists.read(made(LISTS[f"{odd} among them"], 0)) is None, odd
    x = torch.zeros(3)
    others: list[Any] = [x.double(), x.int(), x.to("meta"), torch.eye(3).to_sparse(), x.to_mkldnn(), None, 1.0]
    for other in others:
        assert lists.read([x, other]) is None
        assert lists.read([other, x]) is None
    assert lists.read_pairs([x], [x.clone()]) is not None
    assert lists.read_pairs([x], [torch.zeros(1, 3)]) is None
    assert lists.read_pairs([torch.zeros(2), torch.zeros(3, 2)], [torch.zeros(2, 3), torch.zeros(2)]) is None


@pytest.mark.usefixtures("nothing_is_read")
def test_nothing_is_read_where_c_cannot():
    assert lists.read([torch.zeros(3)]) is None
    assert lists.read_pairs([torch.zeros(3)], [torch.zeros(3)]) is None


@pytest.mark.parametrize("kinds", [LISTS["all plain"], LISTS["columns among them"]], ids=["plain", "not plain"])
def test_what_is_written_is_a_new_version_and_what_is_read_is_not(kinds):
    """Autograd must refuse a backward through a value that a call has overwritten."""
    written, read = [t.detach().float() for t in made(kinds, 0)], made(kinds, 100)
    writes = [
        lambda: hs.cast_(written, read),
        lambda: hs.unscale_(written, 0.5, torch.zeros(())),
        lambda: hs.accumulate_(written, read),
        lambda: hs.grad_stats([*written, *read]),
        lambda: hs.l2_norms([*written, *read]),
    ]
    for call, more in zip(writes, (True, True, True, False, False), strict=True):
        before = [[t._version for t in tensors] for tensors in (written, read)]
        call()
        after = [[t._version for t in tensors] for tensors in (written, read)]
        assert [a > b for a, b in zip(after[0], before[0], strict=True)] == [more] * len(written)
        assert after[1] == before[1]


# ---- memory ----------------------------------------------------------------------------------------------------------
BUFFER = torch.zeros(64)
spans = st.tuples(st.integers(0, 40), st.integers(0, 6), st.booleans())


def part(span: tuple[int, int, bool]) -> Tensor:
    """Some elements of the buffer, as float32 or twice as many bfloat16."""
    offset, size, narrow = span
    return BUFFER[offset : offset + size].view(BFLOAT16) if narrow else BUFFER[offset : offset + size]


def elements(span: tuple[int, int, bool]) -> set[int]:
    return set(range(span[0], span[0] + span[1]))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(spans, max_size=5))
def test_writes_are_apart_if_and_only_if_no_byte_is_shared(writes):
    read = lists.read(list(map(part, writes)))
    collide = any(elements(a) & elements(b) for a, b in itertools.combinations(writes, 2))
    assert lists.are_apart(read or []) == (not collide and bool(writes))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.tuples(spans, st.integers(0, 40)), min_size=1, max_size=4))
def test_pairs_are_accepted_if_and_only_if_no_write_is_shared(pairs):
    """Sources may share memory with each other."""
    writes = [write for write, _ in pairs]
    reads = [(offset, size, narrow) for (_, size, narrow), offset in pairs]
    collide = any(elements(a) & elements(b) for a, b in itertools.combinations(writes, 2)) or any(
        elements(w) & elements(r) for w in writes for r in reads
    )
    assert (lists.read_pairs(list(map(part, writes)), list(map(part, reads))) is None) == collide


def test_a_source_is_its_own_destination_only_as_the_same_object():
    """As without reading: another view of that memory is refused by name."""
    a, b = torch.zeros(3), torch.ones(3)
    assert lists.read_pairs([a, b], [a, b]) is not None
    for src in ([b, a], [a, a], [a.view(3), b], [a.detach(), b]):
        assert lists.read_pairs([a, b], src) is None
        with pytest.raises(ValueError, match=r"(src|dst)_list\[\d\] and (src|dst)_list\[\d\] share memory"):
            hs.cast_([a, b], src)


def test_the_first_look_at_tensors_may_be_inside_inference_mode():
    with torch.inference_mode():
        assert native.make_reader(native_cpu._native(), torch.device("cpu")) is not None
