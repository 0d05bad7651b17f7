"""Segments of Triton's attention: more of them than a program looks at together, and cu_seqlens that no host has looked
at.

Guards: segments of a later chunk at the wrong place, wrong cu_seqlens that pass for right, reads and writes beyond the
tensors.
"""

from __future__ import annotations

import pytest
import torch
from attention_budget import judge
from attention_case import Case, Drawn
from attention_runs import chunks_of, computed
from interpreter import no_overflow, strays

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = Case("lengths", q_lengths=(9, 33, 20), k_lengths=(5, 40, 7), heads=(2, 1), right=0, d_lse=True)
WRONG = {
    "down": (0, 40, 20, 52),
    "down to the end": (0, 30, 52, 40),
    "down, where there would be more blocks than programs": (0, 52, 0, 52),
    "below 0": (-8, 20, 40, 52),
    "far below 0": (-(2**31), 20, 40, 52),
    "beyond the rows": (0, 20, 40, 200),
    "far beyond the rows": (0, 20, 2**31 - 1, 2**31 - 1),
    "anything": (123456789, -987654321, 5, 2**31 - 1),
}


def test_more_segments_than_are_looked_at_together(backend):
    """Nine of them, in chunks of 4: empty ones at the ends of chunks, a chunk of empty ones, a last chunk of one."""
    drawn = Case(
        "chunks",
        q_lengths=(3, 0, 40, 0, 0, 0, 0, 0, 17),
        k_lengths=(0, 5, 35, 0, 0, 0, 0, 0, 33),
        heads=(4, 2),
        right=0,
    ).draw(torch.float32)
    with chunks_of(4):
        judge(drawn, computed(backend, drawn))


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_ends_make_every_row_nan(backend, name: str, of_keys: bool):
    """And nothing beside the tensors is read."""
    call, d_out, d_lse = LENGTHS.draw(torch.float32)
    rows = (call.k if of_keys else call.q).shape[2]
    ends = torch.tensor([rows if end == 52 else end for end in WRONG[name]], dtype=torch.int32)
    call = call._replace(**{"cu_seqlens_k" if of_keys else "cu_seqlens_q": ends})
    with strays([]) as found, no_overflow():
        results = computed(backend, Drawn(call, d_out, d_lse))
    assert found == []
    for result in ("out", "lse", "dq", "dk", "dv"):
        assert results[result].isnan().all(), result


def test_rows_before_and_after_the_segments_are_not_read(backend):
    """Between them, either: no segment has them."""
    drawn = Case("uncovered", q_lengths=(17, 5), k_lengths=(9, 20), uncovered=(3, 6), d_lse=True).draw(torch.float32)
    call = drawn.call
    for x in (call.q, call.k, call.v, drawn.d_out):
        x[:, :, :3] = float("nan")
        x[:, :, -6:] = float("nan")
    results = computed(backend, drawn)
    for name in ("out", "dq", "dk", "dv"):
        rows = results[name]
        assert rows.isfinite().all()
        assert not rows[:, :, :3].any()
        assert not rows[:, :, -6:].any()
    assert (results["lse"][:, :, :3] == -torch.inf).all()
    assert (results["lse"][:, :, -6:] == -torch.inf).all()
