"""What Adam and AdamW share: groups, the fused step, and state that survives.

One step is one call for all parameters of a device: unscale, overflow check, clip, update, cast to the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import compiled_step, states
from .checkpoints import matched
from .hyper import GroupNumbers, adam_group, number
from .ops import devices
from .ops.layout import NARROW, check_tensor
from .ops.optimizer import StepInputs
from .ops.overlap import check_writable
from .outcomes import StepOutcome
from .reports import StepReports, parameter_names, warn
from .shards import first_index, local
from .state_map import BorrowedStates, StateMap
from .step_table import StepTable

_MODES = ("master", "state_dtype")  # of a group; the next are the whole optimizer's
_SETTINGS = ("stochastic_rounding", "seed", "max_grad_norm", "skip_nonfinite", "on_stale", "backend")
_TABLES = 4  # kept at a time
_NO_GRADIENT = "differentiable=True: the fused step has no gradient; use torch.optim for that"


class FusedAdam(torch.optim.Optimizer):
    """The base of `Adam` and `AdamW`; each group's `decoupled_weight_decay` tells them apart, as in torch.optim."""

    _fixed: ClassVar[tuple[str, ...]] = ()  # group options that no checkpoint changes
    _built = False  # until the groups given to __init__ are there, whose memory is checked once, not once a group
    _step_supports_amp_scaling = True  # torch.amp.GradScaler hands over the two below instead of unscaling
    grad_scale: Tensor | None  # both exist only while a scaler drives the step: GradScaler multiplies with one it finds
    found_inf: Tensor | None

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, stochastic_rounding: bool, seed: int,
        max_grad_norm: float | None, skip_nonfinite: bool | None, on_stale: str, backend: str | None,
    ) -> None:  # fmt: skip
        if defaults.pop("differentiable"):
            raise ValueError(_NO_GRADIENT)
        if not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed}: expected an integer from 0 to 2**32 - 1")
        self.stochastic_rounding = stochastic_rounding
        self.seed = seed
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = skip_nonfinite
        self.on_stale = on_stale
        self.backend = backend
        self._check_settings()
        self._forget()
        super().__init__(params, {**defaults, "differentiable": False})
        self.state = StateMap()  # at once: who asks for it before the first step must see that step's states
        self._check_memory()
        self._built = True

    def _check_settings(self) -> None:
        """Of the optimizer, at every step: they are plain attributes that may be set at any time."""
        max_norm, skip, on_stale = map(vars(self).__getitem__, ("max_grad_norm", "skip_nonfinite", "on_stale"))
        if max_norm is not None and not number(max_norm, "max_grad_norm") >= 0:
            raise ValueError(f"max_grad_norm={max_norm}: expected None or a number >= 0")
        if skip not in (None, True, False):
            raise ValueError(f"skip_nonfinite={skip!r}: expected None, True or False")
        if on_stale not in ("refresh", "ignore"):
            raise ValueError(f"on_stale={on_stale!r}: expected 'refresh' or 'ignore'")

    def _forget(self) -> None:
        """Drops all that can be rebuilt: the cached tables, the last step's results, the running reports."""
        self.view = compiled_step.StepView(self)
        self._reports = StepReports()
        self._tables: list[StepTable] = []  # the last used first
        self._captured: list[StepTable] = []
        self._numbers = GroupNumbers()
        self._told_of_lost_updates = False
        self._nothing_done()

    def _nothing_done(self) -> None:
        view = self.view
        view.grad_norm = torch.tensor(math.nan, dtype=torch.float64, device="cpu")
        view.skipped, view.healed = torch.tensor(False, device="cpu"), torch.tensor(0, device="cpu")
        self.outcome = StepOutcome(view.skipped)  # what reports and scalers read

    @property
    def grad_norm(self) -> Tensor:
        """0-d float64: the norm of the last step's unscaled gradients, before clipping; NaN where it was not needed."""
        return self.view.grad_norm

    @property
    def skipped(self) -> Tensor:
        """0-d bool: whether the last step left everything as it was, because a gradient was Inf or NaN."""
        return self.view.skipped

    @property
    def healed(self) -> Tensor:
        """0-d int64: how many weights the last step found written by somebody else."""
        return self.view.healed

    # ---- groups ----------------------------------------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; duplicates, shared memory and bad values are refused before anything changes."""
        params = param_group["params"] if isinstance(param_group, dict) else set()  # torch refuses both
        if not isinstance(params, (Tensor, set)):
            param_group["params"] = params = list(params)
            tensors = [p[1] if isinstance(p, tuple) else p for p in params]
            if len({id(t) for t in tensors}) != len(tensors):
                raise ValueError(
                    "a parameter appears twice in one group; it would be updated twice a step. Pass each once"
                )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group, len(self.param_groups) - 1)
            if self._built:
                self._check_memory()
        except Exception:  # also a warning that a filter made an error: the group is refused as a whole
            self.param_groups.pop()
            raise
        if isinstance(group["lr"], Tensor):  # torch shares the caller's tensor between groups, and between optimizers
            group["lr"] = group["lr"].clone()

    def _check_memory(self) -> None:
        check_writable([local(p) for group in self.param_groups for p in group["params"]], self.names())

    def _check_group(self, group: dict[str, Any], index: int) -> None:
        where = f"parameter group {index}"
        misplaced = sorted(group.keys() & set(_SETTINGS))
        if misplaced:
            raise ValueError(f"{where}: {', '.join(misplaced)} cannot differ between groups; pass it to the optimizer")
        if group["differentiable"]:
            raise ValueError(f"{where}: {_NO_GRADIENT}")
        adam_group(group, index)
        if group["state_dtype"] not in states.STATE_DTYPES:
            raise ValueError(
                f"{where}: state_dtype={group['state_dtype']!r}: this version has torch.float32 and torch.bfloat16"
            )
        for i, param in enumerate(group["params"]):
            name = f"{where}, parameter {i}"
            check_tensor(param, name)
            states.master_kind(group["master"], param.dtype, name)
            if self._rounds(param, group) and first_index(param) is None:
                raise ValueError(f"{name}: stochastic rounding of a DTensor needs it sharded on dimension 0 only")
            bare = param.dtype in NARROW and group["master"] is None
            if bare and not self.stochastic_rounding and not self._told_of_lost_updates:
                self._told_of_lost_updates = True
                warn(
                    f"{name} is {param.dtype} with master=None and nearest rounding: updates smaller than half its "
                    "spacing are lost. Keep a master (master='auto' or 'split') or set stochastic_rounding=True",
                    UserWarning,
                )

    def _rounds(self, param: Tensor, group: dict[str, Any]) -> bool:
        return states.rounds_stochastically(param, group, self.stochastic_rounding)

    def names(self) -> list[str]:
        """One name per parameter, in order: the user's (named parameters), or its place and shape."""
        return parameter_names(self.param_groups)

    # ---- step ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns the closure's loss.

        Afterwards `grad_norm` (0-d float64, unscaled, before clipping; NaN where it was not needed), `skipped` (0-d
        bool) and `healed` (0-d int64) describe the step, on the device. A skipped step changes no bit, not even the
        counters.

        With the CUDA or Triton kernels nothing here waits for the device, and a CUDA graph can capture the step. What
        does wait: parameters on several devices, of which none may update before all are looked at; plain PyTorch in
        place of kernels; eps, betas, weight_decay or max_grad_norm given as a tensor on a device.

        torch.compile(fullgraph=True) takes the whole of it as one operator, which runs this same code when the graph
        runs and reads learning rates and settings then: what the compiled function itself changes of them, or of
        states, before step() ends the graph there (weights, gradients and learning rates that are tensors do not).

        In a CUDA graph: call step() once before the capture, since states are not made in one. lr is then a tensor on
        the device, filled in place (a number is frozen, as everything else). Replays are not reported; the tensors
        `skipped`, `grad_norm` and `healed` are those of right after the capture, filled anew by each. A captured step's
        memory stays with the optimizer; after load_state_dict() or add_param_group() capture again.

        Raises:
            TypeError: a sparse gradient or one of an unsupported dtype.
            ValueError: a setting out of range, or a state whose step is no whole number.
            RuntimeError: states that no longer fit, a backend that is not there, a norm over sharded parameters, or a
                capture that could not be replayed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_dynamo_compiling():
            compiled_step.step(self)
        else:
            self.update()
        return loss

    def update(self) -> None:
        """step() without a closure, hooks and profiler; to be called under no_grad."""
        self._opt_called = True  # what schedulers ask; see the end of the file
        self._check_settings()
        groups = self._numbers(self.param_groups)
        table = self._table()
        if not table:
            self._nothing_done()
            return
        try:
            if table.captures():
                self._hold_for_replays(table)
            result, first_bad = table.run(groups, self._inputs(table))
        finally:
            table.drop_grads()
        view = self.view
        view.grad_norm, view.skipped, view.healed = result
        self.outcome = StepOutcome(view.skipped, first_bad, table.names.__getitem__, view.healed)
        self._reports.add(self.outcome)

    def _hold_for_replays(self, table: StepTable) -> None:
        """A CUDA graph goes on writing where the table's rows and buffers are, as long as it is replayed."""
        for index, group in enumerate(self.param_groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and devices.is_host(lr.device):
                raise RuntimeError(
                    f"parameter group {index}: lr is a tensor on {lr.device}, so a CUDA graph would replay the value "
                    'it has now; move it first: group["lr"] = group["lr"].to(device)'
                )
        if not any(table is held for held in self._captured):
            self._captured.append(table)

    def _inputs(self, table: StepTable) -> StepInputs:
        held = vars(self)  # directly: see wrappers.py, which costs a little
        scale, found_inf, max_norm = held.get("grad_scale"), held.get("found_inf"), held["max_grad_norm"]
        scaled = scale is not None or found_inf is not None
        skip = held["skip_nonfinite"]
        if skip is None or scaled:
            skip = scaled or max_norm is not None or table.any_narrow
        return StepInputs(
            scale=scale, max_norm=None if max_norm is None else number(max_norm, "max_grad_norm"), skip_nonfinite=skip,
            found_inf=found_inf, seed=held["seed"], stochastic_weight=held["stochastic_rounding"],
            heal=held["on_stale"] == "refresh",
        )  # fmt: skip

    def _table(self) -> StepTable:
        """The rows of all parameters that have a gradient, kept until something moves; their gradients are set.

        Several tables are kept: layers that take turns in getting a gradient each have theirs.
        """
        lists = [group["params"] for group in self.param_groups]
        params = lists[0] if len(lists) == 1 and type(lists[0]) is list else list(chain.from_iterable(lists))
        modes: list[Any] = [self.backend, self.stochastic_rounding]
        for group in self.param_groups:
            modes += (len(group["params"]), group["amsgrad"], group["master"], group["state_dtype"])
        state = self.own_states()
        for k in range(len(self._tables)):  # no name for a table: it would keep an outdated one alive
            if self._tables[k].ready(params, modes, state):
                self._tables.insert(0, self._tables.pop(k))
                return self._tables[0]
        return self._table_after_a_close_look(params, modes, state)

    def _table_after_a_close_look(
        self, params: list[Tensor], modes: list[Any], state: StateMap | BorrowedStates
    ) -> StepTable:
        params = list(params)  # the group's own may change
        grads = [p.grad for p in params]
        missing = [g is None for g in grads]
        held = _held(state)
        kept = [table for table in self._tables if table.belongs(params, held, modes)]
        table = next((table for table in kept if table.fits(params, missing)), None)
        self._tables[:] = kept  # what only the others held is freed before more is made
        if table is None:
            groups = [group for group in self.param_groups for _ in group["params"]]
            names = self.names()
            for p, group, name in zip(params, groups, names, strict=True):
                if p.grad is not None:
                    states.complete(p, state.own_state(p), group, self._rounds(p, group), name)
            table = StepTable(self, params, names, missing, _held(state), modes)
        self._tables[:] = [table, *(other for other in kept if not other.replaced_by(table))][:_TABLES]
        table.set_grads(grads)
        table.settle(params, state)
        return table

    def own_states(self) -> StateMap | BorrowedStates:
        """`self.state`, which anyone may have replaced, read without leaving a trace."""
        return self.state if type(self.state) is StateMap else BorrowedStates(self.state)

    # ---- state -----------------------------------------------------------------------------------------------------
    def refresh_masters(self) -> None:
        """Rebuilds every master from its weight: after someone wrote into the parameters on purpose."""
        with torch.no_grad():
            for param, state in self.own_states().own_items():
                if isinstance(param, Tensor):  # torch.optim allows entries of other kinds
                    states.refresh_master(param, state)

    def state_dict(self) -> dict[str, Any]:
        """torch.optim's layout, plus `master` (float32) or `remainder` (int16) for 16-bit parameters.

        Waits for the device, as does load_state_dict().
        """
        self._reports.flush()
        packed = super().state_dict()
        packed["state"] = {key: states.exported(state) for key, state in packed["state"].items()}
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a checkpoint of halfstep or torch.optim, converted to this optimizer's modes. Copies, never aliases.

        Hyper-parameters come from the checkpoint, `master` and `state_dtype` stay this optimizer's. A saved master is
        taken only if it is float32 and rounds to the weight, so load the model first; else it restarts from the
        weight, with a warning. Raises ValueError if groups, parameters or shapes do not match, before changing
        anything.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, found = matched(self, state_dict, keep=(*_MODES, *self._fixed))
        self._tables.clear()  # in place: a trainer's wrapper shares the list
        loaded = {
            one.param: states.imported(one.param, one.saved, one.group, self._rounds(one.param, one.group), one.name)
            for one in found
        }
        if type(self.state) is not StateMap:
            self.state = StateMap()  # what somebody assigned stays theirs, as it was
        self.state.own_clear()
        for param, state in loaded.items():
            self.state.own_put(param, state)
        self.param_groups[:] = groups
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _SETTINGS}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if type(self.state) is not StateMap:
            self.state = StateMap(self.state)  # of a copy or a file
        self._forget()
        self._built = True


# torch's schedulers replace optimizer.step by a function that notes the call and that torch.compile refuses to trace,
# unless it has this mark. FusedAdam notes it itself.
FusedAdam.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _held(state: StateMap | BorrowedStates) -> list[Any]:
    """Parameters, keys and values of all states in one list: the same tensors may come under other names."""
    return list(
        chain.from_iterable(
            (param, *held, *held.values()) if isinstance(held, dict) else (param, held)
            for param, held in state.own_items()
        )
    )
