"""Shapes of well-known models, and shapes read from a transformers configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .model import ModelShape


def _gpt2(name: str, hidden: int, layers: int, heads: int) -> ModelShape:
    """Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2; transformers' code."""
    return ModelShape(
        name=name, vocabulary=50257, hidden=hidden, layers=layers, heads=heads, ffn=4 * hidden, gated=False,
        activation="gelu_new", norm="layer", tied=True, positions=1024, qkv_bias=True, out_bias=True, ffn_bias=True,
        fused_qkv=True, softmax_fp32=False,
    )  # fmt: skip


def _llama(name: str, vocabulary: int, hidden: int, layers: int, heads: int, ffn: int, kv_heads: int = 0,
           **more: Any) -> ModelShape:  # fmt: skip
    return ModelShape(
        name=name, vocabulary=vocabulary, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, ffn=ffn, **more
    )


# Sizes as in the models' published config.json.
PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _gpt2("gpt2", 768, 12, 12),
        _gpt2("gpt2-medium", 1024, 24, 16),
        _gpt2("gpt2-large", 1280, 36, 20),
        _gpt2("gpt2-xl", 1600, 48, 25),
        # Touvron et al., "LLaMA" and "Llama 2" (2023)
        _llama("llama-7b", 32000, 4096, 32, 32, 11008),
        _llama("llama-13b", 32000, 5120, 40, 40, 13824),
        _llama("llama-30b", 32000, 6656, 60, 52, 17920),
        _llama("llama-65b", 32000, 8192, 80, 64, 22016),
        _llama("llama-70b", 32000, 8192, 80, 64, 28672, kv_heads=8),
        # Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 3
        _llama("llama3-8b", 128256, 4096, 32, 32, 14336, kv_heads=8),
        _llama("llama3-70b", 128256, 8192, 80, 64, 28672, kv_heads=8),
        _llama("llama3-405b", 128256, 16384, 126, 128, 53248, kv_heads=8),
        # Zhang et al., "TinyLlama" (2024), table 1
        _llama("tinyllama-1.1b", 32000, 2048, 22, 32, 5632, kv_heads=4),
        # Jiang et al., "Mistral 7B" (2023), table 1; "Mixtral of Experts" (2024), table 1
        _llama("mistral-7b", 32000, 4096, 32, 32, 14336, kv_heads=8, window=4096),
        _llama("mixtral-8x7b", 32000, 4096, 32, 32, 14336, kv_heads=8, experts=8, experts_per_token=2),
        _llama("mixtral-8x22b", 32768, 6144, 56, 48, 16384, kv_heads=8, experts=8, experts_per_token=2),
        # Yang et al., "Qwen2.5" (2024), table 1; "Qwen3" (2025), table 1
        _llama("qwen2.5-0.5b", 151936, 896, 24, 14, 4864, kv_heads=2, qkv_bias=True, tied=True),
        _llama("qwen2.5-7b", 152064, 3584, 28, 28, 18944, kv_heads=4, qkv_bias=True),
        _llama("qwen2.5-72b", 152064, 8192, 80, 64, 29568, kv_heads=8, qkv_bias=True),
        _llama("qwen3-0.6b", 151936, 1024, 28, 16, 3072, kv_heads=8, head_dim=128, qk_norm=True, tied=True),
        _llama("qwen3-8b", 151936, 4096, 36, 32, 12288, kv_heads=8, head_dim=128, qk_norm=True),
        _llama("qwen3-32b", 151936, 5120, 64, 64, 25600, kv_heads=8, head_dim=128, qk_norm=True),
    )
}


def preset(name: str) -> ModelShape:
    if name not in PRESETS:
        raise ValueError(
            f"model={name!r}: expected one of {', '.join(PRESETS)}, or the path of a transformers config.json"
        )
    return PRESETS[name]


# What transformers calls its activation functions, and the name here.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu_new",
                "relu": "relu"}  # fmt: skip
_LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
SUPPORTED = ("gpt2", *_LLAMA_LIKE)


def from_config(config: Mapping[str, Any] | str | Path | Any) -> ModelShape:
    """The shape that a transformers configuration describes: a dictionary, the path of a config.json (or of its
    folder), or a configuration object.

    Raises:
        ValueError: a model type that is not known here, a field that is missing or out of range, a file that is no
            configuration.
    """
    values, name = _read(config)
    kind = values.get("model_type")
    if kind not in SUPPORTED:
        raise ValueError(
            f"model_type={kind!r}: expected one of {', '.join(SUPPORTED)}; measure other models from their module"
        )
    shape = _from_gpt2(values) if kind == "gpt2" else _from_llama_like(values, kind)
    return replace(shape, name=name or kind)


def _read(config: Any) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, (str, Path)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"config={str(config)!r}: expected the path of a transformers config.json; {error}"
            ) from None
        if not isinstance(values, dict):
            raise ValueError(f"config={str(config)!r}: expected a JSON object, got {type(values).__name__}")
        return values, path.parent.name if path.name == "config.json" else path.stem
    if isinstance(config, Mapping):
        return config, str(config.get("_name_or_path") or "")
    if hasattr(config, "to_dict"):
        return config.to_dict(), str(getattr(config, "_name_or_path", "") or "")
    raise ValueError(f"config={config!r}: expected a dictionary, a path, or a transformers configuration")


def _field(values: Mapping[str, Any], name: str, optional: bool = False) -> int:
    """A size, under the name that the configuration has for it; 0 for an optional one that is not there."""
    value = values.get(name)
    if value is None and optional:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        kind = values["model_type"]
        raise ValueError(f"{name}={value!r}: expected an integer >= 1 in a configuration of model_type={kind!r}")
    return value


def _activation(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name) or "silu"
    if value not in _ACTIVATIONS:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _from_gpt2(values: Mapping[str, Any]) -> ModelShape:
    hidden = _field(values, "n_embd")
    shape = _gpt2("", hidden, _field(values, "n_layer"), _field(values, "n_head"))
    return replace(
        shape, vocabulary=_field(values, "vocab_size"), ffn=_field(values, "n_inner", optional=True) or 4 * hidden,
        positions=_field(values, "n_positions"), dropout=float(values.get("resid_pdrop", 0.0)),
        activation=_activation(values, "activation_function"), tied=bool(values.get("tie_word_embeddings", True)),
    )  # fmt: skip


def _from_llama_like(values: Mapping[str, Any], kind: str) -> ModelShape:
    bias = bool(values.get("attention_bias", False))
    windowed = kind in ("mistral", "mixtral") or values.get("use_sliding_window")
    if kind == "mistral":  # transformers' default where a file says nothing; null says that there is none
        values = {"sliding_window": 4096, **values}
    return ModelShape(
        vocabulary=_field(values, "vocab_size"), hidden=_field(values, "hidden_size"),
        layers=_field(values, "num_hidden_layers"), heads=_field(values, "num_attention_heads"),
        ffn=_field(values, "intermediate_size"), kv_heads=_field(values, "num_key_value_heads", optional=True),
        head_dim=_field(values, "head_dim", optional=True), activation=_activation(values, "hidden_act"),
        qk_norm=kind == "qwen3",
        tied=bool(values.get("tie_word_embeddings", False)), qkv_bias=bias or kind == "qwen2", out_bias=bias,
        ffn_bias=bool(values.get("mlp_bias", False)),
        window=_field(values, "sliding_window", optional=True) if windowed else 0,
        experts=_field(values, "num_local_experts") if kind == "mixtral" else 0,
        experts_per_token=_field(values, "num_experts_per_tok") if kind == "mixtral" else 0,
    )  # fmt: skip
