"""Shapes of models: their parameters, and errors for shapes that cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from halfstep.planner.model import ModelShape
from halfstep.planner.presets import PRESETS

SMALL: dict[str, Any] = dict(vocabulary=100, hidden=32, layers=2, heads=4, ffn=48)


# Published parameter counts.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("llama-7b", 6_738_415_616), ("llama-70b", 68_976_648_192), ("llama3-8b", 8_030_261_248),
     ("mistral-7b", 7_241_732_096), ("mixtral-8x7b", 46_702_792_704), ("qwen2.5-0.5b", 494_032_768)],
)  # fmt: skip
def test_parameters_of_presets(name: str, parameters: int) -> None:
    assert PRESETS[name].parameters == parameters


def test_parts_add_up() -> None:
    for shape in PRESETS.values():
        assert sum(shape.parts.values()) == shape.parameters == shape.trainable_parameters


def test_active_parameters_are_those_of_a_token_s_experts() -> None:
    """Jiang et al., "Mixtral of Experts" (2024): 47 B parameters, 13 B of them for each token."""
    mixtral = PRESETS["mixtral-8x7b"]
    assert mixtral.parameters - mixtral.active_parameters == 32 * 6 * 3 * 4096 * 14336
    assert round(mixtral.active_parameters / 1e9) == 13


def test_experts_are_stacked_in_one_tensor() -> None:
    """transformers' gate_up_proj [experts, 2 x ffn, hidden]: what an optimizer sees as its largest."""
    shape = ModelShape(**SMALL, experts=4, experts_per_token=3)
    assert shape.largest_weight == 4 * 2 * 48 * 32
    biased = dataclasses.replace(shape, ffn_bias=True)
    assert biased.parameters - shape.parameters == 2 * 4 * (2 * 48 + 32)
    assert biased.active_parameters - shape.active_parameters == 2 * 3 * (2 * 48 + 32)
    adapted = dataclasses.replace(shape, lora_rank=2, lora_targets="all")
    of_experts = 2 * (96 + 32) + 2 * (32 + 48)  # up, gate together; down
    of_attention = 4 * 2 * (32 + 32)
    assert adapted.trainable_parameters == 2 * (4 * of_experts + of_attention)
    assert adapted.active_parameters - shape.active_parameters == 2 * (3 * of_experts + of_attention)


def test_grouped_heads_shrink_keys_and_values() -> None:
    whole = ModelShape(**SMALL)
    grouped = ModelShape(**SMALL, kv_heads=1)
    assert whole.parameters - grouped.parameters == 2 * 2 * 32 * 24  # layers, k and v, hidden, 3 heads of 8


def test_factorised_embedding() -> None:
    """Lan et al., "ALBERT", section 3.1: V x E + E x H in the place of V x H."""
    assert ModelShape(**SMALL, tied=True, embedding_rank=8).parts["embedding"] == 100 * 8 + 8 * 32
    assert ModelShape(**SMALL, tied=True).parts["embedding"] == 100 * 32


def test_frozen_parts_do_not_train() -> None:
    shape = ModelShape(**SMALL, frozen=frozenset({"embedding", "ffn"}))
    assert shape.parameters - shape.trainable_parameters == 100 * 32 + 2 * 3 * 32 * 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden=0), "hidden=0: expected an integer >= 1"),
        (dict(layers=2.5), "layers=2.5: expected an integer >= 1"),
        (dict(heads=True), "heads=True: expected an integer >= 1"),
        (dict(heads=5), "heads=5: hidden=32 is no multiple of it; give a divisor, or head_dim"),
        (dict(kv_heads=3), "kv_heads=3: expected a divisor of heads=4"),
        (dict(kv_heads=-1), "kv_heads=-1: expected an integer >= 0"),
        (dict(activation="swish"), "activation='swish': expected one of silu, gelu, gelu_new, relu"),
        (dict(norm="batch"), "norm='batch': expected one of rms, layer"),
        (dict(dropout=1), r"dropout=1: expected a number in \[0, 1\)"),
        (dict(experts=4), "experts_per_token=0: expected 1 .. experts=4, the experts that a token goes through"),
        (dict(experts=4, experts_per_token=5), "experts_per_token=5: expected 1 .. experts=4"),
        (dict(experts_per_token=2), "experts_per_token=2: expected 0 without experts; set experts too"),
        (dict(embedding_rank=64), "embedding_rank=64: expected 1 .. hidden=32, or 0 for no factorisation"),
        (dict(lora_targets="ffn"), "lora_targets='ffn': expected one of attention, all"),
        (dict(frozen={"mlp"}), "frozen='mlp': expected one of embedding, attention"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ModelShape(**{**SMALL, **change})


def test_a_shape_is_a_value() -> None:
    assert ModelShape(**SMALL) == ModelShape(**SMALL, kv_heads=4, head_dim=8)
    assert len({ModelShape(**SMALL), ModelShape(**SMALL)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelShape(**SMALL).layers = 3  # type: ignore[misc]
