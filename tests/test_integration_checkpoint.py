"""`hs.checkpoint` on tiny random models of transformers: their layers are found, every bit is as without.

Guards: a cache of keys and values that the recomputation fills again (use_cache is on by default), layers recomputed
twice because transformers' own checkpointing is on too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from bits import assert_same_bits
from torch import Tensor

import halfstep as hs

pytestmark = [pytest.mark.usefixtures("offline", "one_thread"), pytest.mark.xdist_group("integration")]
IDS = torch.arange(24).view(2, 12) % 31
SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=61, decoder_start_token_id=0)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=64, bos_token_id=0, eos_token_id=0)
IMAGE = {k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED, attention_dropout=0.2)), "model.layers"),
    "qwen3": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=8)), "model.layers"),
    "mixtral": (lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**GROUPED, num_local_experts=4)), "model.layers"),
    "gpt2": (lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)), "transformer.h"),
    "bert": (lambda: tf.BertForMaskedLM(tf.BertConfig(**SIZES)), "bert.encoder.layer"),
    "t5": (lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)), "encoder.block"),
    "vit": (lambda: tf.ViTForImageClassification(tf.ViTConfig(**IMAGE, image_size=16, patch_size=4)), "vit"),
}
OLD_NAMES = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")
CACHED = ("llama", "qwen3", "mixtral", "gpt2", "t5")
CACHE_WARNING = "halfstep.checkpoint leaves the cache of keys and values out while gradients are recorded"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    tf.logging.set_verbosity_error()
    yield
    tf.logging.set_verbosity_warning()


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def gradients(model: Any) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad()
    if model.config.model_type == "vit":
        given = {
            "pixel_values": torch.linspace(0, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16),
            "labels": torch.tensor([0, 1]),
        }
    else:
        mask = torch.ones_like(IDS)
        mask[0, -3:] = 0
        given = {"input_ids": IDS, "attention_mask": mask, "labels": IDS}
    loss = model(**given).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("policy", ["layer", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_is_as_without(name: str, policy: str, recwarn: pytest.WarningsRecorder) -> None:
    model = made(name)
    plain = gradients(model)
    blocks = hs.checkpoint(model, policy).blocks
    assert len(blocks) == (4 if name == "t5" else 2)
    assert all(re.fullmatch(r".+\.\d", block) for block in blocks)
    assert blocks[0].startswith(MODELS[name][1])
    for _ in range(2):
        for key, got in gradients(model).items():
            assert_same_bits(got, plain[key], key)
    said = [str(w.message) for w in recwarn if CACHE_WARNING in str(w.message)]
    assert len(said) == (name in CACHED), "once for a model"
    assert all("set model.config.use_cache = False" in text for text in said)


def test_without_gradients_the_cache_stays() -> None:
    model = made("llama").eval()
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    hs.checkpoint(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), expected)
    with torch.no_grad():
        assert model(IDS).past_key_values.get_seq_length() == 12


@OLD_NAMES
def test_a_cache_that_is_full_already_is_refused() -> None:
    """Without it the result would be another one: prompts and prefixes that were computed before."""
    model = made("llama")
    with torch.no_grad():
        cache = model(IDS).past_key_values
    hs.checkpoint(model)
    message = (
        "cannot record gradients with a cache that holds keys and values already; got a DynamicCache of length 12: "
    )
    with pytest.raises(
        ValueError, match=re.escape(message + "undo the checkpoint with halfstep.checkpoint(model, None)")
    ):
        model(IDS, past_key_values=cache)


@OLD_NAMES
def test_transformers_own_checkpointing_is_refused() -> None:
    message = re.escape(
        "gradient checkpointing of transformers is on in 'model', so every activation would be recomputed "
        "twice; call model.gradient_checkpointing_disable() (and leave gradient_checkpointing out of TrainingArguments)"
    )
    model = made("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=message):
        hs.checkpoint(model)
    model.gradient_checkpointing_disable()
    hs.checkpoint(model)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing of transformers is on in 'LlamaDecoderLayer'"):
        model(IDS, use_cache=False)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo asks
@pytest.mark.filterwarnings(f"ignore:{CACHE_WARNING}:UserWarning")  # the other layer's
def test_a_layer_compiled_in_one_graph() -> None:
    model = made("llama")
    model.eval()
    plain = gradients(model)
    hs.checkpoint(model, "selective")
    model.model.layers[0].compile(backend="aot_eager", fullgraph=True)
    for key, got in gradients(model).items():
        assert_same_bits(got, plain[key], key)
