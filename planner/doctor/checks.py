"""Each check of this machine: a fact, its state, and the mend where it is not well."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Final

from planner.record import record
from planner.units import format_bytes, format_seconds

_PROBE_TIMEOUT_S: Final = 300
_GIB: Final = 1024**3
_TORCH: Final = ">=2.11,<2.14"
_WANTED: Final = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)")
"""A package of the metadata, and its bounds."""
_LEAST_FREE_BYTES: Final = _GIB
"""Below this a disk is said to be nearly full: checkpoints and torch's own caches need more."""


class State(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@record
class Finding:
    """What one check found. ``mend``: what to do about it; empty where it is ok. ``figures``: for programs."""

    name: str
    state: State
    fact: str
    mend: str = ""
    figures: dict[str, Any] | None = None


class ProbeError(Exception):
    """A child process that was asked something ended without an answer; the message is its last words."""


def probe(*words: str) -> dict[str, Any]:
    """What ``python -m planner.doctor.probe`` answers. Raises ProbeError where it does not."""
    try:
        made = subprocess.run(
            [sys.executable, "-m", "planner.doctor.probe", *words],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {_PROBE_TIMEOUT_S} s") from None
    except OSError as error:
        raise ProbeError(f"no process could be started ({error.strerror})") from None
    if made.returncode:
        said = [line.strip() for line in made.stderr.splitlines() if line.strip()]
        raise ProbeError(said[-1][:200] if said else f"ended with code {made.returncode}")
    answer: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return answer


def examine() -> Iterator[Finding]:
    """Every check, one after the other, as each is done."""
    machine: dict[str, Any] = {}
    for check in CHECKS:
        yield from check(machine)


# --- the checks; ``machine`` holds what an earlier one found ----------------------------------------------------------


def _python(_: dict[str, Any]) -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info < (3, 11)
    yield Finding(
        name="python",
        state=State.BROKEN if old else State.OK,
        fact=f"{found}, {sys.executable}",
        mend="pipeplan needs Python 3.11 or later" if old else "",
        figures={"version": found},
    )


def _packages(_: dict[str, Any]) -> Iterator[Finding]:
    """The packages that pipeplan's own metadata asks for."""
    try:
        wanted = [entry for entry in requires("pipeplan") or () if "extra ==" not in entry]
    except PackageNotFoundError:
        yield Finding(name="packages", state=State.WARNING, fact="pipeplan is not installed", mend="pip install .")
        return
    asked = {match[1]: match[2] for entry in wanted if (match := _WANTED.match(entry)) and match[1] != "torch"}
    found, missing, unfit = {}, [], {}
    for name, bounds in asked.items():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
        else:
            if not _within(found[name], bounds):
                unfit[name] = bounds
    state = State.BROKEN if missing else State.WARNING if unfit else State.OK
    said = [*(f"{name} not there" for name in missing)]
    said += [f"{name} {found[name]} is none that pipeplan is made for" for name in unfit]
    mend = " ".join([*missing, *(f"'{name}{bounds}'" for name, bounds in unfit.items())])
    yield Finding(
        name="packages",
        state=state,
        fact=", ".join(said) or f"pipeplan {version('pipeplan')}, all it needs is there",
        mend=f"pip install {mend}" if mend else "",
        figures=found,
    )


def _within(found: str, bounds: str) -> bool:
    """Whether a version keeps to bounds such as ``<4,>=3.3``, by its numbers."""
    own = _numbers(found)
    return not any(
        (sign == "<" and own >= _numbers(bound)) or (sign == ">=" and own < _numbers(bound))
        for sign, bound in re.findall(r"(<|>=)([\d.]+)", bounds)
    )


def _numbers(text: str) -> tuple[int, ...]:
    """E.g. (2, 13) of ``2.13.0+cpu``: zeros at its end say nothing."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _solver(_: dict[str, Any]) -> Iterator[Finding]:
    name = "solver"
    try:
        found = probe("solver")
    except ProbeError as error:
        yield Finding(name=name, state=State.BROKEN, fact=str(error), mend="pip install 'pulp[highs]>=3.3,<4'")
        return
    solved = {solver: found[solver] == found["optimum"] for solver in ("highs", "cbc")}
    if solved["highs"]:
        state, fact, mend = State.OK, f"HiGHS solves a small integer programme (PuLP {found['pulp']})", ""
    elif solved["cbc"]:
        state, fact = State.WARNING, f"HiGHS does not work ({_one_line(found['highs'])}); CBC, far slower, does"
        mend = "pip install 'pulp[highs]>=3.3,<4'"
    else:
        state, fact = State.BROKEN, f"no solver works (HiGHS: {_one_line(found['highs'])})"
        mend = "pip install 'pulp[highs]>=3.3,<4'"
    yield Finding(name=name, state=state, fact=fact, mend=mend, figures=found)


def _torch(machine: dict[str, Any]) -> Iterator[Finding]:
    try:
        found = probe("torch")
    except ProbeError as error:
        mend = f"pip install 'torch{_TORCH}'; import, simulate, check, solve and show do without"
        yield Finding(name="torch", state=State.BROKEN, fact=str(error), mend=mend)
        return
    machine["torch"] = found
    tried = _within(found["version"], _TORCH)
    build = f"CUDA {found['cuda']}" if found["cuda"] else "CPU build"
    yield Finding(
        name="torch",
        state=State.OK if tried else State.WARNING,
        fact=f"{found['version']} ({build})",
        mend="" if tried else f"pipeplan is made for torch 2.11 to 2.13: pip install 'torch{_TORCH}'",
        figures={"version": found["version"], "cuda": found["cuda"]},
    )
    yield _backends(found)
    yield _gpus(found)


def _backends(found: dict[str, Any]) -> Finding:
    there = [name for name in ("gloo", "nccl") if found[name]]
    if not found["gloo"]:
        state, mend = State.BROKEN, "install a torch build with torch.distributed and gloo"
    elif found["gpus"] and not found["nccl"]:
        state, mend = State.BROKEN, "GPUs talk over nccl: install a CUDA build of torch"
    else:
        state, mend = State.OK, ""
    return Finding(
        name="backends",
        state=state,
        fact=", ".join(there) or "none",
        mend=mend,
        figures={name: found[name] for name in ("gloo", "nccl")},
    )


def _gpus(found: dict[str, Any]) -> Finding:
    gpus = found["gpus"]
    cores = os.cpu_count() or 1
    if gpus:
        shown = dict.fromkeys(f"{gpu['name']} ({format_bytes(gpu['memory_bytes'])})" for gpu in gpus)
        held = [index for index, gpu in enumerate(gpus) if gpu["free_bytes"] < 0.9 * gpu["memory_bytes"]]
        state = State.WARNING if held else State.OK
        fact = f"{len(gpus)}: {', '.join(shown)}"
        fact += f"; others hold over a tenth of GPU {', '.join(map(str, held))}" if held else ""
        mend = "end what runs there (nvidia-smi lists it), or plan with --memory" if held else ""
    elif shutil.which("nvidia-smi") and not found["cuda"]:
        state, fact = State.WARNING, "there is an NVIDIA driver, but this torch is a CPU build"
        mend = "install a CUDA build of torch to train on the GPUs"
    else:
        state, fact = State.WARNING, f"none: runs train in processes on {cores} CPU cores"
        mend = f"fine to try things; times mean little with more than {cores} processes"
    return Finding(name="GPUs", state=state, fact=fact, mend=mend, figures={"cpu_cores": cores, "gpus": gpus})


def _processes(machine: dict[str, Any]) -> Iterator[Finding]:
    """Two processes that meet and send to each other, as the ranks of a run do."""
    if "torch" not in machine:
        return
    fault = _loopback_fault()
    if fault:
        yield Finding(
            name="processes",
            state=State.BROKEN,
            fact=f"this machine cannot connect to itself: 127.0.0.1: {fault}",
            mend="bring its loopback interface up (ip link set lo up), or allow connections to localhost",
        )
        return
    device = "cuda" if len(machine["torch"]["gpus"]) > 1 else "cpu"
    where = "two GPUs" if device == "cuda" else "two processes"
    try:
        found = probe("link", device)
    except ProbeError as error:
        yield Finding(
            name="processes",
            state=State.BROKEN,
            fact=f"{where} did not meet: {error}",
            mend="allow connections to localhost and writing to the temporary folder",
        )
        return
    yield Finding(name="processes", state=State.OK, fact=f"{where} start, meet and end")
    slow = found["bandwidth_bytes_per_s"] < 1e8 or found["latency_s"] > 5e-3
    beside = "beside compute" if found["overlap"] else "not beside compute"
    yield Finding(
        name="link",
        state=State.WARNING if slow else State.OK,
        fact=f"{format_seconds(found['latency_s'])} and {format_bytes(found['bandwidth_bytes_per_s'])}/s between "
        f"{where}, {beside}",
        mend="a busy machine or a slow network interface; GLOO_SOCKET_IFNAME=lo picks another" if slow else "",
        figures={name: found[name] for name in ("latency_s", "bandwidth_bytes_per_s", "overlap")},
    )


def _loopback_fault() -> str:
    """Why a connection to 127.0.0.1 fails; empty where it does not."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _disk(_: dict[str, Any]) -> Iterator[Finding]:
    yield _folder(
        "this folder", Path.cwd(), "plans and profiles are written here: free some room, or go to a folder of yours"
    )
    asked = os.environ.get("TMPDIR")
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        yield Finding(name="temporary folder", state=State.BROKEN, fact=str(error), mend="set TMPDIR to a folder")
        return
    found = _folder("temporary folder", folder, "free some room, or set TMPDIR to a folder that has it")
    if asked and found.state is State.OK and folder.resolve() != Path(asked).resolve():
        found = Finding(
            name=found.name,
            state=State.WARNING,
            fact=f"TMPDIR names {asked}, which cannot be written; {found.fact}",
            mend="set TMPDIR to a folder that can be written",
            figures=found.figures,
        )
    yield found


def _folder(name: str, folder: Path, mend: str) -> Finding:
    """Whether a file can be written there, and the room that is left."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(name=name, state=State.BROKEN, fact=f"{folder}: {error.strerror}", mend=mend)
    state = State.WARNING if free < _LEAST_FREE_BYTES else State.OK
    return Finding(
        name=name,
        state=state,
        fact=f"{folder}, {format_bytes(free)} free",
        mend=mend if state is State.WARNING else "",
        figures={"free_bytes": free},
    )


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:120]


Check = Callable[[dict[str, Any]], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (_python, _packages, _solver, _torch, _processes, _disk)
