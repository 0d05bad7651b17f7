"""An optimizer and its model in plain lists, which get the same and must hold the same bits."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from adversarial import BFLOAT16, FLOAT32, ordinary
from bits import assert_same_bits
from drawn_optimizers import Gradients, fitting, laid_out
from optimizer_runs import assert_same, held, params_of, saved_and_loaded
from reference_optimizer import Checkpoint, Group, Member, ReferenceOptimizer
from torch import Tensor
from torch.nn import Parameter

import halfstep as hs
from halfstep.reference import round_to

LOST_UPDATES = "updates smaller than half its spacing are lost"  # told once, when an optimizer is built


class Saved(NamedTuple):
    state_dict: dict[str, Any]
    model: Checkpoint
    weights: list[Tensor]


@contextmanager
def told(expected: list[str]) -> Iterator[None]:
    """Exactly these warnings come, in this order."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in seen if LOST_UPDATES not in str(w.message)]
    assert len(messages) == len(expected), (messages, expected)
    for message, pattern in zip(messages, expected, strict=True):
        assert re.search(pattern, message), (message, pattern)


class Lockstep:
    def __init__(self, cls: type[hs.Adam], groups: Sequence[dict[str, Any]], options: dict[str, Any]) -> None:
        self.cls, self.options = cls, options
        self.model = ReferenceOptimizer([], cls is hs.AdamW, **options)
        with told([]):
            self.real = cls([self.new_group(group) for group in groups], **options)
        self._left_behind: tuple[hs.Adam, dict[str, Tensor]] | None = None

    def new_group(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """For the real optimizer; the model has it then."""
        options = {key: value for key, value in drawn.items() if key not in ("params", "modes")}
        options.update(drawn["modes"])
        options["master"] = fitting(options["master"], [p.dtype for p in drawn["params"]])
        weights = [ordinary(p.shape, p.dtype, p.seed) for p in drawn["params"]]
        self.model.groups.append(Group([Member(w.clone()) for w in weights], **options))
        params = [Parameter(laid_out(w, p.layout)) for w, p in zip(weights, drawn["params"], strict=True)]
        return {"params": params, **options}

    def pairs(self) -> list[tuple[Parameter, Member]]:
        return list(zip(params_of(self.real), self.model.members, strict=True))

    def backward(self, drawn: Gradients, scale: float = 1.0) -> None:
        pairs = self.pairs()
        for i, (p, member) in enumerate(pairs):
            p.grad = member.grad = None
            if drawn.missing >> i & 1:
                continue
            grad = (ordinary(tuple(p.shape), p.dtype, drawn.seed + i, drawn.spread).float() * scale).to(p.dtype)
            if drawn.bad and drawn.bad[0] % len(pairs) == i and grad.numel():
                grad.view(-1)[-1] = drawn.bad[1]
            p.grad, member.grad = laid_out(grad, drawn.layout), grad

    def step(self) -> None:
        with told(self.model.step()):
            self.real.step()

    # ---- checkpoints and copies --------------------------------------------------------------------------------------
    def save(self) -> Saved:
        weights = [member.weight.clone() for member in self.model.members]
        return Saved(saved_and_loaded(self.real.state_dict()), self.model.save(), weights)

    def restore_weights(self, saved: Saved) -> None:
        for (p, member), weight in zip(self.pairs(), saved.weights, strict=True):
            p.data.copy_(weight)
            member.weight = weight.to(p.dtype, copy=True)

    def masters_become_ties(self) -> None:
        """Between two bfloat16 numbers, where the two kinds of master show different weights."""
        for p, member in self.pairs():
            if p.dtype is BFLOAT16 and "remainder" in member.state:
                member.state["remainder"].fill_(-(2**15))
                self.real.state[p]["remainder"].fill_(-(2**15))
            elif p.dtype is BFLOAT16 and "master" in member.state:
                tie = (member.weight.float().view(torch.int32) | 2**15).view(FLOAT32)
                member.state["master"], member.weight = tie, round_to(tie, BFLOAT16)
                self.real.state[p]["master"].copy_(tie)
                p.data.copy_(member.weight)

    def hand_over(self, state_dict: dict[str, Any], saved: Checkpoint, own: list[Any] | None, layout: str) -> None:
        """A new optimizer on copies of the weights, perhaps with modes of its own; the rest is the checkpoint's."""
        model, groups = self._copied_model(), []
        for i, group in enumerate(model.groups):
            if own:
                dtypes = [member.weight.dtype for member in group.members]
                group.master, group.state_dtype = fitting(own[i]["master"], dtypes), own[i]["state_dtype"]
            params = [Parameter(laid_out(p.detach(), layout)) for p in self.real.param_groups[i]["params"]]
            groups.append({"params": params, "master": group.master, "state_dtype": group.state_dtype})
        with told([]):
            real = self.cls(groups, **self.options)
        with told(model.load(saved)):
            real.load_state_dict(state_dict)
        self._left_behind = self.real, held(self.real)
        self.real, self.model = real, model

    def go_on_with(self, copied: hs.Adam) -> None:
        self._left_behind = self.real, held(self.real)
        self.real, self.model = copied, self._copied_model()

    def _copied_model(self) -> ReferenceOptimizer:
        model = copy.deepcopy(self.model)
        model.forget()
        return model

    # ---- comparison --------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Weights, gradients, states, results and settings; and what was left behind is as it was."""
        expected = {}
        for i, (p, member) in enumerate(self.pairs()):
            assert_same_bits(p.grad, member.grad, f"gradient {i}")
            expected[f"{i}.weight"] = member.weight
            expected.update({f"{i}.{key}": value for key, value in member.state.items()})
        assert_same(held(self.real), expected)
        assert (bool(self.real.skipped), int(self.real.healed)) == (self.model.skipped, self.model.healed)
        assert_same_bits(self.real.grad_norm, torch.tensor(self.model.norm, dtype=torch.float64), "norm")
        for mine, group in zip(self.real.param_groups, self.model.groups, strict=True):
            assert {**mine, "lr": float(mine["lr"])}.items() >= group.settings().items()
        if self._left_behind:
            assert_same(held(self._left_behind[0]), self._left_behind[1])
