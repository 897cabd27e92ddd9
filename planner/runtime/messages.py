"""Which tensors travel between which ranks, in which order: derived from the stages' boundaries and the schedule.

    tensor x, made in stage 0, read in stages 1, 3 and 4; 1 and 3 lie on rank 1, 4 on rank 0 (as 0 does)

    forward    0F ──x──▶ rank 1: 1F, 3F         a rank receives a tensor once, for the lowest stage that reads it
                0F ──▶ 4F                        a stage on the same rank takes it over
    gradient   4B ──x'──▶ 3B ──▶ 1B ──x'──▶ 0B   relayed: each reader adds its own, as one process adds them

Both ends of a link go through its messages in the order in which the sender hands them over, so no tags are needed.
After the last action the gradients of tied parameters travel: for each, by name, down the stages that use it, and the
sum back up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from planner.errors import InputError
from planner.record import record
from planner.schedules import Action, Letter, Schedule, Wiring, check_schedule


class BoundaryLike(Protocol):
    """A tensor that passes between stages; planner.capture.Boundary is one."""

    @property
    def name(self) -> str:
        """Unique in the model."""

    @property
    def producer(self) -> int:
        """The stage that makes it."""

    @property
    def readers(self) -> tuple[int, ...]:
        """The later stages that read it, ascending."""

    @property
    def grad_readers(self) -> tuple[int, ...]:
        """Those of them through which a gradient flows, ascending."""


class Key(NamedTuple):
    """One tensor of one micro-batch on its way to a stage: an activation ("F"), a gradient ("B"), a tied gradient.

    A tied parameter's partial sum goes down ("D"), the whole sum back up ("U"); their micro-batch is -1.
    """

    way: str
    name: str
    to_stage: int
    microbatch: int


class Kind(NamedTuple):
    """What all micro-batches' messages of one tensor share: their layout is told once, but for tied gradients."""

    way: str
    name: str
    to_stage: int

    @property
    def is_tied(self) -> bool:
        """Whether it is a sum of a tied parameter's gradients, of which a step may have none."""
        return self.way in ("D", "U")


Post = tuple[int, int]
"""A sending rank, and how many of its messages of a training step have their receives posted by then."""


@record
class Routes:
    """The boundaries of a cut by stage, and the ranks of the stages."""

    ranks: tuple[int, ...]
    reads: tuple[tuple[str, ...], ...]
    """Names of the activations that each stage's F reads from other stages."""
    sends: tuple[tuple[tuple[int, str], ...], ...]
    """(reading stage, name) in the order handed over after F: nearest stage first."""
    gradient_reads: tuple[tuple[str, ...], ...]
    """Names whose gradient comes from a later stage."""
    returns: tuple[tuple[tuple[int, str], ...], ...]
    """(stage, name) in the order handed over after B or I: highest stage first."""
    ties: tuple[tuple[str, tuple[int, ...]], ...]
    """Trainable parameters that several stages use, by name, with those stages, ascending."""

    @property
    def wiring(self) -> Wiring:
        """The same between whole stages."""
        return Wiring(
            ranks=self.ranks,
            sends=tuple(tuple(dict.fromkeys(to for to, _ in row)) for row in self.sends),
            returns=tuple(tuple(dict.fromkeys(to for to, _ in row)) for row in self.returns),
        )


def routes(
    boundaries: Sequence[Sequence[BoundaryLike]],
    ranks: Sequence[int],
    *,
    parameters: Sequence[Sequence[str]],
    trainable: Callable[[str], bool],
) -> Routes:
    """The routes of all tensors: ``boundaries[k]`` are made in stage k, ``parameters[k]`` used there."""
    num_stages = len(ranks)
    reads: list[list[str]] = [[] for _ in range(num_stages)]
    gradient_reads: list[list[str]] = [[] for _ in range(num_stages)]
    sends: list[list[tuple[int, str]]] = [[] for _ in range(num_stages)]
    returns: list[list[tuple[int, str]]] = [[] for _ in range(num_stages)]
    for made in (boundary for row in boundaries for boundary in row):
        for reader in made.readers:
            reads[reader].append(made.name)
            sends[made.producer].append((reader, made.name))
        chain = (made.producer, *made.grad_readers)
        for before, reader in itertools.pairwise(chain):
            gradient_reads[before].append(made.name)
            returns[reader].append((before, made.name))
    users: dict[str, list[int]] = {}
    for stage, names in enumerate(parameters):
        for name in names:
            users.setdefault(name, []).append(stage)
    return Routes(
        ranks=tuple(ranks),
        reads=tuple(map(tuple, reads)),
        sends=tuple(tuple(sorted(row, key=lambda entry: entry[0])) for row in sends),
        gradient_reads=tuple(map(tuple, gradient_reads)),
        returns=tuple(tuple(sorted(row, key=lambda entry: -entry[0])) for row in returns),
        ties=tuple((name, tuple(users[name])) for name in sorted(users) if len(users[name]) > 1 and trainable(name)),
    )


def check_routes(schedule: Schedule, found: Routes, *, num_microbatches: int) -> tuple[str, ...]:
    """Check that a schedule runs to its end over these routes; the remarks on it.

    Raises InputError with the first fault.
    """
    checked = check_schedule(schedule, num_microbatches=num_microbatches, wiring=found.wiring)
    if checked.errors:
        more = f" (and {len(checked.errors) - 1} more)" if len(checked.errors) > 1 else ""
        raise InputError(f"schedule: {checked.errors[0]}{more}", hint="correct the plan's schedule or actions")
    return checked.remarks


# --- what one rank does -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a rank with all that it takes, keeps and hands over."""

    action: Action
    waits: tuple[tuple[int, int, Key], ...]
    """(sending rank, position in that rank's messages to this one, what it is): received before the action starts."""
    reads: tuple[Key, ...]
    """What the action is given of other stages' tensors."""
    drops: tuple[Key, ...]
    """What no later action on this rank reads."""
    keeps: tuple[Key, ...]
    """What the action makes that a later action of another stage on this rank reads."""
    sends: tuple[tuple[int, Key], ...]
    """(receiving rank, what it is), in the order handed over."""


@dataclass(frozen=True, slots=True)
class TiedStep:
    """One stage's part in the sum of a tied parameter's gradients, after the last action."""

    name: str
    stage: int
    upwards: bool
    """Whether it hands the whole sum back up, rather than its part of it down."""
    waits: tuple[int, int] | None
    """(sending rank, position in that rank's messages to this one) of what it reads, where that comes from one."""
    reads: Key | None
    hands_over: Key | None
    to_rank: int
    leaves: bool
    """Whether what it hands over goes to another rank."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A rank's part of one training step, before the optimizer."""

    rank: int
    steps: tuple[Step, ...]
    tied: tuple[TiedStep, ...]
    inbox: Mapping[int, tuple[Kind, ...]]
    """Per sending rank: all its messages of a step to this one, in order."""
    posts: tuple[tuple[Post, ...], ...] = ()
    """Per step what is posted as it begins, as planner.runtime.posting has it; none: all only when waited for."""


def rank_programs(schedule: Schedule, found: Routes) -> tuple[RankProgram, ...]:
    """What each rank does."""
    tied = _tied_steps(found, len(schedule))
    handed = {rank: _handed_over(order, found) for rank, order in enumerate(schedule)}
    inboxes: list[dict[int, list[Key]]] = [{} for _ in schedule]
    for rank in range(len(schedule)):
        sent = [entry for row in handed[rank] for entry in row]
        sent += [(step.to_rank, step.hands_over) for step in tied[rank] if step.hands_over and step.leaves]
        for receiver, key in sent:
            inboxes[receiver].setdefault(rank, []).append(key)
    places = [
        {key: (sender, place) for sender, keys in inbox.items() for place, key in enumerate(keys)} for inbox in inboxes
    ]
    steps = [_rank_steps(order, handed[rank], found, rank, places[rank]) for rank, order in enumerate(schedule)]
    closing = [
        [replace(step, waits=places[rank].get(step.reads)) if step.reads else step for step in tied[rank]]
        for rank in range(len(schedule))
    ]
    return tuple(
        RankProgram(
            rank=rank,
            steps=tuple(steps[rank]),
            tied=tuple(closing[rank]),
            inbox={sender: tuple(Kind(*key[:3]) for key in keys) for sender, keys in inboxes[rank].items()},
        )
        for rank in range(len(schedule))
    )


def _handed_over(order: Sequence[Action], found: Routes) -> list[list[tuple[int, Key]]]:
    """Per action of one rank, its messages to other ranks: (receiving rank, what)."""
    rows: list[list[tuple[int, Key]]] = []
    for stage, letter, microbatch in order:
        row: list[tuple[int, Key]] = []
        here = found.ranks[stage]
        if letter is Letter.FORWARD:
            has_it = {(here, name) for _, name in found.sends[stage]}
            for reader, name in found.sends[stage]:
                if (found.ranks[reader], name) not in has_it:
                    has_it.add((found.ranks[reader], name))
                    row.append((found.ranks[reader], Key("F", name, reader, microbatch)))
        elif letter is not Letter.BACKWARD_WEIGHT:
            for before, name in found.returns[stage]:
                if found.ranks[before] != here:
                    row.append((found.ranks[before], Key("B", name, before, microbatch)))
        rows.append(row)
    return rows


def _rank_steps(
    order: Sequence[Action],
    handed: Sequence[Sequence[tuple[int, Key]]],
    found: Routes,
    rank: int,
    places: Mapping[Key, tuple[int, int]],
) -> list[Step]:
    """The steps of one rank: who on it reads what first and last follows from its order."""
    arriving = {(key.name, key.microbatch): key for key in places if key.way == "F"}
    reads: list[tuple[Key, ...]] = []
    for stage, letter, m in order:
        if letter is Letter.FORWARD:
            # A tensor has one key on a rank: that of the message, or of the lowest reader where it is made here.
            reads.append(tuple(arriving.get((name, m)) or _local(found, rank, name, m) for name in found.reads[stage]))
        elif letter is Letter.BACKWARD_WEIGHT:
            reads.append(())
        else:
            reads.append(tuple(Key("B", name, stage, m) for name in found.gradient_reads[stage]))
    first: dict[Key, int] = {}
    last: dict[Key, int] = {}
    for position, row in enumerate(reads):
        for key in row:
            first.setdefault(key, position)
            last[key] = position
    return [
        Step(
            action=action,
            waits=tuple((*places[key], key) for key in reads[position] if key in places and first[key] == position),
            reads=reads[position],
            drops=tuple(key for key in reads[position] if last[key] == position),
            keeps=tuple(key for key in _made(action, found) if key in first and key not in places),
            sends=tuple(handed[position]),
        )
        for position, action in enumerate(order)
    ]


def _local(found: Routes, rank: int, name: str, microbatch: int) -> Key:
    readers = [stage for stage, names in enumerate(found.reads) if name in names and found.ranks[stage] == rank]
    return Key("F", name, min(readers), microbatch)


def _made(action: Action, found: Routes) -> list[Key]:
    """What an action makes for other stages, as the keys of those that read it."""
    stage, letter, microbatch = action
    if letter is Letter.BACKWARD_WEIGHT:
        return []
    way, row = ("F", found.sends[stage]) if letter is Letter.FORWARD else ("B", found.returns[stage])
    return [Key(way, name, to, microbatch) for to, name in row]


def _tied_steps(found: Routes, num_ranks: int) -> list[list[TiedStep]]:
    """Per rank, the sums of tied gradients: down the stages and back up, parameter by parameter."""
    made: list[list[TiedStep]] = [[] for _ in range(num_ranks)]
    for name, stages in found.ties:
        for way, path in (("D", stages[::-1]), ("U", stages)):
            for index, stage in enumerate(path):
                rank = found.ranks[stage]
                after = path[index + 1] if index + 1 < len(path) else None
                made[rank].append(
                    TiedStep(
                        name=name,
                        stage=stage,
                        upwards=way == "U",
                        waits=None,
                        reads=Key(way, name, stage, -1) if index else None,
                        hands_over=None if after is None else Key(way, name, after, -1),
                        to_rank=rank if after is None else found.ranks[after],
                        leaves=after is not None and found.ranks[after] != rank,
                    )
                )
    return made
