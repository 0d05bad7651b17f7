"""offload_activations around a tiny Llama of transformers, with and without its own gradient checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_cases import offloaded
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.usefixtures("offline", "one_thread"), pytest.mark.xdist_group("integration")]
SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    tie_word_embeddings=True, attention_dropout=0.1,
)  # fmt: skip


def grads(model: LlamaForCausalLM, context: Any) -> list[Tensor]:
    torch.manual_seed(2)
    ids = torch.arange(24).view(2, 12) % 61
    with context:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")  # the name of old ones
@pytest.mark.parametrize("checkpointing", [False, True])
def test_llama_keeps_its_gradients(checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = grads(model, torch.enable_grad())
    moved = []
    for seed in range(4):
        context, device = offloaded(seed, min_bytes=257)
        with device.watch():
            assert all(map(torch.equal, grads(model, context), expected))
        device.finish()
        moved.append(context.bytes)
        assert device.buffers.used_bytes == 0
    assert moved[0] > 0
    assert set(moved) == {moved[0]}
