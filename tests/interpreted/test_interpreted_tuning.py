"""hs.tune_attention on interpreted kernels, under a planted clock: what it tries, keeps and leaves alone.

Guards: a choice that leaks to calls of another shape or option, a tile that changes more than rounding, a trial that
stays in force after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import halfstep as hs
from halfstep.ops import attention_torch, attention_tuning
from halfstep.ops import backend as backends
from halfstep.ops.triton_gpu import TritonBackend
from halfstep.triton_kernels.attention import backward, bias, choices, forward
from halfstep.triton_kernels.attention.tiles import INTERPRETED, Tile, candidates

OTHER = Tile(16, 32, 4, 1, 1)


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention runs interpreted; a pass would take 1 ms with the other tile for the kernel that is tried, else 3."""

    def milliseconds(run: Callable[[], Any]) -> float:
        return 1.0 if OTHER in choices._trials[-1].tiles.values() else 3.0

    monkeypatch.setattr(attention_tuning, "milliseconds", milliseconds)
    with backends.override(TritonBackend(torch.device("cpu"))):
        yield
    choices.forget()


@contextmanager
def still() -> Iterator[None]:
    """Kernels are launched, and do not run."""

    class Still:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: None

    with ExitStack() as stack:
        for module in (forward, backward, bias):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(mock.patch.object(module, name, Still()))
        yield


def qkv(length: int, dim: int = 16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(2, heads, length, dim, generator=generator) for heads in (2, 1, 1))


def tiles_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> dict[str, Tile]:
    """Of the kernels that a call and its gradients launch; they do not run."""
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with still(), choices.trying({}) as trial:
        hs.attention(*inputs, **options).sum().backward()
    return {kernel: tile for kernel, (_, tile, _) in trial.asked.items()}


def test_the_faster_tile_is_kept_for_such_calls_alone() -> None:
    with still():
        found = hs.tune_attention(*qkv(20), causal=True)
    assert list(found) == ["forward", "keys", "queries"]
    for tile in found.values():
        assert tile == attention_tuning.TunedTile(16, 32, 4, 1, ms=1.0, ms_before=3.0)
    assert set(tiles_of(*qkv(20), causal=True).values()) == {OTHER}
    assert set(tiles_of(*qkv(32), causal=True).values()) == {OTHER}  # up to the same power of 2
    for others in (tiles_of(*qkv(33), causal=True), tiles_of(*qkv(20), window=5), tiles_of(*qkv(20, 24), causal=True)):
        assert set(others.values()) == {INTERPRETED}
    assert not choices._trials


def test_the_tile_that_it_has_stays_if_none_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tuning, "milliseconds", lambda run: 2.0)
    with still():
        assert {tile[:2] for tile in hs.tune_attention(*qkv(20)).values()} == {INTERPRETED[:2]}


def test_a_backend_without_tiles_is_said() -> None:
    with (
        backends.override(attention_torch),
        pytest.raises(
            RuntimeError, match=r"the backend in use launched none of them: call it without backend\.override"
        ),
    ):
        hs.tune_attention(*qkv(3))


def test_no_random_number_is_drawn_from_a_training() -> None:
    state = torch.get_rng_state()
    with still():
        hs.tune_attention(*qkv(20), dropout_p=0.3)
    assert torch.equal(torch.get_rng_state(), state)


def test_results_are_the_same_up_to_rounding() -> None:
    q, k, v = (t.double() for t in qkv(18))
    terms = torch.randn(1, 2, 18, 18, dtype=torch.float64)

    def everything() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v, terms)]
        out = hs.attention(*inputs[:3], bias=inputs[3], window=9)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    before = everything()
    with still():
        found = hs.tune_attention(q, k, v, bias=terms.requires_grad_(), window=9)
    assert list(found) == ["forward", "keys", "queries", "bias"]
    for one, other in zip(before, everything(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=64 * torch.finfo(torch.float64).eps * one.detach().abs().max())


@pytest.mark.parametrize("kind", ["plain", "heavy", "tf32", "exact"])
@pytest.mark.parametrize("shared", [65_536, 101_376, 166_912, 232_448])
def test_candidates_begin_with_the_table(kind: str, shared: int) -> None:
    for kernel in ("forward", "keys", "queries", "bias"):
        for width in (16, 32, 64, 128, 256):
            found = candidates(kernel, width, kind, shared)
            assert len(found) == len(set(found)) >= 1
            assert all(tile.block_m >= 16 and tile.block_n >= 16 and tile.warps <= 16 for tile in found)
    assert len(candidates("forward", 64, "plain", shared)) >= 2
