"""Architecture levers: what each saves, against sums made by hand."""

from __future__ import annotations

import pytest

from halfstep.planner import MODELS, Job, ModelShape, estimate
from halfstep.planner.levers import Lever, levers

LLAMA = MODELS["llama-7b"]
JOB = Job(data_parallel=8, zero=3, recompute="layer")


@pytest.fixture(scope="module")
def found() -> dict[str, Lever]:
    return {f"{lever.name}: {lever.change}": lever for lever in levers(LLAMA, JOB)}


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("GQA: 32 -> 4 KV heads", 32 * 2 * 4096 * 28 * 128),
        ("MQA: 32 -> 1 KV head", 32 * 2 * 4096 * 31 * 128),
        ("fewer layers: 32 -> 24 layers", 8 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)),
        ("tied embeddings: one table for input and output", 32000 * 4096),
        ("factorised embeddings: tables of rank 128", 2 * (32000 * 4096 - 128 * (32000 + 4096))),
        ("MoE of the same size: 8 experts, 2 for a token, FFN 1376 each", -32 * 8 * 4096),
        ("MoE of the same compute: 8 experts, 2 for a token, FFN 5504 each", -32 * (3 * 3 * 4096 * 11008 + 8 * 4096)),
        ("optimizer states: master -> split", 0),
    ],
)
def test_parameters_saved(found: dict[str, Lever], name: str, saved: int) -> None:
    lever = found[name]
    assert lever.parameters_saved == saved
    assert lever.parameters == LLAMA.parameters - saved
    assert lever.peak_saved == estimate(LLAMA, JOB).peak - lever.peak


def test_width_counts_with_its_square(found: dict[str, Lever]) -> None:
    lever = found["smaller width: 4096 -> 3072 wide, FFN and heads in proportion"]
    inner = LLAMA.parameters - 2 * 32000 * 4096 - 65 * 4096
    assert lever.parameters - 2 * 32000 * 3072 - 65 * 3072 == inner * 9 // 16


def test_states_of_fewer_bytes(found: dict[str, Lever]) -> None:
    """16 -> 14, 10, 8 and 6.06 bytes per parameter on an eighth of the model, where states decide the peak."""
    states = {lever.change: lever for name, lever in found.items() if name.startswith("optimizer states")}
    for mode, saved in (("split", 2), ("split-bf16-states", 6), ("weights-bf16-states", 8), ("adafactor", 12)):
        assert states[f"master -> {mode}"].peak_saved == pytest.approx(saved * LLAMA.parameters / 8, rel=0.05)
        assert states[f"master -> {mode}"].available
    int8 = states["master -> weights-int8-states"]
    assert not int8.available
    assert "not available in this version" in int8.reason


def test_a_mixture_says_what_a_token_goes_through(found: dict[str, Lever]) -> None:
    same = found["MoE of the same compute: 8 experts, 2 for a token, FFN 5504 each"]
    assert same.active_parameters == LLAMA.parameters + 32 * 8 * 4096, "and a router"
    assert same.peak_saved < 0, "a cost, and said as one"


def test_the_largest_saving_comes_first(found: dict[str, Lever]) -> None:
    saved = [lever.peak_saved for lever in found.values()]
    assert saved == sorted(saved, reverse=True)


def test_what_a_model_has_already_is_no_lever() -> None:
    shape = ModelShape(vocabulary=1000, hidden=128, layers=1, heads=4, kv_heads=1, ffn=256, tied=True, experts=4,
                       experts_per_token=1)  # fmt: skip
    names = {lever.name for lever in levers(shape, Job(precision="fp32", optimizer="fp32"))}
    assert names <= {"smaller width"}
