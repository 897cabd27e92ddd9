"""What a rank's memory lets it still have to do once the last F of one of its stages has begun.

From then on that micro-batch goes through all stages behind and back, however long that takes, and of all others the
rank has only left what it holds: a B (or an I and its W) for what an F saved, a W for what an I left, and for a
micro-batch that is held in that stage also what comes in between. With p that stage, t the start of its last F:

    t >= a + M · (sum of S) - left                        for S = {actions of the rank whose head is a or more}
    t >= head(I) + M · (works) - begun - left             begun: F's that memory holds before the rank's first I
    T >= t + F of p + tail(F of p)

where what is begun and left does not come to all of it. ``left`` is a fractional knapsack over what it takes to hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from planner.graph import Stage
from planner.schedules import Letter
from planner.simulate.memory import held_by


class Piece(NamedTuple):
    """Work that a rank may have left of one micro-batch, and what it holds for it (seconds, bytes)."""

    bytes: float
    seconds: float


def pieces(stage: Stage, *, backward_s: float, weight_s: float | None, between_s: float = 0.0) -> list[Piece]:
    """What may be left of a micro-batch whose F is done, in a stage: the most for a byte first, each at most once.

    ``weight_s``: of its W (None: backwards are whole). ``between_s``: of other stages' work that comes before its B.
    """
    kept = float(held_by(stage, Letter.FORWARD)[1])
    whole = Piece(kept, between_s + backward_s + (weight_s or 0.0))
    if weight_s is None:
        return [whole]
    waiting = Piece(kept + held_by(stage, Letter.BACKWARD_INPUT)[1], weight_s)
    if waiting.seconds * whole.bytes <= whole.seconds * waiting.bytes:
        return [whole]
    return [waiting, Piece(whole.bytes - waiting.bytes, whole.seconds - waiting.seconds)]


def most_s(held: Iterable[Piece], room: float, count: int) -> float:
    """The most seconds of work, at most M of each piece, that a room (bytes) holds at once: a fractional knapsack."""
    made, room = 0.0, max(room, 0.0)
    free = [piece for piece in held if piece.seconds > 0]
    for piece in sorted(free, key=lambda one: one.bytes / one.seconds):
        many = float(count) if not piece.bytes else min(float(count), room / piece.bytes)
        made += many * piece.seconds
        room -= many * piece.bytes
    return made
