"""Whether the CUDA kernels run on this machine's devices, and what is said where they do not: torch's answers are ours.

Guards: a module built for other GPUs that is taken and fails at the first launch, a driver that is too old for it, a
machine without a driver where nothing says why the kernels are not used.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from halfstep import doctor
from halfstep.ops import attention_torch, backend, native_cuda, triton_attention, triton_gpu

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

    caches = backend._native_for_cuda, triton_gpu.why_not, backend._say_once
    for cached in caches:
        cached.cache_clear()
    yield see
    for cached in caches:
        cached.cache_clear()


class Module:
    """What the backend asks of halfstep._cuda."""

    def __init__(self, archs: str = ARCHS, error: str | None = None) -> None:
        self.archs, self._error = archs, error

    def device_count(self) -> int:
        if self._error:
            raise RuntimeError(self._error)
        return 1


def cuda_choice() -> tuple[str, str]:
    """Of everything but attention, which has no native kernels."""
    operators = backend.report()["operators"]
    (choice,) = {devices["cuda"] for name, devices in operators.items() if name != "attention"}
    return choice


def attention_choice() -> tuple[str, str]:
    return backend.report()["operators"]["attention"]["cuda"]


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


# ---- Triton in their place -------------------------------------------------------------------------------------------
GPU = torch.device("cuda", 0)
NO_NVCC = "halfstep._cuda is not built (no nvcc at install time?)"


@pytest.fixture
def triton_starts(monkeypatch: pytest.MonkeyPatch):
    """Says whether Triton starts, and returns what the backend would be."""

    def set_to(why_not: str | None) -> object:
        monkeypatch.setattr(triton_gpu, "why_not", lambda device: why_not)
        kernels = object()
        monkeypatch.setattr(triton_gpu, "of_device", lambda device: kernels)
        return kernels

    return set_to


def test_triton_runs_where_no_module_is_built(devices, triton_starts) -> None:
    devices((9, 0), error=NO_NVCC)
    kernels = triton_starts(None)
    assert backend.choose(GPU) is kernels
    assert backend.choose(GPU, "triton") is kernels
    why = f"Triton kernels, compiled at their first use: the same results. {NO_NVCC}"
    assert cuda_choice() == ("triton", why)
    assert backend.report()["triton"] == {"installed": True, "used": True, "why": NO_NVCC}
    with pytest.raises(RuntimeError, match=r"backend='native' cannot run on cuda tensors: halfstep._cuda is not built"):
        backend.choose(GPU, "native")


def test_triton_runs_on_gpus_of_amd(devices, triton_starts, monkeypatch) -> None:
    devices((9, 4), module=Module())
    kernels = triton_starts(None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert backend.choose(GPU) is kernels


def test_the_module_comes_first_unless_triton_is_named(devices, triton_starts) -> None:
    devices((9, 0), module=Module())
    kernels = triton_starts(None)
    assert isinstance(backend.choose(GPU), native_cuda.CudaBackend)
    assert backend.choose(GPU, "triton") is kernels
    assert backend.report()["triton"] == {"installed": True, "used": False, "why": "the native kernels run instead"}


def test_attention_takes_triton_whatever_is_built(devices, triton_starts) -> None:
    devices((9, 0), module=Module())
    kernels = triton_starts(None)
    assert backend.choose_attention(GPU) is kernels
    assert attention_choice() == ("triton", "Triton kernels, compiled at their first use")
    assert backend.choose_attention(torch.device("cpu")) is attention_torch
    assert backend.report()["operators"]["attention"]["cpu"][0] == "torch"


def test_attention_says_once_why_plain_pytorch_runs(devices, triton_starts, recwarn) -> None:
    devices((7, 5), module=Module())
    triton_starts("Triton has no code for this GPU")
    for _ in range(2):
        assert backend.choose_attention(GPU) is attention_torch
    (said,) = [str(warning.message) for warning in recwarn]
    assert said.startswith("halfstep: Triton has no code for this GPU; plain PyTorch runs on cuda tensors instead")
    why = "Triton has no code for this GPU; plain PyTorch runs instead, over chunks of queries: many times slower"
    assert attention_choice() == ("torch", why)


def test_attention_multiplies_float32_as_precisely_as_torch_may() -> None:
    """However that was said: torch's older settings cannot be read once a newer one is made."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("tf32", "ieee"):
            matmul.fp32_precision = precision
            assert triton_attention._precision(torch.float32) == precision
            assert triton_attention._precision(torch.bfloat16) == "ieee"
    finally:
        matmul.fp32_precision = before
    assert not matmul.allow_tf32
    assert triton_attention._precision(torch.float32) == "ieee"


def test_attention_without_a_device(devices, monkeypatch) -> None:
    devices()
    assert attention_choice() == ("triton", "Triton kernels, compiled at their first use; no device here")
    monkeypatch.setattr(triton_gpu, "installed", lambda: False)
    assert attention_choice()[0] == "torch"
    assert attention_choice()[1].startswith("Triton is not installed (pip install triton); plain PyTorch")


def test_both_reasons_are_said_where_neither_runs(devices, triton_starts) -> None:
    devices((9, 0), error=NO_NVCC)
    triton_starts("Triton does not start here")
    with pytest.warns(RuntimeWarning, match=r"is not built .*; Triton does not start here; plain PyTorch"):
        assert backend.choose(GPU).name == "reference"
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run on cuda tensors: Triton does not start here"):
        backend.choose(GPU, "triton")


def test_why_triton_does_not_start(devices, monkeypatch) -> None:
    devices((9, 0), error=NO_NVCC)
    assert triton_gpu.why_not(torch.device("cpu")) == "Triton has kernels for GPUs, not for cpu tensors"

    def fail(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "device", fail)
    assert triton_gpu.why_not(GPU) == (
        "Triton does not start here (RuntimeError: Failed to find C compiler); it needs a C compiler (gcc or clang) "
        "and Python's headers at run time"
    )
    triton_gpu.why_not.cache_clear()
    monkeypatch.setattr(triton_gpu, "kernels", lambda: SimpleNamespace(INTERPRETED=True))
    assert triton_gpu.why_not(GPU) == (
        "TRITON_INTERPRET is set, and Triton's interpreter cannot follow a GPU's addresses: unset it"
    )
    triton_gpu.why_not.cache_clear()
    monkeypatch.setattr(triton_gpu, "installed", lambda: False)
    assert triton_gpu.why_not(GPU) == "Triton is not installed (pip install triton)"


def test_triton_runs_on_gpus_that_it_has_code_for(devices, monkeypatch) -> None:
    """Those of CUDA by their compute capability; AMD's have other names, and Triton's start says it."""
    devices((9, 0), (7, 5))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    active = SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    assert triton_gpu.why_not(GPU) is None
    old = torch.device("cuda", 1)
    assert triton_gpu.why_not(old) == "Triton has no code for this GPU (compute capability 7.5, it needs 8.0)"
    triton_gpu.why_not.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert triton_gpu.why_not(old) is None


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
