"""The time model against sums made by hand, and that every constant in it counts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from halfstep.planner.flops import forward_flops
from halfstep.planner.hardware import hardware
from halfstep.planner.job import Job
from halfstep.planner.memory import kept_activations
from halfstep.planner.model import ModelShape
from halfstep.planner.presets import PRESETS
from halfstep.planner.time import (
    Assumptions,
    bubble_fraction,
    data_parallel_bytes,
    data_parallel_elements,
    offload_bytes,
    step_time,
    tokens,
)

LLAMA = PRESETS["llama-7b"]
H100 = hardware("h100")
PLAIN = Job(data_parallel=8, micro_batch=2)


@pytest.mark.parametrize(("zero", "psi"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_published_volumes(zero: int, psi: int) -> None:
    assert data_parallel_elements(zero, 7_500_000_000) == psi * 7_500_000_000


@pytest.mark.parametrize(("zero", "psi"), [(0, 2), (1, 5), (2, 8), (3, 12)])
def test_volumes_of_four_micro_batches(zero: int, psi: int) -> None:
    """FSDP2 gathers for each; gradients are reduced once where they are not sharded."""
    assert data_parallel_elements(zero, 10**6, 4) == psi * 10**6


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_over_a_ring(zero: int) -> None:
    """(N - 1) / N of what is gathered in 2 bytes and reduced in 4 (plain data parallelism: in the gradients' 2)."""
    gathered, reduced = {0: (0, 4), 1: (2, 4), 2: (2, 4), 3: (4, 4)}[zero]
    expected = 7 / 8 * (gathered + reduced) * LLAMA.parameters
    assert data_parallel_bytes(LLAMA, replace(PLAIN, zero=zero)) == pytest.approx(expected)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 2), (4, 8), (8, 64)])
def test_bubble(stages: int, micro_batches: int) -> None:
    fraction = bubble_fraction(stages, micro_batches)
    assert fraction == (stages - 1) / (micro_batches + stages - 1)
    # The fraction of the step is that of a schedule drawn slot by slot: m busy slots out of m + p - 1.
    assert fraction == pytest.approx(1 - micro_batches / (micro_batches + stages - 1))


def test_flops_of_a_token_are_six_times_its_weights_and_the_scores() -> None:
    shape = ModelShape(vocabulary=1000, hidden=64, layers=3, heads=4, ffn=128)
    job = Job(micro_batch=2, sequence=16)
    products = 3 * (4 * 64 * 64 + 3 * 64 * 128) + 1000 * 64  # a lookup multiplies nothing
    scores = 3 * 4 * (16 + 0) * 64  # q k and p v, two FLOPs each, 16 keys a query
    assert forward_flops(shape, job, causal=False) == 32 * (2 * products + scores)
    assert forward_flops(shape, job) == 32 * (2 * products + scores / 2)
    assert forward_flops(replace(shape, tied=True), job) == forward_flops(shape, job), "the same products"
    windowed = forward_flops(replace(shape, window=4), job, causal=False)
    assert windowed == 32 * (2 * products + scores / 4)
    mixture = replace(shape, experts=8, experts_per_token=2)
    router = 3 * 8 * 64
    more = 2 * (3 * 3 * 64 * 128 + router)
    assert forward_flops(mixture, job, causal=False) == 32 * (2 * products + scores + more), "two experts, not eight"


def test_seven_billion_by_hand() -> None:
    """6 Psi a token and the scores, at half of the peak: the sum that papers make."""
    found = step_time(LLAMA, PLAIN, H100)
    flops = 3 * (2 * (LLAMA.parameters - 32000 * 4096 - 65 * 4096) + 4 * 1024 * 4096 * 32) * 2 * 2048
    assert found.compute == pytest.approx(flops / 989e12 / 0.5)
    assert found.recompute == 0
    assert found.overhead == pytest.approx(3 * 32 * 5e-5)
    moved = 2 * (2 + 2 + 4 + 8) * LLAMA.parameters
    assert found.optimizer == pytest.approx(moved / 3350e9 / 0.8)
    assert found.data_parallel == pytest.approx(max(0, 7 / 8 * 4 * LLAMA.parameters / 450e9 / 0.8
                                                    - 0.8 * (found.compute + found.overhead)))  # fmt: skip
    assert found.total == pytest.approx(sum(found.parts.values()))
    assert tokens(PLAIN) == 2 * 2048 * 8


def test_recomputation() -> None:
    plain = step_time(LLAMA, PLAIN, H100)
    layer = step_time(LLAMA, replace(PLAIN, recompute="layer"), H100)
    assert layer.recompute == pytest.approx(plain.compute / 3), "one forward pass more: a third"
    assert layer.overhead == pytest.approx(plain.overhead * 4 / 3)
    selective = replace(PLAIN, recompute="selective")
    dropped = kept_activations(LLAMA, PLAIN) - kept_activations(LLAMA, selective)
    assert dropped > 0
    assert step_time(LLAMA, selective, H100).recompute == pytest.approx(2 * dropped / (3350e9 * 0.8))


def test_accumulation_repeats_all_but_the_update() -> None:
    once = step_time(LLAMA, PLAIN, H100)
    found = step_time(LLAMA, replace(PLAIN, accumulation=5), H100)
    assert found.compute == pytest.approx(5 * once.compute)
    assert found.overhead == pytest.approx(5 * once.overhead)
    assert found.optimizer == once.optimizer


def test_a_group_over_several_nodes_uses_the_slower_link() -> None:
    slow = replace(H100, gpus=16)
    assumptions = Assumptions(communication_overlap=0)
    found = step_time(LLAMA, replace(PLAIN, data_parallel=16), slow, assumptions).data_parallel
    assert found == pytest.approx(15 / 16 * 4 * LLAMA.parameters / (8 * 50e9 * 0.8)), "eight network cards in a node"
    split = replace(PLAIN, tensor_parallel=4, data_parallel=4)
    assert step_time(LLAMA, split, slow, assumptions).data_parallel == pytest.approx(
        3 / 4 * LLAMA.parameters / (2 * 50e9 * 0.8)
    ), "two of a group in a node"
    fast = replace(slow, between_nodes=200e9)
    capped = step_time(LLAMA, replace(PLAIN, data_parallel=16), fast, assumptions).data_parallel
    assert capped == pytest.approx(15 / 16 * 4 * LLAMA.parameters / (450e9 * 0.8)), "NVLink is the narrower one"
    within = step_time(LLAMA, replace(PLAIN, tensor_parallel=2, data_parallel=4), H100, assumptions).data_parallel
    assert within == pytest.approx(3 / 4 * 4 * LLAMA.parameters / 2 / (450e9 * 0.8))


def test_communication_hides_behind_compute_as_far_as_assumed() -> None:
    slow = replace(H100, in_node=1e9)
    bare = step_time(LLAMA, PLAIN, slow, Assumptions(communication_overlap=0))
    half = step_time(LLAMA, PLAIN, slow, Assumptions(communication_overlap=0.5))
    assert half.data_parallel == pytest.approx(bare.data_parallel - 0.5 * (bare.compute + bare.overhead))
    assert step_time(LLAMA, PLAIN, replace(H100, in_node=1e13)).data_parallel == 0


def test_tensor_parallel_all_reduces() -> None:
    """Four of [b, s, h] a layer and micro-batch, six with the forward pass again; 2 (t - 1) / t over a ring."""
    job = Job(tensor_parallel=4, data_parallel=2, micro_batch=2, accumulation=3)
    ring = 2 * 3 / 4 * 2 * 2048 * 4096 * 2
    found = step_time(LLAMA, job, H100)
    assert found.tensor_parallel == pytest.approx(3 * 4 * ring * 32 / (450e9 * 0.8))
    again = step_time(LLAMA, replace(job, recompute="layer"), H100)
    assert again.tensor_parallel == pytest.approx(3 * 6 * ring * 32 / (450e9 * 0.8))
    assert found.compute == pytest.approx(step_time(LLAMA, replace(job, tensor_parallel=1), H100).compute / 4)


def test_pipeline_waits_in_proportion_to_its_bubble() -> None:
    job = Job(pipeline_parallel=4, data_parallel=2, accumulation=12)
    found = step_time(LLAMA, job, replace(H100, in_node=1e14))
    busy = found.compute + found.overhead
    assert found.pipeline / (busy + found.pipeline) == pytest.approx(3 / 15, rel=1e-3)
    uneven = step_time(replace(LLAMA, layers=33), job, H100).compute
    even = step_time(replace(LLAMA, layers=36), job, H100).compute
    assert uneven / even == pytest.approx(1, rel=0.01), "the stage with nine layers sets the pace of both"


def test_stages_hand_on_what_is_between_layers() -> None:
    """[b, s, h] forward and its gradient back, for each micro-batch and stage behind; tensor parallelism splits it."""
    slow = replace(H100, gpus=16)
    job = Job(pipeline_parallel=4, data_parallel=2, tensor_parallel=2, accumulation=12)
    found = step_time(LLAMA, job, slow)
    busy = found.compute + found.overhead + found.tensor_parallel
    sent = 2 * (12 + 3) * 2048 * 4096 * 2 / 2
    assert found.pipeline - busy * 3 / 12 == pytest.approx(sent / (50e9 * 0.8))


def test_experts_exchange_tokens() -> None:
    mixtral = PRESETS["mixtral-8x7b"]
    job = Job(data_parallel=8, expert_parallel=8, zero=2)
    found = step_time(mixtral, job, H100)
    assert found.expert_parallel == pytest.approx(4 * 2 * 7 / 8 * 2048 * 4096 * 2 * 32 / (450e9 * 0.8))


@pytest.mark.parametrize("zero", [2, 3])
def test_offload_traffic(zero: int) -> None:
    job = Job(data_parallel=8, zero=zero, accumulation=2)
    shard = LLAMA.parameters / 8
    assert offload_bytes(LLAMA, job) == 0
    assert offload_bytes(LLAMA, replace(job, offload=frozenset({"optimizer"}))) == 4 * shard
    activations = replace(job, offload=frozenset({"activations"}))
    assert offload_bytes(LLAMA, activations) == 2 * 2 * kept_activations(LLAMA, job)
    if zero == 3:  # two gathers and one reduction for each of two micro-batches
        both = replace(job, offload=frozenset({"optimizer", "parameters"}))
        assert offload_bytes(LLAMA, both) == pytest.approx((4 * 2 + 2 * 2) * shard)


def test_an_update_on_the_host_is_bound_by_its_ram() -> None:
    job = Job(data_parallel=8, zero=3, offload=frozenset({"optimizer", "parameters"}))
    found = step_time(LLAMA, job, H100)
    assert found.optimizer == pytest.approx(2 * 16 * LLAMA.parameters / 200e9), "eight shards through one node's RAM"


@pytest.mark.parametrize(("in_fp32", "moved"), [(True, 2 + 4 + 4), (False, 2 + 2 + 2)])
def test_micro_batches_are_added_up_by_the_host_that_has_the_gradients(in_fp32: bool, moved: int) -> None:
    job = Job(data_parallel=8, zero=3, offload=frozenset({"optimizer", "parameters"}), accumulate_in_fp32=in_fp32)
    once, found = (step_time(LLAMA, replace(job, accumulation=k), H100).optimizer for k in (1, 10))
    assert found - once == pytest.approx(10 * moved * LLAMA.parameters / 200e9)
    states = replace(job, offload=frozenset({"optimizer"}))
    assert len({step_time(LLAMA, replace(states, accumulation=k), H100).optimizer for k in (1, 10)}) == 1


def test_frozen_weights_need_no_gradients() -> None:
    lora = replace(LLAMA, lora_rank=8)
    found, full = step_time(lora, PLAIN, H100), step_time(LLAMA, PLAIN, H100)
    assert found.compute == pytest.approx(full.compute * 2 / 3, rel=0.01)
    assert found.optimizer < full.optimizer / 100


# A job in which every constant counts: products, launches, links, host, update on the host.
RICH = Job(data_parallel=4, tensor_parallel=2, pipeline_parallel=2, zero=3, recompute="selective", accumulation=4,
           offload=frozenset({"optimizer", "parameters", "activations"}))  # fmt: skip


@pytest.mark.parametrize("name", [each.name for each in fields(Assumptions) if each.name != "indifference"])
def test_every_constant_counts(name: str) -> None:
    slow = hardware("h100", gpus=16, in_node="1GB/s", between_nodes="1GB/s", host_link="1GB/s")
    given = getattr(Assumptions(), name)
    changed = Assumptions(**{name: not given if isinstance(given, bool) else given * 0.9})
    assert step_time(LLAMA, RICH, slow, changed).total != step_time(LLAMA, RICH, slow).total


def test_constants_have_ranges() -> None:
    with pytest.raises(ValueError, match=r"matmul_efficiency=1\.5: expected 0\.01 \.\. 1\.0"):
        Assumptions(matmul_efficiency=1.5)
    with pytest.raises(ValueError, match=r"layer_seconds=-1: expected 0\.0 \.\. 1\.0"):
        Assumptions(layer_seconds=-1)
