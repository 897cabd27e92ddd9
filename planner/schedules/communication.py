"""The messages of a schedule, derived: which, between which ranks, in which order.

A sender hands its messages over in the order of its actions, those of one action in the order of the stage's list; the
receiver posts its receives for each sender in just that order, ahead of time. So both ends of a pair of ranks agree
without a word, and no schedule free of deadlock can block, as long as sends do not wait for their receivers.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.schedules.action import Action, Letter, Order, Schedule
from planner.schedules.wiring import Wiring


class Message(NamedTuple):
    """What ``action`` hands over to a stage on another rank: an activation after F, a gradient after B or I."""

    action: Action
    to_stage: int


Channels = dict[tuple[int, int], tuple[Message, ...]]
"""Per ordered pair of ranks (sender, receiver), its messages in the order in which both ends take them."""


def sent_by(action: Action, wiring: Wiring) -> list[Message]:
    """The messages that an action hands over to other ranks, in order."""
    if action.letter is Letter.BACKWARD_WEIGHT:
        return []
    targets = (wiring.sends if action.letter is Letter.FORWARD else wiring.returns)[action.stage]
    here = wiring.ranks[action.stage]
    return [Message(action, target) for target in targets if wiring.ranks[target] != here]


def channels(schedule: Schedule, wiring: Wiring) -> Channels:
    """All messages of a schedule by ordered pair of ranks."""
    found: dict[tuple[int, int], list[Message]] = {}
    for rank, order in enumerate(schedule):
        for action in order:
            for message in sent_by(action, wiring):
                found.setdefault((rank, wiring.ranks[message.to_stage]), []).append(message)
    return {pair: tuple(messages) for pair, messages in sorted(found.items())}


def blocks_under_rendezvous(schedule: Schedule, wiring: Wiring) -> tuple[int, Action] | None:
    """The first rank and action that would wait for ever if every send waited for its receive; None: none would.

    There a rank receives what an action needs right before it, sender by sender, and sends right after it.
    """
    programs = [_program(order, wiring) for order in schedule]
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                sends, other, message, _ = program[at[rank]]
                if not sends:
                    break
                there = programs[other][at[other]] if at[other] < len(programs[other]) else None
                if there is None or there[0] or there[2] != message:
                    break
                at[rank] += 1
                at[other] += 1
                moved = True
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            return rank, program[at[rank]][3]
    return None


_Step = tuple[bool, int, tuple[int, int, str, int], Action]
"""Send or receive, the other rank, what is sent (from stage, to stage, F or B, micro-batch), the action it is for."""


def _program(order: Order, wiring: Wiring) -> list[_Step]:
    """A rank's sends and receives, one after the other."""
    ranks = wiring.ranks

    def elsewhere(rows: tuple[tuple[int, ...], ...]) -> list[list[tuple[int, int]]]:
        return [[(ranks[other], other) for other in row if ranks[other] != ranks[k]] for k, row in enumerate(rows)]

    activations = ("F", elsewhere(wiring.senders), elsewhere(wiring.sends))
    gradients = ("B", elsewhere(wiring.returners), elsewhere(wiring.returns))
    steps: list[_Step] = []
    for action in order:
        stage, letter, m = action
        if letter is not Letter.BACKWARD_WEIGHT:
            kind, sources, targets = activations if letter is Letter.FORWARD else gradients
            steps += [(False, rank, (source, stage, kind, m), action) for rank, source in sources[stage]]
            steps += [(True, rank, (stage, target, kind, m), action) for rank, target in targets[stage]]
    return steps
