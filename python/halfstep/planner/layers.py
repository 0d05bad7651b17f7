"""Activations of a layer by sub-layer, as torch runs it operator by operator.

Sizes follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (MLSys 2023), section
4.1, where the code is Megatron's; norms, activation functions, attention and experts keep what torch's operators and
transformers' modules (version 5) keep in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .job import Job
from .model import ModelShape
from .sizes import FLOAT32, INT64, Sizes
from .tape import Tape, Value


class Layers:
    """Writes the operators of a model's blocks to a tape."""

    def __init__(self, model: ModelShape, job: Job):
        self.model, self.job = model, job
        self.n = Sizes.of(model, job)
        self.tape = Tape()

    def layer(self) -> Tape:
        """Attention and FFN, each behind a norm and beside a residual connection."""
        x = self.tape.value("residual", self.n.residual_tokens * self.model.hidden, self.n.stream)
        x = self.residual(x, self.attention(self.norm(x)))
        feed = self.experts if self.model.experts else self.ffn
        self.residual(x, feed(self.norm(x)))
        return self.tape

    def residual(self, x: Value, branch: Value) -> Value:
        return self.op("residual", [x, self.dropout(branch)], x.elements, x.item, adds=x.item == branch.item)

    # ---- building blocks ---------------------------------------------------------------------------------------------
    def op(self, part: str, inputs: Value | Sequence[Value], elements: int, item: int, *saves: Value,
           **more: object) -> Value:  # fmt: skip
        return self.tape.op(part, inputs, elements, item, saves, **more)  # type: ignore[arg-type]

    def cast(self, part: str, x: Value, item: int) -> Value:
        """x with elements of so many bytes; itself if it has them."""
        return x if x.item == item else self.op(part, x, x.elements, item)

    def linear(self, part: str, x: Value, outputs: int, inputs: int, *, rows: int = 0, bias: bool = False,
               copies: int = 1, adapted: bool = False) -> Value:  # fmt: skip
        """x [rows, inputs] times a weight [outputs, inputs]; x is kept for the weight's gradient."""
        n, model = self.n, self.model
        rows = rows or n.tokens
        x = self.cast(part, x, n.value)
        trains = model.trains(part)
        weight = copies * (outputs * inputs + (outputs if bias else 0)) * n.weight if trains else 0
        y = self.op(part, x, rows * outputs, n.value, *[x] * trains, weight=weight, kept=True)
        if not (adapted and model.lora_rank):
            return y
        rank = model.lora_rank
        low = self.op("adapters", x, rows * rank, n.value, x, weight=copies * rank * inputs * n.weight, kept=True)
        change = self.op(
            "adapters", low, y.elements, n.value, low, weight=copies * rank * outputs * n.weight, kept=True
        )
        change = self.op("adapters", change, y.elements, n.value)  # scaled
        return self.op("adapters", [y, change], y.elements, n.value, adds=True)

    def dropout(self, x: Value) -> Value:
        if not self.model.dropout:
            return x
        # On the CPU F.dropout multiplies by a mask in the input's dtype.
        mask = x.elements * (x.item if self.n.cpu else 1)
        return self.op(x.part, x, x.elements, x.item, extra=[mask])

    def norm(self, x: Value) -> Value:
        return self.normed(x, self.n.residual_tokens, self.model.hidden, rms=self.model.norm == "rms")

    def normed(self, x: Value, rows: int, width: int, rms: bool = True) -> Value:
        """A norm over the last dimension of x [rows, width]."""
        n, trains = self.n, self.model.trains("norms")
        gradient = width * n.weight if trains else 0
        if not rms:
            extra = [rows * n.statistic] * 2  # mean and deviation
            return self.op("norms", x, x.elements, n.stream, x, extra=extra, weight=2 * gradient)
        if self.model.norm_code == "fused":
            return self.op("norms", x, x.elements, n.stream, x, extra=[rows * FLOAT32], weight=gradient)
        # transformers' RMSNorm: to float32, times 1 / rms, back, times the weight; every step keeps its input.
        wide = self.cast("norms", x, FLOAT32)
        squares = self.op("norms", wide, x.elements, FLOAT32, wide, hidden=2 * wide.size)
        mean = self.op("norms", squares, rows, FLOAT32)
        inverse = self.op("norms", mean, rows, FLOAT32, save_output=True)
        hat = self.op("norms", [wide, inverse], x.elements, FLOAT32, wide, inverse, hidden=wide.size)
        hat = self.cast("norms", hat, x.item)
        return self.op("norms", hat, x.elements, n.stream, *[hat] * trains, weight=gradient)

    # ---- attention ---------------------------------------------------------------------------------------------------
    def attention(self, y: Value) -> Value:
        model, n = self.model, self.n
        q_width, kv_width = n.heads * model.head_dim, n.kv_heads * model.head_dim
        if model.fused_qkv:  # views of one tensor
            width = q_width + 2 * kv_width
            q = k = v = self.linear("attention", y, width, model.hidden, bias=model.qkv_bias, adapted=True)
        else:
            q, k, v = (
                self.linear("attention", y, width, model.hidden, bias=model.qkv_bias, adapted=True)
                for width in (q_width, kv_width, kv_width)
            )
        if model.qk_norm:
            q = self.normed(q, n.tokens * n.heads, model.head_dim)
            k = self.normed(k, n.tokens * n.kv_heads, model.head_dim)
        if not model.positions and not model.fused_qkv:
            q, k = self.rotated(q), self.rotated(k)
        fused = self.job.attention == "fused"
        # With fused kernels only where there is a mask (transformers' use_gqa_in_sdpa), and a single head as a view.
        repeats = n.kv_heads > 1 and self.job.attention_mask if fused else True
        if model.repeats_kv and repeats and n.kv_heads < n.heads:
            k, v = (self.op("attention", x, n.tokens * q_width, x.item) for x in (k, v))
        out = self.fused_core(q, k, v) if fused else self.eager_core(q, k, v)
        rows = n.residual_tokens if self.job.sequence_parallel else n.tokens
        return self.linear("attention", out, model.hidden, q_width, rows=rows, bias=model.out_bias, adapted=True)

    def rotated(self, x: Value) -> Value:
        """x cos + (-x2, x1) sin (Su et al., arXiv 2104.09864), by angles in the residual stream's dtype."""
        by_cos = self.op("attention", x, x.elements, self.n.stream)
        negative = self.op("attention", x, x.elements // 2, x.item)
        turned = self.op("attention", [negative, x], x.elements, x.item)
        by_sin = self.op("attention", turned, x.elements, self.n.stream)
        return self.op("attention", [by_cos, by_sin], x.elements, self.n.stream, adds=True)

    def fused_core(self, q: Value, k: Value, v: Value) -> Value:
        """Flash attention (Dao et al., NeurIPS 2022): keeps its inputs, its output, and a float32 log-sum-exp a row."""
        n, job = self.n, self.job
        inputs = [q] if q is k else [self.cast("attention", x, n.value) for x in (q, k, v)]
        mask = []
        if job.attention_mask:  # booleans turned into numbers to add, in every layer
            mask = [self.op("attention", [], job.micro_batch * job.sequence**2, n.value)]
        width, log_sum = n.heads * self.model.head_dim, n.heads * n.tokens * FLOAT32
        return self.op("attention", inputs, n.tokens * width, n.value, *inputs, *mask, save_output=True,
                       extra=[log_sum], kept=True)  # fmt: skip

    def eager_core(self, q: Value, k: Value, v: Value) -> Value:
        """Scores, softmax and dropout as matrices [heads, s, s]."""
        n, job = self.n, self.job
        inputs = [q] if q is k else [self.cast("attention", x, n.value) for x in (q, k)]
        matrix = n.heads * job.micro_batch * job.sequence**2
        small = job.sequence <= 2 * self.model.head_dim  # not larger than its operands: see keep_products
        s = self.op("scores", inputs, matrix, n.value, *inputs, kept=small)
        s = self.op("scores", s, matrix, n.value)  # scaled
        if job.attention_mask:
            s = self.op("scores", s, matrix, n.stream)
        item = FLOAT32 if self.model.softmax_fp32 or job.autocast else n.value
        if job.precision != "fp16" or n.cpu:  # torch's softmax takes float16 as it is
            s = self.cast("scores", s, item)
        p = self.op("scores", s, matrix, item, save_output=True)
        p = self.dropout(self.cast("scores", p, n.value))
        v = self.cast("attention", v, n.value)
        width = n.heads * self.model.head_dim
        return self.op("attention", [p, v], n.tokens * width, n.value, p, v, kept=True)

    # ---- FFN ---------------------------------------------------------------------------------------------------------
    def ffn(self, y: Value) -> Value:
        """Keeps its input, what the activation function keeps, and the input of the last product."""
        model, n = self.model, self.n
        adapted = model.lora_targets == "all"
        up = self.linear("ffn", y, n.ffn, model.hidden, bias=model.ffn_bias, adapted=adapted)
        active = self.activated(up)
        if model.gated:
            other = self.linear("ffn", y, n.ffn, model.hidden, bias=model.ffn_bias, adapted=adapted)
            active = self.op("ffn", [active, other], active.elements, n.value, active, other)
        rows = n.residual_tokens if self.job.sequence_parallel else n.tokens
        return self.linear("ffn", active, model.hidden, n.ffn, rows=rows, bias=model.ffn_bias, adapted=adapted)

    def activated(self, x: Value) -> Value:
        """silu and gelu keep their input, relu its output; of transformers' gelu_new, four operators keep something."""
        if self.model.activation == "relu":
            return self.op("ffn", x, x.elements, x.item, save_output=True)
        if self.model.activation == "gelu_new":
            # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
            inner = self.op("ffn", x, x.elements, x.item, x)
            tanh = self.op("ffn", inner, x.elements, x.item, save_output=True)
            one_more = self.op("ffn", tanh, x.elements, x.item)
            half = self.op("ffn", x, x.elements, x.item)
            return self.op("ffn", [half, one_more], x.elements, x.item, half, one_more)
        return self.op("ffn", x, x.elements, x.item, x)

    def experts(self, y: Value) -> Value:
        """Router and grouped products over tokens sorted by expert, evenly spread over the expert-parallel ranks."""
        model, n = self.model, self.n
        sent = n.tokens * model.experts_per_token
        chances = self.linear("router", y, model.experts, model.hidden)
        chances = self.op("router", self.cast("router", chances, FLOAT32), chances.elements, FLOAT32, save_output=True)
        order = [sent * INT64] * 4  # chosen experts, tokens and weights in their order, and the way back
        weights = self.op("router", chances, sent, FLOAT32, extra=[*order, n.tokens * FLOAT32, sent * FLOAT32])
        x = self.op("ffn", y, sent * model.hidden, n.value, extra=[n.experts * FLOAT32])  # where an expert's tokens end
        stacked: dict[str, Any] = dict(rows=sent, copies=n.experts, adapted=model.lora_targets == "all")
        up = self.linear("ffn", x, n.ffn * (1 + model.gated), model.hidden, **stacked)
        active = self.activated(up) if not model.gated else self.gate(up, sent)
        out = self.linear("ffn", active, model.hidden, n.ffn, **stacked)
        # Backward of the float32 product makes both gradients in full size before it shrinks them.
        wide = [self.op("ffn", x, out.elements, FLOAT32) for x in (out, weights)]
        weighted = self.op("ffn", wide, out.elements, FLOAT32, out, weights)
        back = self.op("ffn", weighted, out.elements, FLOAT32)
        return self.op("ffn", back, n.residual_tokens * model.hidden, n.stream)

    def gate(self, up: Value, rows: int) -> Value:
        """silu of one half of the result times the other half."""
        width = rows * self.n.ffn
        active = self.op("ffn", up, width, self.n.value, up)
        return self.op("ffn", [active, up], width, self.n.value, active, up)
