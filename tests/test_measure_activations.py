"""`hs.measure_activations`: what lives from forward to backward, to the byte.

The oracle is autograd itself: what saved_tensors_hooks sees of a plain model, each storage once and without parameters,
and the results that the caller holds.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget_models import LlamaBlock
from example_runs import tiny
from gpt.matmul import Matmul
from gpt.model import GPT
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.activations.measure import attention_backward_flops, attention_flops, flop_formulas


def kept_by_autograd(model: nn.Module, forward: Any, given: Any) -> int:
    """Bytes of saved tensors and results, each storage once, without what there was before."""
    before = {t.untyped_storage()._cdata for t in tree_leaves([*model.parameters(), *model.buffers(), given])}
    found: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = forward()
    keep(result.detach())
    return sum(storage.nbytes() for key, storage in found.items() if key not in before)


def gpt(attends: Any = "sdpa") -> tuple[nn.Module, Any, list[Tensor]]:
    config = tiny(layers=2)
    model = GPT(61, config.width, config.layers, config.heads, Matmul("native", "a test", attends))
    tokens = torch.randint(0, 61, (2, 16))
    return model, partial(model, tokens, tokens), [tokens]


def llama(dtype: torch.dtype) -> tuple[nn.Module, Any, list[Tensor]]:
    model = nn.Sequential(*(LlamaBlock(32, 4, 2, 48) for _ in range(2))).to(dtype)
    x = torch.randn(2, 16, 32).to(dtype)
    return model, partial(model, x), [x]


MODELS = {
    "gpt": gpt,
    "gpt, hs.attention": partial(gpt, "halfstep"),
    "llama, float32": partial(llama, torch.float32),
    "llama, bfloat16": partial(llama, torch.bfloat16),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_plain_model_keeps_what_autograd_saves_and_the_results(make):
    torch.manual_seed(0)
    model, forward, given = make()
    wanted = kept_by_autograd(model, forward, given)
    with hs.measure_activations() as measured:
        result = forward()
    assert measured.bytes == wanted > 10_000
    assert measured.peak >= measured.bytes
    result.sum().backward()
    assert measured.bytes == wanted, "what is freed afterwards does not count"


def test_a_llama_layer_keeps_what_the_formula_says():
    """bfloat16, as many heads of keys as of queries: norms 16sbh + 8sb, queries, keys and values 6sbh, attention 2sbh
    and 4asb of log-sum-exp, SwiGLU 8sbf. The result, 2sbh, is held here."""
    s, b, h, a, f = 16, 2, 32, 4, 48
    block, x = LlamaBlock(h, a, a, f).to(torch.bfloat16), torch.randn(b, s, h).bfloat16().requires_grad_()
    with hs.measure_activations() as measured:
        result = block(x)
    assert measured.bytes == 24 * s * b * h + 8 * s * b * f + 4 * a * s * b + 8 * s * b + 2 * s * b * h
    del result


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpoint_keeps_its_input_and_the_result(early_stop):
    block = LlamaBlock(32, 4, 2, 48)
    x = torch.randn(2, 16, 32)
    with hs.measure_activations() as measured:
        y = x * 2
        z = checkpoint(block, y, use_reentrant=False, early_stop=early_stop)
    assert measured.bytes == 4 * (y.numel() + z.numel())
    assert measured.peak > 2 * measured.bytes, "the block's own tensors were there for a while"


def test_bytes_while_the_block_runs_and_split():
    with hs.measure_activations() as measured:
        a = torch.ones(10)
        b = torch.ones(4, dtype=torch.float64)
        assert measured.bytes == measured.peak == 72
        assert measured.by_dtype == {torch.float32: 40, torch.float64: 32}
        del a
        assert (measured.bytes, measured.peak) == (32, 72)
        c = torch.ones(2)
        assert (measured.bytes, measured.peak) == (40, 72)
        del c
    assert (measured.bytes, measured.peak) == (32, 72)
    assert measured.by_dtype == {torch.float64: 32}
    assert measured.by_device == {"cpu": 32}
    assert str(measured) == "32 B kept (float64), 72 B at most"
    del b
    assert measured.bytes == 32


def test_views_in_place_results_and_what_was_there_before_cost_nothing():
    weight = nn.Parameter(torch.ones(8, 8))
    x = torch.ones(4, 8)
    with hs.measure_activations() as measured:
        y = x.view(8, 4).t()[1:]
        x.mul_(2)
        w = weight.t().detach()
        assert measured.bytes == 0
        z = torch.empty(100)[:1]
    assert (measured.bytes, z.numel()) == (400, 1), "a view keeps the whole storage"
    del y, w


def test_results_that_share_a_new_storage_count_it_once():
    library = torch.library.Library("halfstep_test", "FRAGMENT")
    library.define("halves(Tensor x) -> (Tensor, Tensor)")
    library.impl("halves", lambda x: tuple(torch.empty(10).chunk(2)), "CPU")
    with hs.measure_activations() as measured:
        first, second = torch.ops.halfstep_test.halves(torch.ones(0))
    assert measured.bytes == 40
    del first, second


def test_mapped_files_are_no_allocation(tmp_path):
    torch.save(torch.ones(1000), tmp_path / "t.pt")
    with hs.measure_activations() as measured:
        loaded = torch.load(tmp_path / "t.pt", mmap=True, weights_only=True)
    assert measured.bytes == 0
    del loaded


def test_nothing_is_held_by_the_measurement():
    with hs.measure_activations() as measured:
        x = torch.ones(10, requires_grad=True)
        loss = (x * 2).exp().sum()
        loss.backward()
        del loss, x
        gc.collect()
        assert measured.bytes == 0


def test_one_object_measures_one_block():
    measured = hs.measure_activations()
    with measured:
        pass
    with pytest.raises(RuntimeError, match=r"measures one block; make a new one for the next block"), measured:
        pass


# ---- FLOPs of hs.attention -------------------------------------------------------------------------------------------
def test_attention_s_flops_are_those_of_torch_s_own():
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (torch.randn(2, heads, n, 8, requires_grad=True) for heads, n in ((4, 6), (4, 10), (4, 10)))
    wanted = 2 * 2 * 4 * 6 * 10 * 16, 2 * 2 * 4 * 6 * 10 * 40
    for attend in (hs.attention, F.scaled_dot_product_attention):
        with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counted:
            out = attend(q, k, v)
            forward = counted.get_total_flops()
            out.sum().backward()
        assert (forward, counted.get_total_flops() - forward) == wanted
    assert sdpa_flop_count(q.shape, k.shape, v.shape) == wanted[0]
    assert sdpa_backward_flop_count(v.new_empty(2, 4, 6, 8).shape, q.shape, k.shape, v.shape) == wanted[1]


def test_attention_s_flops_with_grouped_heads_and_wide_values():
    q, k, v = (2, 8, 5, 16), (2, 2, 7, 16), (2, 2, 7, 24)
    assert attention_flops(q, k, v) == 2 * 2 * 8 * 5 * 7 * (16 + 24)
    assert attention_backward_flops(q, None, q, q, q, [True] * 4, q, k, v) == 2 * 2 * 8 * 5 * 7 * (3 * 16 + 2 * 24)
