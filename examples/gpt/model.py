"""A small GPT: RMSNorm, causal attention with rotary positions, SwiGLU, one table for input and output embedding.

The weights may be float32, bfloat16 or float16; activations between the operations have the same dtype. What needs
range or precision (norms, rotation, softmax, loss) is computed in float32 whatever the weights are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .matmul import Matmul


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """x / rms(x) over the last dimension, in float32; the caller rounds."""
    return F.rms_norm(x.float(), x.shape[-1:], None if weight is None else weight.float(), eps=1e-6)


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight).to(x.dtype)


class Linear(nn.Module):
    """No bias. Starts with variance gain^2 / inputs, so that activations keep their size from layer to layer."""

    def __init__(self, inputs: int, outputs: int, matmul: Matmul, gain: float = 1.0):
        super().__init__()
        self.matmul = matmul
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * gain * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul.linear(x, self.weight)


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Turns pairs of channels of x [..., length, dim], float32, by angles that grow with the position: rotary
    embedding (Su et al., arXiv 2104.09864). The angles are made anew: a buffer would be rounded with the weights."""
    length, dim = x.shape[-2:]
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=x.device), frequencies)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, matmul: Matmul, gain: float):
        super().__init__()
        self.heads, self.matmul = heads, matmul
        self.qkv = Linear(width, 3 * width, matmul)
        self.out = Linear(width, width, matmul, gain)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, batch, heads, length, dim]
        # normalised queries and keys bound the scores, which keeps high learning rates (and float16) safe
        q, k = rotate(rms_norm(qkv[:2])).to(qkv.dtype)
        v = qkv[2]
        return self.out(self.matmul.attention(q, k, v).transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate) * up) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int, matmul: Matmul, gain: float):
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden, matmul)
        self.down = Linear(hidden, width, matmul, gain)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, matmul: Matmul, gain: float):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(width), Attention(width, heads, matmul, gain)
        self.mlp_norm, self.mlp = RMSNorm(width), SwiGLU(width, hidden, matmul, gain)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Maps tokens [batch, length] to logits [batch, length, vocabulary], or to the mean loss in nats per token."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, matmul: Matmul):
        super().__init__()
        hidden = 64 * round(width * 8 / 3 / 64)  # the parameters of a classical 4 x width MLP, in whole cache lines
        gain = (2 * layers) ** -0.5  # 2 x layers branches add up in the residual stream: their variances sum to 1
        self.matmul = matmul
        self.embedding = nn.Parameter(torch.randn(vocabulary, width) * width**-0.5)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, matmul, gain) for _ in range(layers))
        self.norm = RMSNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.matmul.embedding(tokens, self.embedding)
        x = rms_norm(x).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.matmul.linear(self.norm(x), self.embedding)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
