"""hs.Accumulator on two ranks (gloo): DistributedDataParallel, FSDP2 and plain replicas against the whole batch.

What the ranks run is in accumulation_ranks.py.
Guards: ranks that count alike though their tokens differ, a gradient divided by the ranks twice or never, ranks that
drift apart, a collective that one of them does not call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accumulation import Block, assert_within_budget, in_float64, model, spread, whole_batch
from bits import assert_same_bits
from torch import distributed

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

from accumulation_ranks import UNEVEN, WINDOWS, parts
from ranks_job import RANKS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("accumulator_ranks")]


WITHIN: dict[str, tuple[torch.dtype, torch.dtype, dict[int, list[list[int]]]]] = {
    # parameters, what the model computes in, micro-batches
    "ddp_float32": (torch.float32, torch.float32, WINDOWS),
    "ddp_bfloat16": (torch.bfloat16, torch.bfloat16, WINDOWS),
    "ddp_unused": (torch.float32, torch.float32, WINDOWS),
    "ddp_uneven": (torch.bfloat16, torch.bfloat16, UNEVEN),
    "group_float32": (torch.float32, torch.float32, WINDOWS),
    "fsdp_every": (torch.float32, torch.float32, WINDOWS),
    "fsdp_last": (torch.float32, torch.float32, WINDOWS),
    "fsdp_bfloat16": (torch.bfloat16, torch.bfloat16, WINDOWS),
    "fsdp_last_mixed": (torch.float32, torch.bfloat16, WINDOWS),
}


@pytest.mark.parametrize("name", WITHIN)
def test_the_gradient_is_that_of_all_ranks_batches(name: str, ranks_found: Any) -> None:
    dtype, computed, windows = WITHIN[name]
    ranks = [rank[name] for rank in ranks_found]
    assert not isinstance(ranks[0], str), ranks[0]
    scale = 1.0 if name.startswith("fsdp") else 8.0  # halfstep's optimizers share no overflow flag between shards

    for window in range(2):
        both = [batch for rank in range(RANKS) for batch in parts(rank, window, windows)]
        first, second = (rank[window] for rank in ranks)

        def net(dtype: torch.dtype = dtype, weights: Any = first["weights"]) -> Block:
            made = model(dtype)
            made.load_state_dict({"unused": made.unused, **weights}, strict=False)
            return made

        loss, exact = in_float64(net, both)
        naive_loss, naive = whole_batch(net().to(computed), both)
        terms = spread(net, both)
        for rank in (first, second):
            got = {key: grad / scale for key, grad in rank["gradients"].items()}
            assert set(rank["dtypes"].values()) == {torch.float32}
            assert_within_budget(got, naive, exact, terms)
            assert rank["tokens"] == sum(sum(windows[r][window]) for r in range(RANKS))
            assert abs(rank["loss"] - loss) <= 3 * abs(naive_loss - loss) + 2 * torch.finfo(computed).eps * loss
        for key, grad in first["gradients"].items():
            assert_same_bits(second["gradients"][key], grad, key)
    for key, weight in ranks[0][2]["weights"].items():
        assert_same_bits(ranks[1][2]["weights"][key], weight, key)
        assert key == "unused" or not torch.equal(weight, ranks[0][0]["weights"][key])
    assert "unused" not in ranks[0][0]["gradients"]


def test_a_parameter_that_one_rank_uses(ranks_found: Any) -> None:
    """1 token on rank 0 and 3 on rank 1; the second parameter is rank 0's alone, and no weight decay touches zeros."""
    for rank in ranks_found:
        first, second = rank["a_parameter_that_one_rank_uses"]
        assert (first.tolist(), second.tolist()) == ([0.5, 0.5], [0.125, 0.125])


def test_sums_are_those_of_all_tensors_whatever_their_size(ranks_found: Any) -> None:
    for rank in ranks_found:
        *flat, matrix, wide = rank["sums_in_buckets"]
        assert [t.tolist() for t in flat] == [[2.0 * n + 1] * n for n in (1, 7, 16, 40, 3, 12)]
        assert torch.equal(matrix, (2 * torch.arange(40.0).view(5, 8) + 1).t())
        assert wide.tolist() == [3.0] * 9


def test_fsdp_reduces_again_without_its_accumulator(ranks_found: Any) -> None:
    assert [rank["fsdp_syncs_again"] for rank in ranks_found] == [True, True]


def test_an_overflow_on_one_rank_skips_on_all(ranks_found: Any) -> None:
    for rank in ranks_found:
        assert rank["an_overflow_on_one_rank"] == (True, True, 4.0)


def test_ddp_hands_out_buffers_once_a_window_and_syncs_again_afterwards(ranks_found: Any) -> None:
    (first, on_again), (second, _) = (rank["buffers_of_ddp"] for rank in ranks_found)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, True, False]
    assert on_again is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddp_static", "DistributedDataParallel(static_graph=True) cannot leave out its own synchronisation"),
        ("fsdp_last_in_16_bits", 'sync="last" lets FSDP2 add up gradients in torch.bfloat16, which stalls'),
        ("fsdp_last_of_bfloat16", 'sync="last" lets FSDP2 add up gradients in torch.bfloat16, which stalls'),
        ("fsdp_divided", "set_gradient_divide_factor() was called on an FSDP2 module"),
        ("fsdp_after_the_optimizer", "is no DTensor though the model has FSDP2 modules"),
        ("fsdp_without_a_model", "is a DTensor; pass the model that fully_shard() was called on as model="),
        ("two_wrappers", "model has DistributedDataParallel and FSDP2 modules; use one of them"),
        ("two_groups", "gradients would be summed over two process groups"),
        ("inside_ddp", "a DistributedDataParallel module that is not in model= averages gradients of this optimizer's"),
        ("one_of_two_ddp", "Pass that module itself as model=, or what contains it; not the module inside"),
        ("no_group", "torch.distributed runs 2 ranks, and the accumulator cannot see which of them share the batch"),
        ("nothing_on_any_rank", "step() with no gradient accumulated"),
    ],
)
def test_what_is_refused(name: str, message: str, ranks_found: Any) -> None:
    for rank in ranks_found:
        assert message in rank[name]


def test_a_wrapper_that_was_dropped_has_no_say(ranks_found: Any) -> None:
    assert [rank["wrapped_again"] for rank in ranks_found] == [True, True]


def test_a_window_that_fsdp_has_not_reduced_can_be_dropped(ranks_found: Any) -> None:
    assert not isinstance(ranks_found[0]["fsdp_last_not_announced"], str), ranks_found[0]["fsdp_last_not_announced"]
    for said, grad in (found for rank in ranks_found for found in rank["fsdp_last_not_announced"]):
        assert "of a shorter window needs backward(loss, tokens, last=True). Call reset() to drop the window" in said
        assert grad.tolist() == [[0.125] * 4] * 2  # nothing of the dropped micro-batch


def test_fsdp1_is_refused() -> None:
    import halfstep as hs

    class FullyShardedDataParallel(torch.nn.Linear):
        """Only its name is looked at, so as not to import it."""

    net = FullyShardedDataParallel(2, 2)
    with pytest.raises(TypeError, match=r"FullyShardedDataParallel module \(FSDP1\).*use fully_shard\(\) \(FSDP2\)"):
        hs.Accumulator(hs.AdamW(net.parameters()), 2, model=net)
