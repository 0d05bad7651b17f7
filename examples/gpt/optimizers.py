"""The optimizer phase, two ways behind one interface: halfstep's, and what one writes by hand around torch.optim.

Both hand back (optimizer, scaler), used as
    optimizer.zero_grad(); scaler.scale(loss).backward(); skipped = scaler.step(optimizer); scaler.update()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs

from .config import Config

BETAS = (0.9, 0.95)


def build(config: Config, model: nn.Module) -> tuple[Any, Any]:
    """(optimizer, scaler) for a model whose weights have their final dtype and device already."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    scaling: dict[str, Any] = dict(
        device=config.device,
        init_scale=config.init_scale,
        growth_interval=config.growth_interval,
        enabled=config.scaled,
    )
    if config.optimizer == "torch":
        return TorchPhase(groups, config), TorchScaler(**scaling)
    optimizer = hs.AdamW(
        groups,
        lr=config.lr,
        betas=BETAS,
        master=None if config.master == "none" else config.master,
        max_grad_norm=config.clip or None,
    )
    return optimizer, hs.LossScaler(**scaling)


class TorchPhase:
    """torch.optim.AdamW on float32 masters: copy the gradients up, clip, step, copy the weights down.

    Weights that are float32 already, and all with `master="none"`, are updated in place.
    """

    def __init__(self, groups: list[dict[str, Any]], config: Config):
        self.weights: list[Tensor] = [p for group in groups for p in group["params"]]
        self.copied = config.weight_dtype != torch.float32 and config.master != "none"
        self.masters = [p.detach().float() for p in self.weights] if self.copied else self.weights
        if self.copied:
            for master in self.masters:
                master.grad = torch.empty_like(master)
        of = dict(zip(self.weights, self.masters, strict=True))
        self.inner = torch.optim.AdamW(
            [{**group, "params": [of[p] for p in group["params"]]} for group in groups],
            lr=config.lr,
            betas=BETAS,
            fused=True,  # the fastest of torch's three
        )
        self.param_groups = self.inner.param_groups
        self.max_norm = config.clip or float("inf")
        self.norm_needed = config.scaled or config.clip > 0

    def take_gradients(self) -> None:
        if self.copied:
            _copy([m.grad for m in self.masters], [p.grad for p in self.weights])

    def give_weights(self) -> None:
        if self.copied:
            _copy(self.weights, self.masters)

    def zero_grad(self) -> None:
        for p in self.weights:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "masters": [m.detach() for m in self.masters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.param_groups = self.inner.param_groups
        _copy(self.masters, state["masters"])


@torch.no_grad()
def _copy(targets: list[Any], sources: list[Any]) -> None:
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


class TorchScaler(torch.amp.GradScaler):
    """torch's GradScaler around a TorchPhase; `step` returns whether it skipped, as halfstep's does."""

    def step(self, optimizer: TorchPhase) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        optimizer.take_gradients()
        self.unscale_(optimizer.inner)
        norm = torch.zeros(())
        if optimizer.norm_needed:
            norm = nn.utils.clip_grad_norm_(optimizer.masters, optimizer.max_norm)
        super().step(optimizer.inner)
        optimizer.give_weights()
        return ~norm.isfinite()


def bytes_by_part(model: nn.Module, optimizer: Any, *, summed: bool) -> dict[str, float]:
    """Bytes per parameter of everything the phase keeps, added up from the tensors themselves.

    `summed`: gradients were added up in float32 beside the weights' dtype and are gone; they are computed.
    """
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    parts: dict[str, list[Tensor | None]] = {"weights": [*parameters]}
    if not summed:
        parts["gradients"] = [p.grad for p in parameters]
    if isinstance(optimizer, TorchPhase):
        states = [optimizer.inner.state[m] for m in optimizer.masters]
        if optimizer.copied:
            parts["master"] = [*optimizer.masters]
            parts["float32 gradients"] = [m.grad for m in optimizer.masters]
    else:
        states = [optimizer.state[p] for p in parameters]
        parts["master"] = [state.get("master", state.get("remainder")) for state in states]
    parts["exp_avg"] = [state["exp_avg"] for state in states]
    parts["exp_avg_sq"] = [state["exp_avg_sq"] for state in states]
    sizes = {part: sum(t.nbytes for t in tensors if t is not None) / count for part, tensors in parts.items()}
    if summed:
        narrow = sum(p.numel() for p in parameters if p.dtype != torch.float32)
        sizes |= {"gradients": sizes["weights"], "float32 sums of gradients": 4 * narrow / count}
    return {part: size for part, size in sizes.items() if size}
