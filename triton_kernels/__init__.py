"""Triton kernels, by operator family, and their launches. Installed as `halfstep.triton_kernels`.

    elements, philox, adam_math   what kernels share: dtypes and rounding, random words, the arithmetic
    grad_stats, prologue, update  the optimizer phase       elementwise   scale, cast, accumulate
    layout, sizes, launch         the tables they read, how much a program takes, the launches
    flat, flat_kernels, untraced  the same on one tensor, for users to call

Nothing here imports halfstep, and importing this package does not import triton: the operator layer imports `launch`
when the first GPU tensor comes.
"""
