"""Makespans, bubbles and activations as the papers have them: equal stages, and their measured times."""

from __future__ import annotations

import csv
from collections.abc import Sequence

import pytest
from support.cases import case
from support.jobs import chain_job

from planner.cluster import Link
from planner.schedules import Placement, ScheduleName, build
from planner.simulate import Job, Timeline, simulate

IN_A_V = (ScheduleName.ZB_V, ScheduleName.DUALPIPE_V, ScheduleName.V_HALF, ScheduleName.V_MIN)


def run(job: Job, name: ScheduleName, warmup: Sequence[int] | None = None) -> Timeline:
    virtual = len(job.stages) // job.num_ranks
    schedule = build(
        name,
        num_ranks=job.num_ranks,
        virtual=virtual,
        num_microbatches=job.num_microbatches,
        placement=Placement.V if name in IN_A_V else Placement.LOOP,
        warmup=warmup,
    )
    return simulate(job, schedule)


def longest_span(timeline: Timeline) -> float:
    return max(ended[-1] - begun[0] for begun, ended in zip(timeline.starts_s, timeline.ends_s, strict=True))


@pytest.mark.parametrize(
    ("name", "virtual", "makespan_s", "span_s"),
    [
        (ScheduleName.GPIPE, 1, 33, 33),
        (ScheduleName.ONE_F_ONE_B, 1, 33, 33),
        (ScheduleName.INTERLEAVED, 2, 28.5, 28.5),
        (ScheduleName.INTERLEAVED, 4, 26.25, 26.25),
        (ScheduleName.LOOPED_BFS, 2, 28.5, 28.5),
        (ScheduleName.ZB_H1, 1, 27, 27),
        (ScheduleName.ZB_H2, 1, 27, 24),
        (ScheduleName.ZB_H1, 2, 25.5, 25.5),
        (ScheduleName.ZB_V, 2, 25.5, 24),
        (ScheduleName.DUALPIPE_V, 2, 25.5, 25.5),
    ],
)
def test_makespans_of_four_ranks_and_eight_microbatches(
    name: ScheduleName, virtual: int, makespan_s: float, span_s: float
) -> None:
    placement = Placement.V if name in IN_A_V else Placement.LOOP
    timeline = run(chain_job(4, 8, virtual=virtual, placement=placement), name)
    assert timeline.makespan_s == makespan_s
    assert longest_span(timeline) == span_s
    assert timeline.bubble_fraction == pytest.approx(1 - 24 / makespan_s)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_bubble_of_one_f_one_b_and_its_kin(num_ranks: int, rounds: int, virtual: int) -> None:
    """(P-1)/(M+P-1); over v stages a rank (P-1)/(v·M+P-1)."""
    num_microbatches = rounds * num_ranks
    wanted = pytest.approx((num_ranks - 1) / (virtual * num_microbatches + num_ranks - 1))
    job = chain_job(num_ranks, num_microbatches, virtual=virtual, backward_input_s=0.5, backward_weight_s=1.5)
    names = [ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS]
    names += [ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B] if virtual == 1 else []
    for name in names:
        assert run(job, name).bubble_fraction == wanted


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 2.5, 1.5), (1.0, 1.5, 0.75)])
def test_idle_time_of_zero_bubble(times: tuple[float, float, float]) -> None:
    """Of the longest rank's span: 1F1B (P-1)(F+I+W), ZB-H1 (P-1)(F+I-W), ZB-H2 (P-1)(F+I-2W)."""
    num_ranks, num_microbatches = 4, 12
    forward, backward_input, weight = times
    job = chain_job(
        num_ranks, num_microbatches, forward_s=forward, backward_input_s=backward_input, backward_weight_s=weight
    )
    work = num_microbatches * sum(times)
    ahead = forward + backward_input
    for name, idle in (
        (ScheduleName.ONE_F_ONE_B, ahead + weight),
        (ScheduleName.ZB_H1, ahead - weight),
        (ScheduleName.ZB_H2, ahead - 2 * weight),
    ):
        assert longest_span(run(job, name)) - work == pytest.approx((num_ranks - 1) * idle)


@pytest.mark.parametrize("num_microbatches", [2, 4, 9])
def test_activations_held(num_microbatches: int) -> None:
    """Every stage saves one byte a micro-batch: GPipe holds M of them, 1F1B min(M, P-k), ZB-H2 min(M, 2(P-k)-1)."""
    num_ranks = 4
    peaks = {
        name: [
            use.peak_memory_bytes for use in run(chain_job(num_ranks, num_microbatches, message_bytes=0), name).ranks
        ]
        for name in (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1, ScheduleName.ZB_H2)
    }
    assert peaks[ScheduleName.GPIPE] == [num_microbatches] * num_ranks
    assert peaks[ScheduleName.ONE_F_ONE_B] == [min(num_microbatches, num_ranks - k) for k in range(num_ranks)]
    assert peaks[ScheduleName.ZB_H1] == [min(num_microbatches, num_ranks - k) for k in range(num_ranks)]
    assert peaks[ScheduleName.ZB_H2] == [min(num_microbatches, 2 * (num_ranks - k) - 1) for k in range(num_ranks)]


@pytest.mark.parametrize(("name", "fraction"), [(ScheduleName.V_HALF, 1 / 2), (ScheduleName.V_MIN, 1 / 3)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 8, 15, 16])
def test_v_half_and_v_min_hold_less(name: ScheduleName, fraction: float, num_ranks: int) -> None:
    """Two stages a rank of one byte each: of the 2P that 1F1B holds about the fraction, and less bubble than 1F1B."""
    job = chain_job(num_ranks, 4 * num_ranks, virtual=2, placement=Placement.V, message_bytes=0)
    timeline = run(job, name)
    assert max(use.peak_memory_bytes for use in timeline.ranks) <= fraction * 2 * num_ranks + 2
    plain = run(chain_job(num_ranks, 4 * num_ranks), ScheduleName.ONE_F_ONE_B)
    assert timeline.makespan_s < plain.makespan_s


def test_zero_bubble_papers_rates() -> None:
    """Rates of 1F1B, ZB-H1, ZB-H2 to all published digits, under measured times and link time as latency.

    The published interleaved rates are lower by just P link times on every row: their longest rank goes round the
    loop of P links once less than the 2v·P - 2 links that lie on the path from its first F to its last B.
    """
    with case("zero-bubble/iclr_bubble_rates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    for row in rows:
        num_ranks, num_microbatches = int(row["p"]), int(row["m"])
        times = {
            f"{what}_s": float(row[key])
            for what, key in (("forward", "TF_us"), ("backward_input", "TB_us"), ("backward_weight", "TW_us"))
        }
        link_s = float(row["Tcomm_us"])
        work = num_microbatches * sum(times.values())

        def span_s(name: ScheduleName, virtual: int = 1) -> float:
            link = Link(latency_s=link_s, bandwidth_bytes_per_s=1e300)  # noqa: B023
            return longest_span(run(chain_job(num_ranks, num_microbatches, virtual=virtual, link=link, **times), name))  # noqa: B023

        for name, column in (
            (ScheduleName.ONE_F_ONE_B, "bubble_1F1B"),
            (ScheduleName.ZB_H1, "bubble_ZB_H1"),
            (ScheduleName.ZB_H2, "bubble_ZB_H2"),
        ):
            assert f"{1 - work / span_s(name):.4f}" == row[column]
        shorter = span_s(ScheduleName.INTERLEAVED, int(row["layers"]) // num_ranks) - num_ranks * link_s
        assert f"{1 - work / shorter:.4f}" == row["bubble_1F1B_interleaved(v=layers/p)"]
