"""Whether the CUDA kernels run on this machine's devices, and what is said where they do not: torch's answers are ours.

Guards: a module built for other GPUs that is taken and fails at the first launch, a driver that is too old for it, a
machine without a driver where nothing says why the kernels are not used.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep import doctor
from halfstep.ops import backend, native_cuda

ARCHS = "75-real,80-real,86-real,89-real,90-real,100-real,120"
KERNELS = (
    "CUDA kernels, three launches a step for up to 580 tensors of one usual kind, at most six for 1,000 small ones"
)


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (ARCHS, (7, 5), True),
        (ARCHS, (8, 0), True),
        (ARCHS, (8, 7), True),  # sm_86's code
        (ARCHS, (9, 0), True),
        (ARCHS, (10, 3), True),  # sm_100's code
        (ARCHS, (12, 1), True),
        (ARCHS, (13, 0), True),  # the driver compiles the PTX
        (ARCHS, (7, 0), False),
        (ARCHS, (6, 1), False),
        (ARCHS, (11, 0), False),  # neither sm_100's code nor compute_120's PTX
        ("90", (8, 9), False),
        ("90-virtual", (9, 0), True),
        ("90-virtual", (10, 0), True),
        ("90-real", (10, 0), False),
        ("86-real", (8, 0), False),
        ("90a-real", (9, 0), True),
        ("90a", (10, 0), False),
        ("100a-real", (10, 3), False),
        ("100f-real", (10, 3), True),
        ("100f", (12, 0), False),
    ],
)
def test_code_covers_devices(archs: str, capability: tuple[int, int], runs: bool) -> None:
    assert native_cuda.covers(archs, capability) is runs


def test_architectures_in_nvidias_words() -> None:
    assert native_cuda.arch_names("90a-real,120") == ["sm_90a", "sm_120", "compute_120 (PTX)"]
    assert native_cuda.arch_names("80-virtual") == ["compute_80 (PTX)"]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch):
    """Makes torch see devices of these capabilities, and the kernels' module what is given."""

    def see(*capabilities: tuple[int, int], module: Any = None, error: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
        monkeypatch.setattr(backend, "native_cuda_module", lambda: (module, error))

    backend._native_for_cuda.cache_clear()
    yield see
    backend._native_for_cuda.cache_clear()


class Module:
    """What the backend asks of halfstep._cuda."""

    def __init__(self, archs: str = ARCHS, error: str | None = None) -> None:
        self.archs, self._error = archs, error

    def device_count(self) -> int:
        if self._error:
            raise RuntimeError(self._error)
        return 1


def cuda_choice() -> tuple[str, str]:
    (choice,) = {devices["cuda"] for devices in backend.report()["operators"].values()}
    return choice


def test_kernels_run_where_there_is_code_for_the_device(devices) -> None:
    devices((9, 0), module=Module())
    assert cuda_choice() == ("native", KERNELS)
    assert backend.report()["native_cuda"]["devices"] == [None]
    assert isinstance(backend.choose(torch.device("cuda", 0)), native_cuda.CudaBackend)


def test_a_device_of_another_architecture_is_said_once_and_gets_the_reference(devices) -> None:
    devices((9, 0), (6, 1), module=Module("80-real,90-real"))
    why = (
        "halfstep._cuda has no code for this GPU (sm_61; it was built for 80-real,90-real): rebuild halfstep with "
        "CUDAARCHS=61 in the environment"
    )
    assert backend.report()["native_cuda"]["devices"] == [None, why]
    backend._say_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="CUDAARCHS=61"):
        assert backend.choose(torch.device("cuda", 1)).name == "reference"
    with pytest.raises(RuntimeError, match=r"backend='native' cannot run on cuda tensors: .*CUDAARCHS=61"):
        backend.choose(torch.device("cuda", 1), "native")


def test_a_driver_that_is_too_old_for_the_module_is_found_before_the_first_launch(devices) -> None:
    devices((9, 0), module=Module(error="the NVIDIA driver supports CUDA 12.4 at most"))
    backend_name, why = cuda_choice()
    assert backend_name == "reference"
    assert why.startswith("the NVIDIA driver supports CUDA 12.4 at most; Triton does not start here")
    assert "; plain PyTorch runs instead" in why


def test_without_the_module_plain_pytorch_runs(devices) -> None:
    devices((9, 0), error="halfstep._cuda is not built (no nvcc at install time?)")
    assert cuda_choice()[0] == "reference"
    assert backend.report()["native_cuda"]["devices"] == ["halfstep._cuda is not built (no nvcc at install time?)"]


def test_without_a_device_the_report_needs_none(devices) -> None:
    devices(module=Module())
    assert cuda_choice() == ("native", f"{KERNELS}; no device here")
    assert backend.report()["native_cuda"] == {
        "built": True, "error": None, "devices": [], "code_for": native_cuda.arch_names(ARCHS)
    }  # fmt: skip


# ---- the doctor's sentence -------------------------------------------------------------------------------------------
BUILT = {"built": True, "code_for": ["sm_90"], "devices": []}


@pytest.mark.parametrize(
    ("cuda", "driver", "versions", "sentence"),
    [
        ({**BUILT, "devices": [None]}, "580", ("13.0", None), None),
        ({**BUILT, "devices": [None, "no code"]}, "580", ("13.0", None), "device 1: no code"),
        (BUILT, None, (None, None), "not used: there is no NVIDIA driver; with an NVIDIA GPU, install one"),
        (BUILT, "580", (None, None), "not used: torch 2.99 is a build for CPUs; install a CUDA build of torch"),
        (BUILT, "550", ("13.0", None), "whether driver 550 is new enough for CUDA 13.0"),
        (BUILT, None, (None, "6.2"), "not used: torch is built for ROCm 6.2, the kernels are for NVIDIA GPUs"),
        ({"built": False, "reason": "no nvcc was found", "remedy": "Install it."}, None, (None, None),
         "not built: no nvcc was found. Install it."),
        ({"built": False, "error": "it is not built"}, None, (None, None), "not built: it is not built. Run `pip"),
    ],
)  # fmt: skip
def test_the_doctor_says_why_and_what_to_do(
    cuda: dict, driver: str | None, versions: tuple, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99")
    monkeypatch.setattr(torch.version, "cuda", versions[0])
    monkeypatch.setattr(torch.version, "hip", versions[1])
    said = doctor.why_no_cuda(cuda, driver)
    if sentence is None:
        assert said is None
    else:
        assert said is not None
        assert sentence in said
