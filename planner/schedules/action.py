"""One action of a rank, in the notation that PyTorch's own pipelining uses: stage, letter, micro-batch (``3F0``)."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Letter(StrEnum):
    """F: forward. B: full backward = I, for the input's gradient, then W, for the weights' gradients."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    __hash__ = str.__hash__  # the same members, several times faster than Enum's own


class Action(NamedTuple):
    """What one rank does for one stage and one micro-batch."""

    stage: int
    letter: Letter
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.letter.value}{self.microbatch}"


Order = tuple[Action, ...]
"""The actions of one rank, in the order it runs them."""

Schedule = tuple[Order, ...]
"""One order per pipeline rank, 0..P-1."""

_NOTATION = re.compile(r"(\d+)([FBIW])(\d+)")


def parse_action(text: str) -> Action:
    """The action that ``3F0`` spells. Raises ValueError on anything else."""
    match = _NOTATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no action; write stage, F, B, I or W, micro-batch, e.g. 3F0")
    return Action(int(match[1]), Letter(match[2]), int(match[3]))


def format_order(order: Order) -> str:
    """One rank's actions as a plan file holds them: ``0F0 0F1 0B0 ...``."""
    return " ".join(map(str, order))
