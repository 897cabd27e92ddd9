"""The time that a search was given, and the line that says where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


class OutOfTimeError(Exception):
    """The time that was given has run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands; ``phase``: what it is at. ``left``: configurations neither solved nor ruled out."""

    phase: str
    configurations: int
    solved: int
    left: Callable[[], int]
    best_s: float
    bound_s: float

    @property
    def pruned(self) -> int:
        """Configurations that their bound rules out, as far as it is known."""
        return self.configurations - self.solved - self.left()


Watch = Callable[[Progress], None]


class Clock:
    """Seconds since a search began against those it was given (None: all that it needs)."""

    def __init__(self, max_seconds: float | None) -> None:
        self.max_seconds: Final = max_seconds
        self._started: Final = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.monotonic() - self._started

    def is_over(self, share: float = 1.0) -> bool:
        """Whether so much of the time has passed."""
        return self.max_seconds is not None and self.seconds > share * self.max_seconds


def never() -> bool:
    """Where there is no clock."""
    return False
