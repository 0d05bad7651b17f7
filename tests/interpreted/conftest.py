"""Triton's kernels in Triton's interpreter, on CPU tensors: `TRITON_INTERPRET=1 pytest tests/interpreted`.

The oracle is the CPU's own kernels, which other tests hold against the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from interpreter import Scratch, interpreted
from triton_session import interpreting

from halfstep.ops import attention_call, results, triton_attention, triton_gpu, triton_plan
from halfstep.ops.triton_gpu import TritonBackend

EXPECTED = [
    # numpy warns of what float32 is made for: overflow to Inf, Inf - Inf, 0 / 0, a cast that float16 cannot hold
    "ignore:(overflow|invalid value|divide by zero) encountered in:RuntimeWarning",
    # what the interpreter of Triton 3.6 does with scalars; numpy 2.4, which it cannot have, refuses it
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
]


def pytest_configure(config: pytest.Config) -> None:
    if not interpreting():
        raise pytest.UsageError(
            "tests/interpreted runs in Triton's interpreter, which Triton chooses when it is imported: set "
            "TRITON_INTERPRET=1 in the environment"
        )
    for line in EXPECTED:
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not triton_gpu.installed():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=triton_gpu.NOT_INSTALLED))


@pytest.fixture(scope="session", autouse=True)
def quick() -> Iterator[None]:
    from quicker import quicker  # here: it needs Triton

    with quicker():
        yield


@pytest.fixture
def backend() -> TritonBackend:
    """One whose tables nobody has filled."""
    return interpreted()


@pytest.fixture
def order() -> None:
    """Of programs, for tests that try several elsewhere: here they ascend."""


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What kernels get as scratch memory is filled with what must not be read, and guarded on both sides."""
    memory = Scratch()
    modules = results, triton_gpu, triton_plan, attention_call, triton_attention, triton_attention.kernels()
    for module in modules:
        monkeypatch.setattr(module, "torch", memory.torch)
    yield
    memory.assert_intact()
