"""Activations by formula: Korthikanti's table, transformers' Llama layer."""

from __future__ import annotations

import dataclasses

import pytest

from halfstep.planner.costs import block_cost
from halfstep.planner.job import Job
from halfstep.planner.layers import Layers
from halfstep.planner.model import ModelShape
from halfstep.planner.presets import PRESETS

GIB = 2**30
# Korthikanti et al., MLSys 2023, table 2 for a layer, in the configurations of table 3: (heads, hidden, micro-batch),
# GiB of a layer without parallelism, with tensor parallelism of 8, with sequence parallelism too; then those two with
# the scores recomputed, and with everything recomputed.
TABLE = {
    "22B": ((64, 6144, 4), (6.594, 1.234, 0.824, 0.609, 0.199, 0.094)),
    "175B": ((96, 12288, 1), (2.672, 0.539, 0.334, 0.305, 0.0996, 0.047)),
    "530B": ((128, 20480, 1), (3.828, 0.820, 0.479, 0.508, 0.166, 0.078)),
    "1T": ((160, 25600, 1), (4.785, 1.025, 0.598, 0.635, 0.208, 0.098)),
}
COLUMNS = [
    dict(),
    dict(tensor_parallel=8),
    dict(tensor_parallel=8, sequence_parallel=True),
    dict(tensor_parallel=8, recompute="attention"),
    dict(tensor_parallel=8, sequence_parallel=True, recompute="attention"),
    dict(recompute="layer"),
]


def megatron(heads: int, hidden: int) -> ModelShape:
    return dataclasses.replace(
        PRESETS["gpt2"],
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        head_dim=0,
        kv_heads=0,
        activation="gelu",
        dropout=0.1,
    )


def kept(model: ModelShape, job: Job) -> int:
    return sum(block_cost(Layers(model, job).layer(), job.recompute).kept.values())


@pytest.mark.parametrize("column", range(len(COLUMNS)))
@pytest.mark.parametrize("size", TABLE)
def test_korthikanti_s_table(size: str, column: int) -> None:
    (heads, hidden, micro_batch), figures = TABLE[size]
    options = COLUMNS[column]
    job = Job(micro_batch=micro_batch, attention="eager", **options)  # type: ignore[arg-type]
    found = kept(megatron(heads, hidden), job)
    s, b, t = job.sequence, micro_batch, job.tensor_parallel
    # The table leaves out mean and deviation of two norms, float32, one each for every token.
    statistics = 0 if job.recompute == "layer" else 2 * 2 * 4 * s * b // (t if job.sequence_parallel else 1)
    sbh, matrix = s * b * hidden, 5 * heads * s * s * b
    formula = [
        34 * sbh + matrix,
        10 * sbh + (24 * sbh + matrix) // t,
        (34 * sbh + matrix) // t,
        10 * sbh + 24 * sbh // t,
        34 * sbh // t,
        2 * sbh,
    ][column]
    assert found - statistics == formula
    assert (found - statistics) / GIB == pytest.approx(figures[column], abs=0.00051)


@pytest.mark.parametrize("eager", [False, True])
def test_the_formula_of_transformers_llama_layer(eager: bool) -> None:
    """24sbh + 8sbf + 4asb + 8sb; matrices of scores add 6as^2b in the place of the log-sum-exp and the output."""
    model, s, b = PRESETS["llama-7b"], 2048, 3
    h, f, a = model.hidden, model.ffn, model.heads
    found = kept(model, Job(micro_batch=b, attention="eager" if eager else "fused"))
    common = 24 * s * b * h + 8 * s * b * f + 8 * s * b
    assert found == common + (6 * a * s * s * b if eager else 4 * a * s * b)


@pytest.mark.parametrize("recompute", ["layer", "selective"])
def test_a_recomputation_brings_back_all_that_is_saved(recompute: str) -> None:
    """... beside the gradient of the layer's output, and what it passes through on the way."""
    model, job = PRESETS["llama-7b"], Job(recompute=recompute, attention="eager")
    again = block_cost(Layers(model, job).layer(), recompute).moments[0]
    saved = kept(model, Job(attention="eager"))
    scores = 4 * model.heads * job.sequence**2
    assert sum(again.values()) >= saved + 2 * job.sequence * model.hidden
    assert sum(again.values()) < saved + 3 * scores


def test_norms_of_one_operator_keep_their_input() -> None:
    """2sbh and a float32 for each token instead of 8sbh and as much."""
    model, s, h = PRESETS["llama-7b"], 2048, 4096
    saved = kept(model, Job()) - kept(dataclasses.replace(model, norm_code="fused"), Job())
    # The products behind a norm keep its result in both cases, 2sbh: what goes is the float32 input and x / rms.
    assert saved == 2 * (8 - 2 - 2) * s * h


def test_heads_that_are_not_copied() -> None:
    model, job = dataclasses.replace(PRESETS["llama-7b"], kv_heads=8), Job(attention="eager")
    saved = kept(model, job) - kept(dataclasses.replace(model, repeats_kv=False), job)
    assert saved == 2 * 2 * job.sequence * (32 - 8) * 128


def test_a_checkpointed_layer_keeps_its_input() -> None:
    assert kept(PRESETS["llama-7b"], Job(recompute="layer", micro_batch=3)) == 2 * 2048 * 3 * 4096
