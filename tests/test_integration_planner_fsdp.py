"""What one rank needs under FSDP2, against torch's tracker: fake tensors, and ranks that are not there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_steps import CPU, fake
from planner_runs import causal_lm
from torch import distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig

from halfstep.planner.job import Job
from halfstep.planner.memory import Allowance, Estimate, estimate
from halfstep.planner.presets import from_config

pytestmark = pytest.mark.xdist_group("planner oracles")
RANKS = 8


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def llama(layers: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4, vocab_size=vocabulary,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def measured(config: LlamaConfig, job: Job, mesh: DeviceMesh) -> dict[str, int]:
    """Bytes by category at the highest moment of the second step."""
    with fake(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = causal_lm(config, job)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32 if job.reduce_in_fp32 else torch.bfloat16
        )
        for module in (*model.model.layers, model):  # type: ignore[union-attr]
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=job.zero == 3)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids = torch.randint(0, config.vocab_size, (job.micro_batch, job.sequence))
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids,))
        for _ in range(2):
            with tracker:
                for _ in range(job.accumulation):
                    tracker.reset_mod_stats()
                    model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return {getattr(k, "value", k): v for k, v in tracker.get_tracker_snapshot("peak")[CPU].items()}


BF16 = dict(precision="bf16", optimizer="weights-bf16-states")
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # layers, vocabulary, changes of the job
    "activations": (3, 1000, dict(sequence=128)),
    "checkpoints": (3, 1000, dict(recompute="layer")),
    "small vocabulary": (3, 96, dict(recompute="layer")),
    "reduced in bfloat16": (3, 1000, dict(reduce_in_fp32=False)),
    "stage 2": (3, 1000, dict(zero=2)),
    "bfloat16 shards": (3, 1000, BF16),
    "one layer": (1, 1000, dict(recompute="layer")),
    "two layers": (2, 1000, dict(sequence=128)),  # nothing is gathered while something is reduced
    "two micro-batches": (3, 1000, dict(accumulation=2, recompute="layer")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_rank(case: str, mesh: DeviceMesh) -> None:
    layers, vocabulary, changes = CASES[case]
    common: dict[str, Any] = dict(
        precision="amp-bf16", optimizer="fp32", zero=3, data_parallel=RANKS, attention_mask=True, device="cpu",
        step="for-loop", sequence=16,
    )  # fmt: skip
    config, job = llama(layers, vocabulary), Job(**{**common, **changes})
    found = estimate(from_config(config), job, Allowance(0, 0, 0.0))
    seen = measured(config, job, mesh)
    assert found.parts["parameters"] == seen["Sharded Param"]
    assert found.parts["optimizer_states"] == seen["OptState"] - 4 * (3 + 9 * layers)  # a step for each parameter
    assert found.peak == pytest.approx(seen["Total"], rel=0.002)
    assert found.peak_phase == "backward"


def found_on(ranks: int, **changes: Any) -> Estimate:
    job = Job(precision="amp-bf16", optimizer="fp32", data_parallel=ranks, zero=3, recompute="layer", **changes)
    return estimate(from_config(llama(4, 1024)), job, Allowance(0, 0, 0.0))


def test_transients_do_not_shrink_with_the_ranks() -> None:
    """4 Psi / N and 8 Psi / N, but 2 (root + layer), 2 layer to gather and 4 layer to reduce, whatever N is."""
    model = from_config(llama(4, 1024))
    layer, root = model.layer_parameters, sum(w.elements * w.copies for w in model.outer_weights)
    for ranks in (8, 64):
        found = found_on(ranks)
        assert found.parts["parameters"] == 4 * model.parameters // ranks
        assert found.parts["optimizer_states"] == 8 * model.parameters // ranks
        assert found.transients["unsharded_parameters"] == 2 * (root + layer)
        assert found.transients["all_gather"] == 2 * layer
        assert found.phases["backward"]["reduce_scatter"] == 4 * layer
    # at s = 1 they are nearly everything on 64 ranks
    small = found_on(64, sequence=1)
    sharded = small.parts["parameters"] + small.parts["optimizer_states"]
    assert 1 - sharded / small.peak > 0.9


def test_offloaded_shards_and_gradients_are_on_the_host() -> None:
    """FSDP2's CPUOffloadPolicy; with hs.Accumulator the sums are there, too."""
    both = frozenset({"optimizer", "parameters"})
    found = found_on(8, offload=both)
    model = from_config(llama(4, 1024))
    assert found.host == {
        "parameters": 4 * model.parameters // 8, "gradients": 4 * model.parameters // 8,
        "optimizer_states": 8 * model.parameters // 8,
    }  # fmt: skip
    assert not {"parameters", "optimizer_states", "gradients"} & set(found.phases["step"])
    job = Job(zero=3, data_parallel=8, offload=both, accumulation=4, accumulate_in_fp32=True)
    summed = estimate(model, job, Allowance(0, 0, 0.0))
    assert summed.host["gradients"] == (2 + 4) * model.parameters // 8
    assert "gradients" not in summed.phases["forward"]
