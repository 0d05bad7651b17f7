"""The pieces under the training example: text and baselines, matmuls, accumulation, clipping, schedule."""

from __future__ import annotations

import math
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example_runs import Config, Run, data, real_load, tiny, train_gpt
from gpt import matmul
from gpt.matmul import Matmul
from gpt.model import rotate
from torch import Tensor

UPCAST, NATIVE = Matmul("upcast", ""), Matmul("native", "")
NARROW = [torch.bfloat16, torch.float16]


# ---- text ----------------------------------------------------------------------------------------------------------
def test_the_text_is_the_same_on_every_call_and_split_by_files() -> None:
    text, again = real_load(), data.load()
    assert torch.equal(text.train, again.train)
    assert torch.equal(text.validation, again.validation)
    share = len(text.validation) / (len(text.train) + len(text.validation))
    assert 0.02 < share < 0.1
    unseen = bytes(text.validation[5000:5200].tolist())
    assert unseen not in bytes(text.train.numpy())


def test_an_epoch_visits_every_block_once() -> None:
    text = data.Text(torch.arange(203, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8), "")
    blocks = 202 // 10 - 1
    seen = [int(text.batch(3, i, 1, 10)[0][0, 0]) for i in range(2 * blocks)]
    first, second = sorted(seen[:blocks]), sorted(seen[blocks:])
    for epoch in (first, second):
        assert [b - a for a, b in pairwise(epoch)] == [10] * (blocks - 1)
    assert seen[:blocks] != first  # shuffled
    inputs, targets = text.batch(3, 1, 4, 10)
    assert inputs.shape == targets.shape == (4, 10)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, torch.cat([text.batch(3, i, 1, 10)[0] for i in range(4, 8)]))


def test_ngram_baselines_are_what_counting_by_hand_gives() -> None:
    train, valid = b"abracadabra" * 3, b"cadabraxbra"
    text = data.Text(*(torch.tensor(list(part), dtype=torch.uint8) for part in (train, valid)), "")
    positions = torch.arange(2, len(valid))[None]

    def probability(context: bytes, byte: int) -> float:
        shorter = probability(context[1:], byte) if context else 1 / 256
        if not context:
            return (train.count(byte) + shorter) / (len(train) + 1)
        windows = Counter(train[i : i + len(context) + 1] for i in range(len(train) - len(context)))
        total = sum(count for window, count in windows.items() if window.startswith(context))
        return (windows[context + bytes([byte])] + shorter) / (total + 1)

    found = data.ngram_nats(text, positions)
    for name, length in (("bigram", 1), ("trigram", 2)):
        losses = [-math.log(probability(valid[i - length : i], valid[i])) for i in range(2, len(valid))]
        assert math.isclose(found[name], sum(losses) / len(losses), rel_tol=len(valid) * torch.finfo(torch.float64).eps)


def test_a_python_without_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"expected the Python standard library's sources .* found 0 bytes; install"):
        data.load()


# ---- matmuls -------------------------------------------------------------------------------------------------------
def _linear(way: Matmul, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = way.linear(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_upcast_linear_is_as_exact_as_rounding_allows(dtype: torch.dtype) -> None:
    """Against float64: half a unit in the last place, and what float32 sums of so many products may add."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*s, generator=generator).to(dtype) for s in ((3, 5, 48), (33, 48), (3, 5, 33)))
    truth = _linear(NATIVE, x.double(), weight.double(), grad.double())
    sizes = _linear(NATIVE, x.double().abs(), weight.double().abs(), grad.double().abs())  # sums of absolute terms
    for ours, exact, size in zip(_linear(UPCAST, x, weight, grad), truth, sizes, strict=True):
        assert ours.dtype == dtype
        bound = exact.abs() * torch.finfo(dtype).eps / 2 + size * 48 * torch.finfo(torch.float32).eps
        assert ((ours.double() - exact).abs() <= bound + torch.finfo(dtype).smallest_normal).all()


def test_under_autocast_the_upcast_linear_has_autocasts_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        torchs = F.linear(x, weight)
        with monkeypatch.context() as patch:
            patch.delattr(matmul.F, "linear")  # the slow way must not be taken
            ours = UPCAST.linear(x, weight)
    assert ours.dtype == torchs.dtype == torch.bfloat16
    ours.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    operands = x.bfloat16().double(), weight.detach().bfloat16().double()
    assert torch.equal(ours, F.linear(*operands).float().bfloat16())


@pytest.mark.parametrize("way", [UPCAST, Matmul("upcast", "", "halfstep")], ids=lambda way: way.attends)
@pytest.mark.parametrize("dtype", NARROW)
def test_attention_rounds_once(dtype: torch.dtype, way: Matmul) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 8).to(dtype)
    out = way.attention(q, k, v)
    assert torch.equal(out, F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(dtype))


def test_halfsteps_attention_gets_the_operands_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It converts them to what it computes in: a copy made before would be for nothing."""
    given: list[Tensor] = []
    attention = matmul.hs.attention
    monkeypatch.setattr(
        matmul.hs, "attention", lambda *qkv, causal: (given.extend(qkv), attention(*qkv, causal=causal))[1]
    )
    qkv = torch.randn(3, 2, 2, 9, 8, dtype=torch.bfloat16).unbind()
    Matmul("upcast", "", "halfstep").attention(*qkv)
    assert all(a is b for a, b in zip(given, qkv, strict=True))


@pytest.mark.parametrize("way", [UPCAST, NATIVE], ids=lambda way: way.kind)
def test_embedding_gradients_are_added_up_in_float32(way: Matmul) -> None:
    """One token 4,096 times: a bfloat16 sum stops growing at 256."""
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    way.embedding(torch.ones(4096, dtype=torch.int64), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0] * 4, [4096.0] * 4]


@pytest.mark.parametrize(("narrow", "wide", "kind"), [(1.0, 40.0, "upcast"), (80.0, 40.0, "native")])
def test_the_probe_takes_the_faster_and_says_why(
    narrow: float, wide: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_gflops", lambda dtype: wide if dtype == torch.float32 else narrow)
    chosen = matmul.choose(torch.device("cpu"), torch.bfloat16)
    assert chosen.kind == kind
    assert chosen.reason == f"a core of this CPU reaches {narrow:.0f} GFLOP/s in bfloat16 and {wide:.0f} in float32"
    assert matmul.choose(torch.device("cpu"), torch.float32).kind == "native"
    assert matmul.choose(torch.device("cuda"), torch.bfloat16).kind == "native"


def test_the_probe_is_not_fooled_by_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine of ten products are held up for 10 ms, as they are when other processes want the cores."""
    clock = {"now": 0.0, "calls": 0}

    def matmul_of(a: Tensor, _b: Tensor) -> Tensor:
        clock["calls"] += 1
        clock["now"] += (1e-3 if a.dtype == torch.bfloat16 else 1e-4) + (1e-2 if clock["calls"] % 10 else 0.0)
        return a

    monkeypatch.setattr(Tensor, "matmul", matmul_of)
    monkeypatch.setattr(matmul.time, "perf_counter", lambda: clock["now"])
    assert matmul.choose(torch.device("cpu"), torch.bfloat16).kind == "upcast"
    found, exact = matmul._gflops(torch.bfloat16), 2 * 256**3 / 1e-3 / 1e9
    assert math.isclose(found, exact, rel_tol=2 * clock["now"] / 1e-3 * sys.float_info.epsilon)


def test_the_probe_leaves_the_threads_as_they_were() -> None:
    threads = torch.get_num_threads()
    assert 0 < matmul._gflops(torch.float32, size=16) < math.inf
    assert torch.get_num_threads() == threads


# ---- the step ------------------------------------------------------------------------------------------------------
def _step(config: Config) -> Run:
    run = Run(config)
    train_gpt.train_step(run, real_load())
    return run


def _first_moments(run: Run) -> Tensor:
    """A tenth of the clipped gradient, after one step."""
    return torch.cat([run.optimizer.state[p]["exp_avg"].flatten().double() for p in run.model.parameters()])


def test_accumulated_batches_equal_one_big_batch() -> None:
    """To float32's rounding: the longest sum in a gradient runs over the tokens of the batch."""
    big = _step(tiny(precision="fp32", batch=8))
    parts = _step(tiny(precision="fp32", batch=2, accumulate=4))
    bound = 8 * 32 * torch.finfo(torch.float32).eps
    assert big.history.batches * 4 == parts.history.batches
    assert math.isclose(big.history.losses[0], parts.history.losses[0], rel_tol=bound)
    whole, summed = _first_moments(big), _first_moments(parts)
    assert (whole - summed).norm() <= bound * whole.norm()
    assert big.config.tokens_per_step == parts.config.tokens_per_step == 256


def _first_moment_norm(run: Run) -> float:
    """After one step m = (1 - beta1) * (clipped gradient)."""
    states = getattr(run.optimizer, "inner", run.optimizer).state.values()
    squares = sum(state["exp_avg"].double().square().sum() for state in states)
    return math.sqrt(squares) / (1 - 0.9)


@pytest.mark.parametrize("optimizer", ["halfstep", "torch"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_clipping_bounds_the_norm_of_the_unscaled_gradient(precision: Any, optimizer: Any) -> None:
    settings: dict[str, Any] = dict(precision=precision, optimizer=optimizer, init_scale=256.0)
    free = _first_moment_norm(_step(tiny(**settings, clip=0.0)))
    clipped = _first_moment_norm(_step(tiny(**settings, clip=free / 8)))
    # torch and halfstep divide by norm + 1e-6; a float32 sum of so many squares is this exact at worst
    bound = 1e-6 / free + 20_000 * torch.finfo(torch.float32).eps
    assert math.isclose(clipped, free / 8, rel_tol=bound)


def test_the_schedule_warms_up_and_decays_to_a_tenth() -> None:
    config = tiny(steps=100, warmup=10, lr=1.0)
    rates = [config.learning_rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_rotation_is_relative_and_keeps_lengths() -> None:
    """The product of a query and a key depends on their distance alone; to float32's rounding of angles up to 63."""
    q, k = (torch.randn(16).expand(64, 16) for _ in range(2))
    rotated = rotate(q) @ rotate(k).T
    bound = (64 + 16) * torch.finfo(torch.float32).eps * q[0].norm() * k[0].norm()
    for distance in (0, 1, 7):
        diagonal = rotated.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() <= bound
    assert (rotated.diagonal(1)[0] - rotated.diagonal(7)[0]).abs() > bound
    assert ((rotate(q).norm(dim=-1) - q.norm(dim=-1)).abs() <= bound).all()


def test_the_model_is_causal() -> None:
    """A changed byte changes no prediction before it."""
    model = Run(tiny(precision="fp32")).model
    tokens, _ = real_load().batch(0, 0, 1, 32)
    changed = tokens.clone()
    changed[0, 20] ^= 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])
