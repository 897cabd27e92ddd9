"""The check of any table: what is wrong is named by rank, position and action; what is right passes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.schedules import (
    Letter,
    Placement,
    Schedule,
    ScheduleName,
    Wiring,
    build,
    channels,
    check_schedule,
    parse_action,
    ranks_of,
    shape_fault,
)

TWO_RANKS = Wiring.chain(ranks_of(2, 1, Placement.LOOP))


def table(*rows: str) -> Schedule:
    return tuple(tuple(map(parse_action, row.split())) for row in rows)


def errors(*rows: str, num_microbatches: int = 1) -> tuple[str, ...]:
    return check_schedule(table(*rows), num_microbatches=num_microbatches, wiring=TWO_RANKS).errors


@st.composite
def shapes(draw: st.DrawFn) -> tuple[ScheduleName, int, int, int, Placement]:
    placement = draw(st.sampled_from((Placement.LOOP, Placement.V)))
    virtual = 2 if placement is Placement.V else draw(st.integers(1, 4))
    fitting = [name for name in ScheduleName if not shape_fault(name, virtual=virtual, placement=placement)]
    return draw(st.sampled_from(fitting)), draw(st.integers(1, 8)), virtual, draw(st.integers(1, 24)), placement


@settings(max_examples=300, deadline=None)
@given(shapes())
def test_every_schedule_is_complete_in_order_and_free_of_deadlock(
    shape: tuple[ScheduleName, int, int, int, Placement],
) -> None:
    name, num_ranks, virtual, num_microbatches, placement = shape
    schedule = build(name, num_ranks=num_ranks, virtual=virtual, num_microbatches=num_microbatches, placement=placement)
    wiring = Wiring.chain(ranks_of(num_ranks, virtual, placement))
    found = check_schedule(schedule, num_microbatches=num_microbatches, wiring=wiring)
    assert not found.errors
    assert not any("rounding" in remark for remark in found.remarks), "gradients add up as in one process"


@settings(max_examples=200, deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_a_broken_table_is_found_out(shape: tuple[ScheduleName, int, int, int, Placement], random: Random) -> None:
    name, num_ranks, virtual, num_microbatches, placement = shape
    schedule = build(name, num_ranks=num_ranks, virtual=virtual, num_microbatches=num_microbatches, placement=placement)
    wiring = Wiring.chain(ranks_of(num_ranks, virtual, placement))
    rank = random.randrange(num_ranks)
    order = list(schedule[rank])
    place = random.randrange(len(order))
    match random.choice(("drop", "double", "move", "letter")):
        case "drop":
            del order[place]
        case "double":
            order.insert(place, order[place])
        case "move":
            order[place] = order[place]._replace(microbatch=num_microbatches)
        case "letter":
            other = Letter.BACKWARD_WEIGHT if order[place].letter is not Letter.BACKWARD_WEIGHT else Letter.FORWARD
            order[place] = order[place]._replace(letter=other)
    broken = (*schedule[:rank], tuple(order), *schedule[rank + 1 :])
    found = check_schedule(broken, num_microbatches=num_microbatches, wiring=wiring)
    assert found.errors
    assert f"rank {rank}" in found.errors[0]


def test_what_is_wrong_is_named() -> None:
    assert errors("0F0 0B0") == ("the table has 1 rows for 2 ranks",)
    assert errors("0F0 0B0", "1F0 1B0") == ()
    assert errors("0F0 1B0", "1F0 1B0")[0] == "rank 0 position 1: 1B0: stage 1 lies on rank 1"
    assert errors("0F0 0B0 2F0", "1F0 1B0") == ("rank 0 position 2: 2F0: there are only stages 0..1",)
    assert errors("0F0 0B0 0F1", "1F0 1B0") == ("rank 0 position 2: 0F1: there are only micro-batches 0..0",)
    assert errors("0F0 0F0 0B0", "1F0 1B0") == ("rank 0 position 1: 0F0: stands already at position 0",)
    assert errors("0F0", "1F0 1B0") == ("rank 0: 0B0 is missing (or 0I0 and 0W0)",)
    assert errors("0F0 0I0", "1F0 1B0") == ("rank 0: 0W0 is missing",)
    assert errors("0F0 0B0 0W0", "1F0 1B0")[0].startswith("rank 0 position 2: 0W0: 0B0 has done that already")
    assert errors("0F0 0W0 0I0", "1F0 1B0") == (
        "rank 0 position 1: 0W0: must come after 0I0, which does not stand before it",
    )


def test_a_deadlock_is_told_as_the_ring_that_it_is() -> None:
    [error] = errors("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", num_microbatches=2)
    assert error == (
        "deadlock: rank 0 position 1: 0B0 waits for B or I of micro-batch 0 of stage 1, "
        "rank 1 position 1: 1F1 waits for F of micro-batch 1 of stage 0"
    )


def test_remarks_are_no_errors() -> None:
    found = check_schedule(table("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"), num_microbatches=2, wiring=TWO_RANKS)
    assert not found.errors
    assert [remark for remark in found.remarks if "only to rounding" in remark and "rank 0 position 3: 0B0" in remark]
    blocking = build(ScheduleName.ONE_F_ONE_B, num_ranks=2, virtual=1, num_microbatches=4, placement=Placement.LOOP)
    [remark] = check_schedule(blocking, num_microbatches=4, wiring=TWO_RANKS).remarks
    assert "rank 0 position 1: 0F1 would block" in remark
    lockstep = table("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")
    assert not check_schedule(lockstep, num_microbatches=2, wiring=TWO_RANKS).remarks


def test_both_ends_of_a_channel_agree_on_what_comes_when() -> None:
    """What a sender hands over, in its order, is just what the receiver's actions wait for from it."""
    wiring = Wiring.chain(ranks_of(3, 2, Placement.LOOP))
    schedule = build(ScheduleName.ZB_H1, num_ranks=3, virtual=2, num_microbatches=5, placement=Placement.LOOP)
    found = channels(schedule, wiring)
    assert set(found) == {(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)}
    for (sender, receiver), messages in found.items():
        senders_order = [message.action for message in messages]
        assert senders_order == [action for action in schedule[sender] if action in set(senders_order)]
        assert {wiring.ranks[message.to_stage] for message in messages} == {receiver}
    assert sum(map(len, found.values())) == 2 * 5 * 5, "five hops each way for every micro-batch"


@pytest.mark.parametrize(
    ("name", "warmup", "said"),
    [
        (ScheduleName.GPIPE, (1, 1), "has no warm-up depth"),
        (ScheduleName.ONE_F_ONE_B, (1,), "1 depths for 2 ranks"),
        (ScheduleName.ONE_F_ONE_B, (2, 0), r"warmup\[1\] is 0"),
        (ScheduleName.ONE_F_ONE_B, (5, 1), r"warmup\[0\] is 5"),
    ],
)
def test_an_impossible_warmup_is_refused(name: ScheduleName, warmup: tuple[int, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        build(name, num_ranks=2, virtual=1, num_microbatches=4, placement=Placement.LOOP, warmup=warmup)


@pytest.mark.parametrize("name", list(ScheduleName))
def test_a_schedule_says_which_shapes_it_is_made_for(name: ScheduleName) -> None:
    for placement in Placement:
        for virtual in (1, 2, 3):
            fault = shape_fault(name, virtual=virtual, placement=placement)
            if fault:
                with pytest.raises(InputError):
                    build(name, num_ranks=2, virtual=virtual, num_microbatches=4, placement=placement)
            else:
                build(name, num_ranks=2, virtual=virtual, num_microbatches=4, placement=placement)
