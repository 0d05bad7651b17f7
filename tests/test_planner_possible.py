"""Plans ask for nothing that halfstep or torch refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import halfstep as hs
from halfstep.planner import MODELS, Job, hardware
from halfstep.planner.inverse import longest_sequence
from halfstep.planner.planning import choices
from halfstep.planner.search import HOST_OFFLOAD, Space, Wish, layouts
from halfstep.planner.settings import optimizer_call, settings

TWO_NODES = hardware("h100", gpus=16)


@pytest.mark.parametrize("split", [dict(zero=1, data_parallel=2), dict(tensor_parallel=2), dict(pipeline_parallel=2)])
def test_ranks_with_parts_of_a_model_do_not_skip_steps_by_themselves(split: dict[str, Any]) -> None:
    assert "skip_nonfinite=False" in optimizer_call(Job(**split))
    assert "skip_nonfinite" not in optimizer_call(Job(data_parallel=2))


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_experts_and_fused_projections_are_split_only_if_asked_for(name: str) -> None:
    def degrees(space: Space) -> set[int]:
        return {job.tensor_parallel for job in layouts(MODELS[name], TWO_NODES, Wish(), space)}

    assert degrees(Space()) == {1}
    assert degrees(Space(tensor_parallels=(4,))) == {4}


@pytest.mark.parametrize("mode", ["weights-fp32-states", "weights-bf16-states", "weights-int8-states"])
def test_stochastic_rounding_takes_no_rowwise_weights(mode: str) -> None:
    """hs.AdamW refuses DTensors sharded on dimension 1."""
    found = {job.tensor_parallel for job in layouts(MODELS["llama-7b"], TWO_NODES, Wish(), Space(optimizers=(mode,)))}
    assert found == {1}
    split = layouts(MODELS["llama-7b"], TWO_NODES, Wish(), Space(optimizers=("split",)))
    assert {job.tensor_parallel for job in split} == {1, 2, 4, 8}


def test_a_scaler_works_on_whole_models_alone() -> None:
    for space in choices("fp16"):
        assert (space.zeros, space.tensor_parallels, space.pipeline_parallels) == ((0,), (1,), (1,))
    plan = hs.plan("llama-7b", "a100-80gb", precision="fp16", optimizer="master", global_batch=64)
    assert not plan.fits
    (other,) = [each for each in plan.remedies if each.change.startswith("bfloat16 weights")]
    assert other.fits


def test_learned_positions_limit_the_sequence() -> None:
    assert hs.plan("gpt2", "h100", global_batch=8).job.sequence == 1024
    assert hs.plan("llama-7b", "h100", global_batch=8).job.sequence == 2048
    assert longest_sequence(MODELS["gpt2"], TWO_NODES, Wish(), [Space()]) == 1024


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(model="gpt2", sequence=1025), "sequence=1,025: expected 1 .. positions=1,024, the learned positions of"),
        (
            dict(optimizer="weights-bf16-states", tensor_parallel=2),
            "tensor_parallel=2: expected 1 with optimizer='weights-bf16-states', whose stochastic rounding",
        ),
        (dict(precision="fp16", pipeline_parallel=2), "pipeline_parallel=2: expected 1 with precision='fp16'"),
    ],
)
def test_what_cannot_be_is_said(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        hs.plan(**{"model": "llama-7b", **arguments})


@pytest.mark.parametrize(("zero", "kept", "sync"), [(1, "False", ', sync="last"'), (2, "False", ""), (3, "True", "")])
def test_stages_in_the_words_of_fsdp2(zero: int, kept: str, sync: str) -> None:
    """Stage 1 reduces the sums of all micro-batches once, 2 each micro-batch's; 3 gathers again for backward."""
    found = settings(Job(zero=zero, data_parallel=8, accumulation=4))
    assert f"reshard_after_forward={kept}," in found["data parallel"]
    assert found["accumulation"] == f"hs.Accumulator(optimizer, steps=4, model=model{sync})"


def test_sums_of_gradients_that_lose_bits_are_said() -> None:
    """hs.Accumulator's float32 sums are for whole models and FSDP2's shards alone."""
    assert settings(Job(tensor_parallel=2, accumulation=4))["accumulation"].startswith(
        "backward() 4 times a step: torch adds the gradients up in 16 bits"
    )
    staged = settings(Job(pipeline_parallel=2, accumulation=4, precision="fp32", optimizer="fp32"))
    assert staged["accumulation"].startswith("the schedule's micro-batches: torch adds the gradients up in float32")
    assert "accumulation" not in settings(Job(tensor_parallel=2))


def test_sharding_is_simpler_than_offload() -> None:
    """The first of equally fast ways is taken, so all stages without offload come first, the lowest before others."""
    space = Space(optimizers=("master",), recomputes=("none",), tensor_parallels=(1,), pipeline_parallels=(1,))
    found = [(bool(job.offload), job.zero) for job in layouts(MODELS["llama-7b"], TWO_NODES, Wish(), space)]
    assert found == [(offload, zero) for offload in (False, True) for zero in range(4)]


def test_parameters_on_the_host_need_stage_three() -> None:
    space = Space(offloads=(HOST_OFFLOAD,))
    assert {job.zero for job in layouts(MODELS["llama-7b"], TWO_NODES, Wish(), space)} == {3}


@pytest.mark.parametrize("model", [torch.nn.Sequential(torch.nn.Linear(2, 2)), lambda: torch.nn.Linear(2, 2)])
def test_a_module_is_measured_from_what_makes_it(model: Any) -> None:
    with pytest.raises(TypeError, match=r"^model=\w+: expected halfstep.planner.MeasuredModel\(make, loss_of\) .*$"):
        hs.plan(model)


def test_ram_that_is_missing_is_said() -> None:
    """405 B parameters at 14 bytes are 5.7 TB, 710 GB for each of 8 GPUs; a node with 2 TB has 250 GB for each."""
    plan = hs.plan("llama3-405b", "h100", global_batch=8)
    (offload,) = [each for each in plan.remedies if "CPUOffloadPolicy" in each.change]
    assert not offload.fits
    assert offload.margin > 0
    assert offload.host == pytest.approx(14 * plan.model.parameters / 8, rel=0.001)
    assert offload.host_missing == offload.host - 250 * 10**9
    assert re.search(
        r"on the host .*: does not fit, .* left, 710\.2 GB of RAM per GPU \(460\.2 GB missing\)", str(plan)
    )
    fixed = hs.plan("llama3-405b", "h100", global_batch=8, offload="host")
    assert (fixed.fits, fixed.margin > 0) == (False, True)
    assert re.search(r"RAM per GPU: 710\.2 GB \(460\.2 GB missing\)", str(fixed))
    enough = hs.plan("llama3-405b", {"preset": "h100", "host_memory": "8TB"}, global_batch=8, offload="host")
    assert enough.fits
    assert "of RAM per GPU (" not in str(enough)


def test_one_gpu_offloads_to_the_host_if_asked_to() -> None:
    plan = hs.plan("llama-7b", {"preset": "rtx-4090", "gpus": 1}, offload="host", global_batch=8)
    assert plan.fits
    assert (plan.job.zero, plan.job.offload >= HOST_OFFLOAD) == (3, True)
