"""Ways to train: what is refused, in one line that names the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from halfstep.planner.job import Job


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(micro_batch=0), "micro_batch=0: expected an integer >= 1"),
        (dict(sequence=2048.0), r"sequence=2048\.0: expected an integer >= 1"),
        (dict(accumulation=-1), "accumulation=-1: expected an integer >= 1"),
        (dict(data_parallel=0), "data_parallel=0: expected an integer >= 1"),
        (dict(precision="fp8"), "precision='fp8': expected one of bf16, fp16, fp32, amp-bf16"),
        (dict(optimizer="adam"), "optimizer='adam': expected one of master, split, "),
        (dict(recompute="full"), "recompute='full': expected one of none, attention, selective, layer"),
        (dict(attention="flash"), "attention='flash': expected one of fused, eager"),
        (dict(loss="chunked"), "loss='chunked': expected one of logits, fused"),
        (dict(step="loop"), "step='loop': expected one of fused, foreach, for-loop"),
        (dict(device="tpu"), "device='tpu': expected one of cuda, cpu"),
        (dict(offload={"weights"}), "offload='weights': expected one of optimizer, parameters, activations"),
        (dict(zero=4), r"zero=4: expected a stage, 0 \.\. 3"),
        (dict(optimizer="fp32"), "optimizer='fp32': expected one of master, split, .* with precision='bf16'"),
        (dict(precision="fp32"), "optimizer='master': expected one of fp32 with precision='fp32'"),
        (
            dict(precision="fp16", optimizer="split"),
            "optimizer='split': a split master needs precision='bf16', got 'fp16'",
        ),
        (dict(sequence_parallel=True), "sequence_parallel=True: expected False with tensor_parallel=1; raise tensor_"),
        (dict(release_gradients=True, accumulation=4), "release_gradients=True: expected False with accumulation=4"),
        (dict(data_parallel=4, expert_parallel=3), "expert_parallel=3: expected a divisor of data_parallel=4"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        Job(**change)
    assert "\n" not in str(raised.value)


def test_degrees_multiply() -> None:
    job = Job(micro_batch=2, accumulation=3, data_parallel=4, tensor_parallel=2, pipeline_parallel=5)
    assert (job.gpus, job.global_batch) == (40, 24)


def test_what_blocks_do_not_depend_on_is_forgotten() -> None:
    """Guards the caches of activations: equal keys for jobs that keep the same, other keys for jobs that do not."""
    base = Job()
    same: list[dict[str, Any]] = [
        dict(zero=3), dict(data_parallel=8), dict(accumulation=4), dict(pipeline_parallel=2), dict(optimizer="split"),
        dict(offload={"optimizer"}), dict(step="foreach"), dict(release_gradients=True), dict(reduce_in_fp32=False),
        dict(precision="amp-bf16", optimizer="fp32", zero=3, data_parallel=8),
    ]  # fmt: skip
    other: list[dict[str, Any]] = [
        dict(micro_batch=2), dict(sequence=1), dict(recompute="layer"), dict(attention="eager"), dict(loss="fused"),
        dict(precision="fp32", optimizer="fp32"), dict(precision="fp16"), dict(precision="amp-bf16", optimizer="fp32"),
        dict(tensor_parallel=2), dict(tensor_parallel=2, sequence_parallel=True), dict(attention_mask=True),
        dict(data_parallel=2, expert_parallel=2), dict(device="cpu"),
        dict(precision="amp-bf16", optimizer="fp32", zero=3),  # a single rank shards nothing: autocast
    ]  # fmt: skip
    assert {Job(**change).blocks for change in same} == {base.blocks}
    assert base.blocks not in {Job(**change).blocks for change in other}
