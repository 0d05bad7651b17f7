"""The step as a whole: phases, first step, parallelism, offload, allowances, published examples."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from halfstep.planner.job import Job
from halfstep.planner.memory import (
    ACTIVATION_PARTS,
    PHASES,
    STATE_PARTS,
    TRANSIENTS,
    Allowance,
    Estimate,
    estimate,
    kept_activations,
)
from halfstep.planner.model import ModelShape
from halfstep.planner.presets import PRESETS
from halfstep.planner.sharding import stages

TENSORS = Allowance(0, 0, 0.0)
SEVEN = PRESETS["llama-7b"]


def found(model: ModelShape = SEVEN, **changes: Any) -> Estimate:
    return estimate(model, Job(**changes), TENSORS)


def activations(parts: Any) -> int:
    return sum(parts.get(part, 0) for part in ACTIVATION_PARTS)


def test_every_part_is_named() -> None:
    known = {*STATE_PARTS, *ACTIVATION_PARTS, *TRANSIENTS, "inputs", "context", "fragmentation"}
    jobs: list[dict[str, Any]] = [
        dict(), dict(zero=3, data_parallel=8, accumulation=2, accumulate_in_fp32=True), dict(attention="eager"),
        dict(precision="amp-bf16", optimizer="fp32"), dict(offload={"optimizer", "parameters", "activations"}),
    ]  # fmt: skip
    for job in jobs:
        one = found(PRESETS["mixtral-8x7b"], **job)
        assert set(one.parts) <= known
        assert tuple(one.phases) == PHASES
        assert all(size > 0 for phase in one.phases.values() for part, size in phase.items() if part in known - {
            "context", "fragmentation"})  # fmt: skip


def test_the_peak_is_not_the_sum_of_the_parts() -> None:
    """Gradients appear while activations go; with several micro-batches they are there before."""
    once, twice = found(), found(accumulation=2)
    assert once.peak < sum(once.parts.values()) - activations(once.parts) / 2
    everything = sum(twice.parts[part] for part in STATE_PARTS) + activations(twice.parts)
    assert twice.peak == pytest.approx(everything, rel=0.02)
    assert twice.phases["forward"]["gradients"] == 2 * SEVEN.parameters
    assert "gradients" not in once.phases["forward"]


def test_float32_sums_of_an_accumulator_stand_beside_the_gradients() -> None:
    sums = found(accumulation=2, accumulate_in_fp32=True)
    assert sums.phases["forward"]["gradients"] == 4 * SEVEN.parameters
    assert sums.phases["reduce"]["gradients"] == 6 * SEVEN.parameters
    assert sums.phases["step"]["gradients"] == 4 * SEVEN.parameters
    assert found(accumulate_in_fp32=True).phases["reduce"]["gradients"] == 2 * SEVEN.parameters


def test_the_first_step_has_no_states_until_the_optimizer_makes_them() -> None:
    long = found(micro_batch=32)
    assert long.peak_phase == "loss"
    assert long.peak - long.first_step_peak == 12 * SEVEN.parameters
    short = found()
    assert short.first_step_peak == short.totals["step"]


def test_gradients_that_are_used_up_at_once() -> None:
    released = found(release_gradients=True)
    assert "gradients" not in released.parts
    assert released.totals["step"] == found().totals["step"] - 2 * SEVEN.parameters


def test_temporaries_of_the_optimizer() -> None:
    """foreach: as much as the weights. For-loop: twice the largest one, beside one that is let go late."""
    assert found(step="foreach").phases["step"]["temporaries"] == 2 * SEVEN.parameters
    loop = found(step="for-loop").phases["step"]["temporaries"]
    assert 0 <= loop - 2 * 2 * SEVEN.largest_weight <= 2 * SEVEN.hidden
    assert "temporaries" not in found(step="fused").phases["step"]
    sharded = found(step="foreach", zero=3, data_parallel=8).phases["step"]["temporaries"]
    assert sharded == pytest.approx(2 * SEVEN.parameters / 8, rel=0.001)


def test_buckets_of_data_parallel_are_there_from_the_start() -> None:
    """DistributedDataParallel allocates them for all gradients, which are views of them."""
    one, sums = found(data_parallel=8), found(data_parallel=8, accumulation=2, accumulate_in_fp32=True)
    assert {phase: parts["gradients"] for phase, parts in one.phases.items()} == dict.fromkeys(
        one.phases, 2 * SEVEN.parameters
    )
    assert {phase: parts["gradients"] for phase, parts in sums.phases.items()} == dict.fromkeys(
        sums.phases, (2 + 4) * SEVEN.parameters
    )
    largest = 2 * SEVEN.largest_weight  # made beside its bucket, then added to it
    assert one.phases["loss"]["temporaries"] >= largest
    assert found().phases["forward"].get("gradients", 0) == 0


# ---- parallelism -----------------------------------------------------------------------------------------------------
def test_tensor_parallelism_divides_matrices_and_what_is_between_them() -> None:
    whole, split, more = (
        found(**changes).phases["forward"]
        for changes in (dict(), dict(tensor_parallel=8), dict(tensor_parallel=8, sequence_parallel=True))
    )
    norms = SEVEN.parts["norms"]
    assert split["parameters"] == 2 * ((SEVEN.parameters - norms) // 8 + norms)
    assert split["ffn"] * 8 == whole["ffn"]
    assert split["norms"] == whole["norms"] == more["norms"] * 8


def test_rows_that_do_not_divide_are_rounded_up() -> None:
    model = ModelShape(vocabulary=1001, hidden=8, layers=1, heads=2, ffn=7, tied=True)
    table, attention, up, down, norms = 501 * 8, 4 * 4 * 8, 2 * 4 * 8, 4 * 7, 3 * 8
    found_bytes = found(model, tensor_parallel=2).parts["parameters"]
    assert found_bytes == 2 * (table + attention + up + down + norms)


def test_a_tied_table_is_at_both_ends_of_a_pipeline() -> None:
    model = dataclasses.replace(SEVEN, tied=True)
    job = Job(pipeline_parallel=2)
    names = [[weight.name for weight in stage.outer(model)] for stage in stages(model, job)]
    assert names == [["embedding"], ["embedding", "final_norm"]]
    names = [[weight.name for weight in stage.outer(SEVEN)] for stage in stages(SEVEN, job)]
    assert names == [["embedding"], ["final_norm", "head"]]


def test_heads_of_keys_are_copied_beyond_their_number() -> None:
    seventy = PRESETS["llama-70b"]
    keys = {t: Job(tensor_parallel=t) for t in (8, 16)}
    kept = {t: estimate(seventy, job, TENSORS).parts["attention"] for t, job in keys.items()}
    assert kept[16] > kept[8] / 2


@pytest.mark.parametrize(("accumulation", "in_flight"), [(1, 1), (3, 3), (16, 4)])
def test_the_first_stage_of_a_pipeline_waits_longest(accumulation: int, in_flight: int) -> None:
    """1F1B: p micro-batches at most, and no more than there are."""
    one = found(pipeline_parallel=4, accumulation=accumulation)
    layer = activations(found(dataclasses.replace(SEVEN, layers=2)).phases["forward"])
    layer -= activations(found(dataclasses.replace(SEVEN, layers=1)).phases["forward"])
    stage = one.stage
    if stage.first:
        assert stage.in_flight == in_flight
        cos_and_sin = 2 * 2048 * 128 * 2
        assert activations(one.phases["forward"]) == in_flight * 8 * layer + cos_and_sin
    else:
        assert accumulation == 1


def test_micro_batches_that_wait_are_there_to_the_end_of_a_backward() -> None:
    """The embedding's gradient is made last, beside what the other micro-batches keep."""
    model = ModelShape(vocabulary=500_000, hidden=64, layers=4, heads=4, ffn=64)
    one = found(model, pipeline_parallel=4, accumulation=4, sequence=16, loss="fused")
    assert one.stage.first
    alone = found(dataclasses.replace(model, layers=1), sequence=16)
    assert one.phases["backward"]["ffn"] == 3 * alone.phases["forward"]["ffn"]


def test_layers_that_do_not_divide_go_to_the_first_stages() -> None:
    model = dataclasses.replace(SEVEN, layers=10)
    one = found(model, pipeline_parallel=4, accumulation=16)
    assert one.stage.layers == 3
    with pytest.raises(ValueError, match=r"^pipeline_parallel=11: expected 1 .. layers=10, a layer for each"):
        found(model, pipeline_parallel=11)


def test_degrees_combine() -> None:
    one = found(zero=1, data_parallel=4, tensor_parallel=2, pipeline_parallel=2, accumulation=8)
    matrices = 16 * (SEVEN.layer_parameters - 2 * 4096) // 2 + 16 * 2 * 4096 + 32000 * 4096 // 2
    assert one.parts["optimizer_states"] == 8 * matrices // 4
    assert one.parts["gradients"] >= 2 * matrices


def test_experts_are_split_over_data_parallel_ranks() -> None:
    mixtral = PRESETS["mixtral-8x7b"]
    whole, split = found(mixtral, data_parallel=8), found(mixtral, data_parallel=8, expert_parallel=8)
    assert whole.parts["parameters"] - split.parts["parameters"] == 2 * mixtral.parts["ffn"] * 7 // 8
    # ZeRO shards an expert over the ranks that have it, which is one here
    sharded = found(mixtral, data_parallel=8, expert_parallel=8, zero=1)
    dense = mixtral.parameters - mixtral.parts["ffn"]
    assert sharded.parts["optimizer_states"] == pytest.approx(8 * (dense + mixtral.parts["ffn"]) / 8, rel=0.001)


# ---- model -----------------------------------------------------------------------------------------------------------
def test_fewer_heads_of_keys_keep_less() -> None:
    grouped = dataclasses.replace(SEVEN, kv_heads=4)
    saved = kept_activations(SEVEN, Job()) - kept_activations(grouped, Job())
    assert saved == 32 * 2 * 2 * 2048 * (4096 - 4 * 128)


def test_adapters_make_frozen_products_keep_nothing_for_their_weights() -> None:
    adapted = dataclasses.replace(SEVEN, lora_rank=8)
    # The FFN's input and its product are only needed for gradients of weights.
    one, whole = found(adapted), found()
    assert one.phases["forward"]["ffn"] < whole.phases["forward"]["ffn"]
    assert one.phases["reduce"]["gradients"] == 2 * adapted.trainable_parameters


def test_adapters_of_experts() -> None:
    mixtral = dataclasses.replace(PRESETS["mixtral-8x7b"], layers=2, lora_rank=4, lora_targets="all")
    one = found(mixtral)
    assert one.phases["backward"]["gradients"] <= one.phases["reduce"]["gradients"] == 2 * mixtral.trainable_parameters


def test_logits_that_are_never_whole() -> None:
    tokens, vocabulary = 2048, 32000
    assert found().phases["loss"]["temporaries"] >= 2 * 4 * tokens * vocabulary
    assert found(loss="fused").phases["loss"].get("temporaries", 0) < 4 * tokens * vocabulary
    saved = kept_activations(SEVEN, Job()) - kept_activations(SEVEN, Job(loss="fused"))
    targets, number, log_sum = 8 * (tokens + 1), 4, 4 * tokens
    assert saved == 4 * tokens * vocabulary + targets + number - log_sum


# ---- allowances ------------------------------------------------------------------------------------------------------
def test_what_is_assumed_is_said() -> None:
    one = estimate(SEVEN, Job(), Allowance(context=10, communication=7, fragmentation=0.5))
    bare = found()
    for phase, parts in one.phases.items():
        assert parts["context"] == 10
        assert parts["fragmentation"] == round(0.5 * bare.totals[phase])
    assert estimate(SEVEN, Job(data_parallel=2), Allowance(10, 7, 0.0)).parts["context"] == 17
    assert estimate(SEVEN, Job()).peak > bare.peak
    mib = 2**20
    assert Allowance() == Allowance(context=600 * mib, communication=400 * mib, fragmentation=0.03)


# ---- published examples ----------------------------------------------------------------------------------------------
def test_which_states_fit_into_eight_gpus() -> None:
    """13 B: 26 GB of states on each of 8 GPUs under ZeRO-3; 70 B: 140 GB, and 70 GB at 8 bytes per parameter."""
    for name, mode, low, high in [
        ("llama-13b", "master", 26, 26.1), ("llama-70b", "master", 137, 140),
        ("llama-70b", "weights-bf16-states", 68, 70),
    ]:  # fmt: skip
        one = found(PRESETS[name], zero=3, data_parallel=8, optimizer=mode)
        states = sum(one.parts.get(part, 0) for part in ("parameters", "masters", "optimizer_states"))
        states += 2 * PRESETS[name].parameters // 8
        assert low <= states / 1e9 <= high


def test_seven_billion_parameters_with_activations() -> None:
    """112 GB of states, about 122 with 10 GB of activations (those of a long or large micro-batch)."""
    one = found(accumulation=2)
    states = sum(one.parts[part] for part in STATE_PARTS) / 1e9
    assert states == pytest.approx(16 * 6.738, rel=0.001)
    assert 10 <= activations(one.parts) / 1e9 <= 14
