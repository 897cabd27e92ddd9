"""What machine this is: the device's name and memory, the versions of what runs on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from planner.errors import InputError
from planner.profile import Device


def chosen_device(asked: str | None) -> str:
    """``cpu`` or ``cuda``: what was asked for, else a GPU where there is one.

    Raises InputError where a GPU is asked for and there is none.
    """
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here", hint="use --device cpu")
    return asked


def this_device(kind: str, *, notes: dict[str, str]) -> Device:
    """The device that is measured; ``notes`` on how go beside the versions."""
    software = {"torch": torch.__version__, "python": platform.python_version()}
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        software |= {"cuda": str(torch.version.cuda), "driver": _driver()}
        return Device(
            kind="cuda", name=properties.name, memory_bytes=properties.total_memory, software=software | notes
        )
    return Device(kind="cpu", name=_cpu_name(), memory_bytes=_ram_bytes(), software=software | notes)


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _ram_bytes() -> int:
    """The memory that this process may use: the machine's, or its control group's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _group_bytes("memory.max", "memory.limit_in_bytes")
    return total if limit is None else min(total, limit)


def free_bytes(kind: str) -> int:
    """The memory that is free on the device now, for this process."""
    if kind == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    known = dict(line.split(":", 1) for line in lines)
    free = int(known["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in known else _ram_bytes()
    limit, used = (
        _group_bytes("memory.max", "memory.limit_in_bytes"),
        _group_bytes("memory.current", "memory.usage_in_bytes"),
    )
    if limit is None or used is None:
        return free
    return min(free, max(0, limit - used + _group_cache_bytes()))


def _group_cache_bytes() -> int:
    """Of the control group's memory what only caches files, and is given back when asked for."""
    for path, key in (("memory.stat", "file"), ("memory/memory.stat", "total_cache")):
        try:
            lines = (Path("/sys/fs/cgroup") / path).read_text().splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)
    return 0


def _group_bytes(*names: str) -> int | None:
    """What the control group says, in its second or first version."""
    for path in (Path("/sys/fs/cgroup") / names[0], Path("/sys/fs/cgroup/memory") / names[1]):
        try:
            word = path.read_text().strip()
        except OSError:
            continue
        if word.isdigit():
            return int(word)
    return None
