"""What the functions on lists refuse (cast_, accumulate_, grad_stats, l2_norms, ...), and how they say it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep.ops import native_cpu

X, ZERO = torch.zeros(3), torch.zeros(())
META = torch.zeros(3, device="meta")
SPARSE = torch.eye(3).to_sparse()


def with_grad(grad: Tensor) -> Parameter:
    param = Parameter(torch.zeros(grad.shape))
    param.grad_dtype = None  # anything
    param.grad = grad
    return param


TYPE_ERRORS = [
    (lambda: hs.cast_([1.0], [X]), "dst_list[0]: expected a torch.Tensor, got float"),
    (lambda: hs.cast_([X, X], [X, None]), "src_list[1]: expected a torch.Tensor, got NoneType"),
    (
        lambda: hs.cast_([X], [X.double()]),
        "src_list[0]: dtype torch.float64 of shape (3,) is not supported; use float32",
    ),
    (
        lambda: hs.cast_([X.int()], [X]),
        "dtype torch.int32 of shape (3,) is not supported; use float32, bfloat16, float16",
    ),
    (lambda: hs.cast_([torch.zeros(3, dtype=torch.complex64)], [X]), "dst_list[0]: dtype torch.complex64"),
    (lambda: hs.grad_stats([X, SPARSE]), "grads[1]: sparse layout torch.sparse_coo is not supported; pass a dense"),
    (lambda: hs.grad_stats([X, X.double()]), "grads[1]: dtype torch.float64"),
    (lambda: hs.accumulate_([X], [1.0]), "src_list[0]: expected a torch.Tensor, got float"),
    (
        lambda: hs.accumulate_([X, X.clone().bfloat16()], [X, X]),
        "dst_list[1]: dtype torch.bfloat16 of shape (3,) is not supported; use float32",
    ),
    (lambda: hs.accumulate_([X.half()], [X.half()]), "dst_list[0]: dtype torch.float16 of shape (3,) is not supported"),
    (lambda: hs.accumulate_([X], [X.double()]), "src_list[0]: dtype torch.float64 of shape (3,) is not supported"),
    (lambda: hs.accumulate_([SPARSE], [X]), "dst_list[0]: sparse layout torch.sparse_coo is not supported"),
    (lambda: hs.l2_norms([X, None]), "tensors[1]: expected a torch.Tensor, got NoneType"),
    (lambda: hs.l2_norms([X.int()]), "tensors[0]: dtype torch.int32 of shape (3,) is not supported; use float32"),
    (lambda: hs.l2_norms([SPARSE]), "tensors[0]: sparse layout torch.sparse_coo is not supported; pass a dense"),
    (lambda: hs.unscale_([SPARSE], 1.0, ZERO), "grads[0]: sparse layout torch.sparse_coo"),
    (lambda: hs.unscale_([X.long()], 1.0, ZERO), "grads[0]: dtype torch.int64"),
    (lambda: hs.clip_grad_norm_(with_grad(X.double()), 1.0), "parameters' gradients[0]: dtype torch.float64"),
    (lambda: hs.clip_grad_norm_([with_grad(X), with_grad(SPARSE)], 1.0), "parameters' gradients[1]: sparse layout"),
]

VALUE_ERRORS = [
    (lambda: hs.cast_([X], [X], rounding="up"), "rounding='up': expected 'nearest' or 'stochastic'"),
    (lambda: hs.cast_([X], [X], seed=-1), "seed=-1: expected an integer from 0 to 2**32 - 1"),
    (lambda: hs.cast_([X], [X], seed=2**32), f"seed={2**32}: expected an integer from 0 to 2**32 - 1"),
    (lambda: hs.cast_([X], []), "dst_list has 1 tensors and src_list 0; they are paired, so give as many of each"),
    (lambda: hs.cast_([X, X[:2]], [X, X]), "dst_list[1] has shape (2,) and src_list[1] (3,); pairs need one shape"),
    (lambda: hs.cast_([X], [X[None]]), "dst_list[0] has shape (3,) and src_list[0] (1, 3)"),
    (lambda: hs.cast_([X], [META]), "pair 0 is on cpu and meta, the first on cpu; use one device a call"),
    (lambda: hs.cast_([X, META], [X, META]), "pair 1 is on meta and meta, the first on cpu; use one device a call"),
    (
        lambda: hs.accumulate_([X, X], [X]),
        "dst_list has 2 tensors and src_list 1; they are paired, so give as many of each",
    ),
    (lambda: hs.accumulate_([X], [X[None]]), "dst_list[0] has shape (3,) and src_list[0] (1, 3); pairs need one shape"),
    (lambda: hs.accumulate_([X], [META]), "pair 0 is on cpu and meta, the first on cpu; use one device a call"),
    (lambda: hs.l2_norms([X, META]), "tensors[1] is on meta, tensors[0] on cpu; use one device a call"),
    (lambda: hs.grad_stats([X, META]), "grads[1] is on meta, grads[0] on cpu; use one device a call"),
    (lambda: hs.grad_stats([X], torch.ones(2)), "scale must be one number, got shape (2,)"),
    (lambda: hs.unscale_([X, META], 1.0, ZERO), "grads[1] is on meta, grads[0] on cpu; use one device a call"),
    (lambda: hs.unscale_([X], torch.ones(1, 2), ZERO), "inv_scale must be one number, got shape (1, 2)"),
    (lambda: hs.unscale_([META], 1.0, ZERO), "found_inf is on cpu, grads[0] on meta; they need one device"),
    (lambda: hs.unscale_([X], 1.0, X), "found_inf must be a 1-element floating tensor, got torch.float32 (3,)"),
    (lambda: hs.unscale_([X], 1.0, ZERO.bool()), "found_inf must be a 1-element floating tensor, got torch.bool ()"),
    (lambda: hs.clip_grad_norm_([], 1.0, norm_type=1.0), "norm_type=1.0: halfstep clips by the 2-norm; use torch.nn"),
    (lambda: hs.clip_grad_norm_([], -1.0), "max_norm=-1.0: expected a number >= 0"),
    (lambda: hs.clip_grad_norm_([], float("nan")), "max_norm=nan: expected a number >= 0"),
]


@pytest.fixture(autouse=True, params=[True, False], ids=["lists read by C++", "nothing read"])
def reader(request, monkeypatch):
    """C++ accepts whole lists where it can; what it does not accept is refused by name, and where it cannot is too."""
    if not request.param:
        monkeypatch.setattr(native_cpu, "tensor_reader", lambda: None)


@pytest.mark.parametrize(("call", "message"), TYPE_ERRORS, ids=[message for _, message in TYPE_ERRORS])
def test_type_errors(call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(("call", "message"), VALUE_ERRORS, ids=[message for _, message in VALUE_ERRORS])
def test_value_errors(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_norm_that_is_not_finite_is_an_error_if_asked_for(value):
    grad = torch.tensor([1.0, float(value)])
    with pytest.raises(RuntimeError, match=f"the gradients' norm is {value}, so they were not clipped; some gradient"):
        hs.clip_grad_norm_(with_grad(grad), 1.0, error_if_nonfinite=True)
    assert grad[0] == 1
    hs.clip_grad_norm_(with_grad(torch.ones(2)), 1.0, error_if_nonfinite=True)


def test_in_place_work_on_shared_memory_is_refused_by_name():
    x = torch.zeros(12)
    expanded, windows, zero = torch.zeros(1).expand(3), x.as_strided((3, 4), (2, 1)), torch.zeros(())
    refusals = [
        (
            lambda: hs.unscale_([zero, expanded], 1.0, zero),
            r"grads\[1\]: shape \(3,\) with strides \(0,\) maps several",
        ),
        (lambda: hs.unscale_([windows], 1.0, zero), r"grads\[0\]: shape \(3, 4\) with strides \(2, 1\)"),
        (
            lambda: hs.unscale_([x[:6], x[5:]], 1.0, zero),
            r"grads\[0\] and grads\[1\] share memory, so writing in place",
        ),
        (lambda: hs.unscale_([x[::2], x[4:6]], 1.0, zero), r"grads\[0\] and grads\[1\] share memory"),
        (lambda: hs.unscale_([x, x[3:4]], 1.0, zero), r"grads\[0\] and grads\[1\] share memory"),
        (lambda: hs.cast_([expanded], [torch.zeros(3)]), r"dst_list\[0\]: shape .* \(an expanded tensor\?\)"),
        (lambda: hs.cast_([x[1:]], [x[:-1]]), r"src_list\[0\] and dst_list\[0\] share memory"),
        (lambda: hs.cast_([x[:6]], [x[:12:2]]), r"share memory"),
        (lambda: hs.cast_([x, x], [x, x]), r"dst_list\[0\] and dst_list\[1\] share memory"),
        (lambda: hs.accumulate_([expanded], [torch.zeros(3)]), r"dst_list\[0\]: shape .* \(an expanded tensor\?\)"),
        (lambda: hs.accumulate_([x[1:]], [x[:-1]]), r"src_list\[0\] and dst_list\[0\] share memory"),
        (lambda: hs.accumulate_([x], [x.view(12)]), r"(src|dst)_list\[0\] and (src|dst)_list\[0\] share memory"),
        (lambda: hs.accumulate_([x, x], [x, x]), r"dst_list\[0\] and dst_list\[1\] share memory"),
        (lambda: hs.accumulate_([x[:4], x[4:8]], [x[4:8], x[:4]]), r"share memory"),
        (lambda: hs.clip_grad_norm_(with_grad(expanded), 1.0), r"gradient 0: shape \(3,\) with strides \(0,\)"),
        (lambda: hs.clip_grad_norm_([with_grad(x[:6]), with_grad(x[5:])], 1.0), "gradient 0 and gradient 1 share"),
    ]
    for call, message in refusals:
        with pytest.raises(ValueError, match=message):
            call()
    assert not x.any()


def test_shared_memory_that_cannot_collide_is_accepted():
    """Interleaved columns; a source that is the destination; a source read twice; any tensor without elements."""
    x = torch.arange(12.0).reshape(3, 4)
    hs.unscale_([x[:, :2], x[:, 2:], x[:0], x[:, 1:1]], 2.0, torch.zeros(()))
    assert torch.equal(x, 2 * torch.arange(12.0).reshape(3, 4))
    y = x.clone()
    hs.cast_([x], [x])
    assert torch.equal(x, y)
    a, b = torch.zeros(3), torch.zeros(3)
    hs.cast_([a, b], [x[0, :3], x[0, :3]])
    assert torch.equal(a, x[0, :3])
    assert torch.equal(b, x[0, :3])
