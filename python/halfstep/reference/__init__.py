"""What every operator means, in plain PyTorch: the oracle of the kernels, and the backend when no kernel is built.

Slow and readable. Imports torch and nothing else of halfstep; runs on any device that has float64.
"""

from .cast import accumulate_, cast_
from .optimizer import AdamGroup, AdamScalars, adam_scalars, clip_coefficient, grad_stats, power, unscale_, update_
from .philox import philox_words
from .rounding import join_master, round_stochastic, round_to, split_master
from .sum_squares import sums_of_squares

__all__ = [
    "AdamGroup",
    "AdamScalars",
    "accumulate_",
    "adam_scalars",
    "cast_",
    "clip_coefficient",
    "grad_stats",
    "join_master",
    "philox_words",
    "power",
    "round_stochastic",
    "round_to",
    "split_master",
    "sums_of_squares",
    "unscale_",
    "update_",
]
