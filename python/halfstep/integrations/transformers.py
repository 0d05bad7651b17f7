"""hs.attention as an attention of transformers: `attn_implementation="halfstep"`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention import attention

NAME = "halfstep"


def register_attention() -> None:
    """Makes "halfstep" an `attn_implementation` of transformers' models: `hs.attention` in place of SDPA.

    Calling it again changes nothing. Models then take it when they are made or loaded, or later:

        hs.integrations.transformers.register_attention()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="halfstep")
        model.set_attn_implementation("halfstep")

    What a model hands over means what it means for transformers' "sdpa": scaling, dropout, grouped heads (read as they
    are, never repeated), sliding windows (size w: a token sees itself and the w - 1 before it), position_bias, masks.
    Softcaps, which "sdpa" refuses, are applied. A boolean mask says who is visible; a query that sees nothing gets 0. A
    float mask is added to the scores as it is, so where it is the dtype's minimum in a whole row, the row is the mean
    of all values, as with "eager".

    Memory: no score matrix. transformers makes a boolean mask [batch, 1, length, key length], one for all layers, where
    something is padded, packed or outside a window; without such a thing there is no mask at all.

    Raises:
        RuntimeError: transformers is not installed, or older than 5.
        ValueError, by the model's forward: attention sinks, or weights that shall be returned.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise RuntimeError(
            f"expected transformers 5 or newer, with its AttentionMaskInterface, and importing it failed: {error}; "
            "install it with pip install 'halfstep[integrations]'"
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, position_bias: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls in every layer: query [batch, heads, length, dim] -> ([batch, length, heads, dim], None).

    Args:
        attention_mask: of sdpa_mask, or the user's: boolean, True is visible, or float, which is added. With a mask
            nothing else hides anything. Without: `is_causal`, or else module.is_causal, and `sliding_window`.
        position_bias: float, added.
        options: what other implementations want is ignored, unless it would change the result.
    """
    _refuse(options)
    causal: bool | str = False
    window = None
    if attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        # transformers leaves the mask out where one query sees all keys, or the first query the first key alone, also
        # with more keys than queries: of an empty static cache
        causal = "top-left" if query.shape[2] > 1 else "bottom-right"
        window = None if sliding_window is None else (sliding_window - 1, 0)
    mask, bias = attention_mask, position_bias
    if mask is not None and mask.is_floating_point():
        mask, bias = None, mask if bias is None else mask + bias
    out = attention(
        query, key, value, mask=mask, bias=bias, causal=causal, window=window, scale=scaling, softcap=softcap,
        dropout_p=dropout,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _refuse(options: dict[str, Any]) -> None:
    for name in ("s_aux", "sinks"):
        if options.get(name) is not None:
            raise ValueError(
                f"expected no attention sinks, got {name} of shape {tuple(options[name].shape)}: hs.attention has "
                'none; use attn_implementation="eager" for this model'
            )
    if options.get("output_attentions"):
        raise ValueError(
            "expected output_attentions=False, got True: hs.attention never holds the weights that would be returned; "
            'use attn_implementation="eager" to look at them'
        )
