"""The C allocator of a process that trains: what is freed stays the process's own.

By default glibc hands large blocks back to the kernel and takes them anew a moment later, zeroed and page by page. A
training step frees and takes the same blocks over and over, so a third of a convolution's backward went into page
faults; whether it did hung on what else lay in the heap, so that two processes timed the same layers 40 % apart.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""


def keep_freed_memory() -> None:
    """From now on this process keeps what it frees for itself; without glibc all stays as it is."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, -1)  # never shrink the heap
        mallopt(M_MMAP_MAX, 0)  # nor take large blocks from outside it


def give_back_freed_memory() -> None:
    """Hand the kernel what is free in the heap, as far as glibc can: what comes next needs blocks of other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)
