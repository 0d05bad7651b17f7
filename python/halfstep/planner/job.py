"""One way to train: batch, precision, optimizer mode, recomputation, parallelism, offload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from .checks import check_choice, check_count
from .states import MODES

PRECISIONS = ("bf16", "fp16", "fp32", "amp-bf16")
RECOMPUTE = ("none", "attention", "selective", "layer")
ATTENTIONS = ("fused", "eager")
LOSSES = ("logits", "fused")
STEPS = ("fused", "foreach", "for-loop")
OFFLOADS = ("optimizer", "parameters", "activations")
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Job:
    """One way to train a model. Degrees multiply: data x tensor x pipeline parallel ranks are the GPUs."""

    micro_batch: int = 1  # sequences at a time on one data-parallel rank
    sequence: int = 2048  # tokens
    accumulation: int = 1  # micro-batches for one optimizer step
    precision: str = "bf16"  # of weights and activations; "amp-bf16": float32 weights under autocast
    accumulate_in_fp32: bool = False  # hs.Accumulator: float32 sums of 16-bit gradients, beside them
    optimizer: str = "master"  # a name in states.MODES
    release_gradients: bool = False  # the update runs inside backward, gradients are freed at once
    recompute: str = "none"  # "attention": the stored scores alone (Korthikanti et al.'s "selective")
    attention: str = "fused"  # "eager" stores [heads, sequence, sequence]
    attention_mask: bool = False  # every layer keeps an additive mask [sequence, sequence]
    loss: str = "logits"  # "fused": the logits are never whole in memory
    zero: int = 0  # stage: 1 shards optimizer states, 2 gradients too, 3 parameters too
    reduce_in_fp32: bool = True  # FSDP2's reduce_dtype
    data_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False  # norms and residuals are split over the tensor-parallel ranks
    pipeline_parallel: int = 1
    expert_parallel: int = 1  # experts split over data-parallel ranks
    offload: frozenset[str] = frozenset()
    step: str = "fused"  # how the optimizer updates: temporaries of "foreach" and "for-loop"
    device: str = "cuda"  # "cpu": as torch runs on the CPU, whose kernels keep other statistics and masks

    def __post_init__(self) -> None:
        for field in ("micro_batch", "sequence", "accumulation", "data_parallel", "tensor_parallel",
                      "pipeline_parallel", "expert_parallel"):  # fmt: skip
            check_count(field, getattr(self, field), 1)
        for field, choices in (("precision", PRECISIONS), ("optimizer", MODES), ("recompute", RECOMPUTE),
                               ("attention", ATTENTIONS), ("loss", LOSSES), ("step", STEPS),
                               ("device", DEVICES)):  # fmt: skip
            check_choice(field, getattr(self, field), choices)
        object.__setattr__(self, "offload", frozenset(self.offload))
        for kind in sorted(self.offload):
            check_choice("offload", kind, OFFLOADS)
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero!r}: expected a stage, 0 .. 3")
        weights_fp32 = self.precision in ("fp32", "amp-bf16")
        if weights_fp32 != (MODES[self.optimizer].weight_bytes == 4):
            fits = [name for name, mode in MODES.items() if (mode.weight_bytes == 4) == weights_fp32]
            raise ValueError(
                f"optimizer={self.optimizer!r}: expected one of {', '.join(fits)} with precision={self.precision!r}"
            )
        if self.precision == "fp16" and self.optimizer.startswith("split"):
            raise ValueError(f"optimizer={self.optimizer!r}: a split master needs precision='bf16', got 'fp16'")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel=True: expected False with tensor_parallel=1; raise tensor_parallel")
        if self.release_gradients and self.accumulation > 1:
            raise ValueError(
                f"release_gradients=True: expected False with accumulation={self.accumulation}, which adds gradients up"
            )
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel={self.expert_parallel}: expected a divisor of data_parallel={self.data_parallel}"
            )

    @cached_property
    def blocks(self) -> Job:
        """With everything that one micro-batch's activations do not depend on put to one value, for caches."""
        autocast = self.autocast
        fp32 = self.precision == "fp32" or autocast
        return replace(
            self, accumulation=1, accumulate_in_fp32=False, optimizer="fp32" if fp32 else "master", zero=0,
            release_gradients=False, precision=self.precision if fp32 or self.precision == "fp16" else "bf16",
            reduce_in_fp32=True, data_parallel=self.expert_parallel, pipeline_parallel=1, offload=frozenset(),
            step="fused",
        )  # fmt: skip

    @property
    def autocast(self) -> bool:
        """Autocast keeps 16-bit copies of float32 weights. FSDP2's mixed precision takes its place where it shards."""
        return self.precision == "amp-bf16" and not self.sharded

    @property
    def sharded(self) -> int:
        """The stage of ZeRO that there are ranks for. FSDP2's CPUOffloadPolicy goes layer by layer on one GPU, too."""
        if self.offload >= {"optimizer", "parameters"}:
            return 3
        return self.zero if self.data_parallel > 1 else 0

    @property
    def gpus(self) -> int:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def global_batch(self) -> int:
        """Sequences for one optimizer step."""
        return self.micro_batch * self.data_parallel * self.accumulation
