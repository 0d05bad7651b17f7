"""Steps inside a CUDA graph: nothing is asked or reported, nothing is made that a replay would make again.

Whether a stream is captured is planted, and CPU tensors stand in for a device's: this is about what Python does then.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from no_sync import NeverReads, capturing, forbid_waits
from optimizer_runs import assert_same, held, parameters, set_grads
from torch.nn import Parameter

import halfstep as hs
from halfstep.ops import backend, devices

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def graph() -> Iterator[None]:
    """The steps are done, which under a real capture would be for the replays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: True)
        yield


def optimizer_after(steps: int, **options: object) -> hs.AdamW:
    optimizer = hs.AdamW(parameters(BFLOAT16), **options)
    for t in range(steps):
        set_grads(optimizer.param_groups[0]["params"], t)
        optimizer.step()
    return optimizer


def overflow(optimizer: hs.AdamW) -> None:
    params = optimizer.param_groups[0]["params"]
    set_grads(params, 9)
    params[1].grad.view(-1)[0] = math.inf


def test_it_is_no_question_for_the_host():
    """torch without CUDA cannot even be asked."""
    assert not devices.is_capturing(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert devices.is_capturing(torch.device("cuda", 1))
        assert not devices.is_capturing(torch.device("cpu"))
        assert not devices.is_capturing(torch.device("meta"))


def test_nothing_is_copied_asked_or_told():
    with backend.override(NeverReads()), forbid_waits() as clock:
        optimizer, scaler = hs.AdamW(parameters(FLOAT16), lr=torch.tensor(0.1)), hs.LossScaler()

        def step(unscale: bool) -> None:
            scaler.scale(sum(p.float().sum() for p in optimizer.param_groups[0]["params"])).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

        at_first = clock.recorded
        step(unscale=True)
        before = clock.recorded
        assert before == at_first + 3  # unscale_, step, update
        asked = []
        clock.finish()
        with pytest.MonkeyPatch.context() as patch, capturing():
            patch.setattr(type(clock.record_event()), "query", lambda event: asked.append(event) or True)
            clock.recorded = before
            step(unscale=False)
            step(unscale=True)
        assert (clock.recorded, asked) == (before, [])
        clock.done = 0
        step(unscale=False)
        assert clock.recorded == before + 2


def test_a_captured_step_is_the_eager_step(graph):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: False)
        optimizer = optimizer_after(2)
        other = copy.deepcopy(optimizer)
        set_grads(other.param_groups[0]["params"], 5)
        other.step()
    set_grads(optimizer.param_groups[0]["params"], 5)
    optimizer.step()
    assert_same(held(optimizer), held(other))


def test_a_captured_skip_is_not_told_and_ends_no_row():
    """The reports go on with the eager steps as if it had not been."""
    optimizer = optimizer_after(1)
    told = []
    for captured in (False, True, False, True, False, False):
        overflow(optimizer)
        with warnings.catch_warnings(record=True) as seen, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            patch.setattr(devices, "is_capturing", lambda device, captured=captured: captured)
            optimizer.step()
        assert optimizer.skipped
        told.append(len(seen))
    assert told == [1, 0, 1, 0, 0, 1]


def test_a_scale_that_learns_from_a_captured_step_tells_nothing():
    optimizer, scaler = optimizer_after(1), hs.LossScaler(init_scale=1.0)
    scaler.scale(torch.ones(()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for update_is_captured in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(devices, "is_capturing", lambda device: True)
                overflow(optimizer)
                scaler.step(optimizer)
                if update_is_captured:
                    scaler.update()
            if not update_is_captured:
                scaler.update()
    overflow(optimizer)
    with pytest.warns(RuntimeWarning, match="a step was skipped"):
        scaler.step(optimizer)
    with pytest.warns(RuntimeWarning, match="the loss scale is at its minimum"):
        scaler.update()


def test_the_rows_of_a_captured_step_stay():
    """Other sets of gradients, and a checkpoint, would drop the table whose buffers the graph writes."""
    optimizer = optimizer_after(1)
    params = optimizer.param_groups[0]["params"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: True)
        for t in (2, 3):
            set_grads(params, t)
            optimizer.step()
    (table,) = optimizer._captured
    assert table is optimizer._tables[0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._captured == [table]
    set_grads(params, 4)
    optimizer.step()
    assert table is not optimizer._tables[0]
    assert copy.deepcopy(optimizer)._captured == []


# ---- what cannot be captured ---------------------------------------------------------------------------------------
def test_a_state_is_not_made_in_a_capture(graph):
    optimizer = hs.AdamW([Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 .* has no state yet: made while a CUDA graph"):
        optimizer.step()
    assert not dict.get(optimizer.state, optimizer.param_groups[0]["params"][0])


def test_a_step_counter_of_others_is_not_read_in_a_capture():
    optimizer = optimizer_after(1)
    param = optimizer.param_groups[0]["params"][0]
    optimizer.state[param]["step"] = torch.tensor(3.0)
    set_grads(optimizer.param_groups[0]["params"], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="no state yet"):
            optimizer.step()
    optimizer.step()
    assert optimizer.state[param]["step"] == 4


def test_a_scale_is_not_made_in_a_capture(graph):
    with pytest.raises(RuntimeError, match="would start again at every replay; call scale"):
        hs.LossScaler().scale(torch.ones(()))


def test_a_rate_on_the_host_would_be_frozen():
    optimizer = optimizer_after(1, lr=torch.tensor(0.1))
    before = held(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="group 0: lr is a tensor on cpu, so a CUDA graph would replay"):
            optimizer.step(lambda: set_grads(optimizer.param_groups[0]["params"], 1))
    assert_same(held(optimizer), before)


def test_a_scale_on_the_host_would_be_frozen():
    with backend.override(NeverReads()), forbid_waits("meta"):
        optimizer = hs.AdamW([Parameter(torch.ones(3, device="meta"))])
        param = optimizer.param_groups[0]["params"][0]
        param.grad = torch.ones_like(param)
        optimizer.step()
        for name in ("grad_scale", "found_inf"):
            setattr(optimizer, name, torch.tensor(1.0))
            with capturing(), pytest.raises(RuntimeError, match=f"{name} is on cpu, so a CUDA graph would replay"):
                optimizer.step()
            setattr(optimizer, name, torch.ones((), device="meta"))
            with capturing():
                optimizer.step()
            delattr(optimizer, name)


def test_plain_pytorch_cannot_be_captured():
    optimizer = optimizer_after(1, backend="reference")
    set_grads(optimizer.param_groups[0]["params"], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="plain PyTorch runs the step here and waits"):
            optimizer.step()


def test_other_optimizers_under_the_scaler_cannot_be_captured():
    param = Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), hs.LossScaler()
    scaler.scale(param.sum()).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="whether SGD skips a step is decided on the host"):
            scaler.step(optimizer)


def test_schedules_do_not_advance_by_a_captured_step():
    """The host has no answer; before, it would have been silence."""
    optimizer, scaler = optimizer_after(1), hs.LossScaler()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scaler.scale(torch.ones(()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: True)
        set_grads(optimizer.param_groups[0]["params"], 1)
        scaler.step(optimizer)
        scaler.update()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the last step was captured in a CUDA graph"):
            scaler.advance(schedule)
    set_grads(optimizer.param_groups[0]["params"], 1)
    scaler.step(optimizer)
    assert scaler.advance(schedule)
