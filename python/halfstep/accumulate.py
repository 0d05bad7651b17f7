"""Accumulator: gradients of several micro-batches and ranks, added up to exactly that of the whole batch.

With a loss l_j for each valid token, the gradient of a batch is sum_j grad(l_j) / N, N the number of valid tokens of
all micro-batches and ranks. A mean of the micro-batches' means is something else as soon as their counts differ. N is
known when the window ends, so weighted sums are kept until then and divided at the end (`token_weights.py`).
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from .fused_adam import FusedAdam
from .gradient_sums import GradientSums
from .gradient_sync import OneRank, ranks_of
from .loss_graph import check_reduction, silenced
from .token_weights import TokenWeights, WindowScale, check_loss, token_count
from .window_stage import WindowStage, refuse_empty
from .wrappers import innermost


class Accumulator:
    """Gradient accumulation with exactly the gradient of the whole batch, to float32 rounding.

        accumulator = hs.Accumulator(optimizer, steps=8, scaler=scaler, model=model)
        for batch in loader:
            loss = model(batch)                                     # the mean over this micro-batch's valid tokens
            accumulator.backward(loss, tokens=(labels != -100).sum())
            if accumulator.ready:                                   # `steps` micro-batches are in
                accumulator.step()
                schedule.step()
        if accumulator.pending:                                     # a last, shorter window
            accumulator.step()

    Do not divide the loss by `steps`, do not call loss.backward(), no_sync(), optimizer.step() or zero_grad(). Count
    the tokens that the loss counts: where a causal model shifts the labels, (labels[:, 1:] != -100).sum(). Gradients
    are there after finish() alone, so a clip before it clips nothing: use the optimizer's max_grad_norm, or

        accumulator.finish()                                        # scaler.unscale_(optimizer), if there is a scaler
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        accumulator.step()

    Micro-batches may have any number of valid tokens; one without any adds exactly nothing, even if its mean is NaN.
    If a whole window has none, gradients and loss are 0, and the step is made with them. Nothing waits for the device,
    but for what LossScaler and GradScaler wait for, and ranks on which a parameter had no gradient (below).

    16-bit gradients are added to float32 sums in one kernel for all parameters: 4 bytes for each 16-bit parameter from
    the first micro-batch of a window to its end, 10 bytes moved for each in a micro-batch, 8 for each parameter at the
    end. float32 gradients are added up in place by autograd. Parameters without a gradient in any micro-batch (of any
    rank) keep .grad = None, so that the optimizer leaves them alone. Halfstep's optimizers take the float32 gradients
    as they are; for others, gradients are rounded to the parameter's dtype, once, at the end.

    Under DistributedDataParallel the model's own synchronisation is off for as long as the accumulator exists, its comm
    hooks are not called, and the float32 sums are all-reduced once at the end of a window: 4 bytes of traffic for each
    parameter, exact sums, not overlapped with the last backward. Ranks may have different numbers of micro-batches,
    also none: all must call step() equally often. A rank that has no gradient of some parameter asks the others
    whether they have, and waits for the answer.

    Under FSDP2 (fully_shard) every rank needs as many micro-batches as the others (their forward passes communicate);
    give the rest 0 tokens. sync="every" reduce-scatters each micro-batch's gradients, in FSDP2's reduce_dtype, and sums
    up the shards in float32. sync="last" does so once a window and keeps sums of unsharded gradients (4 bytes for every
    parameter of the model). In this version halfstep's optimizers
    cannot share the norm and the overflow flag of shards: use them with float32 parameters without scaler and clipping,
    or with skip_nonfinite=False.

    Args:
        optimizer: of halfstep or torch.optim; its parameter groups may change between windows.
        steps: micro-batches in a window, on this rank, >= 1.
        scaler: an hs.LossScaler or torch.amp.GradScaler; the accumulator scales, steps and updates. A window has one
            scale, and one micro-batch that overflows skips all of it.
        model: the DistributedDataParallel or FSDP2 model, or what contains it. Needed where torch.distributed runs
            several ranks; a plain model there is one that this rank trains alone.
        process_group: sum over these ranks, for plain models that every rank has a copy of.
        reduction: what the losses are: "mean" over the micro-batch's valid tokens, or the "sum". A loss whose autograd
            graph contradicts is refused; it cannot tell where the loss is multiplied or divided afterwards, or made by
            something else than torch's loss functions.
        sync: "every" or "last", for FSDP2; DistributedDataParallel always communicates once.

    Raises:
        ValueError: an argument out of range, parameters that are summed over other ranks than these, several ranks
            without a model or group.
        TypeError: a model of FSDP1, or of several kinds.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        >>> accumulator = hs.Accumulator(hs.AdamW([weight]), steps=2)
        >>> for length in (1, 100):
        ...     tokens = torch.ones(length, 3)
        ...     accumulator.backward((tokens @ weight.float()).mean(), tokens=length)
        >>> accumulator.finish()
        >>> weight.grad.tolist(), accumulator.tokens.item()
        ([1.0, 1.0, 1.0], 101)
        >>> accumulator.step().item()
        False
    """

    def __init__(
        self, optimizer: Optimizer, steps: int, *, scaler: Any = None, model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None, reduction: str = "mean", sync: str = "every",
    ) -> None:  # fmt: skip
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={reduction!r}: expected 'mean' or 'sum', as the loss function was given")
        if sync not in ("every", "last"):
            raise ValueError(f"sync={sync!r}: expected 'every' or 'last'")
        inner = innermost(optimizer)
        if not isinstance(inner, Optimizer):
            raise TypeError(
                f"optimizer must be one of halfstep's or torch.optim's, got {type(optimizer).__name__}; the model goes "
                "to model="
            )
        self.optimizer, self.scaler = optimizer, scaler
        self.reduction = reduction
        self._stage = WindowStage(_checked_steps(steps))
        self._sums = GradientSums(optimizer)
        params = self._sums.trainable()
        if not params:
            raise ValueError("the optimizer has no parameter that requires a gradient; there is nothing to accumulate")
        self._ranks: OneRank = ranks_of(model, process_group, params, sync)
        self._device = params[0].device
        self._weights, self._scale = TokenWeights(reduction, steps), WindowScale(scaler)
        self._loss = torch.tensor(float("nan"), dtype=torch.float64, device="cpu")
        self._tokens = torch.tensor(0, device="cpu")
        self._start_window()
        weakref.finalize(self, self._ranks.release)
        weakref.finalize(self, self._stage.watch(inner).remove)

    def _start_window(self) -> None:
        self._stage.start()
        self._weights.start_window()
        self._scale.start_window()

    # ---- the loop --------------------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Micro-batches in a window, on this rank; may be set between windows."""
        return self._stage.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._stage.check_between_windows("setting steps")
        self._stage.steps = _checked_steps(steps)

    @property
    def ready(self) -> bool:
        """True if `steps` micro-batches are in: time for step()."""
        return self._stage.full

    @property
    def pending(self) -> bool:
        """True if at least one micro-batch is in and not stepped with."""
        return self._stage.micro_batches > 0

    @property
    def loss(self) -> Tensor:
        """0-d float64: the last finished window's mean loss over all valid tokens of all ranks; 0 if it had none.

        On the device; NaN before the first finish() or step().
        """
        return self._loss

    @property
    def tokens(self) -> Tensor:
        """0-d int64: the number of valid tokens of the last finished window, of all ranks. On the device."""
        return self._tokens

    def backward(self, loss: Tensor, tokens: int | Tensor, *, last: bool = False, retain_graph: bool = False) -> None:
        """Runs one micro-batch backward and adds its gradients to the window's sums, weighted by its tokens.

        Args:
            loss: of one element, not yet scaled: the mean or the sum over the micro-batch's valid tokens.
            tokens: how many valid tokens that is: an integer or a 0-d integer tensor >= 0 (which is not read on the
                host if it is on a device). Count what the loss counts, as labels[:, 1:] where a causal model shifts
                them. 1 in every call weighs micro-batches equally.
            last: this micro-batch ends the window though it is not the `steps`-th; needed with sync="last" alone.
            retain_graph: as in torch's backward().

        Raises:
            RuntimeError: `steps` micro-batches are in already; a parameter has a gradient from elsewhere; the loss has
                no gradient.
            ValueError: a loss of several elements, or of the other reduction as far as its graph shows; tokens < 0.
            TypeError: tokens that are no integer; a sparse gradient.
        """
        self._stage.check_backward()
        check_loss(loss)
        count = token_count(tokens, loss.device)
        check_reduction(loss, self.reduction, self.steps)
        self._scale.check_unscaled(loss)
        self._sums.check_untouched()
        self._ranks.check(self._sums.trainable())
        self._weights.expect(count, self._ranks.largest)
        scaled = self._weights.weigh(loss, count)
        scaled = self._scale.applied(scaled)
        self._ranks.before_backward(last=last or self._stage.micro_batches + 1 >= self.steps)
        self._sums.lend()
        with silenced(loss, count == 0):
            scaled.backward(retain_graph=retain_graph)
        self._sums.take()
        self._weights.count_in(loss, count)
        self._stage.micro_batches += 1

    def finish(self) -> None:
        """Ends the window: sums over the ranks and divides, so that .grad is the gradient of the mean loss.

        Not needed before step(); for code that looks at gradients or clips them itself. Gradients are float32 with
        halfstep's optimizers, of the parameter's dtype with others, and carry the scaler's scale: call
        scaler.unscale_(optimizer) before clipping. Then call step(). Where several ranks share the batch all must call
        it, also those without a micro-batch in this window.

        Raises RuntimeError if nothing was accumulated, or if FSDP2's gradients are not reduced (see backward()).
        """
        self._stage.check_finish(alone=self._ranks.size == 1)
        self._ranks.check_summed()
        self._sums.check_untouched()
        totals = self._weights.totals(self._device)
        self._weights.expect(totals[1], self._ranks.largest)
        self._ranks.sum_totals(totals)
        loss, count = totals.unbind()
        factor = self._weights.factor(count) * self._ranks.divided_by
        self._sums.multiply(factor * self._scale.correction(factor.device))
        self._ranks.sum_gradients(self._sums.trainable(), self._sums.sums)
        if not self._sums.sums:
            refuse_empty()
        self._sums.give(wide=isinstance(innermost(self.optimizer), FusedAdam))
        self._weights.learn(count / self._ranks.size)
        self._loss, self._tokens = loss / count.clamp(min=1), count.long()
        self._stage.finished = True

    def step(self, *, update_scale: bool = True) -> Any:
        """finish(), if it was not called; then the optimizer's step, the scaler's update, and a new window.

        Args:
            update_scale: False leaves scaler.update() to the caller, for several optimizers with one scaler.

        Returns whether the step was skipped (0-d bool, on the device) with halfstep's optimizers or LossScaler; else
        what the scaler's or the optimizer's step() returned. Raises as finish() and as these.
        """
        if not self._stage.finished:
            self.finish()
        self._sums.check_given()
        self._stage.stepping = True
        try:
            if self.scaler is None:
                result = self.optimizer.step()
            else:
                result = self.scaler.step(self.optimizer)
        finally:
            self._stage.stepping = False
        if self.scaler is not None and update_scale:
            self.scaler.update()
        inner = innermost(self.optimizer)
        self.reset()
        return inner.skipped if isinstance(inner, FusedAdam) else result

    def reset(self) -> None:
        """Drops the window's gradients and begins a new one, for instance after an error in a micro-batch."""
        self._sums.clear()
        self._ranks.after_window()
        self._start_window()

    # ---- state -----------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same bits, between windows alone. Waits for the device.

        Raises RuntimeError within a window, whose gradients are in no checkpoint: step() or reset() first.
        """
        self._stage.check_between_windows("state_dict()")
        expected = self._weights.expected
        return {"window_tokens": None if expected is None else float(expected)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() returned, the same on every rank.

        Raises RuntimeError within a window, ValueError for anything else.
        """
        self._stage.check_between_windows("load_state_dict()")
        expected = state_dict.get("window_tokens", 0.0)
        if expected is not None and (not isinstance(expected, float) or not expected >= 1):
            raise ValueError(
                f"the accumulator's state has window_tokens={expected!r}; expected None or a number >= 1, as "
                "state_dict() gives"
            )
        known = None if expected is None else torch.tensor(expected, dtype=torch.float64, device="cpu")
        self._weights.expected = known

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "an accumulator belongs to its optimizer and model, so it is not copied or pickled; save state_dict() "
            "between two windows and load it into a new hs.Accumulator"
        )


def _checked_steps(steps: int) -> int:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps={steps!r}: expected an integer >= 1, the number of micro-batches in a window")
    return steps
