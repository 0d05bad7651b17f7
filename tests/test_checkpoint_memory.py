"""FLOPs and bytes of each policy, to the unit: of a Llama-shaped chain and of the GPT example's model.

Guards: a product computed twice under "selective", a whole forward more under "layer" (torch's recomputation stops
after the last result that is needed), a kept result that nothing needs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpointed import keep_all
from example_runs import Config  # noqa: F401  (puts the examples' folder on the path)
from gpt.matmul import Matmul
from gpt.model import GPT
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import halfstep as hs

pytestmark = pytest.mark.usefixtures("one_thread")
B, S, H, A, FFN, LAYERS = 2, 12, 16, 2, 40, 3  # batch, length, width, heads, width of the MLP
ITEM = 4  # bytes of a float32
SBH, SBF = S * B * H * ITEM, S * B * FFN * ITEM
LSE = A * S * B * ITEM
PRODUCTS = 2 * S * B * (4 * H * H + 3 * H * FFN)  # FLOPs of a layer's matrix products
DOWN = 2 * S * B * H * FFN
ATTENTION = 2 * 2 * B * S * S * H  # scores and weighted values; torch's formula counts no triangle


class LlamaLayer(nn.Module):
    """Operators of a layer as transformers' Llama runs them: RMSNorm, rotary embedding, SDPA, SwiGLU; no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList(torch.ones(H) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(H, H, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(H, FFN, bias=False), nn.Linear(H, FFN, bias=False)
        self.down = nn.Linear(FFN, H, bias=False)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x: Tensor, *, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        y = self.norm(x, self.norms[0])
        q, k, v = (p(y).view(B, S, A, H // A).transpose(1, 2) for p in (self.q, self.k, self.v))
        cos, sin = position_embeddings
        q, k = (z * cos + torch.cat((-z[..., H // A // 2 :], z[..., : H // A // 2]), -1) * sin for z in (q, k))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).reshape(B, S, H))
        y = self.norm(x, self.norms[1])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(LAYERS))
        angles = torch.outer(torch.arange(S), torch.ones(H // A))
        self.tables = (angles.cos(), angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, position_embeddings=self.tables)
        return x


def _forward_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(q, k, v)


# Its backward is counted as none: the tests are about what is computed again.
CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops}


def counted(model: nn.Module, *arguments: Tensor) -> tuple[int, int, int]:
    """(FLOPs of the forward, FLOPs of forward and backward, bytes that the forward left allocated)"""
    flops = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with flops:
        with hs.measure_activations() as measured:
            out = model(*arguments)
        forward = flops.get_total_flops()
        out.sum().backward()
    return forward, flops.get_total_flops(), measured.bytes


@pytest.fixture
def llama() -> Llama:
    torch.manual_seed(0)
    return Llama()


def test_a_plain_llama_layer(llama: Llama) -> None:
    forward, total, kept = counted(llama, torch.randn(B, S, H, requires_grad=True))
    assert forward == LAYERS * (PRODUCTS + ATTENTION)
    assert total == LAYERS * (3 * PRODUCTS + ATTENTION)
    # Two norms save x / rms, what they give to the products, and 1 / rms; the residual stream is saved twice. Then the
    # rotated q and k, v, attention's output, and of SwiGLU both products, silu(gate) and what goes down.
    assert kept == LAYERS * (4 * SBH + 2 * S * B * ITEM + 2 * SBH + 3 * SBH + SBH + LSE + 4 * SBF)


@pytest.mark.parametrize("policy", ["layer", "selective"])
def test_a_llama_layer(llama: Llama, policy: str) -> None:
    hs.checkpoint(llama, policy)
    forward, total, kept = counted(llama, torch.randn(B, S, H, requires_grad=True))
    assert forward == LAYERS * (PRODUCTS + ATTENTION)
    if policy == "layer":
        # The last product is not repeated: nothing behind it is saved. The output of a layer is the input of the next.
        assert total == LAYERS * (4 * PRODUCTS - DOWN + 2 * ATTENTION)
        assert kept == LAYERS * SBH
    else:
        assert total == LAYERS * (3 * PRODUCTS + ATTENTION)
        # q, k, v, attention's output and log-sum-exp, o, gate, up; down's result is not needed for anything saved
        assert kept == LAYERS * (SBH + 3 * SBH + SBH + LSE + SBH + 2 * SBF)


@pytest.mark.parametrize("policy", ["layer", "selective"])
def test_the_gpt_example_s_model(policy: str) -> None:
    vocabulary, width, layers, heads, hidden = 50, 32, 2, 4, 64
    tokens = torch.randint(vocabulary, (B, S))
    torch.manual_seed(0)
    model = GPT(vocabulary, width, layers, heads, Matmul("native", "for the test"))
    plain = counted(model, tokens)
    hs.checkpoint(model, policy)
    assert model.blocks[0].mlp.down.weight.shape == (width, hidden)
    forward, total, kept = counted(model, tokens)
    model.blocks = nn.ModuleList()
    _, _, outside = counted(model, tokens)
    down = 2 * S * B * hidden * width
    products = 2 * S * B * 4 * width * width + 3 * down
    attention = 2 * 2 * B * S * S * width
    sbh, sbf, lse = S * B * width * ITEM, S * B * hidden * ITEM, heads * S * B * ITEM
    assert forward == plain[0]
    if policy == "layer":
        assert total == plain[1] + layers * (products - down + attention)
        assert kept == outside + layers * sbh
    else:
        assert total == plain[1]
        assert kept == outside + layers * (sbh + 3 * sbh + sbh + lse + sbh + 2 * sbf)


class Written(nn.Module):
    """Attention written out: scores [heads, length, length] are a batched product larger than what it multiplies."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x @ x.mT).softmax(-1) @ x


@pytest.mark.parametrize(("length", "again"), [(9, 1), (8, 0)])
def test_quadratic_scores_are_computed_again(length: int, again: int) -> None:
    """8 x 8 scores of 8 x 4 queries and keys are no larger than these together; 9 x 9 are."""
    x = torch.randn(2, length, 4)
    blocks = nn.ModuleList([Written(length)])
    plain = counted(blocks[0], x)
    hs.checkpoint(blocks, "selective")
    assert counted(blocks[0], x)[1] - plain[1] == again * 2 * 2 * length * length * 4


@pytest.mark.parametrize("policy", ["layer", "selective"])
def test_what_was_computed_again_is_freed(llama: Llama, policy: str) -> None:
    """With the graph kept, each backward recomputes the same and leaves nothing behind."""
    hs.checkpoint(llama, policy)
    x = torch.randn(B, S, H)
    flops = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with hs.measure_activations() as measured:
        loss = llama(x).square().sum()
        kept = measured.bytes
        totals = []
        for _ in range(3):
            with flops:
                torch.autograd.grad(loss, list(llama.parameters()), retain_graph=True)
            totals.append(flops.get_total_flops())
            assert measured.bytes == kept
    assert totals[0] == totals[1] == totals[2]


def test_results_that_nothing_needs_are_not_kept() -> None:
    """A policy that keeps everything keeps no more than what is made up to the last saved tensor."""
    block = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H, bias=False), nn.Flatten(0))
    hs.checkpoint(block, keep_all, blocks=nn.Sequential)
    x = torch.randn(B, H)
    _, _, kept = counted(block, x)
    assert kept == (H * B + H * B + H * B) * ITEM, "two results, and the output"


def test_views_are_not_kept(llama: Llama) -> None:
    """A view that a policy asks for would keep the memory of all that it shows a part of."""
    views = (torch.ops.aten.view.default, torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor)
    hs.checkpoint(llama, lambda ctx, op, *args, **kwargs: op in views)
    _, _, kept = counted(llama, torch.randn(B, S, H, requires_grad=True))
    assert kept == LAYERS * SBH
