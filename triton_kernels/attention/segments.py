"""Which segment, head and rows a program works on, and moving rows of [rows, D] matrices.

Offsets of rows are int64; within a tile they are int32, so a row's stride stays below 2^23 elements. Strides come in
units of 8 elements, which keeps accesses at 16 bytes whatever the layout.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..elements import BFLOAT16, float_of, narrowed

CHUNK = tl.constexpr(1024)  # segments looked at together


class Config(NamedTuple):
    """What is known when a kernel is compiled."""

    D_K: int
    D_V: int
    WIDTH_K: int  # columns of tiles: powers of 2
    WIDTH_V: int
    BLOCK_M: int  # queries
    BLOCK_N: int  # keys
    EDGE_STAGES: int  # of loads in flight in blocks that are not whole
    PLAIN: bool  # scores stay unscaled until their exponentials
    TOP_LEFT: bool
    UPCAST: bool  # to float32, and rounded to bfloat16 by integers: for the interpreter, which has no bfloat16
    PRECISION: str  # of float32 dot products


class Matrix(NamedTuple):
    """Rows of one head and segment."""

    base: Any
    stride: Any
    length: Any


class Segment(NamedTuple):
    index: Any
    batch: Any  # in the tensors: 0 if segments are named by cu_seqlens
    q_first: Any
    q_length: Any
    k_first: Any
    k_length: Any
    shift: Any  # query i is at the place of key i + shift
    good: Any  # 0: cu_seqlens go down, or out of the tensors


@triton.jit
def number(n):
    """A number that came in a tuple (launch.py, `plain`)."""
    return n >> 2


@triton.jit
def _lengths(cu_ptr, i, exists, rows):
    """(lengths of segments i, whether none of them is negative and all lie within the rows)."""
    begin, end = tl.load(cu_ptr + i, mask=exists, other=0), tl.load(cu_ptr + i + 1, mask=exists, other=0)
    good = (begin >= 0) & (begin <= end) & (end <= rows)
    return tl.where(good, end, 0) - tl.where(good, begin, 0), tl.min(good.to(tl.int32), 0)


@triton.jit
def _find(cu_ptr, rows, other_cu_ptr, other_rows, segments, index, SIZE: tl.constexpr):
    """(segment, block within it, whether both cu_seqlens are in order) of the block `index` of all segments' blocks of
    SIZE rows. There is no such block if the segment is `segments`.

    If they are not in order, all rows are those of segment 0: each of them is told.
    """
    passed, before, blocks_before, good = index * 0, index * 0, index * 0, index * 0 + 1
    for start in range(0, segments, CHUNK):
        i = start + tl.arange(0, CHUNK)
        exists = i < segments
        lengths, of_rows = _lengths(cu_ptr, i, exists, rows)
        _, of_others = _lengths(other_cu_ptr, i, exists, other_rows)
        good = tl.minimum(good, tl.minimum(of_rows, of_others))
        blocks = (lengths + (SIZE - 1)) // SIZE
        done = (before + tl.cumsum(blocks, 0) <= index) & exists
        passed += tl.sum(done.to(tl.int32), 0)
        blocks_before += tl.sum(tl.where(done, blocks, 0), 0)
        before += tl.sum(blocks, 0)
    return tl.where(good != 0, passed, 0), tl.where(good != 0, index - blocks_before, index), good


@triton.jit
def place(cu_ptr, rows, other_cu_ptr, other_rows, heads, segments, SIZE: tl.constexpr, REVERSED: tl.constexpr):
    """(segment, head, block of SIZE rows, whether cu_seqlens are in order) of this program.

    Args:
        cu_ptr, rows: of what the blocks are made of, queries or keys; cu_ptr may be None.
        other_cu_ptr, other_rows: of keys or queries.
    """
    program = tl.program_id(0)
    if cu_ptr is None:
        blocks = tl.cdiv(rows, SIZE)
        block = program % blocks
        if REVERSED:  # blocks with the most work first
            block = blocks - 1 - block
        return program // blocks // heads, program // blocks % heads, block, 1
    else:
        blocks = rows // SIZE + segments  # at least as many as there are
        index, block, good = _find(cu_ptr, rows, other_cu_ptr, other_rows, segments, program % blocks, SIZE)
        return index, program // blocks, block, good


@triton.jit
def _bounds(cu_ptr, index, rows, good):
    """A segment's first row, and how many it has."""
    if cu_ptr is None:
        return 0, rows
    else:
        first = tl.where(good != 0, tl.load(cu_ptr + index), 0)
        return first, tl.where(good != 0, tl.load(cu_ptr + index + 1), rows) - first


@triton.jit
def segment_of(cu_q_ptr, cu_k_ptr, index, shape, good, C: tl.constexpr):
    q_first, q_length = _bounds(cu_q_ptr, index, number(shape[2]), good)
    k_first, k_length = _bounds(cu_k_ptr, index, number(shape[3]), good)
    batch = index if cu_q_ptr is None else index * 0
    shift = 0 if C.TOP_LEFT else k_length - q_length
    return Segment(index, batch, q_first, q_length, k_first, k_length, shift, good)


@triton.jit
def matrix(ptr, strides, batch, head, first, length):
    """strides: of batch, head and row."""
    stride = number(strides[2]) * 8
    offset = number(strides[0]).to(tl.int64) * 8 * batch + number(strides[1]).to(tl.int64) * 8 * head
    return Matrix(ptr + offset + stride.to(tl.int64) * first, stride, length)


@triton.jit
def stat_row(at, head, shape):
    """Where a head's numbers of its rows, [batch, heads, rows], begin."""
    return (at.batch.to(tl.int64) * number(shape[0]) + head) * number(shape[2]) + at.q_first


@triton.jit
def load_rows(x, first, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, C: tl.constexpr):
    """[ROWS, WIDTH] of a Matrix; zeros beyond its length, which is not looked at if ALL, and beyond column D."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    where = x.base + x.stride.to(tl.int64) * first + (row[:, None] * x.stride + column[None, :])
    if ALL and WIDTH == D:
        tile = tl.load(where)
    elif ALL:
        tile = tl.load(where, mask=(column < D)[None, :], other=0)
    elif WIDTH == D:
        tile = tl.load(where, mask=(row < x.length - first)[:, None], other=0)
    else:
        tile = tl.load(where, mask=(row < x.length - first)[:, None] & (column < D)[None, :], other=0)
    if C.UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_rows(x, first, tile, D: tl.constexpr, C: tl.constexpr):
    """Rounds to nearest."""
    row, column = tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
    where = x.base + x.stride.to(tl.int64) * first + (row[:, None] * x.stride + column[None, :])
    if C.UPCAST:
        tile = _nearest_bfloat16(tile)
    exists = (first + row < x.length)[:, None] & (column < D)[None, :]
    tl.store(where, tile.to(x.base.dtype.element_ty), mask=exists)


@triton.jit
def _nearest_bfloat16(x):
    return float_of(narrowed(x, BFLOAT16) << 16)


@triton.jit
def dot(a, b, acc, C: tl.constexpr):
    """a b, added to acc if that is not None; a is rounded to the dtype of b."""
    if C.UPCAST:
        a = _nearest_bfloat16(a)
    OUT: tl.constexpr = tl.float64 if b.dtype == tl.float64 else tl.float32
    return tl.dot(a.to(b.dtype), b, acc, input_precision=C.PRECISION, out_dtype=OUT)
