"""Which process speaks for what: makes the loss, tells a parameter, writes it into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.capture import StageProgram
from planner.runtime.job import RunJob


def loss_process(job: RunJob, programs: Sequence[StageProgram]) -> int:
    """The process that makes the loss, of the first replica."""
    last = next(program for program in programs if program.has_loss)
    return job.first_process(job.ranks[last.index])


def tellers(job: RunJob, programs: Sequence[StageProgram], unused: Iterable[str]) -> dict[str, int]:
    """The process that tells each parameter: the first one that has it; process 0 those that no stage uses."""
    found = dict.fromkeys(unused, 0)
    for program in programs:
        process = job.first_process(job.ranks[program.index])
        for name in program.parameters:
            found[name] = min(process, found.get(name, process))
    return found


def writing_ranks(job: RunJob, programs: Sequence[StageProgram]) -> dict[str, int]:
    """The pipeline rank that writes each parameter and buffer: the first that changes it, else that uses it."""
    found: dict[str, int] = {}
    for program in sorted(programs, key=lambda program: job.ranks[program.index]):
        for name in (*program.parameters, *program.buffers):
            found.setdefault(name, job.ranks[program.index])
    for program in programs:
        found |= dict.fromkeys(program.changed_buffers, job.ranks[program.index])
    return found
