"""A sound Triton kernel, and what faults make of it."""

import triton
import triton.language as tl

# What may be wrong with it
NOTHING, FUSED, FAST_DIVISION, FAST_ROOT, UNALIGNED = [tl.constexpr(i) for i in range(5)]
MASKED, CONVERTED, SPILLED, ROOT_OF_DENORMALS, LOST_SIGN = [tl.constexpr(i) for i in range(5, 10)]


@triton.jit
def planted_kernel(table, half_ptr, tiles, FAULT: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    # Addresses from a table, as the real kernels take them
    x_ptr = tl.multiple_of(tl.load(table).to(tl.pointer_type(tl.float32)), 16)
    y_ptr = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(tl.float32)), 16)
    for k in range(tiles):
        i = k * BLOCK + tl.arange(0, BLOCK)
        if FAULT == UNALIGNED:
            i = 3 * i
        if FAULT == MASKED:
            x = tl.load(x_ptr + i, mask=i < tiles * 7, other=0.0)
        else:
            x = tl.load(x_ptr + i)
        if FAULT == FUSED:
            z = tl.fma(x, x, 1.0)
        else:
            z = x * x + 1.0
        if FAULT == FAST_DIVISION:
            z = z / x
        else:
            z = tl.div_rn(z, x)
        if FAULT == FAST_ROOT:
            z = tl.sqrt(z)
        elif FAULT == ROOT_OF_DENORMALS:
            z = tl.sqrt_rn(z)
        else:
            small = z < 2.0**-64
            z = tl.sqrt_rn(z * tl.where(small, 2.0**64, 1.0)) * tl.where(small, 2.0**-32, 1.0)
        if FAULT == CONVERTED:
            z = tl.sum(tl.reshape(z, (4, BLOCK // 4)), 0)
            tl.store(y_ptr + k * BLOCK + tl.arange(0, BLOCK // 4), z)
        elif FAULT == SPILLED:
            tl.store(y_ptr + i, tl.sort(z) + z)
        else:
            tl.store(y_ptr + i, z)
        if FAULT == LOST_SIGN:
            tl.store(half_ptr + i, (tl.load(half_ptr + i).to(tl.float32) * z).to(tl.float16))
