"""Triton kernels, one file per operator family: a `_kernel` and the `launch` function that calls it.

Installed as `halfstep.triton_kernels`. Nothing here imports halfstep, and importing this package does not import
triton: the operator layer imports the one file it needs when a GPU tensor comes. The first kernels (optimizer, cast)
arrive with the GPU backends; until then the package is empty on purpose.
"""
