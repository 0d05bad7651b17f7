"""Adam and AdamW with float32 masters: drop-in for torch.optim.Adam and AdamW."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .fused_adam import FusedAdam
from .wrappers import PassedOn

__all__ = ["Adam", "AdamW"]


class Adam(FusedAdam):
    """torch.optim.Adam with float32 masters: `AdamW` (which see) with L2 weight decay, default 0.

    g + weight_decay * p takes the place of the gradient g. decoupled_weight_decay=True makes it AdamW, as in
    torch.optim; a checkpoint brings its own.

    Source: Kingma & Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> optimizer = hs.Adam([weight], lr=0.1)
        >>> weight.grad = torch.ones(3)
        >>> optimizer.step()
        >>> weight.tolist() == [weight[0].item()] * 3
        True
    """

    # All that a scaler or a user may write while training, perhaps through a trainer's wrapper.
    grad_scale = PassedOn()  # type: ignore[assignment]
    found_inf = PassedOn()  # type: ignore[assignment]
    max_grad_norm, skip_nonfinite, on_stale = PassedOn(), PassedOn(), PassedOn()
    stochastic_rounding, seed, backend = PassedOn(), PassedOn(), PassedOn()

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
        decoupled_weight_decay: bool = False, master: str | None = "auto",
        state_dtype: torch.dtype = torch.float32, stochastic_rounding: bool = False, seed: int = 0,
        max_grad_norm: float | None = None, skip_nonfinite: bool | None = None,
        on_stale: str = "refresh", backend: str | None = None,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable,
            "fused": fused, "decoupled_weight_decay": decoupled_weight_decay, "master": master,
            "state_dtype": state_dtype,
        }  # fmt: skip
        super().__init__(
            params, defaults, stochastic_rounding=stochastic_rounding, seed=seed, max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite, on_stale=on_stale, backend=backend,
        )  # fmt: skip


class AdamW(Adam):
    """torch.optim.AdamW with float32 masters for 16-bit parameters, in one fused step.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW; lr may be a 1-element tensor,
            of which each group keeps its own copy (param_groups[i]["lr"]). One that is on a device is not read on the
            host, so its value is not checked: keep it finite and >= 0.
            eps = 0 is allowed (0 / 0 gives NaN for a weight that never had a gradient, as in torch).
        foreach, capturable, fused: accepted and ignored: there is one implementation, which the CUDA kernels make
            capturable (see step()).
        differentiable: must be False.
        master: what a 16-bit parameter keeps beside itself, so that no update is lost. "auto" and "fp32": a float32
            master (+4 bytes); "split": the lower 16 bits of the float32 whose upper half is the bfloat16 weight
            (+2 bytes, same float32, no copy); None: nothing. float32 parameters need none. May differ by group.
        state_dtype: torch.float32, or torch.bfloat16 for the moments (4 bytes less per parameter), which then round
            stochastically, since nearest rounding would freeze v. May differ by group.
        stochastic_rounding: round 16-bit weights without a master up or down with the right probability.
        seed: of all stochastic rounding, 0 .. 2**32 - 1; the bits depend on it, the step, the parameter's position and
            the element's index alone.
        max_grad_norm: clip the global 2-norm of the gradients inside the step, as torch.nn.utils.clip_grad_norm_.
        skip_nonfinite: leave everything unchanged when a gradient is Inf or NaN. None: on with 16-bit parameters, a
            scaler or clipping; off for plain float32, where NaN propagates as in torch.optim.
        on_stale: "refresh": a weight someone else wrote replaces its master, element by element, at the next step;
            "ignore" trusts the master (2 bytes less read per element).
        backend: None, or "native", "triton", "reference" to insist on one.

    State, bytes per element of a bfloat16 parameter: m 4, v 4, master 4 (split: 2); with weight and gradient 16 (14).
    Traffic per step, same parameter: 32 bytes per element, of which 2 are the first pass over the gradients that
    clipping, a scaler or skip_nonfinite need and 2 the check for stale masters; a split
    master 28, of which 2 the first pass.

    Raises:
        ValueError: hyper-parameters out of range, a parameter given twice, memory shared between parameters.
        TypeError: parameters that are sparse or not float32, bfloat16 or float16.

    Source: Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2; amsgrad: Reddi et al.,
    "On the convergence of Adam and beyond", ICLR 2018; masters: Micikevicius et al., "Mixed precision training",
    ICLR 2018.

    Example:
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> optimizer = hs.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        >>> model(torch.ones(1, 4).bfloat16()).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["master"].dtype
        torch.float32
    """

    _fixed = ("decoupled_weight_decay",)

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
        master: str | None = "auto", state_dtype: torch.dtype = torch.float32, stochastic_rounding: bool = False,
        seed: int = 0, max_grad_norm: float | None = None, skip_nonfinite: bool | None = None,
        on_stale: str = "refresh", backend: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused, decoupled_weight_decay=True, master=master,
            state_dtype=state_dtype, stochastic_rounding=stochastic_rounding, seed=seed, max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite, on_stale=on_stale, backend=backend,
        )  # fmt: skip
