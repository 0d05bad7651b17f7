"""The shape of a decoder-only Transformer: its weights, by part, and what its code keeps for backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from .checks import check_choice, check_count, check_fraction

PARTS = ("embedding", "attention", "ffn", "router", "norms", "head", "adapters")
ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu")
NORMS = ("rms", "layer")
NORM_CODES = ("composed", "fused")
ADAPTED = ("attention", "all")


@dataclass(frozen=True)
class Weight:
    """One parameter tensor, `copies` times in the whole model (or in one layer, see `ModelShape.layer_weights`)."""

    part: str  # one of PARTS
    name: str
    shape: tuple[int, ...]
    copies: int = 1
    trainable: bool = True
    used: int = 0  # elements that one token goes through; 0: all of them
    tensor_parallel: bool = True  # split over the tensor-parallel ranks; norms and routers are not
    matrices: int = 1  # that are stacked in the tensor, as transformers does with experts

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def times(self, layers: int) -> Weight:
        """In so many layers."""
        return replace(self, copies=self.copies * layers, used=self.used * layers)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only Transformer. The defaults are Llama's: rotary positions, RMSNorm, gated FFN, no biases.

    Sizes are counts of elements. The last fields say what the model's code keeps for backward: the defaults are what
    transformers runs in eager mode.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    ffn: int  # width of the FFN (of one expert)
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden / heads
    gated: bool = True  # SwiGLU, GEGLU: two matrices up instead of one
    activation: str = "silu"
    norm: str = "rms"
    qk_norm: bool = False  # RMSNorm of every query and key head
    tied: bool = False  # one table for input and output embedding
    embedding_rank: int = 0  # factorised embedding (Lan et al., "ALBERT", ICLR 2020, section 3.1); 0: not factorised
    positions: int = 0  # rows of the table of learned positions; 0: rotary
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    fused_qkv: bool = False  # queries, keys and values come from one matrix
    experts: int = 0  # 0: one dense FFN
    experts_per_token: int = 0
    window: int = 0  # tokens that attention sees back; 0: all
    dropout: float = 0.0  # of the embedding, the attention's probabilities and both branches
    lora_rank: int = 0  # > 0: low-rank adapters (Hu et al., "LoRA", ICLR 2022) train, everything else is frozen
    lora_targets: str = "attention"
    frozen: frozenset[str] = frozenset()  # parts that do not train
    norm_code: str = "composed"  # "composed": RMSNorm from separate operators; "fused": one that keeps its input
    softmax_fp32: bool = True  # eager attention computes its softmax in float32 and keeps it
    repeats_kv: bool = True  # keys and values are copied to all heads before attention
    name: str = "custom"

    def __post_init__(self) -> None:
        for field in ("vocabulary", "hidden", "layers", "heads", "ffn"):
            check_count(field, getattr(self, field), 1)
        for field in ("kv_heads", "head_dim", "embedding_rank", "positions", "experts", "experts_per_token", "window",
                      "lora_rank"):  # fmt: skip
            check_count(field, getattr(self, field), 0)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("norm", self.norm, NORMS)
        check_choice("norm_code", self.norm_code, NORM_CODES)
        check_choice("lora_targets", self.lora_targets, ADAPTED)
        check_fraction("dropout", self.dropout)
        object.__setattr__(self, "frozen", frozenset(self.frozen))
        for part in self.frozen:
            check_choice("frozen", part, PARTS)
        if self.head_dim == 0:
            if self.hidden % self.heads:
                raise ValueError(
                    f"heads={self.heads}: hidden={self.hidden} is no multiple of it; give a divisor, or head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads}: expected a divisor of heads={self.heads}, in 1 .. {self.heads}"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token}: expected 1 .. experts={self.experts}, the experts that a "
                "token goes through"
            )
        if self.experts_per_token and not self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token}: expected 0 without experts; set experts too")
        if self.embedding_rank > self.hidden:
            raise ValueError(
                f"embedding_rank={self.embedding_rank}: expected 1 .. hidden={self.hidden}, or 0 for no factorisation"
            )

    # ---- weights -----------------------------------------------------------------------------------------------------
    def _make(self, part: str, name: str, *shape: int, copies: int = 1, used: int = 0, split: bool = True) -> Weight:
        return Weight(part, name, shape, copies, self.trains(part), used, split)

    def trains(self, part: str) -> bool:
        """Whether the weights of a part are trained."""
        return part == "adapters" or not (self.lora_rank or part in self.frozen)

    @cached_property
    def layer_weights(self) -> tuple[Weight, ...]:
        """The parameter tensors of one layer."""
        return (*self._attention(), *self._ffn(), *self._norms("norm", 2), *self._adapters())

    @cached_property
    def outer_weights(self) -> tuple[Weight, ...]:
        """The parameter tensors outside the layers."""
        return (*self._embedding(), *self._norms("final_norm", 1), *self._head())

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All parameter tensors."""
        return (*self.outer_weights, *(w.times(self.layers) for w in self.layer_weights))

    def _norms(self, name: str, copies: int) -> Iterator[Weight]:
        yield self._make("norms", name, self.hidden, copies=copies, split=False)
        if self.norm == "layer":
            yield self._make("norms", f"{name}_bias", self.hidden, copies=copies, split=False)

    def _embedding(self) -> Iterator[Weight]:
        yield self._make("embedding", "embedding", self.vocabulary, self.embedding_rank or self.hidden)
        if self.embedding_rank:
            yield self._make("embedding", "embedding_up", self.embedding_rank, self.hidden, split=False)
        if self.positions:
            yield self._make("embedding", "positions", self.positions, self.hidden, split=False)

    def _head(self) -> Iterator[Weight]:
        if not self.tied:
            yield self._make("head", "head", self.vocabulary, self.embedding_rank or self.hidden)
            if self.embedding_rank:
                yield self._make("head", "head_down", self.embedding_rank, self.hidden, split=False)

    def _attention(self) -> Iterator[Weight]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.fused_qkv:
            yield self._make("attention", "qkv", q + 2 * kv, self.hidden)
        else:
            yield self._make("attention", "q", q, self.hidden)
            yield self._make("attention", "kv", kv, self.hidden, copies=2)
        yield self._make("attention", "out", self.hidden, q)
        if self.qkv_bias:
            yield self._make("attention", "qkv_bias", q + 2 * kv)
        if self.out_bias:
            yield self._make("attention", "out_bias", self.hidden, split=False)
        if self.qk_norm:
            yield self._make("norms", "qk_norm", self.head_dim, copies=2, split=False)

    def _ffn(self) -> Iterator[Weight]:
        up = 2 if self.gated else 1
        if self.experts:  # gates, ups and downs of all experts as one tensor each
            yield self._stacked("up", up * self.ffn, self.hidden)
            yield self._stacked("down", self.hidden, self.ffn)
            if self.ffn_bias:
                yield self._stacked("up_bias", up * self.ffn)
                yield self._stacked("down_bias", self.hidden)
            yield self._make("router", "router", self.experts, self.hidden, split=False)
        else:
            yield self._make("ffn", "up", self.ffn, self.hidden, copies=up)
            yield self._make("ffn", "down", self.hidden, self.ffn)
            if self.ffn_bias:
                yield self._make("ffn", "up_bias", self.ffn, copies=up)
                yield self._make("ffn", "down_bias", self.hidden, split=False)

    def _stacked(self, name: str, rows: int, *columns: int) -> Weight:
        """One matrix or vector of every expert."""
        whole = self._make("ffn", name, self.experts * rows, *columns)
        return replace(whole, matrices=self.experts, used=whole.elements // self.experts * self.experts_per_token)

    def _adapters(self) -> Iterator[Weight]:
        """A pair [rank, inputs], [outputs, rank] beside each adapted matrix."""
        if not self.lora_rank:
            return
        targets = [*self._attention(), *(self._ffn() if self.lora_targets == "all" else ())]
        for weight in targets:
            if len(weight.shape) == 2 and weight.part != "router":
                rows, columns = weight.shape
                for name, shape in (("a", (weight.matrices * self.lora_rank, columns)), ("b", (rows, self.lora_rank))):
                    made = self._make("adapters", f"{weight.name}_{name}", *shape, copies=weight.copies)
                    used = made.elements // self.experts * self.experts_per_token if weight.used else 0
                    yield replace(made, used=used, matrices=weight.matrices)

    # ---- counts ------------------------------------------------------------------------------------------------------
    @cached_property
    def parameters(self) -> int:
        return sum(w.elements * w.copies for w in self.weights)

    @cached_property
    def active_parameters(self) -> int:
        """What one token goes through: of the experts, those that it is sent to."""
        return sum(w.used or w.elements * w.copies for w in self.weights)

    @cached_property
    def trainable_parameters(self) -> int:
        return sum(w.elements * w.copies for w in self.weights if w.trainable)

    @cached_property
    def parts(self) -> dict[str, int]:
        """Parameters by part; parts that the model does not have are left out."""
        sums = {part: sum(w.elements * w.copies for w in self.weights if w.part == part) for part in PARTS}
        return {part: count for part, count in sums.items() if count}

    @cached_property
    def layer_parameters(self) -> int:
        """Of one layer."""
        return sum(w.elements * w.copies for w in self.layer_weights)

    @cached_property
    def largest_weight(self) -> int:
        """Elements of the largest trainable tensor."""
        return max((w.elements for w in self.weights if w.trainable), default=0)
