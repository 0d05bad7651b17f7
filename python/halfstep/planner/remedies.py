"""What would make a model train that does not fit, and by what margin; what this version cannot do yet among it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .hardware import Hardware
from .memory import Estimate, Model, estimate
from .quantities import shown
from .search import EXACT, HOST_OFFLOAD, NARROW_STATES, NO_MASTER, Candidate, Space, Wish, fits, most_frugal
from .states import MODES

INT8 = "weights-int8-states"
MOST_GPUS = 4096  # how far the search for enough GPUs goes

NARROWER = {"narrow states": NARROW_STATES, "no master": NO_MASTER, "int8 states": (INT8,)}
CHANGES = {
    "sharded": "float32 masters and states, everything sharded, recomputed and split as far as it goes",
    "offload": "parameters and optimizer states on the host (torch's FSDP2 CPUOffloadPolicy)",
    "bfloat16": "bfloat16 weights and gradients, float32 masters and states",
    "narrow states": "bfloat16 optimizer states beside a master",
    "no master": "8 bytes per parameter, 12 with accumulation: 16-bit weights and states, stochastic rounding",
    "int8 states": "block-quantised 8-bit optimizer states, no master",
    "optimizer offload": "optimizer states alone on the host",
}
UNAVAILABLE = {
    "int8 states": MODES[INT8].reason,
    "optimizer offload": "halfstep does not move states to the host yet",
}


@dataclass(frozen=True)
class Remedy:
    """One change, and whether the model trains with it: the most frugal way at one sequence on each rank."""

    change: str
    gpus: int
    optimizer: str
    states: int  # bytes on a GPU of weights, gradients, masters and optimizer states
    peak: int  # bytes on a GPU
    host: int  # bytes of RAM for a GPU
    host_missing: int  # of which its share of the node lacks
    margin: int  # bytes of GPU memory that are left at the peak; negative: missing
    fits: bool  # on the GPU and on the host
    available: bool  # in this version
    reason: str = ""  # why not

    def __str__(self) -> str:
        on = f"{shown(self.peak, 'bytes')} per GPU at the peak ({shown(self.states, 'bytes')} of states)"
        host = f", {shown(self.host, 'bytes')} of RAM per GPU" if self.host else ""
        host += f" ({shown(self.host_missing, 'bytes')} missing)" if self.host_missing else ""
        left = f"{shown(abs(self.margin), 'bytes')} {'left' if self.margin >= 0 else 'missing'}"
        verdict = "fits" if self.fits else "does not fit"
        unavailable = "" if self.available else f"; not available in this version ({self.reason})"
        return f"{self.change}: {verdict}, {on}, {left}{host}{unavailable}"


def remedies(model: Model, hardware: Hardware, wish: Wish, space: Space) -> list[Remedy]:
    """What the most frugal way needs as things are, and after each change."""
    float32 = wish.precision in ("fp32", "amp-bf16")
    wide = replace(space, optimizers=("fp32",) if float32 else EXACT)
    variants: list[tuple[str, Wish, Space]] = [("sharded", wish, wide)]
    if wish.precision != "fp16":  # which is not sharded in this version, so FSDP2 cannot offload it
        variants.append(("offload", wish, replace(wide, offloads=(HOST_OFFLOAD,), zeros=(3,))))
    if float32:
        variants.append(("bfloat16", replace(wish, precision="bf16"), replace(space, optimizers=EXACT)))
    else:
        if wish.precision == "fp16":
            variants.append(("bfloat16", replace(wish, precision="bf16"), Space(pipeline_parallels=(1,))))
        variants += [(key, wish, replace(space, optimizers=modes)) for key, modes in NARROWER.items()]
    variants.append(("optimizer offload", wish, replace(wide, offloads=(frozenset({"optimizer"}),))))
    found = []
    for key, wished, variant in variants:
        candidate = most_frugal(model, hardware, wished, variant)
        if candidate is not None:
            found.append(_remedy(CHANGES[key], candidate, hardware, UNAVAILABLE.get(key, "")))
    more = _more_gpus(model, hardware, wish, wide)
    return found if more is None else [*found, more]


def _more_gpus(model: Model, hardware: Hardware, wish: Wish, space: Space) -> Remedy | None:
    """The least number of GPUs (in whole nodes, once there are several) on which it trains without any other change."""
    for gpus in _more(hardware):
        larger = replace(hardware, gpus=gpus)
        candidate = most_frugal(model, larger, wish, space)
        if candidate is not None and fits(candidate.estimate, larger):
            return _remedy(f"{gpus:,} GPUs", candidate, larger)
    return None


def _more(hardware: Hardware) -> Iterator[int]:
    gpus = hardware.gpus
    while gpus < hardware.gpus_per_node:
        gpus = min(2 * gpus, hardware.gpus_per_node)
        yield gpus
    nodes = hardware.nodes
    while (gpus := (nodes := nodes + max(1, nodes // 8)) * hardware.gpus_per_node) <= MOST_GPUS:
        yield gpus


def _remedy(change: str, candidate: Candidate, hardware: Hardware, reason: str = "") -> Remedy:
    found = candidate.estimate
    return Remedy(
        change=change,
        gpus=hardware.gpus,
        optimizer=candidate.job.optimizer,
        states=state_bytes(found),
        peak=found.peak,
        host=sum(found.host.values()),
        host_missing=hardware.host_missing(found.host),
        margin=hardware.gpu_memory - found.peak,
        fits=fits(found, hardware),
        available=not reason,
        reason=reason,
    )


STATES = ("parameters", "gradients", "masters", "optimizer_states")


def state_bytes(found: Estimate) -> int:
    return sum(found.parts.get(part, 0) for part in STATES)


# ---- savings that this version does not have -------------------------------------------------------------------------
@dataclass(frozen=True)
class Unavailable:
    """What a job would need with something that this version cannot do."""

    change: str
    peak: int
    saves: int  # bytes of the peak


def unavailable(model: Model, candidate: Candidate) -> list[Unavailable]:
    """For the chosen job: each saving that is computed, but never chosen."""
    job, peak = candidate.job, candidate.estimate.peak
    changes: list[tuple[str, dict]] = [("fused linear cross entropy (logits never whole)", {"loss": "fused"})]
    if job.accumulation == 1:
        changes.append(("gradient release (update inside backward)", {"release_gradients": True}))
    int8 = {"split": "split-int8-states", "master": "split-int8-states"}.get(job.optimizer, "weights-int8-states")
    if MODES[job.optimizer].weight_bytes == 2 and job.precision == "bf16":
        changes.append(("block-quantised 8-bit optimizer states", {"optimizer": int8}))
    if "optimizer" not in job.offload:
        changes.append(("optimizer states on the host", {"offload": job.offload | {"optimizer"}}))
    found = ((text, estimate(model, replace(job, **change)).peak) for text, change in changes)
    return [Unavailable(text, less, peak - less) for text, less in found if less < peak]
