"""One optimizer on the CPU and one on the device, with the same weights, gradients and settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from bits import assert_same_bits
from optimizer_runs import assert_same, held, parameters, set_grads
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs

SHAPES = [(7,), (3, 5), (1,), (0, 3), (), (33, 501), (20000,)]
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FLOAT32, {}),
    "float32, amsgrad, maximize": (FLOAT32, {"amsgrad": True, "maximize": True}),
    "float32, clip": (FLOAT32, {"max_grad_norm": 0.5}),
    "bfloat16": (BFLOAT16, {}),
    "bfloat16, clip": (BFLOAT16, {"max_grad_norm": 0.5}),
    "bfloat16, split, clip": (BFLOAT16, {"master": "split", "max_grad_norm": 0.5}),
    "bfloat16, split, bfloat16 states": (BFLOAT16, {"master": "split", "state_dtype": BFLOAT16, "seed": 3}),
    "bfloat16, split, amsgrad": (BFLOAT16, {"master": "split", "amsgrad": True}),
    "bfloat16, no master": (BFLOAT16, {"master": None, "stochastic_rounding": True, "seed": 5}),
    "float16, clip": (FLOAT16, {"max_grad_norm": 0.5}),
    "float16, no master": (FLOAT16, {"master": None, "stochastic_rounding": True, "state_dtype": BFLOAT16}),
}


class Twins:
    """`host` is the judge, on the CPU's own kernels; `there` runs on the device.

    Args:
        gpu: the `gpu` fixture.
        weights: what both start from; parameters of `dtype` if not given.
        rate: the learning rate of the device's, if it is a tensor there.
    """

    def __init__(
        self, gpu: Any, dtype: torch.dtype, *, cls: Callable[..., Any] = hs.AdamW,
        weights: Sequence[Tensor] | None = None, rate: Tensor | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.gpu = gpu
        weights = parameters(dtype, gpu.shapes(SHAPES)) if weights is None else weights
        self.host_params = [Parameter(w.detach().clone()) for w in weights]
        self.params = [Parameter(moved(w.detach(), gpu.device)) for w in weights]
        self.host = cls(self.host_params, **options)
        self.there = cls(self.params, **(options if rate is None else {**options, "lr": rate}))

    def backward(self, t: int, scale: float = 1.0, bad: bool = False) -> None:
        """The gradients of step t. Those of the device are written where they lie from the second time on."""
        before = [p.grad for p in self.params]
        set_grads(self.host_params, t, scale)
        if bad:
            host_grad(self.host_params[1]).view(-1)[-1] = float("inf")
        for p, twin, grad in zip(self.params, self.host_params, before, strict=True):
            if grad is None:
                p.grad = moved(host_grad(twin), self.gpu.device)
            else:
                grad.copy_(host_grad(twin))

    def step(self, t: int, scale: float = 1.0, bad: bool = False) -> None:
        """One step of both, without scaler."""
        self.backward(t, scale, bad)
        with expected_skip(bad):
            self.host.step()
        with self.gpu.used():
            self.there.step()

    def assert_same_states(self) -> None:
        self.gpu.synchronize()
        assert_same({key: value.cpu() for key, value in held(self.there).items()}, held(self.host))

    def assert_same(self) -> None:
        """The same bits in all weights and states, and in what the last step says of itself."""
        self.assert_same_states()
        for name in ("grad_norm", "skipped", "healed"):
            assert_same_bits(getattr(self.there, name).cpu(), getattr(self.host, name), name)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy there, with the same strides and the same place in its storage."""
    start = tensor.storage_offset()
    end = start + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.zeros(end if tensor.numel() else start, dtype=tensor.dtype, device=device)
    return storage.as_strided(tensor.shape, tensor.stride(), start).copy_(tensor)


def host_grad(param: Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def expected_skip(bad: bool) -> Any:
    """Lets pass what a step that is skipped on purpose says."""
    return quiet() if bad else nullcontext()


class quiet(warnings.catch_warnings):  # noqa: N801 (used as a function)
    """Skipped steps are told nobody."""

    def __enter__(self) -> Any:
        log = super().__enter__()
        warnings.filterwarnings("ignore", message=r"halfstep: .*skipped")
        return log
