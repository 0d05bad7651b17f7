"""The search: against brute force over the time model, and the answers that people know."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

import halfstep as hs
from halfstep.planner import MODELS, Assumptions, Job, ModelShape, Plan, estimate, hardware, step_time
from halfstep.planner.batch import batch_advice, micro_batches_for, scaled_learning_rate
from halfstep.planner.inverse import SCALES, largest_model, longest_sequence
from halfstep.planner.planning import choices
from halfstep.planner.search import EXACT, NO_MASTER, Space, Wish, any_fits, cheapest, fits, largest_micro_batch
from halfstep.planner.time import tokens

SMALL = ModelShape(name="small", vocabulary=1000, hidden=256, layers=6, heads=8, kv_heads=4, ffn=704)
# The allowance of about 1 GB of a CUDA context is most of it: little is left for a model this small.
TIGHT = hardware("h100", gpus=4, gpu_memory="1.5GB")


# ---- brute force -----------------------------------------------------------------------------------------------------
def every_job(space: Space, gpus: int, sequences: int):
    """Nothing left out: all degrees, all micro-batches."""
    for tensor, pipeline in product(space.tensor_parallels, space.pipeline_parallels):
        if gpus % (tensor * pipeline):
            continue
        ranks = gpus // (tensor * pipeline)
        for zero, offload, mode, recompute in product(space.zeros, space.offloads, space.optimizers, space.recomputes):
            if zero and ranks == 1:
                continue
            for micro_batch in range(1, sequences + 1):
                yield Job(
                    micro_batch=micro_batch, accumulation=-(-sequences // (micro_batch * ranks)), sequence=1024,
                    optimizer=mode, recompute=recompute, zero=zero, data_parallel=ranks, tensor_parallel=tensor,
                    sequence_parallel=tensor > 1, pipeline_parallel=pipeline, offload=offload,
                    accumulate_in_fp32=tensor == pipeline == 1,
                )  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "sequences", "pipelines"),
    [("1.3GB", 24, (1,)), ("1.16GB", 13, (1,)), ("1.2GB", 16, (1, 2)), ("40GB", 24, (1, 2))],
)
def test_the_cheapest_is_brute_forces(memory: str, sequences: int, pipelines: tuple[int, ...]) -> None:
    on = replace(TIGHT, gpu_memory=hardware("h100", gpu_memory=memory).gpu_memory)
    space = Space(tensor_parallels=(1, 2), pipeline_parallels=pipelines)
    times = {job: step_time(SMALL, job, on).total for job in every_job(space, 4, sequences)}
    ordered = sorted(times, key=times.__getitem__)
    expected = next(job for job in ordered if fits(estimate(SMALL, job), on))
    wish = Wish(sequence=1024, sequences=sequences)
    found = cheapest(SMALL, on, wish, space, Assumptions(indifference=0))
    assert found is not None
    assert found.time.total == times[expected]
    assert fits(found.estimate, on)
    assert found.estimate.peak == estimate(SMALL, found.job).peak
    if memory == "1.16GB":
        assert times[expected] > times[ordered[0]], "memory has a say here"
    # Nearly as fast counts as fast; of those the first that is simple enough to come first.
    near = [job for job in times if times[job] <= 1.05 * times[expected] and fits(estimate(SMALL, job), on)]
    simple = cheapest(SMALL, on, wish, space, Assumptions(indifference=0.05))
    assert simple is not None
    assert simple.time.total <= 1.05 * times[expected]
    assert _order(simple.job) == min(map(_order, near))


def test_without_a_wanted_batch_a_token_is_cheapest() -> None:
    space = Space(optimizers=("split",), zeros=(0, 3), tensor_parallels=(1, 2), pipeline_parallels=(1,))
    found = cheapest(SMALL, TIGHT, Wish(sequence=1024), space, Assumptions(indifference=0))
    assert found is not None
    assert found.job.accumulation == 1
    assert found.job.micro_batch < 32

    def cost(job: Job) -> float:
        return step_time(SMALL, job, TIGHT).total / tokens(job)

    single = (replace(job, accumulation=1) for job in every_job(space, 4, 32))
    assert cost(found.job) == min(cost(job) for job in single if fits(estimate(SMALL, job), TIGHT))


def _order(job: Job) -> tuple:
    """What is simple: few splits, nothing offloaded, little sharding, float32 masters, nothing recomputed."""
    return (job.tensor_parallel, job.pipeline_parallel, len(job.offload), job.zero, job.optimizer == "split",
            ("none", "selective", "layer").index(job.recompute))  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"recompute": "layer"}, {"zero": 3}, {"accumulation": 4}])
def test_the_largest_micro_batch_is_the_last_that_fits(changes: dict) -> None:
    job = Job(sequence=1024, data_parallel=4, **changes)
    found = largest_micro_batch(SMALL, job, TIGHT, 10_000)
    assert found > 1
    assert estimate(SMALL, replace(job, micro_batch=found)).peak <= TIGHT.gpu_memory
    assert estimate(SMALL, replace(job, micro_batch=found + 1)).peak > TIGHT.gpu_memory
    assert largest_micro_batch(SMALL, job, TIGHT, found - 1) == found - 1
    assert largest_micro_batch(SMALL, job, replace(TIGHT, gpu_memory=10**9), 100) == 0


# ---- batches ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sequences", "ranks"), [(1, 1), (61, 1), (488, 8), (13, 4), (512, 8), (5, 8)])
def test_micro_batches_cover_the_global_batch(sequences: int, ranks: int) -> None:
    """GBS = MBS x DP x GAS, rounded up; every accumulation that some micro-batch needs is there, with its smallest."""
    found = micro_batches_for(sequences, ranks)
    needed: dict[int, int] = {}
    for micro_batch in range(-(-sequences // ranks), 0, -1):
        needed[-(-sequences // (micro_batch * ranks))] = micro_batch
    assert {k: m for m, k in found} == needed
    for micro_batch, accumulation in found:
        assert micro_batch * ranks * accumulation >= sequences > micro_batch * ranks * (accumulation - 1)


def test_a_remainder_is_said() -> None:
    (text,) = batch_advice(100, 3, 8, 5, 2048)
    assert "the global batch is 120 sequences (245,760 tokens) instead of 100" in text
    assert "a multiple of micro-batch x data-parallel ranks = 24" in text
    assert batch_advice(120, 3, 8, 5, 2048) == []
    assert batch_advice(1e6 / 2048, 61, 8, 1, 2048) == [], "within a sequence of what was asked for"


def test_accumulation_in_the_hundreds_is_warned_of() -> None:
    (text,) = batch_advice(100, 1, 1, 100, 2048)
    assert text.startswith("100 micro-batches for one step: hundreds of them")
    assert batch_advice(99, 1, 1, 99, 2048) == []
    plan = hs.plan("llama-7b", "h100", global_batch=4096, micro_batch=1)
    assert plan.job.accumulation == 512
    assert any("512 micro-batches for one step" in text for text in plan.advice)


def test_learning_rates_go_with_the_batch() -> None:
    found = scaled_learning_rate(3e-4, 4)
    assert (found.sqrt, found.linear) == (pytest.approx(6e-4), pytest.approx(1.2e-3))
    plan = hs.plan("gpt2", "h100", global_batch=512, learning_rate=1e-4, learning_rate_batch=128)
    assert plan.learning_rate is not None
    assert plan.learning_rate.ratio == 4
    text = str(plan)
    assert "learning rate 0.0001 at 0.25 of this batch: 0.0002 by square root (Adam: Malladi et al. 2022" in text
    assert "0.0004 linearly (SGD with warmup: Goyal et al. 2017)" in text


# ---- what is known ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: hs.plan(f"llama-{name}", "a100-80gb", global_batch="1Mi-tokens") for name in ("7b", "13b", "70b")}


def test_a_plan_says_how_far_the_micro_batch_could_go(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        largest, on = plan.largest_micro_batch, plan.hardware
        assert largest >= plan.job.micro_batch
        assert fits(estimate(plan.model, replace(plan.job, micro_batch=largest)), on)
        assert not fits(estimate(plan.model, replace(plan.job, micro_batch=largest + 1)), on)
        assert f"largest micro-batch that fits: {largest:,} (planned: {plan.job.micro_batch:,})" in str(plan)


def test_seven_and_thirteen_billion_train_on_eight_gpus_of_80_gb(plans: dict[str, Plan]) -> None:
    for name in ("7b", "13b"):
        plan = plans[name]
        assert plan.fits
        assert plan.margin >= 0
        assert not plan.job.offload - {"activations"}
        assert plan.job.optimizer in EXACT
        assert not plan.remedies
        assert plan.job.global_batch == 512


def test_seventy_billion_need_offload_or_more_gpus(plans: dict[str, Plan]) -> None:
    plan, model, on = plans["70b"], MODELS["llama-70b"], hardware("a100-80gb")
    exact = choices(offload="none")[0]
    assert not any_fits(model, on, Wish(), choices(offload="none")[:2]), "16 or 14 bytes per parameter, 8 GPUs"
    states = estimate(model, Job(zero=3, data_parallel=8, recompute="layer"))
    assert sum(
        states.parts[part] for part in ("parameters", "gradients", "masters", "optimizer_states")
    ) == pytest.approx(140e9, rel=0.02)
    assert plan.fits
    assert plan.job.offload >= {"parameters", "optimizer"}, "what this version can do without changing numbers"
    assert "CPUOffloadPolicy()" in plan.settings["data parallel"]
    sharded, offload, narrow, no_master, *_ = plan.remedies
    assert (sharded.fits, offload.fits, narrow.fits, no_master.fits) == (False, True, False, False)
    assert sharded.margin == on.gpu_memory - sharded.peak < -40e9
    assert exact.optimizers == EXACT


@pytest.mark.parametrize(("batch", "width", "missing"), [(8, 8, 2.47e9), (512, 12, 37.99e9)])
def test_eight_bytes_of_seventy_billion_do_not_fit(batch: int, width: int, missing: float) -> None:
    """69 GB of states on each of 8 GPUs and the rest of a step: 82.5 GB. Accumulation adds 4 bytes a parameter."""
    plan, model = hs.plan("llama-70b", "a100-80gb", global_batch=batch), MODELS["llama-70b"]
    (no_master,) = [each for each in plan.remedies if each.change.startswith("8 bytes per parameter, 12 with accumul")]
    # A layer's gradients are whole while they are reduced.
    assert no_master.states == pytest.approx(width * model.parameters / 8, rel=0.03)
    assert not no_master.fits
    assert no_master.margin == pytest.approx(-missing, abs=0.01e9)
    assert re.search(r"stochastic rounding: does not fit, .* per GPU at the peak .*, \d+\.?\d* GB missing", str(plan))
    (offload,) = [each for each in plan.remedies if "CPUOffloadPolicy" in each.change]
    assert offload.fits
    assert plan.remedies[-1].change == "16 GPUs"
    assert plan.remedies[-1].fits


def test_more_gpus_are_a_remedy_too(plans: dict[str, Plan]) -> None:
    more = plans["70b"].remedies[-1]
    assert more.fits
    assert more.change == f"{more.gpus:,} GPUs"
    model, wish = MODELS["llama-70b"], Wish(sequences=512)
    assert any_fits(model, hardware("a100-80gb", gpus=more.gpus), wish, [Space(pipeline_parallels=(1,))])
    assert not any_fits(model, hardware("a100-80gb", gpus=more.gpus - 8), wish, [Space(pipeline_parallels=(1,))])


def test_what_is_not_there_yet_is_counted_but_not_chosen(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        assert {"int8", "release"}.isdisjoint(" ".join(plan.settings.values()).split())
        assert all(each.saves > 0 for each in plan.unavailable)
    assert any("8-bit optimizer states" in each.change for each in plans["7b"].unavailable)
    remedies = {each.change: each for each in plans["70b"].remedies}
    unavailable = [each for each in remedies.values() if not each.available]
    assert {each.change: each.fits for each in unavailable} == {
        "block-quantised 8-bit optimizer states, no master": False,  # accumulation's float32 sums beside it
        "optimizer states alone on the host": True,
    }
    assert all(each.reason for each in unavailable)
    with pytest.raises(
        ValueError, match="optimizer='split-int8-states': block-quantised int8 states are not available"
    ):
        hs.plan("llama-7b", optimizer="split-int8-states")


def test_nothing_fits() -> None:
    plan = hs.plan("llama3-405b", {"preset": "rtx-4090"}, global_batch=64)
    assert not plan.fits
    assert plan.margin < 0
    assert "does not fit" in str(plan)
    assert "what would make it:" in str(plan)


def test_float32_weights_have_remedies_of_their_own() -> None:
    plan = hs.plan("llama-7b", {"preset": "rtx-4090", "gpus": 4}, precision="fp32", offload="none")
    assert not plan.fits
    changes = [each.change for each in plan.remedies]
    assert "bfloat16 weights and gradients, float32 masters and states" in changes
    assert not any("8 bytes per parameter" in change for change in changes)


def test_what_changes_numbers_comes_last() -> None:
    """No RAM to offload to: then, and only then, states lose bits; without room for them, masters go."""
    on = hardware("a100-80gb", host_memory="64GB")
    plan = hs.plan("llama-65b", on)
    assert plan.fits
    assert plan.job.optimizer in NO_MASTER
    assert plan.job.tensor_parallel == 1
    assert hs.plan("llama-65b", on, offload="none").job.optimizer in NO_MASTER
    assert not hs.plan("llama-65b", on, optimizer="master").fits
    assert not hs.plan("llama-70b", on).fits, "82.5 GB of 80"


def test_given_fields_are_kept() -> None:
    plan = hs.plan("llama-7b", "h100", global_batch=64, zero=2, recompute="layer", tensor_parallel=2,
                   optimizer="master", micro_batch=2, offload="activations")  # fmt: skip
    job = plan.job
    assert (job.zero, job.recompute, job.tensor_parallel, job.optimizer) == (2, "layer", 2, "master")
    assert (job.micro_batch, job.accumulation, job.data_parallel) == (2, 8, 4)
    assert job.offload == {"activations"}
    assert hs.plan("llama-7b", "h100", pipeline_parallel=4, global_batch=64).job.pipeline_parallel == 4


# ---- the other way round ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", SCALES)
def test_the_largest_model_is_the_last_that_fits(scale: str) -> None:
    wish, spaces = Wish(sequence=1024), [Space(tensor_parallels=(1,), pipeline_parallels=(1,))]
    found = largest_model(SMALL, TIGHT, wish, spaces, scale)
    assert found is not None
    assert any_fits(found, TIGHT, wish, spaces)
    count = {"depth": found.layers, "width": found.heads, "heads": found.heads, "vocabulary": found.vocabulary // 128}[
        scale
    ]
    larger = SCALES[scale](SMALL, count + SMALL.heads // SMALL.kv_heads)
    assert larger.parameters > found.parameters
    assert not any_fits(larger, TIGHT, wish, spaces)
    assert largest_model(SMALL, replace(TIGHT, gpu_memory=10**9), wish, spaces, scale) is None


def test_scales_keep_proportions() -> None:
    wider = SCALES["width"](SMALL, 16)
    assert (wider.hidden, wider.heads, wider.kv_heads, wider.ffn, wider.layers) == (512, 16, 8, 1408, 6)
    assert SCALES["depth"](SMALL, 12).layers == 12
    with pytest.raises(ValueError, match="scale='size': expected one of depth, width, heads, vocabulary"):
        largest_model(SMALL, TIGHT, Wish(), [], "size")


@pytest.mark.parametrize("spare", [0, 30 * 10**6, 60 * 10**6, 90 * 10**6])
def test_the_longest_sequence_is_the_last_that_fits(spare: int) -> None:
    on = replace(TIGHT, gpu_memory=TIGHT.gpu_memory + spare)
    wish, spaces = Wish(), [Space(tensor_parallels=(1,), pipeline_parallels=(1,))]
    found = longest_sequence(SMALL, on, wish, spaces)
    assert found is not None
    assert found % 128 == 0
    assert any_fits(SMALL, on, replace(wish, sequence=found), spaces)
    assert not any_fits(SMALL, on, replace(wish, sequence=found + 128), spaces)
