"""Searches that are ended before they are through: a plan all the same, and an honest word of what is proven."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import pytest
from support.chains import chain

from planner.cluster import Cluster, ClusterLinks, Link, memory_limit, resolve
from planner.search import Asked, Found, Progress, solve
from planner.search.shortfall import NoPlanFitsError
from planner.simulate import simulate
from planner.units import parse_bytes

PROFILE = chain(24)
LINK = Link(latency_s=5e-6, bandwidth_bytes_per_s=50e9)
MEMORY = pytest.mark.parametrize("memory_gibi", [None, 12])


def question(memory_gibi: int | None) -> Asked:
    memory = memory_gibi * 2**30 if memory_gibi else None
    cluster = resolve(Cluster(links=ClusterLinks(intra_node=LINK, inter_node=LINK)), PROFILE, memory)
    return Asked(gpus=4, global_batch=32, cluster=cluster)


@cache
def whole(memory_gibi: int | None) -> Found:
    return solve(PROFILE, question(memory_gibi))


def check_honest(found: Found, memory_gibi: int | None) -> None:
    best = found.best
    assert simulate(best.job, best.timeline.schedule).iteration_s == best.iteration_s
    limit = memory_limit(found.asked.cluster)
    assert limit is None or best.peak_memory_bytes <= limit
    assert found.bound_s <= whole(memory_gibi).best.iteration_s * (1 + 1e-9)
    assert found.bound_s <= best.iteration_s
    assert found.proven == (found.left == 0)
    assert found.solved + found.pruned + found.left == found.configurations
    if found.proven:
        assert best.iteration_s <= whole(memory_gibi).best.iteration_s * (1 + 1e-9)


@MEMORY
@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_time_limit_gives_a_plan(memory_gibi: int | None, seconds: float) -> None:
    check_honest(solve(PROFILE, dataclasses.replace(question(memory_gibi), max_seconds=seconds)), memory_gibi)


@MEMORY
@pytest.mark.parametrize("looks", [3, 15])
def test_an_interrupt_gives_the_best_so_far(memory_gibi: int | None, looks: int) -> None:
    seen: list[Progress] = []

    def watch(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) >= looks and progress.best_s < float("inf"):
            raise KeyboardInterrupt

    found = solve(PROFILE, question(memory_gibi), watch)
    assert found.interrupted
    assert found.best.iteration_s <= seen[-1].best_s * (1 + 1e-9)
    check_honest(found, memory_gibi)


def test_an_interrupt_before_there_is_a_plan_is_one() -> None:
    def watch(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(PROFILE, question(None), watch)


@pytest.mark.parametrize("seconds", [0.0, None])
def test_that_nothing_fits_is_said_only_where_all_was_looked_at(seconds: float | None) -> None:
    asked = question(1)
    with pytest.raises(NoPlanFitsError) as caught:
        solve(PROFILE, dataclasses.replace(asked, max_seconds=seconds))
    error = caught.value
    assert error.ended_early == (seconds is not None)
    assert error.message.startswith(
        "no plan fits" if seconds is None else "no plan was found to fit within 0 s, and not"
    )
    assert ("--max-seconds" in (error.hint or "")) == error.ended_early
    named = re.search(r"--memory (\S+)", error.smallest_change)
    assert named is not None
    cluster = dataclasses.replace(asked.cluster, memory_bytes=parse_bytes(named[1]))
    check = solve(PROFILE, dataclasses.replace(asked, cluster=cluster))
    assert check.best.peak_memory_bytes <= (memory_limit(cluster) or 0)


def test_every_part_of_a_search_says_where_it_stands() -> None:
    phases: dict[str, int] = {}

    def watch(progress: Progress) -> None:
        assert 0 <= progress.solved <= progress.configurations
        assert progress.pruned <= progress.configurations
        phases[progress.phase] = phases.get(progress.phase, 0) + 1

    solve(PROFILE, question(12), watch)
    assert {"first looks", "settling what may be faster", "going through what is left"} <= set(phases)


@pytest.mark.slow
def test_time_is_gone_on_with_where_the_usual_effort_leaves_a_gap() -> None:
    usual = whole(12)
    longer = solve(PROFILE, dataclasses.replace(question(12), max_seconds=20.0 * max(usual.seconds, 1.0)))
    check_honest(longer, 12)
    assert longer.best.iteration_s <= usual.best.iteration_s * (1 + 1e-9)
    assert longer.bound_s >= usual.bound_s * (1 - 1e-9)
    assert longer.proven or longer.interrupted


@pytest.mark.slow
def test_more_effort_is_never_worse() -> None:
    more = solve(PROFILE, dataclasses.replace(question(None), effort=3))
    assert more.best.iteration_s <= whole(None).best.iteration_s * (1 + 1e-9)
    assert more.bound_s <= whole(None).best.iteration_s
