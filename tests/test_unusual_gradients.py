"""Gradients that torch asks Python about, at the end of long lists: refused or right, and never a hang."""

from __future__ import annotations

import io
import pickle
import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

import halfstep as hs
from halfstep.ops import backend, native_cpu

MANY = 700


class Wrapper(Tensor):
    """A tensor without memory whose sizes, strides and device are answered in Python."""

    @staticmethod
    def __new__(cls, inner: Tensor, **dispatch: object) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device, **dispatch)

    def __init__(self, inner: Tensor, **dispatch: object) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].inner.device
        if func in (torch.ops.aten.sym_size.default, torch.ops.aten.size.default):
            return list(args[0].inner.shape)
        if func in (torch.ops.aten.sym_stride.default, torch.ops.aten.stride.default):
            return list(args[0].inner.stride())
        if func is torch.ops.aten.detach.default:
            return args[0]
        return NotImplemented


def trained(count: int = MANY) -> tuple[list[Parameter], hs.AdamW]:
    params = [Parameter(torch.ones(3)) for _ in range(count)]
    optimizer = hs.AdamW(params)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones(3)
        optimizer.step()
    return params, optimizer


DISPATCHES = {"device": {"dispatch_device": True}, "sizes": {"dispatch_sizes_strides_policy": "sizes"}, "none": {}}


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_wrapper_without_memory_is_refused_by_name(dispatch):
    params, optimizer = trained()
    params[-1].grad = Wrapper(torch.ones(3), **DISPATCHES[dispatch])
    before = [p.detach().clone() for p in params]
    with pytest.raises(TypeError, match=rf"the gradient of parameter {MANY - 1} of group 0 .* assign a plain tensor"):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    params[-1].grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[params[-1]]["step"] == 3


def test_a_fake_gradient_is_refused():
    params, optimizer = trained()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(3)
    params[-1].grad = fake
    with pytest.raises(TypeError, match=rf"the gradient of parameter {MANY - 1} of group 0 .*FakeTensor"):
        optimizer.step()


@pytest.mark.parametrize("reader", ["C++", "Python"])
def test_an_old_gradient_under_a_parameter_of_another_shape(reader, monkeypatch):
    """As many elements, at the same address: its numbers belong to others now."""
    if reader == "Python":
        monkeypatch.setattr(native_cpu, "tensor_reader", lambda: None)
    p = Parameter(torch.zeros(2, 3))
    optimizer = hs.AdamW([p])
    p.grad = torch.ones(2, 3)
    optimizer.step()
    p.data = p.data.view(3, 2)
    with pytest.raises(RuntimeError, match=r"has shape \(3, 2\) on cpu, its gradient \(2, 3\) on cpu; call backward"):
        optimizer.step()


def test_the_report_says_when_tensors_cannot_be_read_from_cpp(monkeypatch):
    assert "C++ cannot read" not in backend.report()["operators"]["adam_"]["cpu"][1]
    monkeypatch.setattr(native_cpu, "tensor_reader", lambda: None)
    assert "C++ cannot read this torch's tensors" in backend.report()["operators"]["adam_"]["cpu"][1]


def test_gradients_dropped_by_another_thread_while_large_lists_are_updated():
    """The last reference to a gradient is then the step's own, and letting it go takes Python's lock."""
    params = [Parameter(torch.ones(4096)) for _ in range(MANY)]
    optimizer, stop = hs.AdamW(params, max_grad_norm=1.0), threading.Event()

    def drop() -> None:
        while not stop.is_set():
            for p in params:
                p.grad = None

    for _ in range(3):
        for p in params:
            p.grad = torch.ones(4096)
        stop.clear()
        thread = threading.Thread(target=drop)
        read = optimizer._table

        def table(read=read, thread=thread):
            found = read()
            thread.start()  # the gradients are held from here on
            return found

        optimizer._table = table
        optimizer.step()
        stop.set()
        thread.join()
        optimizer._table = read
    assert all(bool(torch.isfinite(p).all()) for p in params)
    assert all(int(optimizer.state[p]["step"]) == 3 for p in params)


def test_a_pickled_optimizer_is_not_larger_than_its_states():
    _, optimizer = trained()
    reference = torch.optim.AdamW([Parameter(torch.ones(3)) for _ in range(MANY)])
    for p in reference.param_groups[0]["params"]:
        p.grad = torch.ones(3)
    reference.step()
    assert len(pickle.dumps(optimizer)) < 1.5 * len(pickle.dumps(reference))
    file = io.BytesIO()
    torch.save(optimizer.state[optimizer.param_groups[0]["params"][0]], file)
    assert file.tell() < 4096


def test_entries_of_other_kinds_in_the_state_are_left_alone():
    params, optimizer = trained(2)
    optimizer.state["global"] = 3
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    optimizer.refresh_masters()
    assert optimizer.state["global"] == 3
    assert int(optimizer.state[params[0]]["step"]) == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.clear(), r"expected an optimizer's state_dict with 'param_groups' and 'state', got the keys \[\]"),
        (lambda s: s["state"][0].update(exp_avg=1.0), "the saved exp_avg is float; expected a dense tensor of real"),
        (
            lambda s: s["state"][0].update(exp_avg=torch.ones(3).to_sparse()),
            r"the saved exp_avg is torch.sparse_coo torch.float32; expected a dense tensor of real numbers",
        ),
        (
            lambda s: s["state"][0].update(exp_avg=torch.ones(3, dtype=torch.complex64)),
            r"the saved exp_avg is torch.strided torch.complex64; expected a dense tensor of real numbers",
        ),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_by_name(spoil, message):
    _, optimizer = trained(1)
    saved = optimizer.state_dict()
    saved = {"param_groups": saved["param_groups"], "state": {0: dict(saved["state"][0])}}
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)


def test_a_refused_setting_does_not_mark_the_parameters_as_written():
    params, optimizer = trained(2)
    optimizer.max_grad_norm = -1
    versions = [p._version for p in params]
    for p in params:
        p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="max_grad_norm=-1"):
        optimizer.step()
    assert [p._version for p in params] == versions
