"""What Triton's kernels of attention are compiled for: what they need, and nothing that changes from call to call.

Guards: a kernel compiled anew for each length, number of segments, layout, window or share.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_case import Case
from compiled.triton_launches import Launch, recording

from halfstep.ops import triton_attention

BFLOAT16 = torch.bfloat16


def recorded(case: Case, dtype: torch.dtype = BFLOAT16) -> list[Launch]:
    call, d_out, d_lse = case.draw(dtype)
    with recording("sm_90") as made:
        outputs = triton_attention.forward(call)
        triton_attention.backward(call, *outputs, d_out, d_lse, (True, True, True, call.bias is not None))
    return made


def dense(lengths: tuple[int, int] = (33, 65), **options: Any) -> Case:
    given: dict[str, Any] = {"heads": (6, 2), "batch": 3, "left": 7, "right": 3, "d_lse": True, **options}
    return Case("dense", lengths, **given)


def segments(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], **options: Any) -> Case:
    return Case("segments", q_lengths=q_lengths, k_lengths=k_lengths, right=0, **options)


SAME = {
    "a length": (dense(), dense((34, 70))),
    "lengths of 1": (dense(), dense((1, 1))),
    "lengths that are multiples of 16": (dense(), dense((64, 128))),
    "batch of 1": (dense(), dense(batch=1)),
    "heads that are multiples of 16": (dense(), dense(heads=(16, 16))),
    "one head": (dense(), dense(heads=(1, 1))),
    "groups": (dense(), dense(heads=(8, 1))),
    "another window": (dense(), dense(left=0, right=16)),
    "a window beyond everything": (dense(), dense(left=10**9, right=2**40)),
    "scale": (dense(), dense(scale=1.0)),
    "layout": (dense((33, 33)), dense((33, 33), layout="packed")),
    "expanded heads": (dense(), dense(layout="expanded heads")),
    "a misaligned tensor": (dense(), dense(layout="offset")),
    "rows that are not aligned": (dense(), dense(layout="odd rows", d_out="expanded")),
    "softcap": (dense(softcap=2.0), dense(softcap=1.0)),
    "ALiBi's sizes": (dense(alibi="H"), dense((16, 16), alibi="BH")),
    "a mask's sizes": (dense(mask="BHQK"), dense((16, 1), mask="B111")),
    "a bias' sizes": (dense(bias="BHQK"), dense((16, 1), bias="BHQK")),
    "dropout": (dense(dropout_p=0.1), dense((16, 16), dropout_p=0.5)),
    "segments": (segments((5, 33), (5, 33)), segments((1,), (1,))),
    "sixteen segments": (segments((5, 33), (5, 33)), segments((16,) * 16, (1,) * 16)),
}


@pytest.mark.parametrize("name", SAME)
def test_compiled_once(name: str) -> None:
    one, other = SAME[name]
    launches = recorded(one)
    assert len(launches) >= 4
    assert recorded(other) == launches


DIFFERENT = {
    "head dim": dense(dims=(32, 32)),
    "no window": dense(left=None, right=None),
    "top left": dense(top_left=True),
    "softcap": dense(softcap=2.0),
    "mask": dense(mask="B11K"),
    "negative scale": dense(scale=-1.0),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_compiled_for_what_changes_the_code(name: str) -> None:
    ours = {launch.kernel: launch for launch in recorded(dense())}
    theirs = {launch.kernel: launch for launch in recorded(DIFFERENT[name])}
    for kernel in ("forward_kernel", "keys_kernel", "queries_kernel"):
        assert ours[kernel] != theirs[kernel]


def test_compiled_for_each_dtype() -> None:
    forms = [recorded(dense(), dtype)[0] for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert len({str(form) for form in forms}) == 3


@pytest.mark.parametrize("which", ["q", "k"])
def test_too_many_rows_are_refused_before_any_memory_is_asked_for(which: str) -> None:
    call = Case("rows", (1, 1)).draw(BFLOAT16).call
    names = "q" if which == "q" else "kv"
    long = {name: getattr(call, name).to("meta").expand(2, 2, 2**29, 16) for name in names}
    with pytest.raises(
        ValueError,
        match=r"^attention takes less than 2\^29 rows on a GPU, got \d+ queries and \d+ keys: split the call",
    ):
        triton_attention.forward(call._replace(**long))
