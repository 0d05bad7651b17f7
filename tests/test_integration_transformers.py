"""attn_implementation="halfstep" in tiny random models of transformers, against what they compute with SDPA.

Guards: a window of another size than theirs, a mask that is lost or applied twice, causality that starts at the wrong
end (one query, a static cache), grouped heads repeated, a softcap or sinks left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import halfstep as hs
from halfstep.integrations import transformers as integration

pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.xdist_group("integration")]
LENGTH, WINDOW, VOCABULARY = 12, 5, 61
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip
MODELS: dict[str, Callable[..., Any]] = {
    "llama": lambda **o: LlamaForCausalLM(LlamaConfig(**SIZES, **o)),
    "mistral": lambda **o: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW, **o)),
    # a window in every second layer; queries are small at the start, so the cap is too
    "gemma2": lambda **o: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=0.02, **o)
    ),
}
TORCHS = {"llama": "sdpa", "mistral": "sdpa", "gemma2": "eager"}  # SDPA has no softcap
OLD_NAMES = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
PADDING = {"none": (0, 0), "left": (4, 0), "right": (0, 4)}


def by_hand(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The formula in the tensors' dtype: the truth in float64, where "eager" has a softmax in float32."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    if attention_mask is None:
        attention_mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    return (weights @ value).transpose(1, 2), None


@pytest.fixture(autouse=True)
def registered() -> None:
    hs.integrations.transformers.register_attention()
    AttentionInterface.register("by hand", by_hand)
    AttentionMaskInterface.register("by hand", sdpa_mask)


def made(name: str, attention: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name](**options, attn_implementation=attention).to(dtype)


def batch(padding: str) -> dict[str, Tensor]:
    """Two sequences, the second one shorter by what is padded."""
    left, right = PADDING[padding]
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(tokens)
    seen[1, :left] = 0
    seen[1, LENGTH - right :] = 0
    given = {"input_ids": tokens, "labels": tokens.masked_fill(seen == 0, -100)}
    return given if padding == "none" else {**given, "attention_mask": seen}


@lru_cache
def computed(name: str, attention: str, dtype: torch.dtype, padding: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the tokens that are there, and gradients of all weights."""
    model, given = made(name, attention, dtype), batch(padding)
    out = model(**given)
    out.loss.backward()
    gradients = {key: p.grad.double() for key, p in model.named_parameters()}
    return out.logits[given["labels"] != -100].detach().double(), gradients


def assert_within(got: Tensor, truth: Tensor, naive: Tensor, factor: int, dtype: torch.dtype, name: str) -> None:
    rounding = torch.finfo(dtype).eps / 2 * truth.abs()
    error, naive_error = (got - truth).abs(), (naive - truth).abs()
    assert not truth.isnan().any(), name
    assert (error <= factor * naive_error.max() + 2 * rounding).all(), name
    assert error.mean() <= 1.5 * naive_error.mean() + rounding.mean(), name


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_with_torchs_attention(name: str, dtype: torch.dtype, padding: str) -> None:
    (logits, gradients), truth, naive = (
        computed(name, attention, d, padding)
        for attention, d in (("halfstep", dtype), ("by hand", torch.float64), (TORCHS[name], dtype))
    )
    assert_within(logits, truth[0], naive[0], 2, dtype, "logits")
    for key, gradient in gradients.items():
        assert_within(gradient, truth[1][key], naive[1][key], 3, dtype, key)


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_not_repeated_and_what_is_plain_has_no_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append(((q.shape[1], k.shape[1], v.shape[1]), options))
        return hs.attention(q, k, v, **options)

    monkeypatch.setattr(integration, "attention", recorded)
    made(name, "halfstep")(input_ids=batch("none")["input_ids"])
    assert [heads for heads, _ in calls] == [(4, 2, 2)] * 2
    masks = [options["mask"] for _, options in calls]
    assert [mask is None for mask in masks] == {"llama": [True] * 2, "mistral": [False] * 2}.get(name, [False, True])
    assert all(mask is None or mask.dtype == torch.bool for mask in masks)
    assert [options["softcap"] for _, options in calls] == [0.02 if name == "gemma2" else None] * 2


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_with_a_cache_gives_the_same_tokens(name: str, padding: str) -> None:
    given = {key: value for key, value in batch(padding).items() if key != "labels"}
    options: dict[str, Any] = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    ours, torchs = (made(name, a).eval().generate(**given, **options) for a in ("halfstep", TORCHS[name]))
    assert ours.shape == (2, LENGTH + 8)
    assert torch.equal(ours, torchs)


@OLD_NAMES
def test_an_empty_static_cache() -> None:
    """More keys than queries, and the first query sees the first key alone."""
    found = []
    for attention, dtype in (("halfstep", torch.float32), ("by hand", torch.float64), ("sdpa", torch.float32)):
        model = made("llama", attention, dtype).eval()
        cache = StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            found.append(model(input_ids=batch("none")["input_ids"], past_key_values=cache).logits.double())
    assert_within(*found, 2, torch.float32, "logits")


def test_a_compiled_model_is_one_graph() -> None:
    """Padded, so with the mask that transformers makes inside of the graph."""
    given = {key: value for key, value in batch("left").items() if key != "labels"}
    found = []
    for attention, dtype in (("halfstep", torch.float32), ("by hand", torch.float64), ("sdpa", torch.float32)):
        model = made("llama", attention, dtype).eval()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if attention == "halfstep" else model
        with torch.no_grad():
            found.append(call(**given, use_cache=False).logits[given["attention_mask"] == 1].double())
    assert_within(*found, 2, torch.float32, "logits")


@OLD_NAMES
def test_training_with_dropout_repeats_by_seed_and_under_checkpointing() -> None:
    def gradients(seed: int, checkpointing: bool = False, dropout: float = 0.3) -> list[Tensor]:
        model = made("llama", "halfstep", attention_dropout=dropout).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(seed)
        model(**batch("left"), use_cache=False).loss.backward()
        return [p.grad for p in model.parameters()]

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(map(torch.equal, a, b))

    first = gradients(1)
    assert all(g.isfinite().all() for g in first)
    assert same(first, gradients(1))
    assert same(first, gradients(1, checkpointing=True))
    assert not same(first, gradients(2))
    assert same(gradients(1, dropout=0.0), gradients(2, dropout=0.0))


# ---- one layer's call against transformers' own ----------------------------------------------------------------------
class Module(nn.Module):
    num_key_value_groups, is_causal = 2, True


def bias(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(5))


def low(rows: slice) -> Tensor:
    """As transformers writes masks in floats; whole rows too."""
    mask = torch.zeros(2, 1, 6, 9)
    mask[:, :, :, 3:5] = mask[:, :, rows] = torch.finfo(torch.float32).min
    return mask


VISIBLE = torch.arange(9) <= torch.arange(6)[:, None] + 2
CALLS: dict[str, dict[str, Any]] = {
    "causal, more keys": {},
    "one query": {"queries": 1},
    "not causal": {"is_causal": False},
    "scaled": {"scaling": 0.3},
    "boolean mask": {"attention_mask": VISIBLE.expand(2, 1, 6, 9)},
    "float mask": {"attention_mask": low(slice(0, 0))},
    "float mask, whole rows": {"attention_mask": low(slice(2, 4))},
    "position bias": {"position_bias": bias(1, 4, 6, 9)},
    "position bias, not causal": {"position_bias": bias(1, 4, 6, 9), "is_causal": False},
    "position bias, boolean mask": {"position_bias": bias(1, 4, 6, 9), "attention_mask": VISIBLE.expand(2, 1, 6, 9)},
    "position bias, float mask": {"position_bias": bias(1, 4, 6, 9), "attention_mask": low(slice(0, 0))},
}


@pytest.mark.parametrize("case", CALLS)
def test_one_call(case: str) -> None:
    options = {"attention_mask": None, "queries": 6, **CALLS[case]}
    queries = options.pop("queries")
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, n, 16, generator=generator) for h, n in ((4, queries), (2, 9), (2, 9)))

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    ours, _ = integration.attention_forward(Module(), q, k, v, **options)
    naive, _ = sdpa_attention_forward(Module(), q, k, v, **options)
    truth, _ = sdpa_attention_forward(
        Module(), q.double(), k.double(), v.double(), **{name: wide(value) for name, value in options.items()}
    )
    assert ours.shape == (2, queries, 4, 16)
    assert ours.is_contiguous()
    assert_within(ours.double(), truth, naive.double(), 2, torch.float32, case)


def test_a_window_without_a_mask_counts_the_token_itself() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 16).double()
    ours, _ = integration.attention_forward(Module(), q, k, v, None, sliding_window=3)
    place = torch.arange(9)
    seen = (place <= place[:, None]) & (place > place[:, None] - 3)
    torchs, _ = sdpa_attention_forward(nn.Module(), q, k, v, seen)
    torch.testing.assert_close(ours, torchs)
    last, _ = integration.attention_forward(Module(), q[:, :, -1:], k, v, None, sliding_window=3)
    torch.testing.assert_close(last, torchs[:, -1:])


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks_are_refused(name: str) -> None:
    q = torch.randn(2, 4, 6, 16)
    with pytest.raises(
        ValueError, match=rf'no attention sinks, got {name} of shape \(4,\).*attn_implementation="eager"'
    ):
        integration.attention_forward(Module(), q, q, q, None, **{name: torch.zeros(4)})
    integration.attention_forward(Module(), q, q, q, None, **{name: None})


def test_weights_are_refused() -> None:
    q = torch.randn(2, 4, 6, 16)
    with pytest.raises(ValueError, match=r'output_attentions=False, got True: .*attn_implementation="eager" to look'):
        integration.attention_forward(Module(), q, q, q, None, output_attentions=True)
    integration.attention_forward(Module(), q, q, q, None, output_attentions=False)


# ---- registering -----------------------------------------------------------------------------------------------------
def test_registering_twice_changes_nothing() -> None:
    before = len(AttentionInterface()), len(AttentionMaskInterface())
    hs.integrations.transformers.register_attention()
    assert (len(AttentionInterface()), len(AttentionMaskInterface())) == before
    assert AttentionInterface()["halfstep"] is integration.attention_forward
    model = made("llama", "sdpa")
    model.set_attn_implementation("halfstep")
    assert model.config._attn_implementation == "halfstep"


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(RuntimeError, match=r"expected transformers 5 or newer.*pip install 'halfstep\[integrations\]'"):
        hs.integrations.transformers.register_attention()
