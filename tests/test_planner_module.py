"""Models that are measured in the place of a shape: their blocks, what they keep, and the peak of their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from example_runs import EXAMPLES  # puts the examples on the path
from fake_steps import Run, run
from torch import Tensor, nn

import halfstep as hs
from halfstep.planner.job import Job
from halfstep.planner.memory import Allowance, estimate, kept_activations
from halfstep.planner.module import MeasuredModel

assert EXAMPLES.is_dir()
from gpt.matmul import Matmul  # noqa: E402
from gpt.model import GPT  # noqa: E402

TENSORS = Allowance(0, 0, 0.0)
VOCABULARY = 300


def gpt(layers: int) -> Callable[[], GPT]:
    return lambda: GPT(VOCABULARY, 64, layers, 4, Matmul("native", "as on a GPU"))


def loss_of_gpt(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    tokens = torch.randint(0, VOCABULARY, (micro_batch, sequence))
    return model(tokens, tokens)


def measured_gpt(layers: int) -> MeasuredModel:
    return MeasuredModel(gpt(layers), loss_of_gpt)


def job(**changes: Any) -> Job:
    common: dict[str, Any] = dict(optimizer="weights-bf16-states", step="for-loop", micro_batch=3, sequence=96)
    return Job(**{**common, **changes})


def step_of_gpt(layers: int, job: Job) -> Run:
    """One that torch's tracker follows."""

    def make() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = gpt(layers)().train()
        finally:
            torch.set_default_dtype(before)
        if job.recompute != "none":
            hs.checkpoint(model, job.recompute)
        return model

    return run(make, lambda model, ids: model(ids, ids), VOCABULARY, job)


@pytest.mark.parametrize(
    ("layers", "recompute"), [(1, "none"), (2, "layer"), (3, "none"), (3, "layer"), (3, "selective")]
)
def test_the_gpt_of_the_example(layers: int, recompute: str) -> None:
    """Its shape has no preset: norms without weights, queries and keys normalised, one table for both embeddings."""
    wanted = job(recompute=recompute)
    seen, model = step_of_gpt(layers, wanted), measured_gpt(layers)
    found = estimate(model, wanted, TENSORS)
    assert (model.layers, model.parameters) == (layers, seen.parameters)
    assert found.parts["gradients"] == seen.gradients
    assert found.parts["optimizer_states"] == seen.states
    ids_and_loss = wanted.micro_batch * wanted.sequence * 8 + 4
    assert kept_activations(model, wanted) == seen.activations + ids_and_loss
    in_step = max(found.totals[phase] for phase in ("forward", "loss", "backward"))
    assert in_step == pytest.approx(seen.peak, rel=0.02)
    assert found.totals["step"] == pytest.approx(seen.step_peak, rel=0.02)


def test_a_real_run_keeps_what_fake_tensors_say() -> None:
    wanted = job(precision="fp32", optimizer="fp32")
    model = gpt(2)()
    with hs.measure_activations() as measured:
        loss = loss_of_gpt(model, wanted.micro_batch, wanted.sequence)
    assert loss.isfinite()
    assert measured.bytes == kept_activations(measured_gpt(2), wanted)


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_bytes_of_any_micro_batch(micro_batch: int) -> None:
    """Two are measured, the others lie on their line."""
    wanted = job(micro_batch=micro_batch, precision="fp32", optimizer="fp32")
    model = gpt(2)()
    with hs.measure_activations() as measured:
        loss = loss_of_gpt(model, micro_batch, wanted.sequence)
    assert loss.isfinite()
    assert measured.bytes == kept_activations(measured_gpt(2), wanted)


def test_flops_of_a_forward() -> None:
    """Two for every weight of a product and token; two products of attention, of all queries and keys."""
    wanted = job(precision="fp32", optimizer="fp32")
    hidden, tokens = 64 * round(64 * 8 / 3 / 64), wanted.micro_batch * wanted.sequence
    weights = 2 * (4 * 64 * 64 + 3 * 64 * hidden) + VOCABULARY * 64
    attention = 2 * 2 * 2 * tokens * wanted.sequence * 64
    assert measured_gpt(2).forward_flops(wanted) == 2 * weights * tokens + attention


def test_frozen_blocks_have_no_gradients() -> None:
    def make() -> nn.Module:
        model = gpt(2)()
        model.blocks.requires_grad_(False)
        return model

    model = MeasuredModel(make, loss_of_gpt)
    found = estimate(model, job(), TENSORS)
    assert model.trainable_parameters == VOCABULARY * 64 + 64
    assert found.parts["gradients"] == 2 * model.trainable_parameters
    assert found.parts["parameters"] == 2 * model.parameters


def test_autocast_is_measured() -> None:
    """Casts of activations and weights are among what is kept."""
    wanted = job(precision="amp-bf16", optimizer="fp32")
    model = gpt(2)()
    with hs.measure_activations() as measured, torch.autocast("cpu", torch.bfloat16):
        loss = loss_of_gpt(model, wanted.micro_batch, wanted.sequence)
    assert loss.isfinite()
    found = estimate(measured_gpt(2), wanted, TENSORS)
    assert "autocast_copies" not in found.parts
    assert kept_activations(measured_gpt(2), wanted) == measured.bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tensor_parallel=2), "tensor_parallel=2: expected 1 for a measured model; plan its shape instead"),
        (dict(data_parallel=2, expert_parallel=2), "expert_parallel=2: expected 1 for a measured model"),
        (dict(pipeline_parallel=2), "pipeline_parallel=2: expected 1 for a measured model; plan its shape instead"),
        (dict(recompute="attention"), "recompute='attention': expected one of none, selective, layer for a measured"),
    ],
)
def test_what_a_measured_model_cannot_say(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        estimate(measured_gpt(2), job(**change))


def test_blocks_of_several_kinds_are_refused() -> None:
    def make() -> nn.Module:
        model = gpt(2)()
        model.blocks[1].mlp.down.weight = nn.Parameter(torch.zeros(64, 8))
        return model

    with pytest.raises(ValueError, match=r"^blocks: expected one kind, got 2 with weights of different shapes"):
        estimate(MeasuredModel(make, loss_of_gpt), job())


def test_a_model_without_blocks_is_refused() -> None:
    model = MeasuredModel(lambda: nn.Linear(4, 4), lambda model, b, s: model(torch.ones(b, 4)).sum())
    with pytest.raises(ValueError, match="found no blocks in Linear"):
        estimate(model, job())
