"""`hs.checkpoint` on two ranks (gloo), before and after DistributedDataParallel and fully_shard.

What the ranks run is in checkpoint_ranks.py.
Guards: a recomputation with a rank's shard in place of the gathered parameter, or with one that was freed already.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

from checkpoint_ranks import WRAPS

pytestmark = pytest.mark.xdist_group("accumulator_ranks")  # one worker starts the ranks


@pytest.mark.parametrize("name", WRAPS)
def test_every_rank_has_the_bits_of_the_wrapped_model(name: str, ranks_found: Any) -> None:
    for rank in ranks_found:
        found = rank[f"checkpoint {name}"]
        assert not isinstance(found, str), found
        assert found == dict.fromkeys(["layer before", "layer after", "selective before", "selective after"], True)
