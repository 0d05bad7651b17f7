"""What saving, loading and copying a state costs in memory: at most one copy more, measured."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, ordinary
from optimizer_runs import assert_goes_on, assert_same, copies, params_of, train
from torch.nn import Parameter

import halfstep as hs

MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FLOAT32, {}),
    "fp32 master": (BFLOAT16, {}),
    "float16": (FLOAT16, {}),
    "split": (BFLOAT16, {"master": "split"}),
    "bfloat16 states": (BFLOAT16, {"state_dtype": BFLOAT16}),
    "amsgrad": (BFLOAT16, {"amsgrad": True}),
}
each_mode = pytest.mark.parametrize("mode", MODES)
ELEMENTS = 2**21
MANY = [(ELEMENTS // 64,)] * 64
ONE = [(1024, ELEMENTS // 1024)]  # an embedding, or a model whose parameters are flattened into one


def stepped(mode: str, shapes: list[tuple[int, ...]], transposed: bool = False) -> hs.AdamW:
    dtype, options = MODES[mode]
    values = [ordinary(shape, dtype, i) for i, shape in enumerate(shapes)]
    optimizer = hs.AdamW([Parameter(v.t() if transposed else v) for v in values], **options)
    train(optimizer, [1])
    return optimizer


def fresh(optimizer: hs.AdamW, mode: str) -> hs.AdamW:
    return hs.AdamW(copies(params_of(optimizer)), **MODES[mode][1])


def state_bytes(optimizer: hs.AdamW) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


@each_mode
def test_state_dict_copies_nothing_but_the_counters(mode):
    """Its tensors are the optimizer's own, as torch.optim's are."""
    optimizer = stepped(mode, MANY)
    with hs.measure_activations() as made:
        saved = optimizer.state_dict()
    assert made.peak <= 8 * len(MANY)
    for i, p in enumerate(params_of(optimizer)):
        for key, value in optimizer.state[p].items():
            assert key == "step" or saved["state"][i][key].data_ptr() == value.data_ptr()


@each_mode
def test_a_file_holds_the_state_and_nothing_else(mode):
    optimizer = stepped(mode, MANY)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    tensors = sum(map(len, optimizer.state.values()))
    assert file.tell() <= state_bytes(optimizer) + 1024 * tensors  # a header and padding for each


@each_mode
def test_loading_needs_one_copy(mode):
    """Nothing of it is left but the new state."""
    assert_loading_needs_one_copy(stepped(mode, MANY), mode)


@pytest.mark.parametrize("transposed", [False, True])
@each_mode
def test_loading_one_large_parameter_needs_one_copy(mode, transposed):
    """Judging its master needs more bytes an element than the state has, but not of all elements at a time."""
    assert_loading_needs_one_copy(stepped(mode, ONE, transposed), mode)


@pytest.mark.parametrize(("first", "then"), [("fp32 master", "split"), ("split", "fp32 master")])
def test_converting_one_large_master_needs_one_copy(first, then):
    assert_loading_needs_one_copy(stepped(first, ONE), then)


def test_refusing_one_large_master_needs_one_copy():
    optimizer = stepped("fp32 master", ONE)
    (state,) = optimizer.state.values()
    state["master"].view(-1)[-1] += 1
    with pytest.warns(UserWarning, match="does not round to the weight"):
        assert_loading_needs_one_copy(optimizer, "fp32 master")


def assert_loading_needs_one_copy(optimizer: hs.AdamW, mode: str) -> None:
    saved, other = optimizer.state_dict(), fresh(optimizer, mode)
    with hs.measure_activations() as made:
        other.load_state_dict(saved)
    assert made.bytes <= 1.001 * state_bytes(other)
    assert made.peak <= 1.05 * state_bytes(other)


@each_mode
def test_loading_again_frees_the_old_state(mode):
    optimizer = stepped(mode, MANY)
    saved, other = optimizer.state_dict(), fresh(optimizer, mode)
    with hs.measure_activations() as made:
        for _ in range(3):
            other.load_state_dict(saved)
            assert made.bytes <= 1.001 * state_bytes(other)
    assert made.peak <= 2.05 * state_bytes(other), "the state it had, and the new one"


@each_mode
def test_loading_from_a_mapped_file_needs_one_copy(mode, tmp_path):
    """And keeps none of the mapped tensors: training writes into its own."""
    optimizer = stepped(mode, MANY)
    path = tmp_path / "optimizer.pt"
    torch.save(optimizer.state_dict(), path)
    saved, other = torch.load(path, mmap=True, weights_only=True), fresh(optimizer, mode)
    with hs.measure_activations() as made:
        other.load_state_dict(saved)
    assert made.peak <= 1.05 * state_bytes(other)
    assert_goes_on(optimizer, other)
    for i, state in torch.load(path, weights_only=True)["state"].items():
        assert_same(saved["state"][i], state)


@each_mode
def test_a_copy_holds_its_own_weights_and_states_and_nothing_else(mode):
    """No view that keeps a larger storage alive, nothing that the original holds too."""
    optimizer = stepped(mode, MANY)
    other = copy.deepcopy(optimizer)
    mine, theirs = storages(optimizer), storages(other)
    assert not mine.keys() & theirs.keys()
    assert sum(theirs.values()) <= 1.001 * (state_bytes(other) + sum(p.nbytes for p in params_of(other)))


def storages(optimizer: hs.AdamW) -> dict[int, int]:
    """Address and size of every piece of memory behind the weights and states."""
    tensors = [*params_of(optimizer), *(v for state in optimizer.state.values() for v in state.values())]
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}


RESIDENT = """
import sys
import torch
import halfstep as hs

def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

params = [torch.nn.Parameter(torch.ones(2**18, dtype=torch.bfloat16)) for _ in range(64)]
first, second = (hs.AdamW(params) for _ in range(2))
for p in params:
    p.grad = torch.ones_like(p)
first.step()
saved = first.state_dict()
before = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")  # the peak starts again from here
second.load_state_dict(saved)
size = sum(v.nbytes for state in second.state.values() for v in state.values())
print(size, memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_loading_needs_one_copy_of_resident_memory():
    """200 MB of state in a process of its own: what no operator shows would show here."""
    # what is freed goes back to the system: how torn the heap is differs from run to run
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", RESIDENT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    size, grown = map(int, done.stdout.split())
    assert size > 200e6
    assert 0.9 * size <= grown <= 1.1 * size
