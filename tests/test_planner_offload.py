"""What is offloaded: what leaves the GPU, what stays on it, and what the host needs."""

from __future__ import annotations

from typing import Any

import pytest

from halfstep.planner.job import Job
from halfstep.planner.memory import ACTIVATION_PARTS, Allowance, Estimate, estimate, kept_activations
from halfstep.planner.presets import PRESETS

SEVEN = PRESETS["llama-7b"]


def found(**changes: Any) -> Estimate:
    return estimate(SEVEN, Job(**changes), Allowance(0, 0, 0.0))


def activations(parts: Any) -> int:
    return sum(parts.get(part, 0) for part in ACTIVATION_PARTS)


def test_states_on_the_host() -> None:
    one = found(offload={"optimizer"})
    assert not {"masters", "optimizer_states"} & set(one.parts)
    assert one.host == {
        "masters": 4 * SEVEN.parameters, "optimizer_states": 8 * SEVEN.parameters,
        "gradients": 2 * SEVEN.parameters, "updated_parameters": 2 * SEVEN.parameters,
    }  # fmt: skip


def test_parameters_on_the_host_leave_two_layers_and_the_rest() -> None:
    one = found(offload={"optimizer", "parameters"})
    outer = 2 * 32000 * 4096 + 4096
    assert one.parts["unsharded_parameters"] == 2 * (outer + SEVEN.layer_parameters)
    assert one.parts["all_gather"] == 2 * SEVEN.layer_parameters
    assert "parameters" not in one.parts


@pytest.mark.parametrize("precision", ["bf16", "amp-bf16"])
def test_gradients_leave_a_single_gpu_layer_by_layer(precision: str) -> None:
    """FSDP2 with one rank gathers, casts and reduces as with many."""
    mode = "fp32" if precision == "amp-bf16" else "master"
    one = found(offload={"optimizer", "parameters"}, precision=precision, optimizer=mode, zero=3)
    head = SEVEN.vocabulary * SEVEN.hidden + SEVEN.hidden
    assert one.phases["backward"]["gradients"] <= 2 * (head + SEVEN.layer_parameters)
    assert one.parts["gradients"] <= 2 * (2 * head + SEVEN.layer_parameters)
    assert one.phases["backward"]["reduce_scatter"] == 4 * SEVEN.layer_parameters
    assert one.phases["forward"]["unsharded_parameters"] == 2 * (2 * head - SEVEN.hidden + SEVEN.layer_parameters)
    assert "autocast_copies" not in one.parts
    assert one.host["gradients"] == (4 if precision == "amp-bf16" else 2) * SEVEN.parameters
    assert one.peak < 20e9 < one.host["parameters"] + one.host["optimizer_states"]


def test_results_that_a_policy_keeps_are_not_moved() -> None:
    """hs.offload_activations sees what autograd saves and what a checkpoint gets, which is the layer's input."""
    one = found(recompute="selective", offload={"activations"})
    residual = 2 * 2048 * 4096
    assert one.host == {"activations": 32 * residual}
    here = found(recompute="selective")
    assert activations(here.phases["loss"]) - activations(one.phases["loss"]) == 31 * residual


def test_activations_on_the_host_leave_one_layer() -> None:
    here, there = found(micro_batch=4), found(micro_batch=4, offload={"activations"})
    assert here.host == {}
    layer = there.host["activations"] // SEVEN.layers
    assert activations(here.phases["loss"]) - activations(there.phases["loss"]) == (SEVEN.layers - 1) * layer
    assert kept_activations(SEVEN, Job(micro_batch=4)) == kept_activations(
        SEVEN, Job(micro_batch=4, offload=frozenset({"activations"}))
    )
