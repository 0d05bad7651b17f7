"""Batch normalisation whose statistics are those of a whole window of micro-batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .ops.layout import NARROW
from .window_statistics import MicroBatch, Moments, Normalise, measured, merged, over_ranks


class EffectiveBatchNorm:
    """Makes the BatchNorm layers of a model count a window of micro-batches as one batch, in place.

    **Merged**, at the cost of the usual forward pass: every layer normalises by its micro-batch, as always, and its
    running statistics move once a window, at `update()`, by one momentum, to the mean and the unbiased variance of all
    elements of the window: those of one large batch, where without this they move once for each micro-batch, to each
    one's own variance. num_batches_tracked counts windows.

        norms = hs.EffectiveBatchNorm(model)
        ...
        if accumulator.ready:
            accumulator.step()
            norms.update()

    For layers whose inputs do not depend on another BatchNorm the running statistics are those of the whole batch to
    float32 rounding. Deeper layers see inputs that were normalised by micro-batch: their running statistics are exactly
    those of what they saw.

    **Exact**, `exact()`: passes without gradients come first and collect the statistics of the window, by which every
    layer then normalises. Outputs, loss and running statistics are those of the whole batch to float32 rounding, for
    every layer.

    Gradients are not those of the whole batch in either way, since a micro-batch's backward pass cannot know how the
    others depend on the shared mean and variance. Relative error of the whole gradient, networks of linear, BatchNorm
    and ReLU layers of width 16, float64, 8 micro-batches, mean of 5 seeds:

        BatchNorm layers, samples in a micro-batch      1, 16    1, 64    3, 16    3, 64    8, 16
        every micro-batch by itself (as in "merged")    0.43     0.17     0.72     0.41     1.52
        "exact"                                         0.24     0.08     0.37     0.17     0.64
        exact statistics, taken as constants            0.48     0.54     1.12     1.20     1.33

    The last is what normalising by given statistics would come to; so "exact" takes the two means that batch
    normalisation subtracts from a gradient over the micro-batch. LayerNorm, RMSNorm and GroupNorm need nothing of this.

    Layers in eval mode, and what they do there, are left alone; evaluating in the middle of a window is refused, since
    it would mean that update() was forgotten. A layer inside a checkpointed block counts once, with hs.checkpoint and
    with torch's. Copies of the model, and models loaded from a pickle, have plain layers. Not for torch.compile.

    SyncBatchNorm, for statistics over ranks within each micro-batch, is torch's own and needs nothing of this either:

        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device])
        accumulator = hs.Accumulator(optimizer, steps, model=model)

    Then every rank needs as many micro-batches as the others, and a mean over the ranks' samples is what is normalised
    by; running statistics move once for each micro-batch.

    Args:
        model: any module; its BatchNorm layers of all dimensions, those that are there now.
        process_group: ranks whose micro-batches belong to the same windows; all of them then call update() and exact()
            equally often. In "merged", two all-reduces a window of 8 bytes a channel; in "exact", for every sweep.

    Kept for each micro-batch and layer until update(): 8 bytes a channel.

    Raises:
        ValueError: no BatchNorm layer, or a SyncBatchNorm, which shares its statistics by itself.
        RuntimeError: the layers belong to another EffectiveBatchNorm.

    Example:
        >>> norm = torch.nn.BatchNorm1d(1)
        >>> norms = hs.EffectiveBatchNorm(norm)
        >>> for values in ([[0.0], [2.0]], [[4.0], [6.0], [8.0]]):
        ...     _ = norm(torch.tensor(values))
        >>> norms.update()
        >>> norm.running_mean.item(), norm.running_var.item(), norm.num_batches_tracked.item()
        (0.4000000059604645, 1.899999976158142, 1)
    """

    def __init__(self, model: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
        if not layers:
            raise ValueError("the model has no BatchNorm layer; other norms need no statistics of a window")
        for name, layer in layers.items():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ValueError(
                    f"layer {name!r} is a SyncBatchNorm, which shares its statistics in every micro-batch by itself. "
                    "For statistics of a window over ranks use BatchNorm layers and process_group="
                )
            if isinstance(layer.__dict__.get("forward"), _Forward) and layer.__dict__["forward"].active:
                raise RuntimeError(f"layer {name!r} belongs to another EffectiveBatchNorm; call its remove() first")
        self._group = process_group
        self._forwards = [_Forward(layer, name) for name, layer in layers.items()]
        weakref.finalize(self, _remove, self._forwards)

    def update(self) -> None:
        """Ends a window: running statistics move once, by those of all micro-batches since the last update().

        Without waiting for the device. Layers that saw no micro-batch (of any rank) stay as they are.
        """
        with torch.no_grad():
            for forward, moments in zip(self._forwards, self._moments(), strict=True):
                forward.move(moments)
        self.reset()

    def reset(self) -> None:
        """Drops what the window has collected, without moving anything: after an error, or accumulator.reset()."""
        for forward in self._forwards:
            forward.seen.clear()

    def _moments(self) -> list[Moments]:
        found = [forward.moments() for forward in self._forwards]
        return found if self._group is None else over_ranks(found, self._group)

    @contextmanager
    def exact(
        self, batches: Sequence[Any], forward: Callable[[Any], Any], *, sweeps: int | None = None
    ) -> Iterator[None]:
        """While inside, the layers normalise by the statistics of all these micro-batches; leaving is an update().

            with norms.exact(batches, lambda batch: model(batch.x)):
                for batch in batches:
                    accumulator.backward(loss(model(batch.x), batch.y), tokens=len(batch.y))
            accumulator.step()

        Args:
            batches: the window's micro-batches, a list (it is gone through several times).
            forward: runs one of them through the model; called without gradients, its result is dropped. Random
                numbers are the same in every sweep and in the pass inside, if that begins with the same micro-batch.
            sweeps: passes over all of `batches` before. None: as many as there are layers in training mode. The first
                makes the statistics exact of layers before which there is no other BatchNorm, each further one those of
                the next. Fewer cost less: the rest then normalise by statistics that are nearly those of the window.

        Cost: `sweeps` forward passes more. Inside, a layer's forward pass saves its input, as always, and has temporary
        tensors of its size in float32.

        Every micro-batch needs more than one value a channel, as in torch: the means that are taken over it would else
        be the values themselves, and their gradients 0.

        Raises TypeError for an iterator, which a sweep would exhaust; ValueError for sweeps < 1 or no micro-batch
        (unless other ranks have some), and torch's for micro-batches of one value a channel.
        """
        training = [one for one in self._forwards if one.layer().training]
        sweeps = len(training) if sweeps is None else sweeps
        self._check(batches, sweeps)
        self.reset()
        devices = {tensor.device for one in training for tensor in one.tensors() if tensor.device.type == "cuda"}
        try:
            for _ in range(sweeps):
                with torch.no_grad(), torch.random.fork_rng(devices):
                    for batch in batches:
                        forward(batch)
                    moments = self._moments()
                for one, of_window in zip(self._forwards, moments, strict=True):
                    one.given = of_window
                    one.seen.clear()
            yield
            for one in self._forwards:
                if one.given is not None:
                    one.move(one.given)
        finally:
            for one in self._forwards:
                one.given = None
            self.reset()

    def _check(self, batches: Sequence[Any], sweeps: int) -> None:
        if not hasattr(batches, "__len__"):
            raise TypeError(
                f"exact() goes through the micro-batches several times, got {type(batches).__name__}; pass a list"
            )
        if sweeps < 1:
            raise ValueError(f"sweeps={sweeps}: expected an integer >= 1")
        if not len(batches) and self._group is None:
            raise ValueError("exact() got no micro-batch, so there are no statistics to normalise by")

    def remove(self) -> None:
        """The layers are plain again; what the window has collected is dropped."""
        _remove(self._forwards)


def _remove(forwards: list[_Forward]) -> None:
    for forward in forwards:
        forward.remove()


class _Forward:
    """Stands as `forward` on a BatchNorm layer in training mode. On copies of the layer it only hands on."""

    def __init__(self, layer: _BatchNorm, name: str) -> None:
        self.name, self.active = name, True
        self.seen: list[MicroBatch] = []
        self.given: Moments | None = None  # what to normalise by
        self._layer = weakref.ref(layer)
        self._previous = layer.__dict__.get("forward")
        layer.__dict__["forward"] = self

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "layer": self._layer(), "previous": self._previous}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self.active = state["name"], False
        self.seen, self.given = [], None
        self._layer, self._previous = weakref.ref(state["layer"]), state["previous"]

    def layer(self) -> _BatchNorm:
        found = self._layer()
        assert found is not None, "whoever asks holds the model"
        return found

    def tensors(self) -> list[Tensor]:
        layer = self.layer()
        return [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer()
        if not self.active or not layer.training:
            if self.active and self.seen and self.given is None:
                raise RuntimeError(
                    f"layer {self.name!r} evaluates while {len(self.seen)} micro-batches have not moved its running "
                    "statistics; call update() of the EffectiveBatchNorm at the end of every window, or reset()"
                )
            return type(layer).forward(layer, x) if self._previous is None else self._previous(x)
        layer._check_input_dim(x)
        if self.given is not None:
            return self._by_window(layer, x, self.given)
        return self._by_micro_batch(layer, x)

    def _by_micro_batch(self, layer: _BatchNorm, x: Tensor) -> Tensor:
        running = layer.running_mean
        if running is None or running.dtype in NARROW:
            if running is not None or not torch.is_grad_enabled():
                self._saw(measured(x))
            return F.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
        # A momentum of 1 leaves the micro-batch's own statistics, which nothing has to compute again.
        mean, variance = (running.new_zeros(x.shape[1]) for _ in range(2))
        y = F.batch_norm(x, mean, variance, layer.weight, layer.bias, True, 1.0, layer.eps)
        self._saw(MicroBatch(x.numel() // x.shape[1], mean, variance, unbiased=True))
        return y

    def _by_window(self, layer: _BatchNorm, x: Tensor, given: Moments) -> Tensor:
        if not torch.is_grad_enabled():  # a sweep
            self._saw(measured(x))
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, variance = given.mean.to(dtype), given.variance(unbiased=False).to(dtype)
        return Normalise.apply(x, layer.weight, layer.bias, mean, variance, layer.eps)  # type: ignore[return-value]

    def _saw(self, micro_batch: MicroBatch) -> None:
        # Within a backward pass it is a checkpointed block that runs again. Private; torch's checkpoint asks the same.
        if torch._C._current_graph_task_id() == -1:
            self.seen.append(micro_batch)

    def moments(self) -> Moments:
        layer = self.layer()
        device = next((t.device for t in self.tensors()), torch.device("cpu"))
        return merged(self.seen, layer.num_features, device)

    def move(self, moments: Moments) -> None:
        layer = self.layer()
        if layer.running_mean is None or layer.running_var is None or not layer.training:
            return
        count = torch.zeros_like(moments.count) if layer.num_batches_tracked is None else layer.num_batches_tracked
        count += moments.count > 0
        momentum = 1.0 / count.clamp(min=1).double() if layer.momentum is None else layer.momentum
        for running, new in ((layer.running_mean, moments.mean), (layer.running_var, moments.variance(unbiased=True))):
            moved = running.double() * (1 - momentum) + new * momentum
            running.copy_(torch.where(moments.count > 0, moved, running.double()))

    def remove(self) -> None:
        layer = self._layer()
        self.active = False
        self.seen.clear()
        if layer is None or layer.__dict__.get("forward") is not self:  # somebody's forward calls this one
            return
        if self._previous is None:
            del layer.__dict__["forward"]
        else:
            layer.__dict__["forward"] = self._previous
