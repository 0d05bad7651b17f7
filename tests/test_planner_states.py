"""Bytes of weights, gradients, masters and optimizer states, against published tables and real optimizers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import halfstep as hs
from halfstep.planner.job import Job
from halfstep.planner.memory import STATE_PARTS, Allowance, estimate
from halfstep.planner.model import ModelShape
from halfstep.planner.presets import PRESETS
from halfstep.planner.sharding import Elements, model_states
from halfstep.planner.states import MODES

NOTHING = Allowance(0, 0, 0.0)
GB = 10**9


@pytest.mark.parametrize(
    ("billions", "weights", "gradients", "moments", "masters", "total"),
    [(10, 20, 20, 80, 40, 160), (7, 14, 14, 56, 28, 112)],
)
def test_sums_of_mixed_precision_adam(
    billions: int, weights: int, gradients: int, moments: int, masters: int, total: int
) -> None:
    count = billions * GB
    found = model_states(Elements(count, count), MODES["master"], zero=0)
    assert [found[part] // GB for part in STATE_PARTS] == [weights, gradients, masters, moments]
    assert sum(found.values()) == total * GB


# Rajbhandari et al., "ZeRO", SC 2020: figure 1 and table 1, in GB.
@pytest.mark.parametrize(
    ("parameters", "ranks", "expected"),
    [
        (7.5e9, 1, (120, 120, 120, 120)),
        (7.5e9, 4, (120, 52.5, 41.25, 30)),
        (7.5e9, 16, (120, 35.62, 21.56, 7.5)),
        (7.5e9, 64, (120, 31.4, 16.6, 1.88)),
        (7.5e9, 256, (120, 30.35, 15.41, 0.47)),
        (1e12, 1024, (16000, 4011.7, 2013.7, 15.6)),
    ],
)
def test_the_table_of_zero(parameters: float, ranks: int, expected: tuple[float, ...]) -> None:
    count = int(parameters)
    for stage, figure in enumerate(expected):
        found = sum(model_states(Elements(count, count // ranks), MODES["master"], stage).values())
        # within a unit of the last printed digit: some are cut off, not rounded
        assert found / GB == pytest.approx(figure, abs=0.1 ** len(str(figure).partition(".")[2]))


@pytest.mark.parametrize(
    ("mode", "released", "bytes_per_parameter"),
    [
        ("master", False, 16), ("split", False, 14), ("master-bf16-states", False, 12),
        ("split-bf16-states", False, 10),
        ("weights-fp32-states", False, 12), ("weights-bf16-states", False, 8), ("fp32", False, 16),
        ("split-int8-states", False, 8.0625), ("weights-int8-states", False, 6.0625),
        ("weights-int8-states", True, 4.0625),
        ("master", True, 14),
    ],
)  # fmt: skip
def test_bytes_per_parameter_of_every_mode(mode: str, released: bool, bytes_per_parameter: float) -> None:
    model = PRESETS["tinyllama-1.1b"]
    job = Job(optimizer=mode, precision="fp32" if mode == "fp32" else "bf16", release_gradients=released)
    parts = estimate(model, job, NOTHING).phases["step"]
    assert sum(parts.get(part, 0) for part in STATE_PARTS) == bytes_per_parameter * model.parameters
    assert MODES[mode].bytes_per_parameter == bytes_per_parameter + 2 * released


def settings(mode: str) -> dict[str, object]:
    """The keyword arguments that a mode's settings write down."""
    text = MODES[mode].settings
    return eval(text.replace("hs.AdamW(params", "dict(_=0"), {"torch": torch, "dict": dict})


@pytest.mark.parametrize("mode", [m.name for m in MODES.values() if m.available and m.settings.startswith("hs.")])
def test_the_settings_of_a_mode_make_its_states(mode: str) -> None:
    dtype = torch.float32 if MODES[mode].weight_bytes == 4 else torch.bfloat16
    weight = torch.nn.Parameter(torch.zeros(512, 256, dtype=dtype))
    weight.grad = torch.zeros_like(weight)
    arguments = settings(mode)
    arguments.pop("_")
    optimizer = hs.AdamW([weight], **arguments)  # type: ignore[arg-type]
    optimizer.step()
    held = [state for name, state in optimizer.state[weight].items() if name != "step"]
    found = sum(state.untyped_storage().nbytes() for state in held)
    assert found == (MODES[mode].master_bytes + MODES[mode].state_bytes) * weight.numel()


def test_the_states_of_adafactor() -> None:
    model = ModelShape(vocabulary=100, hidden=32, layers=2, heads=4, ffn=48)
    weights = [
        torch.nn.Parameter(torch.zeros(w.shape, dtype=torch.bfloat16)) for w in model.weights for _ in range(w.copies)
    ]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.Adafactor(weights)
    optimizer.step()
    kept = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    found = estimate(model, Job(optimizer="adafactor"), NOTHING).phases["step"]["optimizer_states"]
    assert found == sum(t.nbytes for t in kept if t is not None)


@pytest.mark.parametrize("mode", [mode.name for mode in MODES.values() if not mode.available])
def test_what_is_not_there_yet_says_so(mode: str) -> None:
    assert MODES[mode].reason.endswith("not available in this version")
    with pytest.raises((ValueError, TypeError)):
        hs.AdamW([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], **{**settings(mode), "_": 0})


def test_a_shard_is_the_largest_rank_s() -> None:
    """Rows are dealt out whole: 7 rows on 4 ranks are 2, 2, 2 and 1."""
    model = ModelShape(vocabulary=7, hidden=8, layers=1, heads=1, ffn=9, tied=True)
    found = estimate(model, Job(zero=3, data_parallel=4), NOTHING).phases["step"]
    rows = {"embedding": 2 * 8, "qkvo": 4 * 2 * 8, "up, gate": 2 * 3 * 8, "down": 2 * 9, "norms": 3 * 2}
    assert found["optimizer_states"] == 8 * sum(rows.values())


def test_frozen_weights_have_no_states() -> None:
    model = dataclasses.replace(PRESETS["llama-7b"], lora_rank=8)
    found = estimate(model, Job(), NOTHING).phases["step"]
    adapters = 32 * 4 * 2 * 8 * 4096  # q, k, v, out of 32 layers, two matrices of rank 8
    assert model.trainable_parameters == adapters
    assert found["parameters"] == 2 * (PRESETS["llama-7b"].parameters + adapters)
    assert found["optimizer_states"] + found["masters"] == 12 * adapters
