"""`halfstep plan`: what it prints, and one line for everything that is wrong with its input."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

import halfstep as hs
from halfstep import cli
from halfstep.planner import Plan, command, inverse

WIDTH = 80


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return lambda *arguments: CliRunner().invoke(cli.app, ["plan", *arguments])


EXAMPLE = ["llama-7b", "--gpus", "8", "--gpu-memory", "80GB", "--seq", "2048", "--global-batch", "1M-tokens"]


def test_the_example(run) -> None:
    result = run(*EXAMPLE)
    assert result.exit_code == 0, result.output
    assert "llama-7b (6,738,415,616 parameters) on 8 x h100 (80 GB each): trains" in " ".join(result.output.split())
    for word in ("What to set", "hs.AdamW(", "Memory of one GPU", "backward", "A step by the time model", "GQA"):
        assert word in result.output
    assert max(map(len, result.output.splitlines())) <= WIDTH


def test_help_says_how_other_models_are_planned(run) -> None:
    """No text can name what makes a module, so that is Python's affair."""
    result = run("--help")
    assert result.exit_code == 0
    assert "hs.plan(MeasuredModel(...))" in " ".join(result.output.split())


def test_json(run) -> None:
    result = run(*EXAMPLE, "--json")
    assert result.exit_code == 0
    found = Plan.from_json(json.loads(result.stdout))
    assert found == hs.plan("llama-7b", {"preset": "h100", "gpus": 8, "gpu_memory": "80GB"}, global_batch="1M-tokens")


def test_every_option_arrives(run) -> None:
    result = run(
        "llama-13b", "--gpu", "a100-40gb", "--gpus", "16", "--gpu-memory", "48GiB", "--gpus-per-node", "4",
        "--host-memory", "3TB", "--in-node", "100GB/s", "--between-nodes", "200Gb/s", "--host-link", "25GB/s",
        "--seq", "1,024", "--global-batch", "256-sequences", "--micro-batch", "2", "--precision", "bf16",
        "--attention", "eager", "--optimizer", "master", "--recompute", "layer", "--zero", "3",
        "--tensor-parallel", "2", "--pipeline-parallel", "2", "--offload", "activations",
        "--lr", "1e-4", "--lr-batch", "64",
        "--assume", "matmul_efficiency=0.4", "--assume", "causal=false", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    plan = Plan.from_json(json.loads(result.stdout))
    on, job = plan.hardware, plan.job
    assert (on.name, on.gpus, on.gpu_memory, on.gpus_per_node) == ("a100-40gb", 16, 48 * 2**30, 4)
    assert (on.host_memory, on.in_node, on.between_nodes, on.host_link) == (3 * 10**12, 100e9, 25e9, 25e9)
    assert (job.sequence, job.micro_batch, job.accumulation, job.data_parallel) == (1024, 2, 32, 4)
    assert (job.precision, job.attention, job.optimizer, job.recompute) == ("bf16", "eager", "master", "layer")
    assert (job.zero, job.tensor_parallel, job.pipeline_parallel, job.offload) == (3, 2, 2, {"activations"})
    assert plan.learning_rate is not None
    assert (plan.learning_rate.reference, plan.learning_rate.ratio) == (1e-4, 4)
    assert (plan.assumptions.matmul_efficiency, plan.assumptions.causal) == (0.4, False)


def test_a_configuration_file(run, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768,
                                "n_layer": 12, "n_head": 12}))  # fmt: skip
    result = run(str(path), "--json")
    assert result.exit_code == 0, result.output
    assert Plan.from_json(json.loads(result.stdout)).model.parameters == 124_439_808


def test_the_other_way_round(run) -> None:
    result = run("llama-7b", "--gpus", "1", "--largest", "depth")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("largest by depth: llama-7b with ")
    result = run("gpt2", "--gpus", "1", "--longest")
    assert result.output == "longest sequence of gpt2: 1,024 tokens\n"
    result = run("tinyllama-1.1b", "--gpus", "1", "--gpu-memory", "24GB", "--largest", "vocabulary")
    assert re.fullmatch(r"largest by vocabulary: tinyllama-1.1b with \d+ tokens, [\d,]+ parameters\n", result.output)


def test_an_answer_at_the_searchs_own_bound_is_a_least_one(run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (command, inverse):
        monkeypatch.setattr(module, "LARGEST", 4)
        monkeypatch.setattr(module, "LONGEST", 512)
    result = run("tinyllama-1.1b", "--gpus", "1", "--largest", "depth")
    assert result.output.startswith("largest by depth: at least tinyllama-1.1b with 4 layers, ")
    assert run("tinyllama-1.1b", "--gpus", "1", "--longest").output.endswith(": at least 512 tokens\n")


@pytest.mark.parametrize("way", [["--largest", "depth"], ["--longest"]])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--json"], "json=True"),
        (["--html", "no/page.html"], "html='no/page.html'"),
        (["--script", "-"], "script='-'"),
        (["--global-batch", "512"], "global_batch='512'"),
        (["--micro-batch", "2"], "micro_batch='2'"),
        (["--lr", "1e-4"], "learning_rate='1e-4'"),
        (["--lr-batch", "4"], "learning_rate_batch='4'"),
        (["--assume", "causal=true"], "assume=['causal=true']"),
    ],
)
def test_what_the_other_way_round_would_not_look_at_is_refused(run, way, arguments: list[str], text: str) -> None:
    result = run("gpt2", *way, *arguments)
    assert result.exit_code == 2
    assert result.stderr == (
        f"halfstep plan: {text}: expected none with {way[0]}, which is answered in one line; plan what it finds\n"
    )


def test_one_question_at_a_time(run) -> None:
    result = run("gpt2", "--largest", "depth", "--longest")
    assert result.exit_code == 2
    assert "longest=True: expected none with --largest" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["llama-8b"], "model='llama-8b': expected one of gpt2, "),
        (["no/such/config.json"], "config='no/such/config.json': expected the path of a transformers config.json"),
        (["gpt2", "--gpu", "tpu"], "hardware='tpu': expected one of "),
        (["gpt2", "--gpus", "eight"], "gpus='eight': expected a whole number"),
        (["gpt2", "--gpus", "0"], "gpus=0: expected 1 .. 1,000,000"),
        (["gpt2", "--gpus", "12"], "gpus=12: expected a multiple of gpus_per_node=8"),
        (["gpt2", "--gpu-memory", "80"], "gpu_memory=80 B: expected 1 GB .. 10 TB"),
        (["gpt2", "--gpu-memory", "80 bananas"], "gpu_memory='80 bananas': expected a number with a unit"),
        (["gpt2", "--host-memory", "1MB"], "host_memory=1 MB: expected 1 GB .. 1 PB"),
        (["gpt2", "--in-node", "fast"], "in_node='fast': expected bytes or bits a second"),
        (["gpt2", "--seq", "0"], "sequence=0: expected 1 .. 134,217,728 tokens"),
        (["gpt2", "--seq", "2k"], "sequence='2k': expected a whole number"),
        (["gpt2", "--global-batch", "many"], "global_batch='many': expected tokens or sequences"),
        (["gpt2", "--global-batch", "0"], "global_batch=0: expected 1 .. 1,048,576 sequences"),
        (["gpt2", "--global-batch", "1M"], "global_batch='1M': expected a unit, 1M-tokens or 1M-sequences"),
        (["gpt2", "--html", "no/page.html"], "html='no/page.html': expected a path to write to, No such file"),
        (["gpt2", "--script", "no/train.py"], "script='no/train.py': expected a path to write to, No such file"),
        (["gpt2", "--script", "."], "script='.': expected a path to write to, Is a directory"),
        (["gpt2", "--micro-batch", "-1"], "micro_batch=-1: expected 1 .. 1,048,576"),
        (["gpt2", "--precision", "int4"], "precision='int4': expected one of bf16, fp16, fp32, amp-bf16"),
        (["gpt2", "--optimizer", "sgd"], "optimizer='sgd': expected one of master, split"),
        (["gpt2", "--recompute", "all"], "recompute='all': expected one of none"),
        (["gpt2", "--zero", "4"], "zero=4: expected 0 .. 3"),
        (["gpt2", "--zero", "two"], "zero='two': expected a whole number"),
        (["gpt2", "--tensor-parallel", "5"], "tensor_parallel=5: expected 1, 2, 4, which divides gpus=8, "),
        (["gpt2", "--longest", "--pipeline-parallel", "5"], "pipeline_parallel=5: expected 1, 2, 4, 8, which divides"),
        (["gpt2", "--offload", "disk"], "offload='disk': expected one of none, activations, host"),
        (["gpt2", "--lr", "1e-4"], "learning_rate=0.0001, learning_rate_batch=None: expected both"),
        (["gpt2", "--lr", "small", "--lr-batch", "1"], "learning_rate='small': expected a number"),
        (["gpt2", "--assume", "speed=2"], "assume='speed=2': expected name=value with one of causal, "),
        (["gpt2", "--assume", "link_efficiency=2"], "link_efficiency=2.0: expected 0.01 .. 1.0"),
        (["gpt2", "--assume", "causal=maybe"], "causal='maybe': expected true or false"),
        (["gpt2", "--largest", "size"], "scale='size': expected one of depth, width, heads, vocabulary"),
        (["gpt2", "--script", "x.py", "--tensor-parallel", "2"], "script: tensor_parallel=2, pipeline_parallel=1: "),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(run, arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert text in result.stderr
    assert result.stderr.startswith("halfstep plan: ")
    assert result.stderr.count("\n") == 1
