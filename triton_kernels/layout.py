"""Where things are in the tables that kernels read from device memory; halfstep's ops/triton_tables.py fills them.

Each name is a word of 8 bytes counted from the table's start, or a column: of n tensors, column c begins at c * n.
"""

import triton.language as tl


def _places(first: int, count: int) -> list[tl.constexpr]:
    return [tl.constexpr(i) for i in range(first, first + count)]


# Rows of an optimizer: int64 columns. Addresses; what there is none of is 0.
PARAM, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, WIDE, STEP_COUNTER = _places(0, 6)  # WIDE: master or remainder
NUMEL, FIRST_INDEX, PARAM_ID, GROUP = _places(6, 4)
ROW_COLUMNS = 10

# Settings of a step: int64 words, of which float64 numbers lend their bits; then so many for each group.
MAX_NORM, SKIP_NONFINITE, SEED = _places(0, 3)
HEADER_WORDS = tl.constexpr(3)
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, FLAGS = _places(0, 6)
GROUP_WORDS = tl.constexpr(6)
DECOUPLED, MAXIMIZE, LR_ON_DEVICE, LR_IS_DOUBLE = [tl.constexpr(1 << i) for i in range(4)]  # of FLAGS

# Records, which the prologue writes for the update: float32 columns, the last two of int32.
R_BETA1, R_ONE_MINUS_BETA1, R_BETA2, R_ONE_MINUS_BETA2, R_EPS, R_WEIGHT_DECAY, R_DECAY = _places(0, 7)
R_STEP_SIZE, R_SQRT_CORRECTION2, R_SIGN, R_T = _places(7, 4)  # R_SIGN flips the gradient; R_T: the step
RECORD_COLUMNS = 11

# Results of a step: int64 words, the first one a float64.
NORM, SKIPPED, HEALED, FIRST_BAD = _places(0, 4)
