"""BatchNorm over the micro-batches of two ranks: hs.EffectiveBatchNorm, and torch's SyncBatchNorm under hs.Accumulator.

Guards: a rank's statistics that count like another's though it has fewer samples, ranks that drift apart, weights of
micro-batches that differ between ranks while SyncBatchNorm's backward mixes their gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

from accumulation import assert_to_rounding
from batch_norm_ranks import assert_sync_batch_norm_is_whole, everything, normed

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("accumulator_ranks")]
EPS = torch.finfo(torch.float32).eps


def whole() -> tuple[nn.Sequential, list[torch.Tensor]]:
    net = normed()
    return net, [net(everything(window)).detach() for window in range(2)]


def assert_close(got: dict[str, Any], expected: dict[str, Any], names: list[str]) -> None:
    for name in names:
        torch.testing.assert_close(got[name], expected[name], rtol=64 * EPS, atol=64 * EPS, msg=name)


STATE = [f"running_{name}" for name in ("mean", "var")] + ["num_batches_tracked"]


def test_merged(ranks_found: Any) -> None:
    """The first layer's statistics are the whole batch's, the second's the same on all ranks."""
    expected = whole()[0].state_dict()
    for rank in ranks_found:
        assert_close(rank["merged_batch_norm"], expected, [f"0.{name}" for name in STATE])
    first, second = (rank["merged_batch_norm"] for rank in ranks_found)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_exact(ranks_found: Any) -> None:
    net, outputs = whole()
    outputs_of = [rank["exact_batch_norm"][1] for rank in ranks_found]
    for window in range(2):
        got = torch.cat([outputs_of[rank][window] for rank in range(2)])
        assert_to_rounding(got, outputs[window], len(got))
    for rank in ranks_found:
        names = [f"{layer}.{name}" for layer in (0, 3) for name in STATE]
        assert_close(rank["exact_batch_norm"][0], net.state_dict(), names)


def test_sync_batch_norm_gives_the_whole_batchs_gradient(ranks_found: Any) -> None:
    assert_sync_batch_norm_is_whole(ranks_found)
