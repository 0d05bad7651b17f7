"""What is wrong with an argument of hs.plan is said in one line: the field, its value, what was expected."""

from __future__ import annotations

import pytest

import halfstep as hs


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(model="llama-8b"), "model='llama-8b': expected one of gpt2, "),
        (dict(hardware="tpu"), "hardware='tpu': expected one of a100-40gb"),
        (dict(hardware=8), "hardware=8: expected a Hardware, a preset's name or a dict of its fields"),
        (dict(sequence=0), "sequence=0: expected 1 .. 134,217,728 tokens"),
        (dict(global_batch=0), "global_batch=0: expected 1 .. 1,048,576 sequences"),
        (dict(global_batch="9G-tokens"), "global_batch=4,394,531: expected 1 .. 1,048,576 sequences"),
        (dict(global_batch="1M"), "global_batch='1M': expected a unit, 1M-tokens or 1M-sequences"),
        (
            dict(learning_rate=1.0, learning_rate_batch="4k"),
            "learning_rate_batch='4k': expected a unit, 4k-tokens or 4k",
        ),
        (dict(assumptions=3), "assumptions=3: expected halfstep.planner.Assumptions(...) or None"),
        (dict(precision="fp8"), "precision='fp8': expected one of bf16, fp16, fp32, amp-bf16"),
        (dict(attention="flash"), "attention='flash': expected one of fused, eager"),
        (dict(optimizer="sgd"), "optimizer='sgd': expected one of master, split"),
        (dict(optimizer="master", precision="fp32"), "optimizer='master': expected one of fp32 with precision='fp32'"),
        (dict(recompute="all"), "recompute='all': expected one of none, selective, layer"),
        (dict(zero=4), "zero=4: expected 0 .. 3"),
        (dict(zero=3, precision="fp16"), "zero=3: expected 0 with precision='fp16', or precision='bf16'"),
        (dict(tensor_parallel=2, precision="fp16"), "tensor_parallel=2: expected 1 with precision='fp16'"),
        (dict(tensor_parallel=0), "tensor_parallel=0: expected 1 .. 1,024"),
        (
            dict(tensor_parallel=3),
            "tensor_parallel=3: expected 1, 2, 4, 8, which divides gpus=8, heads=32, kv_heads=32 and ffn=11008 and is "
            "at most gpus_per_node=8",
        ),
        (dict(tensor_parallel=16, hardware={"gpus": 16}), "tensor_parallel=16: expected 1, 2, 4, 8, which divides"),
        (dict(model="qwen2.5-7b", tensor_parallel=8), "tensor_parallel=8: expected 1, 2, 4, which divides gpus=8, hea"),
        (dict(pipeline_parallel=0), "pipeline_parallel=0: expected 1 .. 1,024"),
        (
            dict(pipeline_parallel=5),
            "pipeline_parallel=5: expected 1, 2, 4, 8, which divides gpus=8 and is at most layers=32",
        ),
        (
            dict(tensor_parallel=4, pipeline_parallel=4),
            "pipeline_parallel=4: expected 1, 2, which divides gpus=8 / tensor_parallel=4 and is at most layers=32",
        ),
        (dict(model="gpt2", pipeline_parallel=16, hardware={"gpus": 16}), "pipeline_parallel=16: expected 1, 2, 4, 8,"),
        (dict(offload="host", zero=2), "zero=2: expected 3 with offload='host'"),
        (dict(offload="host", precision="fp16"), "offload='host': expected none or activations with precision='fp16'"),
        (dict(offload="disk"), "offload='disk': expected one of none, activations, host"),
        (dict(micro_batch=0), "micro_batch=0: expected 1 .. 1,048,576"),
        (dict(learning_rate=1e-4), "learning_rate=0.0001, learning_rate_batch=None: expected both"),
        (dict(learning_rate=0.0, learning_rate_batch=8), "learning_rate=0.0: expected 1e-12 .. 1,000.0"),
        (
            dict(learning_rate=0.1, learning_rate_batch=0),
            "learning_rate_batch=0: expected 0.001 .. 1,073,741,824 sequences",
        ),
    ],
)
def test_errors_name_the_field_its_value_and_the_range(arguments: dict, text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        hs.plan(**{"model": "llama-7b", **arguments})
    assert text in str(error.value)
    assert "\n" not in str(error.value)
