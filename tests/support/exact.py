"""The fastest order there is, by integer programming: for pipelines small enough to wait for.

One binary for every two actions of a rank that may come in either order; micro-batches of one stage and letter keep
theirs (they are alike). Links have latency only. ``ahead``: so many micro-batches may lie between a stage's F and its
B or I (W where it returns nothing): F of micro-batch m + ahead then starts after that of m has ended.
"""

from __future__ import annotations

from itertools import combinations

import pulp

from planner.simulate import Walk

Key = tuple[str, int, int]


def fastest(walk: Walk, *, split: bool, at_most_s: float, at_least_s: float, ahead: int | None = None) -> float:
    """The makespan of the best order with whole backwards, or (``split``) with every B in I and W."""
    job = walk.job
    letters = "FIW" if split else "FB"
    back = letters[1]
    seconds: dict[Key, float] = {}
    for stage, cost in enumerate(walk.durations):
        each = {"F": cost.forward_s, "B": cost.backward_s, "I": cost.backward_input_s, "W": cost.backward_weight_s}
        seconds |= {(letter, stage, m): each[letter] for letter in letters for m in range(job.num_microbatches)}
    problem = pulp.LpProblem("fastest", pulp.LpMinimize)
    end = problem.add_variable("end", at_least_s, at_most_s)
    start = {key: problem.add_variable("s_{}_{}_{}".format(*key), 0, at_most_s) for key in seconds}
    problem += end
    for key, lasts in seconds.items():
        letter, stage, m = key
        problem += start[key] + lasts <= end
        if m:
            problem += start[letter, stage, m - 1] + seconds[letter, stage, m - 1] <= start[key]
        if ahead is not None and letter == "F" and m >= ahead:
            freed = ("W" if split and not job.stages[stage].returns else back, stage, m - ahead)
            problem += start[freed] + seconds[freed] <= start[key]
        for goal, delay in _waits(walk, letter, stage, back, split):
            problem += start[key] + lasts + delay <= start[goal[0], goal[1], m]
    for rank in range(job.num_ranks):
        own = [key for key in seconds if job.stages[key[1]].rank == rank]
        for one, other in combinations(own, 2):
            if one[:2] == other[:2] or (one[1] == other[1] and _settled(one, other, letters)):
                continue
            first = problem.add_variable("o_{}_{}_{}_{}_{}_{}".format(*one, *other), cat="Binary")
            problem += start[one] + seconds[one] <= start[other] + at_most_s * (1 - first)
            problem += start[other] + seconds[other] <= start[one] + at_most_s * first
    problem.solve(pulp.HiGHS(msg=False, threads=1, gapRel=1e-9))
    assert problem.sol_status == pulp.LpSolutionOptimal
    value = pulp.value(problem.objective)
    assert problem.solverModel.getInfo().mip_dual_bound >= value - 1e-6 * at_most_s, "not proven"
    return float(value)


def _settled(one: Key, other: Key, letters: str) -> bool:
    """F of m comes before I (or B) of m and later, and so on: then their order is no question."""
    first, second = sorted((one, other), key=lambda key: letters.index(key[0]))
    return first[2] <= second[2]


def _waits(walk: Walk, letter: str, stage: int, back: str, split: bool) -> list[tuple[tuple[str, int], float]]:
    given = {"F": walk.sends[stage], back: walk.returns[stage]}.get(letter)
    found: list[tuple[tuple[str, int], float]] = []
    if given:
        found += [((letter, goal), 0.0) for goal in given.at_once]
        found += [((letter, parcel.to_stage), parcel.busy_s + parcel.latency_s) for parcel in given.parcels]
    if letter == "F":
        found.append(((back, stage), 0.0))
    if letter == "I" and split:
        found.append((("W", stage), 0.0))
    return found
