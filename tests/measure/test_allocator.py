"""What a training process frees it gets again without asking the kernel for every page."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes, resource
from planner.allocator import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.memset.argtypes, libc.free.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), (ctypes.c_void_p,)

def use():
    block = libc.malloc(64_000_000)
    libc.memset(block, 1, 64_000_000)
    libc.free(block)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults()
keep_freed_memory()
use()
print(plain, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc here")
def test_large_blocks_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    plain, kept = map(int, done.stdout.split())
    assert plain > 10_000
    assert kept < 100


HOLES = """
import ctypes
from planner.allocator import give_back_freed_memory, keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.memset.argtypes, libc.free.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), (ctypes.c_void_p,)

def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

keep_freed_memory()
before, blocks = held(), []
for _ in range(20):
    blocks.append(libc.malloc(8_000_000))
    libc.memset(blocks[-1], 1, 8_000_000)
    libc.malloc(100)
for block in blocks:
    libc.free(block)
kept = held() - before
give_back_freed_memory()
print(kept, held() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc here")
def test_holes_between_what_lives_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 150_000_000
    assert left < 10_000_000
