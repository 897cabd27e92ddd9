"""Every error that a user can meet, in one tree.

    PipeplanError            exit code 1   a bug of ours, unless a subclass says otherwise
    ├── InputError           exit code 2   a file, an option or a model that is wrong: names the place and the mend
    ├── NothingFitsError     exit code 3   no plan fits, or a plan no longer fits: what is missing where and by how much
    └── RunError             exit code 4   a run failed: rank, stage, micro-batch, action

The command line prints an error as one line, ``message; hint``, and exits with its code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


def words_of(error: BaseException) -> str:
    """An exception's type and the first line of what it says; the next ones too where a line but leads up to them."""
    said = ""
    for line in str(error).split("\n"):
        said = f"{said} {line.strip()}".strip()
        if said and not said.endswith(":"):
            break
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


class PipeplanError(Exception):
    """Base of all errors of pipeplan.

    ``message`` states the fact with its numbers, ``hint`` the mend; both are one line.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.hint = " ".join(hint.split())

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class InputError(PipeplanError):
    """Something the user gave is wrong."""

    exit_code = 2


class NothingFitsError(PipeplanError):
    """No plan fits the memory there is, or a given plan does not."""

    exit_code = 3


class RunError(PipeplanError):
    """A run started and failed."""

    exit_code = 4


def nearest(name: str, names: Iterable[str]) -> str:
    """The mend for a name that is not there: the most alike of those that are."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0)
    return f"did you mean {found[0]!r}?" if found else "correct the name"
