"""The time model's rules one by one, on jobs small enough to work out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from support.jobs import chain_job

from planner.cluster import Link
from planner.errors import InputError
from planner.graph.stage import Transfer
from planner.schedules import Schedule, parse_action
from planner.simulate import ClosingKind, Job, Tie, Timeline, simulate

SLOW = Link(latency_s=0.5, bandwidth_bytes_per_s=4.0)
"""Eight bytes keep it busy for two seconds."""


def table(*rows: str) -> Schedule:
    return tuple(tuple(map(parse_action, row.split())) for row in rows)


def starts(timeline: Timeline) -> dict[str, float]:
    return {str(span.action): span.start_s for span in timeline.spans()}


def change(job: Job, stage: int, **changes: object) -> Job:
    stages = list(job.stages)
    stages[stage] = dataclasses.replace(stages[stage], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(job, stages=tuple(stages))


def test_a_link_serves_one_message_at_a_time_and_latency_comes_on_top() -> None:
    timeline = simulate(chain_job(2, 2, link=SLOW), table("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    assert starts(timeline)["1F0"] == 1 + 2 + 0.5
    assert starts(timeline)["1F1"] == 1 + 2 + 2 + 0.5  # handed over at 2, the link is free at 3
    assert [(message.handed_s, message.left_s) for message in timeline.messages[:2]] == [(1, 3), (2, 5)]


def test_without_overlap_the_sender_works_until_the_message_is_there() -> None:
    job = chain_job(2, 2, link=SLOW)
    job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, overlap=False))
    timeline = simulate(job, table("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    assert starts(timeline)["0F1"] == starts(timeline)["1F0"] == 1 + 2 + 0.5
    assert timeline.ranks[0].busy_s == 2 * (1 + 2.5) + 2 * 2


def test_an_entry_without_bytes_comes_with_the_last_message_to_its_rank() -> None:
    job = chain_job(2, 1, virtual=2, link=SLOW)
    job = change(job, 0, sends=(Transfer(to_stage=1, bytes=8), Transfer(to_stage=3, bytes=0)), forward_s=1.0)
    job = change(job, 2, sends=())
    timeline = simulate(job, table("0F0 2F0 2B0 0B0", "3F0 1F0 3B0 1B0"))
    assert starts(timeline)["3F0"] == 3.5


def test_a_first_stage_does_all_of_its_backward_in_w() -> None:
    timeline = simulate(chain_job(1, 1), table("0F0 0I0 0W0"))
    assert (timeline.starts_s, timeline.ends_s) == ([[0, 1, 1]], [[1, 1, 3]])


def test_recompute_lengthens_what_goes_back() -> None:
    job = change(chain_job(2, 1), 1, recompute=True, input_bytes=3, saved_bytes=10, saved_for_weight_bytes=5)
    job = change(job, 0, saved_bytes=0, sends=(Transfer(to_stage=1, bytes=0),))
    job = change(job, 1, returns=(Transfer(to_stage=0, bytes=0),))
    timeline = simulate(job, table("0F0 0I0 0W0", "1F0 1I0 1W0"))
    assert starts(timeline)["1W0"] == 1 + 1 + 2  # I and the forward again
    assert timeline.memory[1] == ((0, 0), (1, 3), (2, 10), (4, 5), (5, 0))


def test_replicas_sum_beside_compute_one_stage_at_a_time() -> None:
    job = chain_job(1, 1, virtual=2, link=Link(latency_s=0.25, bandwidth_bytes_per_s=8.0))
    job = dataclasses.replace(job, data=2, gradient_bytes_per_trainable_byte=1.0)
    for stage in range(2):
        job = change(job, stage, trainable_bytes=16)
    timeline = simulate(job, table("0F0 1F0 1B0 0B0"))
    each = 2 * 0.25 + 16 / 8  # 2(D-1) latencies, 2(D-1)/D of the bytes
    assert [closing[1:] for closing in timeline.closings] == [
        (ClosingKind.ALL_REDUCE, "1", 2, 2 + each),
        (ClosingKind.ALL_REDUCE, "0", 2 + each, 2 + 2 * each),
    ]
    assert (timeline.makespan_s, timeline.iteration_s) == (3, 2 + 2 * each)


def test_a_sharded_optimizer_sums_in_half_the_time_and_gathers_at_the_end() -> None:
    job = chain_job(1, 1, virtual=2, link=Link(latency_s=0.25, bandwidth_bytes_per_s=8.0))
    job = dataclasses.replace(
        job, data=2, gradient_bytes_per_trainable_byte=1.0, step_s_per_trainable_byte=1 / 16, zero1=True
    )
    for stage in range(2):
        job = change(job, stage, trainable_bytes=16)
    timeline = simulate(job, table("0F0 1F0 1B0 0B0"))
    half = 0.25 + 16 / 2 / 8
    assert [closing[1:] for closing in timeline.closings] == [
        (ClosingKind.REDUCE_SCATTER, "1", 2, 2 + half),
        (ClosingKind.REDUCE_SCATTER, "0", 2 + half, 2 + 2 * half),
        (ClosingKind.OPTIMIZER, "", 2 + 2 * half, 4 + 2 * half),
        (ClosingKind.ALL_GATHER, "", 4 + 2 * half, 4 + 4 * half),
    ]
    assert timeline.iteration_s == 4 + 4 * half


def test_tied_parameters_are_summed_by_name_before_the_optimizer_steps() -> None:
    job = chain_job(3, 1, link=SLOW, message_bytes=0)
    for stage in range(3):
        job = change(job, stage, trainable_bytes=16, parameter_bytes=16)
    ties = (
        Tie(name="b", bytes=8, trainable=True, stages=(0, 2)),
        Tie(name="a", bytes=4, trainable=True, stages=(0, 1, 2)),
        Tie(name="frozen", bytes=4, trainable=False, stages=(0, 2)),
    )
    job = dataclasses.replace(job, ties=ties, gradient_bytes_per_trainable_byte=1.0, step_s_per_trainable_byte=1 / 16)
    timeline = simulate(job, table("0F0 0B0", "1F0 1B0", "2F0 2B0"))
    first = timeline.makespan_s + 4 * (0.5 + 4 / 4)
    second = first + 2 * (0.5 + 8 / 4)
    tied = [closing for closing in timeline.closings if closing.kind is ClosingKind.TIED and closing.rank == 0]
    assert [(closing.what, closing.end_s) for closing in tied] == [("a", first), ("b", second)]
    assert timeline.iteration_s == second + 1


def test_a_tied_parameter_counts_once_a_rank_but_its_gradients_once_a_stage() -> None:
    job = chain_job(1, 1, virtual=2)
    for stage in range(2):
        job = change(job, stage, parameter_bytes=100, trainable_bytes=100, saved_bytes=0)
    job = dataclasses.replace(
        job,
        ties=(Tie(name="embedding", bytes=60, trainable=True, stages=(0, 1)),),
        gradient_bytes_per_trainable_byte=1.0,
        state_bytes_per_trainable_byte=2.0,
    )
    [use] = simulate(job, table("0F0 1F0 1B0 0B0")).ranks
    assert use.peak_memory_bytes == 140 + 200 + 2 * 140


def test_what_a_message_holds_and_where() -> None:
    job = chain_job(2, 1, link=SLOW)
    for stage in range(2):
        job = change(job, stage, saved_bytes=0)
    timeline = simulate(job, table("0F0 0B0", "1F0 1B0"))
    assert timeline.memory[0] == ((0, 0), (1, 8), (3, 0), (8.5, 8), (9, 0))
    assert timeline.memory[1] == ((0, 0), (3, 8), (3.5, 0), (6.5, 8), (8.5, 0))


def test_frees_come_first_and_what_lasts_no_time_holds_nothing() -> None:
    job = change(chain_job(1, 2, backward_input_s=0.0), 0, saved_bytes=7, workspace_bytes=2, backward_weight_s=0.0)
    [use] = simulate(job, table("0F0 0B0 0F1 0B1")).ranks
    assert use.peak_memory_bytes == 9
    almost = change(job, 0, backward_weight_s=1e-10)
    assert simulate(almost, table("0F0 0B0 0F1 0B1")).ranks[0].peak_memory_bytes == 9


def test_nothing_is_simulated_that_blocks() -> None:
    with pytest.raises(InputError, match="rank 0 position 1: 0B0 waits"):
        simulate(chain_job(2, 2), table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    with pytest.raises(InputError, match="0B0"):
        simulate(chain_job(1, 1), table("0B0 0F0"))


def test_where_a_rank_first_holds_too_much() -> None:
    timeline = simulate(chain_job(1, 3), table("0F0 0F1 0B0 0F2 0B1 0B2"))
    assert [timeline.first_over(0, limit) for limit in (0, 1, 2)] == [0, 1, None]
