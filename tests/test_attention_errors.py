"""What hs.attention and hs.attention_varlen refuse, and in which words: what was expected, what came, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32
from attention_tensors import drawn, packed_rows, qkv
from torch import Tensor

import halfstep as hs

META = torch.device("meta")


def dense(changes: dict[str, Any]) -> None:
    q, k, v = qkv()
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, **changes}
    hs.attention(**arguments)


def varlen(changes: dict[str, Any]) -> None:
    (q, k, v), ends = packed_rows()
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends, **changes}
    hs.attention_varlen(**arguments)


def zeros(*shape: int, dtype: torch.dtype = FLOAT32, **options: Any) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, **options)


def ends(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


Refused = tuple[dict[str, Any], type[Exception], str]
TENSORS: list[Refused] = [
    ({"q": [1.0]}, TypeError, r"^q is \[1\.0\], a list; expected a tensor"),
    ({"q": zeros(2, 4, 5, 16).numpy()}, TypeError, r"^q is a ndarray; expected a tensor"),
    ({"k": zeros(2, 2, 7, 16).to_sparse()}, TypeError, r"^k is sparse \(torch\.sparse_coo\); .* pass k\.to_dense\(\)"),
    ({"v": torch.nested.nested_tensor([zeros(2, 8)] * 2, layout=torch.jagged)}, TypeError,
     r"^v is a nested tensor; pass its values\(\) and offsets\(\) to hs\.attention_varlen"),
    ({"q": drawn((2, 4, 5, 16), BFLOAT16, 0)}, TypeError,
     r"^q is torch\.bfloat16, k torch\.float32, v torch\.float32; .*one dtype: convert them, or run under "),
    ({"v": drawn((2, 2, 7, 24), FLOAT16, 0)}, TypeError, r"v torch\.float16; attention takes one dtype"),
    ({name: zeros(2, 4, 5, 16, dtype=torch.complex64) for name in "qkv"}, TypeError,
     r"^q, k and v are torch\.complex64; expected bfloat16, float16 or float32 \(on the CPU also float64\)"),
    ({name: zeros(2, 4, 5, 16, dtype=torch.int32) for name in "qkv"}, TypeError,
     r"are torch\.int32; expected bfloat16"),
    ({"k": zeros(2, 2, 7, 16, device=META)}, ValueError, r"^q is on cpu, k on meta, v on cpu; move them to one device"),
]  # fmt: skip
DENSE: list[Refused] = [
    *TENSORS,
    ({"q": zeros(4, 5, 16)}, ValueError,
     r"^q has shape \(4, 5, 16\), k \(2, 2, 7, 16\), .* expected \[batch, heads, length, dim\] for all three; "
     r"hs\.attention_varlen takes \[total, heads, dim\]"),
    ({"v": zeros(2, 2, 8, 24)}, ValueError, r"v \(2, 2, 8, 24\); k and v need the same batch, heads, length: a value"),
    ({"v": zeros(2, 4, 7, 24)}, ValueError, r"k and v need the same batch, heads, length"),
    ({"q": zeros(1, 4, 5, 16)}, ValueError, r"^q has shape \(1, 4, 5, 16\).* need the same batch: expand\(\) one"),
    ({"q": zeros(2, 3, 5, 16)}, ValueError, r"the heads of q \(3\) must be a multiple of those of k and v \(2\)"),
    ({"q": zeros(2, 0, 5, 16)}, ValueError, r"the heads of q \(0\) must be a multiple"),
    ({"q": zeros(2, 4, 5, 24)}, ValueError, r"q and k need the same dim, since their product is summed over it"),
    ({"q": zeros(2, 4, 5, 12), "k": zeros(2, 2, 7, 12)}, ValueError,
     r"the dim of q and k is 12, expected a multiple of 8 from 8 to 256\. Zeros appended with F\.pad .*scale="),
    ({"v": zeros(2, 2, 7, 264)}, ValueError, r"the dim of v is 264, expected a multiple of 8 from 8 to 256"),
    ({"v": zeros(2, 2, 7, 0)}, ValueError, r"the dim of v is 0, expected a multiple of 8"),
    ({"mask": True}, TypeError, r"^mask is True, a bool; expected a tensor"),
    ({"mask": zeros(5, 7)}, TypeError, r"^mask is torch\.float32; what is added to the scores is passed as bias="),
    ({"mask": zeros(5, 7, dtype=torch.uint8)}, TypeError, r"^mask is torch\.uint8; expected bool, .* mask\.bool\(\)"),
    ({"mask": zeros(7, 5, dtype=torch.bool)}, ValueError,
     r"^mask has shape \(7, 5\); expected one that broadcasts to .* = \(2, 4, 5, 7\), each size 1 or that one"),
    ({"mask": zeros(1, 1, 1, 5, 7, dtype=torch.bool)}, ValueError, r"^mask has shape \(1, 1, 1, 5, 7\)"),
    ({"mask": zeros(5, 7, dtype=torch.bool, device=META)}, ValueError, r"^mask is on meta, q on cpu"),
    ({"bias": zeros(5, 7, dtype=torch.bool)}, TypeError, r"^bias is bool; a mask of the visible keys .* mask="),
    ({"bias": zeros(5, 7, dtype=torch.float64)}, TypeError, r"^bias is torch\.float64; .* pass bias\.float\(\)"),
    ({"bias": zeros(5, 7, dtype=torch.int64)}, TypeError, r"^bias is torch\.int64; expected float32, bfloat16 or"),
    ({"bias": zeros(2, 2, 5, 7)}, ValueError, r"^bias has shape \(2, 2, 5, 7\); expected one that broadcasts"),
    ({"bias": zeros(5, 7).to_sparse()}, TypeError, r"^bias is sparse"),
    ({"alibi_slopes": zeros(3)}, ValueError,
     r"^alibi_slopes has shape \(3,\); expected \[heads of q\] = \(4,\) or \[batch, heads of q\] = \(2, 4\)"),
]  # fmt: skip
SETTINGS: list[Refused] = [
    ({"alibi_slopes": zeros(4, dtype=BFLOAT16)}, TypeError, r"^alibi_slopes is torch\.bfloat16; .*alibi_slopes\.float"),
    ({"alibi_slopes": zeros(4, requires_grad=True)}, ValueError,
     r"^alibi_slopes requires grad, and attention has none for it; pass alibi_slopes\.detach\(\)"),
    ({"alibi_slopes": zeros(4, device=META)}, ValueError, r"^alibi_slopes is on meta, q on cpu; move them"),
    ({"alibi_slopes": 0.5}, TypeError, r"^alibi_slopes is 0\.5, a float; expected a tensor"),
    ({"causal": "upper"}, ValueError,
     r"^causal='upper': expected False, True \(the same as 'bottom-right'\) or 'top-left'"),
    ({"causal": None}, ValueError, r"^causal=None: expected False"),
    ({"window": -2}, ValueError,
     r"^window=-2: expected None, an int \(keys seen on each side\) or \(left, right\) of ints; None and -1"),
    ({"window": (1, 2, 3)}, ValueError, r"^window=\(1, 2, 3\): expected"),
    ({"window": (1.5, 2)}, ValueError, r"^window=\(1\.5, 2\): expected"),
    ({"window": True}, ValueError, r"^window=True: expected"),
    ({"scale": float("nan")}, ValueError, r"^scale=nan: expected a finite number"),
    ({"scale": torch.ones(())}, TypeError,
     r"^scale is a tensor of torch\.float32 and shape \(\) on cpu; expected a Python number"),
    ({"scale": "0.5"}, TypeError, r"^scale is '0\.5', a str; expected a Python number"),
    ({"softcap": -1.0}, ValueError,
     r"^softcap=-1\.0: expected None or 0 for none, or the positive bound of the scores"),
    ({"softcap": float("inf")}, ValueError, r"^softcap=inf: expected a finite number"),
    ({"dropout_p": 1.0}, ValueError, r"^dropout_p=1\.0: expected a probability from 0 up to, but not, 1"),
    ({"dropout_p": -0.1}, ValueError, r"^dropout_p=-0\.1: expected a probability"),
    ({"dropout_p": True}, TypeError, r"^dropout_p is True, a bool; expected a Python number"),
    ({"dropout_p": 0.5, "seed": 0.5}, ValueError,
     r"^seed is 0\.5, a float; expected an int, or an int64 tensor of one element"),
    ({"dropout_p": 0.5, "seed": torch.zeros(2, dtype=torch.int64)}, ValueError,
     r"^seed is a tensor of torch\.int64 and shape \(2,\)"),
    ({"dropout_p": 0.5, "seed": torch.zeros(1)}, ValueError, r"^seed is a tensor of torch\.float32"),
    ({"dropout_p": 0.5, "seed": torch.zeros(1, dtype=torch.int64, device=META)}, ValueError,
     r"^seed is a tensor of .* on meta; expected an int, or an int64 tensor of one element on cpu, where q is"),
]  # fmt: skip
VARLEN: list[Refused] = [
    *TENSORS[:3],
    ({"q": zeros(1, 9, 4, 16)}, ValueError,
     r"expected \[total, heads, dim\] for all three; hs\.attention takes \[batch, heads, length, dim\]"),
    ({"v": zeros(8, 2, 24)}, ValueError, r"v \(8, 2, 24\); k and v need the same total, heads: a value for each key"),
    ({"q": zeros(9, 3, 16)}, ValueError, r"the heads of q \(3\) must be a multiple of those of k and v \(2\)"),
    ({"alibi_slopes": zeros(2, 4)}, ValueError,
     r"^alibi_slopes has shape \(2, 4\); expected \[heads of q\] = \(4,\) or \[segments, heads of q\] = \(3, 4\)"),
    ({"cu_seqlens_q": [0, 9]}, TypeError, r"^cu_seqlens_q is \[0, 9\], a list; expected a tensor"),
    ({"cu_seqlens_k": zeros(4)}, TypeError,
     r"^cu_seqlens_k is torch\.float32; expected int32 \(or int64, which is converted"),
    ({"cu_seqlens_q": ends(0, 9)[None]}, ValueError, r"^cu_seqlens_q has shape \(1, 2\); expected \[segments \+ 1\]"),
    ({"cu_seqlens_q": ends()}, ValueError, r"^cu_seqlens_q has shape \(0,\); expected \[segments \+ 1\]"),
    ({"cu_seqlens_q": zeros(4, dtype=torch.int32, device=META)}, ValueError, r"^cu_seqlens_q is on meta, q on cpu"),
    ({"cu_seqlens_q": ends(0, 9)}, ValueError,
     r"^cu_seqlens_q has 2 elements and cu_seqlens_k 4; both list the same segments, so give as many of each"),
    ({"cu_seqlens_q": ends(0, 5, 4, 9)}, ValueError,
     r"^cu_seqlens_q decreases from 5 to 4 at index 2; expected running sums .* not pass 9, the rows of q: F\.pad"),
    ({"cu_seqlens_k": ends(1, 4, 4, 9)}, ValueError, r"^cu_seqlens_k goes from 1 to 9; expected running sums"),
    ({"cu_seqlens_k": ends(0, 4, 4, 10)}, ValueError, r"^cu_seqlens_k goes from 0 to 10; .* pass 9, the rows of k"),
    ({"cu_seqlens_q": ends(0, 4, 4, 9 + 2**32, dtype=torch.int64)}, ValueError,
     r"^cu_seqlens_q goes from 0 to 2147483647"),
    ({"cu_seqlens_q": ends(-(2**32), 4, 4, 9, dtype=torch.int64)}, ValueError, r"^cu_seqlens_q goes from -1 to 9"),
]  # fmt: skip
ALL = [
    (f, *case)
    for f, cases in ((dense, DENSE), (dense, SETTINGS), (varlen, SETTINGS), (varlen, VARLEN))
    for case in cases
]


@pytest.mark.parametrize(
    ("call", "changes", "kind", "words"), ALL, ids=[f"{f.__name__}-{next(iter(changes))}" for f, changes, *_ in ALL]
)
def test_it_is_refused_in_words(call, changes, kind, words):
    with pytest.raises(kind, match=words):
        call(changes)


def test_float64_is_for_the_cpu(monkeypatch):
    """As from a device that torch has here: its tensors are not made, they only say where they are."""

    class Elsewhere(Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    q, k, v = (t.detach().double().as_subclass(Elsewhere) for t in qkv())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    with pytest.raises(
        TypeError, match=r"^q, k and v are float64 on cuda:0; kernels for it are on the CPU alone: pass float32"
    ):
        hs.attention(q, k, v)


def test_slopes_that_learn_elsewhere_may_be_used_without_gradients():
    q, k, v = qkv()
    slopes = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert hs.attention(q, k, v, alibi_slopes=slopes).isfinite().all()


def test_a_dtensor_is_refused(monkeypatch):
    from halfstep import attention_inputs

    monkeypatch.setattr(attention_inputs, "is_sharded", lambda t: True)
    with pytest.raises(
        TypeError, match=r"^q is a DTensor; pass its local part, q\.to_local\(\), if that has whole sequences"
    ):
        hs.attention(*qkv())
