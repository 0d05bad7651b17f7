"""A plan as a value: text, tables, JSON and back."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest
from rich.console import Console

import halfstep as hs
from halfstep.planner import MODELS, Plan, estimate, step_time

WIDTH = 80


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {
        "fits": hs.plan("llama-7b", "a100-80gb", global_batch=512, learning_rate=3e-4, learning_rate_batch=256),
        "offload": hs.plan("llama-70b", "a100-80gb", global_batch=500),
        "nothing": hs.plan("llama-70b", "rtx-4090", global_batch=500, offload="none"),
        "experts": hs.plan("mixtral-8x7b", {"preset": "h100", "gpus": 16}, tensor_parallel=4),
        "fp32": hs.plan("gpt2", "h100", precision="amp-bf16", sequence=1024),
    }


NAMES = ["fits", "offload", "nothing", "experts", "fp32"]


@pytest.mark.parametrize("name", NAMES)
def test_json_and_back(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    found = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(found) == plan
    assert found["summary"]["peak"] == plan.memory.peak
    assert found["summary"]["margin"] == plan.hardware.gpu_memory - plan.memory.peak
    assert found["job"]["offload"] == sorted(plan.job.offload)
    assert all(isinstance(size, int) for parts in found["memory"]["phases"].values() for size in parts.values())


def test_json_with_an_unknown_field_is_refused(plans: dict[str, Plan]) -> None:
    found = plans["fits"].to_json()
    found["job"]["gpu_count"] = 8
    with pytest.raises(TypeError, match="gpu_count"):
        Plan.from_json(found)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_the_estimates(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    found = estimate(plan.model, plan.job)
    assert plan.memory.peak == found.peak == max(plan.memory.totals.values())
    assert plan.memory.peak_phase == found.peak_phase
    assert plan.memory.phases == {phase: dict(parts) for phase, parts in found.phases.items()}
    assert plan.time == step_time(plan.model, plan.job, plan.hardware)
    assert plan.fits == (plan.margin >= 0)
    assert plan.tokens_per_second == pytest.approx(plan.job.global_batch * plan.job.sequence / plan.time.total)


@pytest.mark.parametrize("name", NAMES)
def test_text(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    text = str(plan)
    assert plan.model.name in text
    assert ("trains" if plan.fits else "does not fit") in text.splitlines()[0]
    for call in plan.settings.values():
        assert call in text
    assert ("what would make it:" in text) == (not plan.fits)
    for remedy in plan.remedies:
        assert str(remedy) in text


@pytest.mark.parametrize("name", NAMES)
def test_tables_fit_a_terminal(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    console = Console(width=WIDTH, record=True, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(plan)
    shown = capture.get()
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "…" not in shown
    for part in plan.memory.parts:
        assert part.replace("_", " ") in shown
    for phase in ("forward", "loss", "backward", "reduce", "step"):
        assert phase in shown
    for lever in plan.levers:
        assert lever.name.split()[0] in shown
    assert ("What would make it train" in shown) == (not plan.fits)
    assert ("What to set" if plan.fits else "The way that needs the least") in shown


def test_settings_name_calls(plans: dict[str, Plan]) -> None:
    job = plans["fits"].job
    settings = plans["fits"].settings
    assert settings["optimizer"].startswith("hs.AdamW(params, master=")
    assert ("recomputation" in settings) == (job.recompute != "none")
    assert f"micro-batch {job.micro_batch} x {job.data_parallel} ranks" in settings["batch"]
    offloaded = plans["offload"].settings["data parallel"]
    assert "ZeRO-3: fully_shard(each layer, then the model, reshard_after_forward=True" in offloaded
    assert "offload_policy=CPUOffloadPolicy()" in offloaded
    split = hs.plan("llama-13b", "h100", tensor_parallel=2, pipeline_parallel=2, global_batch=64).settings
    assert "parallelize_module over 2 GPUs" in split["tensor parallel"]
    assert "2 stages, Schedule1F1B(stage, n_microbatches=" in split["pipeline"]
    assert split["accumulation"].startswith("the schedule's micro-batches: torch adds the gradients up in 16 bits")
    scaled = hs.plan("gpt2", "h100", precision="fp16", global_batch=4096, micro_batch=8).settings
    assert scaled["loss scaling"] == "hs.LossScaler()"
    assert scaled["accumulation"] == "hs.Accumulator(optimizer, steps=64, scaler=scaler, model=model)"


def test_plans_are_frozen(plans: dict[str, Plan]) -> None:
    with pytest.raises(FrozenInstanceError):
        plans["fits"].fits = False  # type: ignore[misc]
    assert replace(plans["fits"], fits=False) != plans["fits"]


def test_models_come_in_several_forms(tmp_path) -> None:
    config = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
              "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    for given in (config, str(path), path, str(tmp_path)):
        plan = hs.plan(given, "h100")
        assert plan.model.parameters == MODELS["llama-7b"].parameters
    assert hs.plan(MODELS["gpt2"], "h100").model.name == "gpt2"
