"""Adam and AdamW with float32 masters: drop-in for torch.optim.Adam and AdamW.

One step is one call for all parameters of a device: unscale, overflow check, clip, update, cast to the model's dtype.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import states
from .ops.layout import NARROW, check_tensor, check_writable
from .ops.optimizer import AdamGroup, StepInputs
from .reports import StepReports
from .shards import first_index, local
from .step_table import StepTable

_MODES = ("master", "state_dtype")  # of a group; the others are the optimizer's


class FusedAdam(torch.optim.Optimizer):
    """What Adam and AdamW share; `_decoupled` tells them apart."""

    _decoupled: ClassVar[bool]
    _step_supports_amp_scaling = True  # torch.amp.GradScaler hands over grad_scale and found_inf instead of unscaling
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, stochastic_rounding: bool, seed: int,
        max_grad_norm: float | None, skip_nonfinite: bool | None, on_stale: str, backend: str | None,
    ) -> None:  # fmt: skip
        if defaults.pop("differentiable"):
            raise ValueError("differentiable=True: the fused step has no gradient; use torch.optim for that")
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm={max_grad_norm}: expected None or a number >= 0")
        if on_stale not in ("refresh", "ignore"):
            raise ValueError(f"on_stale={on_stale!r}: expected 'refresh' or 'ignore'")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed}: expected an integer from 0 to 2**32 - 1")
        self.stochastic_rounding = stochastic_rounding
        self.seed = seed
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = skip_nonfinite
        self.on_stale = on_stale
        self.backend = backend
        self._forget()
        super().__init__(params, {**defaults, "differentiable": False})

    def _forget(self) -> None:
        """Drops all that can be rebuilt: the cached tables, the last step's results, the running reports."""
        self._reports = StepReports()
        self._cached: StepTable | None = None
        self.grad_norm = torch.tensor(math.nan, dtype=torch.float64)
        self.skipped = torch.tensor(False)
        self.healed = torch.tensor(0)

    # ---- groups ----------------------------------------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; parameters given twice, shared memory and bad values are refused before anything changes."""
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):
            param_group["params"] = params = list(params)
            tensors = [p[1] if isinstance(p, tuple) else p for p in params]
            if len({id(t) for t in tensors}) != len(tensors):
                raise ValueError("a parameter appears twice in one group; it would be updated twice a step. Pass each once")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group, len(self.param_groups) - 1)
            everything = [local(p) for g in self.param_groups for p in g["params"]]
            check_writable(everything, self.names())
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if isinstance(group["lr"], Tensor):  # torch shares the default's tensor between the groups
            group["lr"] = group["lr"].clone()
        self._cached = None

    def _check_group(self, group: dict[str, Any], index: int) -> None:
        where = f"parameter group {index}"
        for key in ("lr", "eps", "weight_decay"):
            if isinstance(group[key], Tensor) and group[key].numel() != 1:
                raise ValueError(f"{where}: {key} must have one element, got shape {tuple(group[key].shape)}")
            if not float(group[key]) >= 0 or math.isinf(float(group[key])):
                raise ValueError(f"{where}: {key}={group[key]}: expected a finite number >= 0")
        if len(group["betas"]) != 2 or not all(0 <= float(b) < 1 for b in group["betas"]):
            raise ValueError(f"{where}: betas={group['betas']}: expected two numbers in [0, 1)")
        if group["state_dtype"] not in states.STATE_DTYPES:
            raise ValueError(
                f"{where}: state_dtype={group['state_dtype']!r}: this version has torch.float32 and torch.bfloat16"
            )
        for i, param in enumerate(group["params"]):
            name = f"{where}, parameter {i}"
            check_tensor(param, name)
            states.master_kind(group["master"], param.dtype)
            if self._rounds(param, group) and first_index(param) is None:
                raise ValueError(f"{name}: stochastic rounding of a DTensor needs it sharded on dimension 0 only")
            bare = param.dtype in NARROW and group["master"] is None
            if bare and not self.stochastic_rounding:
                warnings.warn(
                    f"{name} is {param.dtype} with master=None and nearest rounding: updates smaller than half its "
                    "spacing are lost. Keep a master (master='auto' or 'split') or set stochastic_rounding=True",
                    UserWarning,
                    stacklevel=6,
                )
                break

    def _rounds(self, param: Tensor, group: dict[str, Any]) -> bool:
        return states.rounds_stochastically(param, group, self.stochastic_rounding)

    def names(self) -> list[str]:
        """One name per parameter, in order: the user's (named parameters), or its place and shape."""
        names = []
        for g, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                given = group.get("param_names")
                label = repr(given[i]) if given else f"{i} of group {g}"
                names.append(f"parameter {label} (shape {tuple(param.shape)}, {param.dtype})")
        return names

    # ---- step ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns the closure's loss.

        Afterwards `grad_norm` (0-d float64, unscaled, before clipping; NaN where it was not needed), `skipped` (0-d bool)
        and `healed` (0-d int64) describe the step, on the device. A skipped step changes no bit, counters included.

        Raises:
            TypeError: a sparse gradient or one of an unsupported dtype.
            RuntimeError: states that no longer fit, a backend that is not there, or a norm over sharded parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reports.flush()
        table = self._table()
        if not table.rows:
            self.skipped, self.healed = torch.tensor(False), torch.tensor(0)
            return loss
        groups = [self._hyper(group) for group in self.param_groups]
        inputs = self._inputs(table)
        result, first_bad = table.run(groups, inputs, self.backend)
        self.grad_norm, self.skipped, self.healed = result
        self._reports.add(self.skipped, self.healed, first_bad, table.names)
        return loss

    def _hyper(self, group: dict[str, Any]) -> AdamGroup:
        beta1, beta2 = group["betas"]
        return AdamGroup(
            float(group["lr"]), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]),
            self._decoupled, bool(group["maximize"]),
        )  # fmt: skip

    def _inputs(self, table: StepTable) -> StepInputs:
        scaled = self.grad_scale is not None or self.found_inf is not None
        skip = self.skip_nonfinite
        if skip is None or scaled:
            skip = scaled or self.max_grad_norm is not None or table.any_narrow
        return StepInputs(
            scale=self.grad_scale, max_norm=self.max_grad_norm, skip_nonfinite=skip, found_inf=self.found_inf,
            seed=self.seed, stochastic_weight=self.stochastic_rounding, heal=self.on_stale == "refresh",
        )  # fmt: skip

    def _table(self) -> StepTable:
        """The rows of all parameters that have a gradient, cached until something moves."""
        active = [(g, p) for g, group in enumerate(self.param_groups) for p in group["params"] if p.grad is not None]
        params = [p for _, p in active]
        flags = [bool(group["amsgrad"]) for group in self.param_groups]
        if self._cached is None or not self._cached.matches(params, self._held(params), flags):
            for g, p in active:
                group = self.param_groups[g]
                states.complete(p, self.state[p], group, self._rounds(p, group))
            self._cached = StepTable(self, active, self._held(params), flags)
        self._cached.set_grads([local(p.grad) for p in params])
        return self._cached

    def _held(self, params: list[Tensor]) -> list[Any]:
        return list(chain.from_iterable(self.state[p].values() for p in params))

    # ---- state -----------------------------------------------------------------------------------------------------
    def refresh_masters(self) -> None:
        """Rebuilds every master from its weight: after someone wrote into the parameters on purpose."""
        with torch.no_grad():
            for param, state in self.state.items():
                states.refresh_master(param, state)

    def state_dict(self) -> dict[str, Any]:
        """torch.optim's layout, plus `master` (float32) or `remainder` (int16) for 16-bit parameters."""
        self._reports.flush()
        packed = super().state_dict()
        packed["state"] = {key: states.exported(state) for key, state in packed["state"].items()}
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a checkpoint of halfstep or torch.optim, converted to this optimizer's modes. Copies, never aliases.

        Hyper-parameters come from the checkpoint, `master` and `state_dtype` stay this optimizer's. A saved master is taken
        only if it is float32 and rounds to the weight, so load the model first; else it restarts from the weight, with
        a warning. Raises ValueError if groups, parameters or shapes do not match; then nothing has changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved_groups, saved_states = state_dict["param_groups"], state_dict["state"]
        ours, theirs = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in saved_groups]
        if ours != theirs:
            raise ValueError(
                f"the checkpoint has parameter groups of {theirs} parameters, this optimizer of {ours}; build it with the "
                "same groups"
            )
        groups = [_merged(mine, saved, self.defaults) for mine, saved in zip(self.param_groups, saved_groups, strict=True)]
        keys = chain.from_iterable(saved["params"] for saved in saved_groups)
        params = [(group, p) for group in groups for p in group["params"]]
        loaded = {}
        for key, (group, param), name in zip(keys, params, self.names(), strict=True):
            if key in saved_states:
                logical = self._rounds(param, group)
                loaded[param] = states.imported(param, saved_states[key], group, logical, name)
        self.state.clear()
        self.state.update(loaded)
        self.param_groups[:] = groups
        self._cached = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        settings = ("stochastic_rounding", "seed", "max_grad_norm", "skip_nonfinite", "on_stale", "backend")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in settings}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


def _merged(mine: dict[str, Any], saved: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A group with the saved hyper-parameters, our parameters and modes, and no tensor shared with the checkpoint."""
    keep = {key: mine[key] for key in ("params", "param_names", *_MODES) if key in mine}
    taken = {k: v.clone() if isinstance(v, Tensor) else v for k, v in saved.items() if k not in ("params", "param_names")}
    return {**defaults, **mine, **taken, **keep}


class AdamW(FusedAdam):
    """torch.optim.AdamW with float32 masters for 16-bit parameters, in one fused step.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW; lr may be a 1-element tensor.
            eps = 0 is allowed (0 / 0 gives NaN for a weight that never had a gradient, as in torch).
        foreach, capturable, fused: accepted and ignored: there is one implementation.
        differentiable: must be False.
        master: what a 16-bit parameter keeps beside itself, so that no update is lost. "auto" and "fp32": a float32
            master (+4 bytes); "split": the lower 16 bits of the float32 whose upper half is the bfloat16 weight
            (+2 bytes, same float32, no copy); None: nothing. float32 parameters need none. May differ by group.
        state_dtype: torch.float32, or torch.bfloat16 for the moments (4 bytes less per parameter), which then round
            stochastically, since nearest rounding would freeze v. May differ by group.
        stochastic_rounding: round 16-bit weights without a master up or down with the right probability.
        seed: of all stochastic rounding, 0 .. 2**32 - 1; the bits depend on it, the step, the parameter's position and the
            element's index alone.
        max_grad_norm: clip the global 2-norm of the gradients inside the step, as torch.nn.utils.clip_grad_norm_.
        skip_nonfinite: leave everything unchanged when a gradient is Inf or NaN. None: on with 16-bit parameters, a scaler
            or clipping; off for plain float32, where NaN propagates as in torch.optim.
        on_stale: "refresh": a weight someone else wrote replaces its master, element by element, at the next step;
            "ignore" trusts the master (2 bytes less read per element).
        backend: None, or "native", "triton", "reference" to insist on one.

    State, bytes per element of a bfloat16 parameter: m 4, v 4, master 4 (split: 2); with weight and gradient 16 (14).
    Traffic per step: 30 bytes per element with clipping or a scaler, 28 without (split: 28 and 26).

    Raises:
        ValueError: hyper-parameters out of range, a parameter given twice, memory shared between parameters.
        TypeError: parameters that are sparse or not float32, bfloat16 or float16.

    Source: Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2; amsgrad: Reddi et al.,
    "On the convergence of Adam and beyond", ICLR 2018; masters: Micikevicius et al., "Mixed precision training", ICLR 2018.

    Example:
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> optimizer = hs.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        >>> model(torch.ones(1, 4).bfloat16()).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["master"].dtype
        torch.float32
    """

    _decoupled = True

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None, master: str | None = "auto",
        state_dtype: torch.dtype = torch.float32, stochastic_rounding: bool = False, seed: int = 0,
        max_grad_norm: float | None = None, skip_nonfinite: bool | None = None, on_stale: str = "refresh",
        backend: str | None = None,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize,
            "foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused,
            "master": master, "state_dtype": state_dtype,
        }  # fmt: skip
        super().__init__(
            params, defaults, stochastic_rounding=stochastic_rounding, seed=seed, max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite, on_stale=on_stale, backend=backend,
        )  # fmt: skip


class Adam(AdamW):
    """torch.optim.Adam with float32 masters: `AdamW` (which see) with L2 weight decay, g + weight_decay * p, default 0.

    Source: Kingma & Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> optimizer = hs.Adam([weight], lr=0.1)
        >>> weight.grad = torch.ones(3)
        >>> optimizer.step()
        >>> weight.tolist() == [weight[0].item()] * 3
        True
    """

    _decoupled = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
