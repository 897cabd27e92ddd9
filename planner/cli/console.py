"""The two terminals: what was asked for goes to ``out`` (stdout), all else to ``err`` (stderr)."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from typing import Any

from rich.console import Console
from rich.text import Text

WIDEST = 100
"""Columns that sentences fill at most: longer lines are hard to read."""


class _Terminal(Console):
    """A console whose reader may have seen enough (``| head``): that is no fault."""

    def on_broken_pipe(self) -> None:
        """What is still buffered goes nowhere.

        Without a reader of the answer the command ends quietly; without one of what is said beside it (``2>&1 | head``)
        it goes on: a run is not cut because nobody looks.
        """
        os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if self.stderr else sys.stdout).fileno())
        if not self.stderr:
            raise SystemExit(0)


out = _Terminal(highlight=False, soft_wrap=False)
err = _Terminal(stderr=True, highlight=False)


def say(text: str, *, to: Console = out, indent: int = 0, style: str = "") -> None:
    """Sentences, wrapped at the terminal's width, with the lines after the first indented; no word is broken."""
    lines = textwrap.wrap(
        text,
        width=min(to.width, WIDEST),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines or [""]:
        to.print(Text(line, style=style), soft_wrap=True)


def remark(text: str) -> None:
    """What is worth knowing beside the answer: on stderr, wrapped."""
    say(f"remark: {text}", to=err, indent=8)


def say_if_estimated(provenance: str, device: str, *, to: Console = out) -> None:
    """Every answer that rests on estimates says so."""
    words = if_estimated(provenance, device)
    if words is not None:
        say(words, to=to)


def if_estimated(provenance: str, device: str) -> str | None:
    """The sentence with which every answer that rests on estimates says so."""
    return f"all of this is ESTIMATED for {device}: nothing was measured there" if provenance == "estimated" else None


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
