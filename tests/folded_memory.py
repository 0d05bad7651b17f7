"""Tensors of more than 2**31 elements in little memory: one block of pages appears again and again, the end is real."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import TracebackType

import torch
from torch import Tensor

_BLOCK = 2**26  # bytes of the block that repeats: few mappings, and small beside what it stands for
_TAIL = 2**16  # bytes at the end that are memory of their own
_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class FoldedZeros:
    """`tensor`: 1-d zeros. All but its last elements share one block of memory: a kernel that writes the same number
    (0) everywhere there behaves as on ordinary memory. Use as a context manager; the tensor is invalid afterwards."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        used = numel * torch.empty((), dtype=dtype).element_size()
        folded = (used - _TAIL // 2) // mmap.PAGESIZE * mmap.PAGESIZE
        self._size = folded + _TAIL
        self._file = os.memfd_create("folded")
        os.ftruncate(self._file, _BLOCK + _TAIL)
        self._address = self._map(None, self._size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        for at in range(0, folded, _BLOCK):
            self._place(at, min(_BLOCK, folded - at), 0)
        self._place(folded, _TAIL, _BLOCK)
        raw = (ctypes.c_char * used).from_address(self._address)
        self.tensor: Tensor = torch.frombuffer(raw, dtype=dtype)

    def _place(self, at: int, size: int, offset: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._map(self._address + at, size, access, mmap.MAP_SHARED | _MAP_FIXED, self._file, offset)

    @staticmethod
    def _map(address: int | None, size: int, access: int, flags: int, file: int, offset: int) -> int:
        found = _libc.mmap(address, size, access, flags, file, offset)
        if found == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, kind: type | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None:
            return  # pytest prints a failing test's tensors: they stay readable
        del self.tensor
        _libc.munmap(self._address, self._size)
        os.close(self._file)
