"""Tables of other systems: the same where the schedule is the same, refused where they are wrong."""

from __future__ import annotations

import re

import pytest
from support.cases import case

from planner.exchange.torch_csv import read_schedule
from planner.schedules import (
    Letter,
    Placement,
    Schedule,
    ScheduleName,
    Wiring,
    build,
    check_schedule,
    default_warmup,
    ranks_of,
)

SAME = {
    "GPipe": ScheduleName.GPIPE,
    "Interleaved1F1B": ScheduleName.INTERLEAVED,
    "InterleavedZeroBubble": ScheduleName.ZB_H1,
    "ZBVZeroBubble": ScheduleName.ZB_V,
    "DualPipeV": ScheduleName.DUALPIPE_V,
}
SIZES = ("P2_v1_M4", "P4_v1_M8", "P4_v1_M16", "P2_v2_M4", "P4_v2_M8", "P4_v2_M16", "P2_v4_M4", "P4_v4_M8", "P4_v4_M16")
TABLES = {"GPipe": SIZES[:3], "Interleaved1F1B": SIZES[3:], "InterleavedZeroBubble": SIZES[:6]}
TABLES |= dict.fromkeys(("ZBVZeroBubble", "DualPipeV"), SIZES[3:6])


def placement_of(name: ScheduleName) -> Placement:
    return Placement.V if name in (ScheduleName.ZB_V, ScheduleName.DUALPIPE_V) else Placement.LOOP


def sizes_of(text: str) -> tuple[int, int, int]:
    match = re.search(r"P(\d+)_v(\d+)_M(\d+)", text)
    assert match
    return int(match[1]), int(match[2]), int(match[3])


def built(name: ScheduleName, num_ranks: int, virtual: int, num_microbatches: int) -> Schedule:
    return build(
        name,
        num_ranks=num_ranks,
        virtual=virtual,
        num_microbatches=num_microbatches,
        placement=placement_of(name),
    )


@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind, sizes in TABLES.items() for size in sizes])
def test_our_table_is_the_golden_one(kind: str, size: str) -> None:
    schedule, remarks = read_schedule(case(f"schedules/{kind}_{size}_compute.csv"))
    assert schedule == built(SAME[kind], *sizes_of(size))
    assert not remarks


@pytest.mark.parametrize("size", SIZES[:3])
def test_the_wrong_1f1b_tables_are_refused(size: str) -> None:
    """Their last rank runs micro-batches 1..M: it starts a backward that it has no forward for, and one too many."""
    num_ranks, _, num_microbatches = sizes_of(size)
    schedule, _ = read_schedule(case(f"schedules/1F1B_{size}_compute.csv"))
    found = check_schedule(
        schedule, num_microbatches=num_microbatches, wiring=Wiring.chain(ranks_of(num_ranks, 1, Placement.LOOP))
    )
    last = num_ranks - 1
    assert any(f"rank {last} position 1: {last}B0: must come after {last}F0" in error for error in found.errors)
    assert any(f"{last}F{num_microbatches}: there are only micro-batches" in error for error in found.errors)
    assert any(f"rank {last}: {last}F0 is missing" in error for error in found.errors)
    ours = built(ScheduleName.ONE_F_ONE_B, num_ranks, 1, num_microbatches)
    assert ours[:-1] == schedule[:-1], "all ranks but the last are right"


@pytest.mark.parametrize(
    ("name", "ranks", "num_microbatches"),
    [
        ("dualpipev_4rank_10mb", ranks_of(4, 2, Placement.V), 10),
        ("torchtitan_custom_2rank_2stage_8mb", ranks_of(2, 2, Placement.LOOP), 8),
        ("zb1p_2rank_2stage_8mb", ranks_of(2, 2, Placement.LOOP), 8),
        ("zb1p_2rank_2stage_8mb_old_letters", ranks_of(2, 2, Placement.LOOP), 8),
    ],
)
def test_public_tables_are_good(name: str, ranks: tuple[int, ...], num_microbatches: int) -> None:
    schedule, _ = read_schedule(case(f"schedules/{name}.csv"))
    assert not check_schedule(schedule, num_microbatches=num_microbatches, wiring=Wiring.chain(ranks)).errors


def test_public_tables_are_ours() -> None:
    assert read_schedule(case("schedules/dualpipev_4rank_10mb.csv"))[0] == built(ScheduleName.DUALPIPE_V, 4, 2, 10)
    assert read_schedule(case("schedules/zb1p_2rank_2stage_8mb.csv"))[0] == built(ScheduleName.ZB_H1, 2, 2, 8)


def test_old_letters_are_translated_and_said() -> None:
    old, remarks = read_schedule(case("schedules/zb1p_2rank_2stage_8mb_old_letters.csv"))
    new, none = read_schedule(case("schedules/zb1p_2rank_2stage_8mb.csv"))
    assert old == new
    assert "old versions" in remarks[0]
    assert not none


@pytest.mark.parametrize("name", [ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED, ScheduleName.ZB_H1])
@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 5, 7, 8, 11, 12, 16, 17])
def test_warmup_is_what_comes_before_the_first_backward(
    name: ScheduleName, num_ranks: int, num_microbatches: int
) -> None:
    for virtual in (1,) if name is ScheduleName.ONE_F_ONE_B else (1, 2, 3, 4):
        warmup = default_warmup(name, num_ranks=num_ranks, virtual=virtual, num_microbatches=num_microbatches)
        assert warmup is not None
        for order, depth in zip(built(name, num_ranks, virtual, num_microbatches), warmup, strict=True):
            letters = [action.letter for action in order]
            assert letters[:depth] == [Letter.FORWARD] * depth
            assert letters[depth] is not Letter.FORWARD
