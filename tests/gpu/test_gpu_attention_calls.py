"""hs.attention as a model on a GPU calls it: graphs, streams, waits, memory, compiled, several devices.

Guards: a dropout that every replay of a graph repeats, a seed that the host reads, work on a stream that the caller
does not look at, a matrix of scores in memory, what bad segments leave.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from bits import assert_all_same_bits
from test_gpu_devices import others
from torch import Tensor

import halfstep as hs
from halfstep.ops import backend, triton_gpu

BACKENDS = ["triton"]
BFLOAT16 = torch.bfloat16


def used(gpu: Any) -> Any:
    """A GPU's tensors take these kernels anyway."""
    return nullcontext() if gpu.compiles else backend.override(triton_gpu.of_device(gpu.device))


def normal(gpu: Any, *sizes: int, seed: int = 0, device: torch.device | None = None) -> Tensor:
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)
    return x.to(device or gpu.device)


def length(gpu: Any, wanted: int) -> int:
    return wanted if gpu.compiles else 17


def qkv(gpu: Any, rows: int, **options: Any) -> list[Tensor]:
    """Of 4 heads that share 2."""
    sizes = [(2, heads, rows, 64) for heads in (4, 2, 2)]
    return [normal(gpu, *size, seed=i, **options).requires_grad_() for i, size in enumerate(sizes)]


def passes(call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """out and the gradients of all inputs."""
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, out.detach())]


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hs.attention(q, k, v, causal=True, softcap=20.0)


# ---- graphs ----------------------------------------------------------------------------------------------------------
def captured(gpu: Any, call: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], list[Tensor]]:
    """What replays both passes, and copies what they left."""
    with used(gpu):
        passes(call, inputs)
    held: dict[str, list[Tensor]] = {}
    replay = gpu.capture(lambda: held.update(found=passes(call, inputs)))

    def again() -> list[Tensor]:
        with used(gpu):
            replay()
        gpu.synchronize()
        return [x.cpu() for x in held["found"]]

    return again


def test_replays_are_calls(gpu: Any) -> None:
    inputs = qkv(gpu, length(gpu, 300))
    replay = captured(gpu, padded, inputs)
    for seed in (5, 6):
        with torch.no_grad():
            inputs[0].copy_(normal(gpu, *inputs[0].shape, seed=seed))
        with used(gpu):
            expected = [x.cpu() for x in passes(padded, inputs)]
        assert_all_same_bits(replay(), expected, f"replay {seed}")


def test_each_replay_draws_its_own_dropout(gpu: Any) -> None:
    """And its backward pass has the mask of its forward pass: v's gradient of the sum is what was kept."""
    inputs = qkv(gpu, length(gpu, 300))
    replay = captured(gpu, lambda q, k, v: hs.attention(q, k, v, dropout_p=0.5), inputs)
    first, second = replay(), replay()
    assert all(x.isfinite().all() for x in (*first, *second))
    assert not torch.equal(first[0], second[0])


def test_a_seed_on_the_device_changes_between_replays(gpu: Any) -> None:
    inputs, seed = qkv(gpu, length(gpu, 300)), torch.tensor([3], device=gpu.device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hs.attention(q, k, v, dropout_p=0.5, seed=seed)

    replay, found = captured(gpu, call, inputs), []
    for value in (7, 2**40 + 1, 7):
        seed.fill_(value)
        found.append(replay())
        with used(gpu):
            expected = passes(lambda q, k, v, value=value: hs.attention(q, k, v, dropout_p=0.5, seed=value), inputs)
        assert_all_same_bits(found[-1], [x.cpu() for x in expected], str(value))
    assert torch.equal(found[0][0], found[2][0])
    assert not torch.equal(found[0][0], found[1][0])


# ---- waits, streams, devices -----------------------------------------------------------------------------------------
def calls(gpu: Any) -> dict[str, Callable[..., Tensor]]:
    ends = torch.tensor([0, 7, 7, 2 * length(gpu, 300)], dtype=torch.int32, device=gpu.device)
    seed = torch.tensor([3], device=gpu.device)

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        return hs.attention_varlen(*rows, ends, ends, causal=True)

    bias = normal(gpu, 1, 4, 1, length(gpu, 300), seed=9)
    return {
        "plain": padded,
        "bias": lambda q, k, v: hs.attention(q, k, v, bias=bias),
        "dropout": lambda q, k, v: hs.attention(q, k, v, dropout_p=0.5),
        "dropout by a number": lambda q, k, v: hs.attention(q, k, v, dropout_p=0.5, seed=3),
        "dropout by a seed there": lambda q, k, v: hs.attention(q, k, v, dropout_p=0.5, seed=seed),
        "varlen": varlen,
    }


@pytest.mark.real_gpu
@pytest.mark.parametrize(
    "name", ["plain", "bias", "dropout", "dropout by a number", "dropout by a seed there", "varlen"]
)
def test_nothing_waits(gpu: Any, name: str) -> None:
    """On what stands in, the kernels' interpreter reads; tests/test_attention_api.py has the host's part."""
    call, inputs = calls(gpu)[name], qkv(gpu, length(gpu, 300))
    for _ in range(2):
        passes(call, inputs)
    with gpu.no_waits():
        passes(call, inputs)


@pytest.mark.parametrize("name", ["plain", "varlen"])
def test_the_callers_stream_is_used(gpu: Any, name: str) -> None:
    """Behind inputs that arrive late on it."""
    call, inputs = calls(gpu)[name], qkv(gpu, length(gpu, 300))
    with used(gpu):
        expected = [x.cpu() for x in passes(call, inputs)]
        late = [torch.zeros_like(x).requires_grad_() for x in inputs]
        with gpu.side_stream():
            with torch.no_grad():
                for x, source in zip(late, inputs, strict=True):
                    x.copy_(source)
            found = passes(call, late)
    gpu.synchronize()
    assert_all_same_bits([x.cpu() for x in found], expected, name)


def test_a_device_that_is_not_the_current_one(gpu: Any) -> None:
    here, (device, *_) = qkv(gpu, length(gpu, 300)), others(gpu)
    with used(gpu):
        expected = [x.cpu() for x in passes(padded, here)]
        found = passes(padded, qkv(gpu, length(gpu, 300), device=device))
    assert {x.device for x in found} == {device}
    assert_all_same_bits([x.cpu() for x in found], expected, str(device))


@pytest.mark.real_gpu
@pytest.mark.parametrize("name", ["plain", "bias", "dropout by a seed there", "varlen"])
def test_compiled(gpu: Any, name: str) -> None:
    """By inductor, as one graph; the operators are the eager ones, so are the bits."""
    call, inputs = calls(gpu)[name], qkv(gpu, 300)
    compiled = torch.compile(call, fullgraph=True)
    assert_all_same_bits([x.cpu() for x in passes(compiled, inputs)], [x.cpu() for x in passes(call, inputs)], name)


# ---- memory, launches ------------------------------------------------------------------------------------------------
def test_memory_grows_with_the_length(gpu: Any) -> None:
    """Both passes: results, statistics of rows; a matrix of scores would be 8 times 2 GiB at the longest."""
    sizes = {}
    for rows in (length(gpu, 16384), 2 * length(gpu, 16384)):
        inputs = qkv(gpu, rows)
        with used(gpu):
            if gpu.compiles:
                passes(padded, inputs)  # compiled from here on
            sizes[rows] = gpu.peak_of(lambda inputs=inputs: passes(padded, inputs))
    short, long = sizes.values()
    assert 0 < long <= 2 * short + 2**20, sizes
    assert long < 40 * 2 * 4 * 64 * max(sizes), "some copies of q, in bytes"


def test_launches(gpu: Any) -> None:
    inputs = qkv(gpu, length(gpu, 300))
    with used(gpu):
        passes(padded, inputs)
        with gpu.launches() as made:
            passes(padded, inputs)
    assert sorted(made) == ["delta_kernel", "forward_kernel", "keys_kernel", "queries_kernel"]


# ---- what cannot be -------------------------------------------------------------------------------------------------
@pytest.mark.real_gpu
@pytest.mark.parametrize("ends", [[0, 200, 100, 300], [0, 100, 400], [-5, 100, 300]], ids=str)
def test_bad_segments_are_nan(gpu: Any, ends: list[int]) -> None:
    """Nobody reads them on the host, where that would wait."""
    q, k, v = (normal(gpu, 300, heads, 64, seed=heads).requires_grad_() for heads in (4, 2, 2))
    cu = torch.tensor(ends, dtype=torch.int32, device=gpu.device)
    out = hs.attention_varlen(q, k, v, cu, cu, causal=True)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    gpu.synchronize()
    for x in (out, *gradients):
        assert x.isnan().all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4, 2), "softcap": 9.0}], ids=str)
@pytest.mark.parametrize("which", ["q", "k"])
def test_rows_that_see_nan_are_nan(gpu: Any, which: str, options: dict[str, Any]) -> None:
    """And no others: maxima of a GPU pass over NaN, a score that is hidden is not one."""
    inputs = [x.detach() for x in qkv(gpu, length(gpu, 300))]
    inputs["qk".index(which)][1, 1, 5, 3] = float("nan")
    with used(gpu):
        found = hs.attention(*inputs, return_lse=True, **options)
    for x, expected in zip(found, hs.attention(*(x.cpu() for x in inputs), return_lse=True, **options), strict=True):
        assert expected.isnan().any()
        assert torch.equal(x.isnan().cpu(), expected.isnan())
