"""Steps in a process of its own (test_gpu_triton.py), where kernels have to be found: prints whose, and the norm."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from cuda_device import CudaDevice
from optimizer_runs import parameters
from stand_in import Interpreted
from twins import BFLOAT16, Twins

from halfstep.ops import backend


def main(stand_in: bool) -> None:
    warnings.filterwarnings("error", message="halfstep")  # as where none are found and plain PyTorch takes over
    # "native": whose tensors go where the choice sends them
    gpu: Any = Interpreted() if stand_in else CudaDevice(torch.device("cuda", torch.cuda.current_device()), "native")
    twins = Twins(gpu, BFLOAT16, weights=parameters(BFLOAT16, [(7,), (300,)]), max_grad_norm=0.5)
    for t in range(2):
        twins.step(t)
        twins.assert_same()
    with gpu.used():
        print(backend.choose(gpu.device).name, twins.there.grad_norm.item())


if __name__ == "__main__":
    main("--stand-in" in sys.argv)
