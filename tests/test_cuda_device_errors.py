"""What the CUDA module says when there is no device, no driver, or no code for the device, and where it puts its work.

Guards: a bare error number, an error that stays behind and is met by the next call, a thread left on another device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_cuda import emulated, launches

from halfstep.ops.native import columns, pair_columns

NO_CODE = [98, 209, 222]  # cudaErrorInvalidDeviceFunction, ...NoKernelImageForDevice, ...UnsupportedPtxVersion


@pytest.fixture
def machine() -> Iterator[Any]:
    """The emulated module, whose devices and driver the test sets."""
    yield emulated().module
    emulated().module.reset_machine()


def cast(device: int = 0, stream: int = 0) -> torch.Tensor:
    src = torch.ones(3)
    dst = torch.zeros(3, dtype=torch.bfloat16)
    emulated().module.cast_(*pair_columns([dst], [src]), False, 0, device, stream)
    return dst


def assert_refused(machine: Any, message: str, device: int = 0) -> None:
    with pytest.raises(RuntimeError, match=message):
        cast(device)
    assert machine.last_error() == 0, "the error is left behind for whoever calls CUDA next"


def test_no_driver(machine):
    machine.set_driver(0)
    message = r"there is no NVIDIA driver on this machine \(halfstep\._cuda was built with CUDA 13\.0\); install one"
    assert_refused(machine, f"^halfstep, CUDA device 0: {message}$")
    with pytest.raises(RuntimeError, match=f"^halfstep, looking for CUDA devices: {message}$"):
        machine.device_count()
    assert machine.last_error() == 0


def test_a_driver_that_is_too_old(machine):
    machine.set_driver(12080)
    assert_refused(
        machine,
        r"the NVIDIA driver supports CUDA 12\.8 at most and halfstep\._cuda was built with CUDA 13\.0; "
        r"update the driver, or rebuild halfstep with an older CUDA$",
    )


def test_no_device(machine):
    machine.set_devices(0)
    assert_refused(machine, "there is no CUDA device, or CUDA_VISIBLE_DEVICES hides it$")
    with pytest.raises(RuntimeError, match="looking for CUDA devices: there is no CUDA device"):
        machine.device_count()


@pytest.mark.parametrize("device", [2, -1])
def test_no_device_of_that_number(machine, device):
    machine.set_devices(2)
    assert machine.device_count() == 2
    assert_refused(machine, f"^halfstep, CUDA device {device}: there is no CUDA device of that number$", device)


@pytest.mark.parametrize("code", NO_CODE)
def test_no_code_for_the_device(machine, code):
    machine.set_capability(7, 2)
    machine.set_launch_result(code)
    assert_refused(
        machine,
        r"^halfstep, cast_: halfstep\._cuda has no code for this GPU \(sm_72; it was built for host\): "
        r"rebuild halfstep with CUDAARCHS=72 in the environment$",
    )


def test_every_operator_names_itself(machine):
    machine.set_launch_result(719)
    x = [torch.ones(3)]
    calls = {
        "cast_": cast,
        "unscale_": lambda: emulated().unscale_(x, torch.tensor(1.0)),
        "grad_stats": lambda: emulated().grad_stats(x, None),
        "accumulate_": lambda: emulated().accumulate_(x, x),
    }
    for name, call in calls.items():
        remedy = "it may come from earlier work on this device: CUDA_LAUNCH_BLOCKING=1 in the environment shows where"
        with pytest.raises(RuntimeError, match=rf"^halfstep, {name}: cudaErrorLaunchFailure \(.+\); {remedy}$"):
            call()
    assert x[0].tolist() == [1.0, 1.0, 1.0]


def test_work_goes_to_the_device_and_stream_of_the_call(machine):
    machine.set_devices(3)
    with launches() as made:
        assert cast(device=2, stream=0x51).tolist() == [1.0, 1.0, 1.0]
        cast(device=0)
    assert [(launch["device"], launch["stream"]) for launch in made] == [(2, 0x51), (0, 0)]
    assert machine.current_device() == 0


def test_the_device_is_put_back_after_an_error(machine):
    machine.set_devices(3)
    machine.set_launch_result(719)
    with pytest.raises(RuntimeError, match="cudaErrorLaunchFailure"):
        cast(device=1)
    assert machine.current_device() == 0


def test_lists_without_elements_launch_nothing_that_fails(machine):
    """A grid of no blocks is an error on a GPU."""
    empty = [torch.ones(0), torch.ones(0)]
    with launches() as made:
        emulated().accumulate_(empty, empty)
        machine.cast_(*pair_columns(empty, empty), False, 0, 0, 0)
    assert made == []
    total, first_bad = emulated().grad_stats(empty, None)
    assert (total.item(), first_bad.item()) == (0.0, -1)
    assert len(columns(empty)[0]) == 2
