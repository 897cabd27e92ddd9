"""Messages derived from boundaries and schedule: run with names in place of tensors, on random graphs of stages."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from support.messages import Boundary, Case, cases

from planner.errors import InputError
from planner.runtime.messages import Key, RankProgram, check_routes, rank_programs, routes
from planner.schedules import Action, Letter


class Rank:
    """Runs one rank's program with the names of tensors as tensors."""

    def __init__(self, program: RankProgram) -> None:
        self.program = program
        self.position = 0
        self.held: dict[Key, str] = {}
        self.seen: list[tuple[Action, dict[str, str]]] = []


def run(case: Case) -> list[Rank]:
    """All ranks to their ends, each as far as its messages allow."""
    programs = rank_programs(case.schedule, case.routes)
    ranks = [Rank(program) for program in programs]
    links: dict[tuple[int, int], list[tuple[Key, str]]] = {}
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            while rank.position < len(rank.program.steps):
                step = rank.program.steps[rank.position]
                if any(len(links.get((sender, number), [])) <= place for sender, place, _ in step.waits):
                    break
                for sender, place, key in step.waits:
                    sent_as, value = links[sender, number][place]
                    assert sent_as == key
                    assert rank.program.inbox[sender][place] == key[:3]
                    rank.held[key] = value
                given_now = {key.name: rank.held[key] for key in step.reads}
                rank.seen.append((step.action, given_now))
                for key in step.drops:
                    del rank.held[key]
                for key in (*step.keeps, *(key for _, key in step.sends)):
                    relayed = given_now.get(key.name, "") if key.way == "B" else ""
                    value = f"{key.way}{key.name}@{step.action.stage}.{key.microbatch}({relayed})"
                    if key in step.keeps:
                        rank.held[key] = value
                    for receiver in [receiver for receiver, other in step.sends if other == key]:
                        links.setdefault((number, receiver), []).append((key, value))
                rank.position += 1
                moved = True
    return ranks


@given(cases())
def test_every_action_gets_what_its_stage_reads(case: Case) -> None:
    assert check_routes(case.schedule, case.routes, num_microbatches=case.num_microbatches) is not None
    ranks = run(case)
    made_by = {boundary.name: boundary for row in case.boundaries for boundary in row}
    for rank in ranks:
        assert rank.position == len(rank.program.steps), "it stopped before its end"
        assert not rank.held, "something was kept that nobody read"
        for (stage, letter, m), given_now in rank.seen:
            if letter is Letter.FORWARD:
                wanted = {b.name: f"F{b.name}@{b.producer}.{m}()" for b in made_by.values() if stage in b.readers}
                assert given_now == wanted
            elif letter is Letter.BACKWARD_WEIGHT:
                assert not given_now
            else:
                assert given_now == {
                    b.name: relayed(b, stage, m)
                    for b in made_by.values()
                    if any(reader > stage for reader in b.grad_readers) and stage in (b.producer, *b.grad_readers)
                }


def relayed(boundary: Boundary, stage: int, microbatch: int) -> str:
    """What reaches a stage: the last reader's gradient, through every reader after the stage."""
    value = ""
    for reader in sorted((reader for reader in boundary.grad_readers if reader > stage), reverse=True):
        value = f"B{boundary.name}@{reader}.{microbatch}({value})"
    return value


@given(cases())
def test_a_tensor_reaches_a_rank_once(case: Case) -> None:
    programs = rank_programs(case.schedule, case.routes)
    for program in programs:
        for sender, kinds in program.inbox.items():
            sent = Counter(
                (key.way, key.name, key.to_stage if key.way != "F" else None, key.microbatch)
                for step in programs[sender].steps
                for receiver, key in step.sends
                if receiver == program.rank
            )
            assert set(sent.values()) <= {1}
            assert sum(sent.values()) == sum(kind.way in "FB" for kind in kinds)


@given(cases())
def test_tied_gradients_go_down_the_stages_and_come_back(case: Case) -> None:
    programs = rank_programs(case.schedule, case.routes)
    users = dict(case.routes.ties)
    assert "c" not in users, "what is not trained has no gradient"
    for name, stages in users.items():
        steps = [step for program in programs for step in program.tied if step.name == name]
        down = sorted((step for step in steps if not step.upwards), key=lambda step: -step.stage)
        up = sorted((step for step in steps if step.upwards), key=lambda step: step.stage)
        assert [step.stage for step in down] == list(reversed(stages))
        assert [step.stage for step in up] == list(stages)
        for before, after in [*itertools.pairwise(down), *itertools.pairwise(up)]:
            assert before.hands_over == after.reads
            assert (before.to_rank, before.leaves) == (
                case.routes.ranks[after.stage],
                case.routes.ranks[after.stage] != case.routes.ranks[before.stage],
            )


def test_a_schedule_that_would_wait_for_ever_is_refused() -> None:
    boundary = [[Boundary("h0", 0, (1,), (1,))], []]
    found = routes(boundary, (0, 1), parameters=[[], []], trainable=lambda name: True)
    forward, backward = Letter.FORWARD, Letter.BACKWARD
    orders = (
        (Action(0, forward, 0), Action(0, backward, 0)),
        (Action(1, backward, 0), Action(1, forward, 0)),
    )
    with pytest.raises(InputError, match="1B0"):
        check_routes(orders, found, num_microbatches=1)
