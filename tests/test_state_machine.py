"""Any sequence of steps, skips, checkpoints, copies, new groups and foreign writes: the bits of a model in plain lists.

Guards: whatever no single test thinks of, such as a cached table that misses a change, a counter that a skip moves, or
a checkpoint that keeps an alias. More examples: pytest tests/test_state_machine.py --hypothesis-profile=search
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from adversarial import FLOATS, ordinary
from drawn_optimizers import (
    MOST_GROUPS,
    Gradients,
    changes,
    fitting,
    gradients,
    laid_out,
    layouts,
    limits,
    lrs,
    modes_of_groups,
    new_groups,
    seeds,
    skipping,
    which,
    writes,
)  # fmt: skip
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from lockstep import Lockstep, Saved, told
from optimizer_runs import params_of
from reference_optimizer import ReferenceScaler
from torch import Tensor

import halfstep as hs

SCALER: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2, "max_scale": 2.0**14}


def pickled(optimizer: hs.Adam) -> hs.Adam:
    return pickle.loads(pickle.dumps(optimizer))


class StateMachine(RuleBasedStateMachine):
    """Most rules end with a step: what they have done must show at the very next one, and before it."""

    checkpoints = Bundle("checkpoints")

    @initialize(
        target=checkpoints,
        cls=st.sampled_from([hs.AdamW, hs.AdamW, hs.Adam]),
        groups=st.lists(new_groups, min_size=1, max_size=3),
        stochastic_rounding=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
        on_stale=st.sampled_from(["refresh", "refresh", "ignore"]),
        max_grad_norm=limits,
        skip_nonfinite=skipping,
        hysteresis=st.integers(1, 2),
        steps=st.lists(gradients, max_size=2),
    )
    def build(self, cls, groups, hysteresis, steps, **options) -> Saved:
        self.run = Lockstep(cls, groups, options)
        self.scaler = hs.LossScaler(**SCALER, hysteresis=hysteresis)
        self.model_scaler = ReferenceScaler(SCALER["init_scale"], 2, hysteresis, SCALER["max_scale"])
        for drawn in steps:
            self._go_on(drawn)
        return self.run.save()

    @invariant()
    def same_bits(self) -> None:
        self.run.check()

    # ---- steps -----------------------------------------------------------------------------------------------------
    def _go_on(self, drawn: Gradients) -> None:
        self.run.check()
        self.run.backward(drawn)
        self.run.step()

    @rule(drawn=gradients)
    def step(self, drawn: Gradients) -> None:
        self._go_on(drawn)

    @rule(drawn=gradients, unscale_first=st.booleans())
    def step_under_the_scaler(self, drawn: Gradients, unscale_first: bool) -> None:
        run = self.run
        run.backward(drawn, self.model_scaler.scale)
        grads = [member.grad for member in run.model.members if member.grad is not None]
        if not grads:
            return
        if unscale_first:
            self.scaler.unscale_(run.real)
            expected = run.model.step(found_inf=self.model_scaler.unscale_(grads))
        else:
            expected = run.model.step(scale=self.model_scaler.scale)
        with told(expected):
            skipped = self.scaler.step(run.real)
        self.scaler.update()
        self.model_scaler.update(run.model.skipped)
        assert bool(skipped) == run.model.skipped
        assert self.scaler.get_scale() == self.model_scaler.scale

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        """Zeros are gradients, and count."""
        self.run.real.zero_grad(set_to_none)
        for member in self.run.model.members:
            member.grad = None if set_to_none or member.grad is None else torch.zeros_like(member.grad)
        self.run.step()

    # ---- settings --------------------------------------------------------------------------------------------------
    @rule(drawn=gradients, g=which, lr=lrs, kind=st.sampled_from(["float", "tensor", "filled"]))
    def change_lr(self, drawn: Gradients, g: int, lr: float, kind: str) -> None:
        g %= len(self.run.model.groups)
        group = self.run.real.param_groups[g]
        if kind == "filled" and isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr if kind == "float" else torch.tensor(lr)
        self.run.model.groups[g].lr = float(group["lr"])
        self._go_on(drawn)

    @rule(drawn=gradients, g=which, change=changes)
    def change_a_groups_value(self, drawn: Gradients, g: int, change: tuple[str, Any]) -> None:
        g %= len(self.run.model.groups)
        self.run.real.param_groups[g][change[0]] = change[1]
        setattr(self.run.model.groups[g], *change)
        self._go_on(drawn)

    @rule(drawn=gradients, max_grad_norm=limits, skip_nonfinite=skipping)
    def change_the_settings(self, drawn: Gradients, **settings: Any) -> None:
        self.run.options.update(settings)
        for key, value in settings.items():
            setattr(self.run.real, key, value)
            setattr(self.run.model, key, value)
        self._go_on(drawn)

    @precondition(lambda self: len(self.run.model.groups) < MOST_GROUPS)
    @rule(drawn=gradients, group=new_groups)
    def add_param_group(self, drawn: Gradients, group: dict[str, Any]) -> None:
        with told([]):
            self.run.real.add_param_group(self.run.new_group(group))
        self._go_on(drawn)

    # ---- what others do to weights and states ------------------------------------------------------------------------
    @rule(drawn=gradients, i=which, seed=seeds, layout=layouts, how=writes)
    def write_a_weight(self, drawn: Gradients, i: int, seed: int, layout: str, how: str) -> None:
        pairs = self.run.pairs()
        p, member = pairs[i % len(pairs)]
        written = ordinary(tuple(p.shape), p.dtype, seed)
        if how == "part" and p.ndim:
            written[1:] = member.weight[1:]
        if how == "new":
            p.data = laid_out(written, layout)
        elif how == "load_state_dict":
            torch.nn.ParameterList([p]).load_state_dict({"0": written})
        else:
            p.data.copy_(written)
        member.weight = written
        self._go_on(drawn)

    @rule(drawn=gradients)
    def refresh_masters(self, drawn: Gradients) -> None:
        self.run.real.refresh_masters()
        self.run.model.refresh_masters()
        self._go_on(drawn)

    @rule(drawn=gradients, g=which, i=which, dtype=st.sampled_from(FLOATS))
    def change_a_dtype(self, drawn: Gradients, g: int, i: int, dtype: torch.dtype) -> None:
        """As model.half() does."""
        g %= len(self.run.model.groups)
        group = self.run.model.groups[g]
        member = group.members[i % len(group.members)]
        p = self.run.real.param_groups[g]["params"][i % len(group.members)]
        logical_order_comes_late = group.master is None and self.run.options["stochastic_rounding"]
        if fitting(group.master, [dtype]) != group.master or logical_order_comes_late:
            return  # refused by the next step, by name
        p.grad = member.grad = None
        p.data = p.data.to(dtype)
        p.grad_dtype = dtype
        member.weight = member.weight.to(dtype)
        self._go_on(drawn)

    @rule(drawn=gradients, i=which, k=which)
    def replace_a_state(self, drawn: Gradients, i: int, k: int) -> None:
        params = params_of(self.run.real)
        state = self.run.real.state.get(params[i % len(params)], {})
        if state:
            key = sorted(state)[k % len(state)]
            state[key] = state[key].clone()
        self._go_on(drawn)

    # ---- checkpoints and copies --------------------------------------------------------------------------------------
    @rule(target=checkpoints)
    def save(self) -> Saved:
        return self.run.save()

    @rule(drawn=gradients, saved=checkpoints, weights_too=st.booleans())
    def load(self, drawn: Gradients, saved: Saved, weights_too: bool) -> None:
        """Back to an earlier time; with other weights than those of that time its masters are not true."""
        run = self.run
        if not run.model.fits(saved.model):
            with pytest.raises(ValueError, match="the checkpoint has parameter groups of"):
                run.real.load_state_dict(saved.state_dict)
            return
        if weights_too:
            run.restore_weights(saved)
        with told(run.model.load(saved.model)):
            run.real.load_state_dict(saved.state_dict)
        self._go_on(drawn)

    @rule(drawn=gradients, saved=checkpoints, weights_too=st.booleans(), own=modes_of_groups, layout=layouts)
    def load_into_a_new_one(
        self, drawn: Gradients, saved: Saved, weights_too: bool, own: list[Any] | None, layout: str
    ) -> None:
        if not self.run.model.fits(saved.model):
            return
        if weights_too:
            self.run.restore_weights(saved)
        self.run.hand_over(saved.state_dict, saved.model, own, layout)
        self._go_on(drawn)

    @rule(drawn=gradients, ties=st.booleans(), own=modes_of_groups, layout=layouts)
    def hand_over_without_a_file(self, drawn: Gradients, ties: bool, own: list[Any] | None, layout: str) -> None:
        """Two optimizers live for a while: what one does must not show in the other."""
        if ties:
            self.run.masters_become_ties()
        self.run.hand_over(self.run.real.state_dict(), self.run.model.save(), own, layout)
        self._go_on(drawn)

    @rule(drawn=gradients, how=st.sampled_from([copy.deepcopy, pickled]))
    def copy(self, drawn: Gradients, how: Any) -> None:
        self.run.go_on_with(how(self.run.real))
        self._go_on(drawn)


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(stateful_step_count=30)
