"""A sound Triton kernel that adds up squares of products of matrices, and what faults make of it."""

import triton
import triton.language as tl

# What may be wrong with it
NOTHING, UPCAST, MASKED, MISALIGNED = [tl.constexpr(i) for i in range(4)]


@triton.jit
def planted_dots_kernel(a_ptr, b_ptr, out_ptr, steps, FAULT: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    row, column = tl.arange(0, M), tl.arange(0, D)
    stride = 3 * D + 1 if FAULT == MISALIGNED else D
    a = tl.load(a_ptr + row[:, None] * stride + column[None, :])
    total = tl.zeros([M, M], tl.float32)
    for step in range(steps):
        b = tl.load(b_ptr + (step * M + row)[:, None] * stride + column[None, :])
        if FAULT == UPCAST:
            products = tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision="tf32")
        else:
            products = tl.dot(a, tl.trans(b))
        if FAULT == MASKED:
            products = tl.where(row[None, :] <= (row - step)[:, None], products, 0.0)
        total += products * products
    tl.store(out_ptr + row[:, None] * M + row[None, :], total.to(out_ptr.dtype.element_ty))
