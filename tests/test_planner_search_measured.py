"""Plans for models that are measured instead of described."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.planner import Hardware, MeasuredModel, Plan, estimate, hardware
from halfstep.planner.flops import forward_flops
from halfstep.planner.inverse import largest_model, longest_sequence
from halfstep.planner.planning import choices, wish_of

WIDTH, LAYERS, OUTPUTS = 64, 3, 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make() -> nn.Module:
    return nn.Sequential(nn.Embedding(OUTPUTS, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, OUTPUTS))


def loss_of(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.long)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.fixture(scope="module")
def model() -> MeasuredModel:
    return MeasuredModel(make, loss_of, name="mlp")


@pytest.fixture(scope="module")
def tight() -> Hardware:
    return hardware("h100", gpus=4, gpu_memory="1.2GB")


@pytest.fixture(scope="module")
def plan(model: MeasuredModel, tight: Hardware) -> Plan:
    return hs.plan(model, tight, sequence=256, global_batch=64)


def test_a_measured_model_is_planned(model: MeasuredModel, plan: Plan) -> None:
    job = plan.job
    assert plan.fits
    assert (job.data_parallel, job.tensor_parallel, job.pipeline_parallel) == (4, 1, 1)
    assert job.global_batch >= 64
    assert plan.memory.peak == estimate(model, job).peak
    assert plan.memory.phases["backward"]["blocks"] > 0
    assert (plan.model.name, plan.model.parameters) == ("mlp", model.parameters)
    assert "mlp" in str(plan)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_hardware_has_its_name(model: MeasuredModel, tight: Hardware, plan: Plan) -> None:
    assert hs.plan(model, hardware=tight, sequence=256, global_batch=64) == plan


def test_its_flops_are_counted(model: MeasuredModel, plan: Plan) -> None:
    token = 2 * (LAYERS * 8 * WIDTH**2 + WIDTH * OUTPUTS)
    assert forward_flops(model, replace(plan.job, micro_batch=3)) == 3 * 256 * token


def test_only_states_are_levers_of_it(plan: Plan) -> None:
    assert {lever.name for lever in plan.levers} == {"optimizer states"}


def test_the_longest_sequence_is_the_last_that_fits(model: MeasuredModel, tight: Hardware) -> None:
    found = longest_sequence(model, tight, wish_of(128, "bf16", "fused"), choices())
    assert found is not None
    assert hs.plan(model, tight, sequence=found, micro_batch=1).fits
    assert not hs.plan(model, tight, sequence=2 * found, micro_batch=1, offload="none").fits


def test_what_is_not_known_of_it_is_refused(model: MeasuredModel, plan: Plan, tight: Hardware) -> None:
    with pytest.raises(ValueError, match="script: model='mlp' was measured: expected a preset"):
        plan.script()
    with pytest.raises(ValueError, match="model='mlp' was measured: expected a shape, whose sizes can be changed"):
        largest_model(model, tight, wish_of(128, "bf16", "fused"), choices())
    for name in ("tensor_parallel", "pipeline_parallel"):
        with pytest.raises(ValueError, match=f"{name}=2: expected 1 or None for a measured model"):
            hs.plan(model, tight, **{name: 2})
