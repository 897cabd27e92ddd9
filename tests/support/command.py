"""The command line as a function: words in, exit code and both streams out."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import pytest

from planner.cli.main import main


class Answer(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str


def pipeplan(*words: object) -> Answer:
    """Run ``pipeplan`` with these words, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return Answer(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def refused(answer: Answer, *, code: int = 2) -> str:
    """The one line that a refusal puts on stderr: no traceback, no bug of ours, nothing on stdout."""
    assert answer.code == code, answer
    assert answer.err.startswith("pipeplan: "), answer
    assert answer.err.count("\n") == 1, answer
    assert answer.err.endswith("\n"), answer
    assert answer.err[:-1].isprintable(), answer
    assert "a bug in pipeplan" not in answer.err
    assert "; " in answer.err, "the mend is missing"
    return answer.err[len("pipeplan: ") : -1]
