"""What test_state_machine.py draws: groups of parameters, gradients, values, and where elements lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from adversarial import BFLOAT16, FLOAT16, FLOAT32, FLOATS
from hypothesis import strategies as st
from torch import Tensor

# More than a vector of 16, more than a block of 512, nothing at all
SHAPES = [(7,), (3, 5), (2, 3, 4, 5), (), (0, 3), (600,)]
MOST_GROUPS = 4
LAYOUTS = ["plain", "transposed", "gaps", "channels_last", "misaligned"]

seeds = st.integers(0, 10_000)
which = st.integers(0, 11)  # modulo what there is
layouts = st.sampled_from(LAYOUTS)
lrs = st.sampled_from([0.0, 1e-3, 0.1])
values = {
    "betas": st.sampled_from([(0.9, 0.999), (0.3, 0.5), (0.0, 0.0)]),
    "eps": st.sampled_from([1e-8, 1e-3]),
    "weight_decay": st.sampled_from([0.0, 0.1]),
    "amsgrad": st.booleans(),
    "maximize": st.booleans(),
}
modes = st.fixed_dictionaries(
    {
        "master": st.sampled_from(["auto", "fp32", "split", "split", None]),
        "state_dtype": st.sampled_from([FLOAT32, FLOAT32, BFLOAT16]),
    }
)
changes = st.one_of(*(st.tuples(st.just(key), value) for key, value in values.items()))
limits = st.sampled_from([None, 0.5, 1e3])
skipping = st.sampled_from([None, None, None, True, True, False])


modes_of_groups = st.one_of(st.none(), st.lists(modes, min_size=MOST_GROUPS, max_size=MOST_GROUPS))
writes = st.sampled_from(["copy", "load_state_dict", "new", "part"])


class NewParam(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int


new_groups = st.fixed_dictionaries(
    {
        "params": st.lists(
            st.builds(NewParam, st.sampled_from(SHAPES), st.sampled_from(FLOATS), layouts, seeds),
            min_size=1,
            max_size=3,
        ),
        "modes": modes,
        "lr": lrs,
        **values,
    }
)


class Gradients(NamedTuple):
    """What backward() leaves: new gradients, none (bits of `missing`), perhaps one that is not finite."""

    seed: int
    spread: float
    missing: int
    layout: str
    bad: tuple[int, float] | None


bad_values = st.sampled_from([float("inf"), float("-inf"), float("nan")])
gradients = st.builds(
    Gradients,
    seeds,
    st.sampled_from([1.0, 1e-3, 100.0]),
    st.sampled_from([0, 0, 0, 0, 0, 1, 2, 6, 0b101010101]),
    layouts,
    st.one_of(st.none(), st.none(), st.none(), st.tuples(which, bad_values)),
)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A copy whose elements lie in another way in memory."""
    backwards = tuple(reversed(range(x.ndim)))
    if layout == "transposed":
        return x.permute(backwards).clone(memory_format=torch.contiguous_format).permute(backwards)
    if layout == "gaps":
        return torch.stack((x, torch.full_like(x, 9.0)), dim=-1)[..., 0]
    if layout == "channels_last" and x.ndim == 4:
        return x.clone(memory_format=torch.channels_last)
    if layout == "misaligned":
        return torch.cat((x.new_full((1,), 9.0), x.reshape(-1)))[1:].view(x.shape)
    return x.clone()


def fitting(master: str | None, dtypes: Sequence[torch.dtype]) -> str | None:
    """A split master needs bfloat16."""
    return "fp32" if master == "split" and FLOAT16 in dtypes else master
