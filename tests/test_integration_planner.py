"""Scripts of plans train: each kind runs on the CPU with a tiny model, and calls only what there is."""

from __future__ import annotations

import ast
import inspect
import math
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import halfstep as hs
from halfstep.planner import MODELS, Job, ModelShape
from halfstep.planner.script import script, transformers_model

LLAMA = ModelShape(name="tiny", vocabulary=64, hidden=32, layers=2, heads=2, kv_heads=1, ffn=64)
GPT2 = ModelShape(
    name="tiny-gpt2", vocabulary=64, hidden=32, layers=2, heads=2, ffn=128, gated=False, activation="gelu_new",
    norm="layer", tied=True, positions=16, qkv_bias=True, out_bias=True, ffn_bias=True, fused_qkv=True,
)  # fmt: skip
JOB = Job(micro_batch=2, sequence=16)
SHARDED = replace(JOB, data_parallel=2, zero=3, optimizer="split")

JOBS = {
    "plain": JOB,
    "accumulated": replace(JOB, accumulation=2, optimizer="split", recompute="layer"),
    "no master": replace(JOB, optimizer="weights-bf16-states", recompute="selective", attention="eager"),
    "fp32 weights": replace(JOB, optimizer="fp32", precision="fp32"),
    "autocast": replace(JOB, optimizer="fp32", precision="amp-bf16", accumulation=2),
    "loss scaling": replace(JOB, precision="fp16"),
    "loss scaling, accumulated": replace(JOB, precision="fp16", accumulation=2, recompute="layer"),
    "offloaded activations": replace(JOB, offload=frozenset({"activations"}), optimizer="split-bf16-states"),
    "adafactor": replace(JOB, optimizer="adafactor"),
    "replicated": replace(JOB, data_parallel=2, accumulation=2),
    "ZeRO-1": replace(SHARDED, zero=1, accumulation=2),
    "ZeRO-2": replace(SHARDED, zero=2, accumulation=2, recompute="layer"),
    "ZeRO-3": replace(SHARDED, recompute="selective"),
    "ZeRO-3, accumulated": replace(SHARDED, accumulation=2, recompute="layer", offload=frozenset({"activations"})),
    "ZeRO-3, autocast": replace(SHARDED, precision="amp-bf16", optimizer="fp32"),
    "one GPU, states on the host": replace(SHARDED, data_parallel=1, offload=frozenset({"optimizer", "parameters"})),
    "ZeRO-3 on the host": replace(SHARDED, accumulation=2, offload=frozenset({"optimizer", "parameters"})),
}


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    """The world of torchrun with one process: sharding and gathering all run, over nothing."""
    address = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    for name, value in {**address, "MASTER_PORT": str(unused_port)}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def run(source: str, job: Job) -> float:
    """What the script's training returns: the last loss."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, "script", "exec"), names)
    names["STEPS"] = 2
    torch.manual_seed(0)
    return names["main"]() if "main" in names else names["train"](names["build_model"]())


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu")
@pytest.mark.parametrize("name", JOBS)
def test_the_script_trains(name: str, one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    job = JOBS[name]
    loss = run(script(LLAMA, job), job)
    assert abs(loss - math.log(64)) < 0.5, "random tokens"
    assert re.findall(r"step (\d): loss", capsys.readouterr().out) == ["0", "1"]


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu")
@pytest.mark.parametrize(
    "model",
    [GPT2, replace(LLAMA, qkv_bias=True), replace(LLAMA, qk_norm=True), replace(LLAMA, window=8),
     replace(LLAMA, experts=4, experts_per_token=2), replace(LLAMA, tied=True)],
    ids=["GPT-2", "Qwen2", "Qwen3", "Mistral", "Mixtral", "tied"],
)  # fmt: skip
@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
def test_other_families(model: ModelShape, sharded: bool, one_rank: None) -> None:
    job = SHARDED if sharded else JOB
    assert abs(run(script(model, job), job) - math.log(64)) < 0.5


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu")
def test_more_ranks_than_experts(one_rank: None) -> None:
    model, job = replace(LLAMA, experts=4, experts_per_token=2), replace(SHARDED, data_parallel=8)
    text = script(model, job)
    assert "shard_placement_fn=lambda weight: Shard(1) if weight.ndim == 3 else None" in text
    assert abs(run(text, job) - math.log(64)) < 0.5
    assert "Shard(1)" not in script(model, replace(job, optimizer="weights-bf16-states"))
    assert "Shard(1)" not in script(model, replace(job, data_parallel=4))


@pytest.mark.parametrize("name", MODELS)
def test_the_model_of_a_script_has_the_planned_size(name: str) -> None:
    kind, arguments = transformers_model(MODELS[name], 1024)
    config = getattr(transformers, f"{kind}Config")(**{**arguments, _depth(kind): 2})
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in built.parameters())
    assert parameters == replace(MODELS[name], layers=2).parameters


def _depth(kind: str) -> str:
    return "n_layer" if kind == "GPT2" else "num_hidden_layers"


@pytest.mark.parametrize("name", JOBS)
def test_only_what_exists_is_called(name: str) -> None:
    """Every name of halfstep, torch.distributed and transformers; the keywords of halfstep's calls, too."""
    tree, job = ast.parse(script(LLAMA, JOBS[name])), JOBS[name]
    # Overflow flags of 16-bit shards are not shared between ranks in this version: the optimizer refuses to look.
    needed = job.zero > 0 and job.precision == "bf16" and job.optimizer != "adafactor"
    assert ("skip_nonfinite=False" in ast.unparse(tree)) == needed
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                assert hasattr(import_module(node.module), alias.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "hs":
                signature = inspect.signature(getattr(hs, node.func.attr))
                signature.bind_partial(*node.args, **{each.arg: None for each in node.keywords if each.arg})


def test_the_settings_of_a_plan_are_its_scripts(tmp_path: Path) -> None:
    plan = hs.plan("llama-7b", "h100", global_batch=512, tensor_parallel=1, recompute="layer", zero=3)
    text = plan.script()
    job = plan.job
    assert f"MICRO_BATCH = {job.micro_batch}  #" in text
    assert f"ACCUMULATION = {job.accumulation}  #" in text
    assert 'hs.checkpoint(model, "layer")' in text
    assert "reshard_after_forward=True" in text
    assert plan.settings["optimizer"].removeprefix("hs.AdamW(params, ") in text
    assert "torchrun --nproc-per-node 8 train.py" in text
    assert "num_hidden_layers=32" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("model", "job", "text"),
    [
        (LLAMA, replace(JOB, tensor_parallel=2), "script: tensor_parallel=2, pipeline_parallel=1: expected 1, 1"),
        (LLAMA, replace(JOB, pipeline_parallel=2), "script: tensor_parallel=1, pipeline_parallel=2: expected 1, 1"),
        (replace(LLAMA, lora_rank=4), JOB, "script: lora_rank=4, frozen=[]: expected 0 and none"),
        (replace(LLAMA, embedding_rank=8), JOB, "script: embedding_rank=8: expected 0"),
        (replace(LLAMA, gated=False), JOB, "script: norm='rms', gated=False, positions=0: expected a Llama's shape"),
    ],
)
def test_no_script_for_these_yet(model: ModelShape, job: Job, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        script(model, job)
