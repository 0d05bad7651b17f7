"""Shapes read from transformers' configurations: objects, dictionaries, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_steps import fake
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config

from transformers import PretrainedConfig, Qwen3Config  # isort: skip

from halfstep.planner.presets import PRESETS, SUPPORTED, from_config, preset

COMMON: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=1000, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
CONFIGS: list[PretrainedConfig] = [
    LlamaConfig(**COMMON), LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    MistralConfig(**COMMON, head_dim=32), Qwen2Config(**COMMON), Qwen3Config(**COMMON, head_dim=32),
    Qwen3Config(**COMMON, attention_bias=True), MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    GPT2Config(n_embd=64, n_layer=2, n_head=4, n_inner=100, vocab_size=1000, bos_token_id=0, eos_token_id=0),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_parameters_are_the_model_s(config: PretrainedConfig) -> None:
    with fake():
        model = AutoModelForCausalLM.from_config(config)
        assert from_config(config).parameters == sum(p.numel() for p in model.parameters())


def test_every_supported_type_is_tried() -> None:
    assert {config.model_type for config in CONFIGS} == {*SUPPORTED}


def test_three_ways_to_give_a_configuration(tmp_path: Path) -> None:
    config = CONFIGS[0]
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    shapes = {from_config(given) for given in (tmp_path, tmp_path / "config.json", str(tmp_path))}
    shapes |= {from_config(json.loads((tmp_path / "config.json").read_text()))}
    (from_file, from_dict) = sorted(shapes, key=lambda shape: shape.name == "llama")
    assert (from_file.name, from_dict.name) == (tmp_path.name, "llama")
    assert from_file.weights == from_dict.weights == from_config(config).weights


def test_windows_are_read_where_they_are_used() -> None:
    assert from_config(MistralConfig(**COMMON, sliding_window=128)).window == 128
    assert from_config(Qwen2Config(**COMMON, sliding_window=128)).window == 0
    assert from_config(Qwen2Config(**COMMON, sliding_window=128, use_sliding_window=True)).window == 128
    said = MistralConfig(**COMMON).to_dict()
    del said["sliding_window"]
    assert from_config(said).window == MistralConfig(**COMMON).sliding_window == 4096
    assert from_config({**said, "sliding_window": None}).window == 0
    assert from_config(LlamaConfig(**COMMON)).window == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "bert"},
            "model_type='bert': expected one of gpt2, llama, .*; measure other models",
        ),
        ({}, "model_type=None: expected one of gpt2"),
        ({"model_type": "llama"}, "vocab_size=None: expected an integer >= 1 in a configuration of model_type='llama'"),
        ({**CONFIGS[0].to_dict(), "hidden_act": "relu6"}, "hidden_act='relu6': expected one of silu, swish"),
        ({**CONFIGS[0].to_dict(), "num_hidden_layers": 0}, "num_hidden_layers=0: expected an integer >= 1 in"),
        ({**CONFIGS[0].to_dict(), "hidden_size": "4096"}, "hidden_size='4096': expected an integer >= 1 in a conf"),
        ({**CONFIGS[0].to_dict(), "head_dim": -8}, "head_dim=-8: expected an integer >= 1 in a configuration"),
        (
            "/nowhere/config.json",
            "config='/nowhere/config.json': expected the path of a transformers config.json; .*No such file",
        ),
        (7, "config=7: expected a dictionary, a path, or a transformers configuration"),
    ],
)
def test_errors(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        from_config(config)


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    for text, message in (
        ("{", "expected the path of a transformers config.json"),
        ("[1]", "expected a JSON object, got list"),
    ):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            from_config(tmp_path)


def test_an_unknown_preset_names_the_known_ones() -> None:
    assert preset("gpt2") is PRESETS["gpt2"]
    with pytest.raises(ValueError, match=r"^model='gpt5': expected one of gpt2, .*, or the path of"):
        preset("gpt5")
