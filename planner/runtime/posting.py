"""When a rank posts its receives: each as the plan has its message come, so that its buffers are those planned.

    sender     ───F1───┐      ───F2───┐           a message leaves when the action that makes it ends
                       ▼              ▼
    receiver  │───────B0───────│──────F1──────│──────B1──────│──────F2──────│
              post F1's        post F2's                                     with the action in which that is planned

One that the plan has this rank wait for is posted when it is waited for. What leaves earlier than planned, because this
rank is slower, waits in the link and at its sender. But a rank that would hardly hold more for it posts a receive an
action before it is waited for at the latest, so that messages come beside its compute whoever is slow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from planner.cluster import Link
from planner.runtime.messages import Key, Post, Step
from planner.schedules import Action

HARDLY: Final = 0.02
"""Of what a rank holds anyway."""
_ROUNDING: Final = 1e-9
"""Of the step: what is as near is one instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the plan says of the step to come."""

    action_s: Callable[[Action], float]
    """Seconds of an action."""
    message_bytes: Callable[[str], int]
    """Of a tensor that passes between stages."""
    link: Callable[[int, int], Link | None]
    """The link from one rank to another; None: it takes no time."""
    overlap: bool
    """Whether messages travel beside the sender's compute."""
    buffered_bytes: int
    """A message of no more than that leaves its sender before its receive is posted; a larger one only then."""
    held_bytes: Sequence[int]
    """What each rank holds at the least when it holds most."""


def posts(steps: Sequence[Sequence[Step]], forecast: Forecast) -> tuple[tuple[tuple[Post, ...], ...], ...]:
    """Per rank and action, what is posted as the action begins, before it waits for what it needs.

    What is posted only to be waited for at once is not among it.
    """
    foretold = _Foretold(steps, forecast)
    return tuple(_posts(rank, row, foretold, forecast) for rank, row in enumerate(steps))


def _posts(rank: int, row: Sequence[Step], foretold: _Foretold, forecast: Forecast) -> tuple[tuple[Post, ...], ...]:
    """Of one rank."""
    ends_s, room_bytes = foretold.ends_s[rank], HARDLY * forecast.held_bytes[rank]
    instant_s = _ROUNDING * max((own[-1] for own in foretold.ends_s if own), default=0.0)
    made: list[dict[int, int]] = [{} for _ in row]
    for position, step in enumerate(row):
        late_bytes = 0
        for sender, number, key in step.waits:
            comes = min(position, bisect_right(ends_s, foretold.begins_s[key] + instant_s))
            late_bytes += forecast.message_bytes(key.name) if comes == position else 0
            if comes == position and late_bytes <= room_bytes:
                comes = max(0, position - 1)
            if comes < position:
                made[comes][sender] = max(made[comes].get(sender, 0), number + 1)
    return tuple(tuple(entry.items()) for entry in made)


class _Foretold:
    """When each rank's actions end, and from when on each message can be received."""

    def __init__(self, steps: Sequence[Sequence[Step]], forecast: Forecast) -> None:
        self._forecast = forecast
        self.ends_s: list[list[float]] = [[] for _ in steps]
        self.begins_s: dict[Key, float] = {}
        self._arrives_s: dict[Key, float] = {}
        self._free_s: dict[tuple[int, int], float] = {}
        while sum([self._go_on(rank, row) for rank, row in enumerate(steps)]):
            pass

    def _go_on(self, rank: int, row: Sequence[Step]) -> int:
        """How many actions a rank does with the messages that are known."""
        own, arrives_s = self.ends_s[rank], self._arrives_s
        first = len(own)
        while len(own) < len(row) and all(key in arrives_s for _, _, key in row[len(own)].waits):
            step = row[len(own)]
            start = max([own[-1] if own else 0.0, *(arrives_s[key] for _, _, key in step.waits)])
            own.append(self._hand_over(rank, step, start + self._forecast.action_s(step.action)))
        return len(own) - first

    def _hand_over(self, rank: int, step: Step, done: float) -> float:
        """Note the messages of an action that is done; when it ends."""
        forecast, end = self._forecast, done
        for (receiver, _), entries in groupby(step.sends, lambda entry: (entry[0], entry[1].to_stage)):
            keys, link = [key for _, key in entries], forecast.link(rank, receiver)
            num_bytes = sum(forecast.message_bytes(key.name) for key in keys)
            latency_s, busy_s = (link.latency_s, num_bytes / link.bandwidth_bytes_per_s) if link else (0.0, 0.0)
            began = max(end, self._free_s.get((rank, receiver), 0.0)) if forecast.overlap else end
            left = self._free_s[rank, receiver] = began + busy_s
            self._arrives_s |= dict.fromkeys(keys, left + latency_s)
            self.begins_s |= dict.fromkeys(keys, left if num_bytes <= forecast.buffered_bytes else began)
            if not forecast.overlap:
                end = left + latency_s
        if not forecast.overlap:
            self._arrives_s |= {key: end for _, key in step.sends}
            self.begins_s |= {key: end for _, key in step.sends if self.begins_s[key] > done}
        return end
