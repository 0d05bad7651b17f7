"""Plans for models and machines that nobody chose: whatever is drawn, the answer is consistent and says why."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

import halfstep as hs
from halfstep.planner import HARDWARE, Hardware, ModelShape, Plan, estimate, step_time
from halfstep.planner.planning import choices, wish_of
from halfstep.planner.remedies import CHANGES
from halfstep.planner.search import any_fits


def drawn_model(rng: random.Random) -> ModelShape:
    kv_heads = rng.choice([1, 2, 4, 8])
    heads = kv_heads * rng.choice([1, 2, 4])
    head_dim = rng.choice([64, 96, 128])
    experts = rng.choice([0, 0, 8])
    return ModelShape(
        name="drawn", vocabulary=rng.randrange(1000, 200_000), hidden=heads * head_dim, layers=rng.randrange(1, 60),
        heads=heads, kv_heads=kv_heads, ffn=rng.randrange(1, 20) * 256, tied=rng.random() < 0.5,
        gated=rng.random() < 0.7, norm=rng.choice(["rms", "layer"]), window=rng.choice([0, 0, 512]),
        experts=experts, experts_per_token=2 if experts else 0, embedding_rank=rng.choice([0, 0, 32]),
        lora_rank=rng.choice([0, 0, 0, 8]),
    )  # fmt: skip


def drawn_machine(rng: random.Random) -> Hardware:
    preset = rng.choice(list(HARDWARE.values()))
    gpus = rng.choice([1, 2, 3, 6, 8, 16, 48])
    memory = rng.choice([2, 3, 5, 24, 80])
    return replace(preset, gpus=gpus, gpu_memory=memory * 10**9, host_memory=rng.randrange(4, 500) * 10**9)


@pytest.mark.parametrize("seed", range(14, 26))
def test_a_drawn_plan_is_consistent(seed: int) -> None:
    rng = random.Random(seed)
    model, on = drawn_model(rng), drawn_machine(rng)
    precision = rng.choice(["bf16", "bf16", "fp16", "fp32", "amp-bf16"])
    sequence, batch = rng.choice([128, 1000, 4096]), rng.choice([None, 1, 37, 512])
    attention = rng.choice(["fused", "eager"])
    plan = hs.plan(model, on, sequence=sequence, global_batch=batch, precision=precision, attention=attention)
    job = plan.job
    assert job.data_parallel * job.tensor_parallel * job.pipeline_parallel == on.gpus
    assert (job.sequence, job.precision) == (sequence, precision)
    assert batch is None or batch <= job.global_batch < batch + job.micro_batch * job.data_parallel
    found = estimate(model, job)
    assert plan.memory.peak == found.peak
    enough_ram = sum(found.host.values()) <= on.host_memory_per_gpu
    assert plan.fits == (found.peak <= on.gpu_memory and enough_ram)
    if not plan.fits:
        assert plan.remedies
        # But for other weights (CHANGES["bfloat16"]), which are another run.
        same = [r for r in plan.remedies if r.available and r.gpus == on.gpus and r.change != CHANGES["bfloat16"]]
        assert not any(remedy.fits for remedy in same)
        spaces = choices(precision)
        wish = replace(wish_of(sequence, precision, attention), sequences=batch)
        assert not any_fits(model, on, wish, spaces)
    assert plan.time == step_time(model, job, on)
    assert all(seconds >= 0 for seconds in plan.time.parts.values())
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert model.name in str(plan)
