"""How a run fails: the first failure's own words, told to every machine of the run."""

from __future__ import annotations

import json
import multiprocessing.forkserver
import signal
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import planner
from planner.errors import InputError, PipeplanError, RunError, words_of
from planner.runtime.board import Slot, State
from planner.runtime.job import RunJob
from planner.schedules import Action

_NOT_THE_USERS = tuple(str(Path(module.__file__ or "").parent) for module in (planner, torch, multiprocessing))

_PHASES = {
    State.STARTING: "while starting",
    State.DATA: "reading data()",
    State.GRADIENTS: "summing gradients",
    State.OPTIMIZER: "in the optimizer step",
    State.VERIFYING: "training in one process to compare",
    State.ENDING: "while ending",
    State.CHECKPOINT: "in a checkpoint",
    State.WAITING: "waiting for the others",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ended a run. ``details``: the traceback of the user's code, or the stack of what hung; may be empty."""

    message: str
    hint: str = ""
    exit_code: int = RunError.exit_code
    details: str = ""

    def to_json(self) -> str:
        """As the store holds it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """What the store holds."""
        return cls(**json.loads(text))

    def error(self) -> PipeplanError:
        """As the exception that the command line ends with."""
        kind = InputError if self.exit_code == InputError.exit_code else RunError
        return kind(self.message, hint=self.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which process it is: ``words`` name its rank, and its replica where there are several."""

    words: str
    order: tuple[Action, ...]

    @classmethod
    def of(cls, job: RunJob, global_rank: int) -> Where:
        """A process of a run."""
        stands = job.place_of(global_rank)
        words = f"rank {stands.rank}" + (f" of replica {stands.replica}" if job.plan.parallel.data > 1 else "")
        return cls(words=words, order=job.schedule[stands.rank])


def place(where: Where, slot: Slot) -> str:
    """What a process was at: ``rank 1, stage 1, micro-batch 3, action 1F3, step 1``; the first step is 1."""
    rank, order = where.words, where.order
    if slot.state in (State.WAITING, State.RUNNING) and 0 <= slot.position < len(order):
        action = order[slot.position]
        words = f"{rank}, stage {action.stage}, micro-batch {action.microbatch}, action {action}, step {slot.step + 1}"
        return words + (", waiting for its messages" if slot.state is State.WAITING else "")
    phase = _PHASES.get(slot.state, "")
    step = "" if slot.state in (State.STARTING, State.ENDING) else f", step {slot.step + 1}"
    return f"{rank}{step}, {phase}"


def raised(error: BaseException, where: str) -> Failure:
    """A rank's own exception."""
    if isinstance(error, PipeplanError):
        cause = error.__cause__
        details = _told(cause) if cause is not None else ""
        message = f"{where}: {error.message}" if isinstance(error, RunError) else error.message
        return Failure(message=message, hint=error.hint, exit_code=error.exit_code, details=details)
    return Failure(
        message=f"{where}: {words_of(error).rstrip('.')}",
        hint="see the traceback above",
        details=_told(error),
    )


def _told(error: BaseException) -> str:
    """An exception's traceback without the frames that are ours or torch's, if any others are in it."""
    told = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = told
    while link is not None:
        own = [frame for frame in link.stack if not frame.filename.startswith(_NOT_THE_USERS)]
        if own:
            link.stack = traceback.StackSummary.from_list(own)
        link = link.__cause__ or link.__context__
    return "".join(told.format())


def _own_lines(stack: str) -> str:
    """The same for a stack that a hung process wrote down."""
    lines = stack.splitlines()
    own = [line for line in lines if not any(f'File "{folder}' in line for folder in _NOT_THE_USERS)]
    return "\n".join(own if any("File" in line for line in own) else lines)


def died(exit_code: int, where: str) -> Failure:
    """A process that ended without a word."""
    if exit_code >= 0:
        return Failure(message=f"{where}: the process ended with code {exit_code}", hint="see its own words above")
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    hint = "out of memory? see dmesg" if -exit_code == signal.SIGKILL else "see its own words above"
    return Failure(message=f"{where}: the process was killed by signal {-exit_code} ({name})", hint=hint)


def left(where: str) -> Failure:
    """A process that ended as if all were done."""
    return Failure(
        message=f"{where}: the process ended with code 0 in mid-run", hint="does the model's code call exit?"
    )


def hung(where: str, *, timeout_s: float, stopped: bool, stack: str) -> Failure:
    """A process that shows no sign of progress."""
    why = " (the process is stopped)" if stopped else ""
    return Failure(
        message=f"{where}: no sign of progress for {timeout_s:g} s{why}",
        hint="mend what hangs, or give it longer with --timeout",
        details=_own_lines(stack),
    )
