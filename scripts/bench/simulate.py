"""Actions per second of the simulator and of the synthesiser.

.venv/bin/python scripts/bench/simulate.py [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from planner.cluster import Cluster, ClusterLinks, Link
from planner.graph import Stage, Transfer
from planner.schedules import Placement, ScheduleName, build, check_schedule, ranks_of
from planner.schedules.wiring import Wiring
from planner.simulate import Job, Walk, simulate
from planner.simulate.greedy import Rule, greedy
from planner.simulate.improve import improve
from planner.simulate.synthesise import synthesise


def job_of(num_ranks: int, virtual: int, num_microbatches: int, *, linked: bool) -> Job:
    """Stages in a row, a tenth apart in time; links of 15 % of a stage's time."""
    ranks = ranks_of(num_ranks, virtual, Placement.LOOP)
    stages = tuple(
        Stage(
            stage=stage,
            rank=rank,
            layers=(f"layer{stage}",),
            forward_s=(1 + 0.1 * (stage * 7 % 5 - 2) / 2) / virtual,
            backward_input_s=1.0 / virtual,
            backward_weight_s=1.0 / virtual,
            parameter_bytes=1000,
            trainable_bytes=1000,
            buffer_bytes=0,
            input_bytes=10,
            saved_bytes=100,
            saved_for_weight_bytes=50,
            workspace_bytes=10,
            sends=(Transfer(to_stage=stage + 1, bytes=100),) if stage < len(ranks) - 1 else (),
            returns=(Transfer(to_stage=stage - 1, bytes=100),) if stage else (),
        )
        for stage, rank in enumerate(ranks)
    )
    link = Link(latency_s=0.01, bandwidth_bytes_per_s=100 / 0.45 * virtual) if linked else None
    return Job(
        stages=stages,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        cluster=Cluster(links=ClusterLinks(intra_node=link, inter_node=link), overlap=True),
        gradient_bytes_per_trainable_byte=1.0,
        state_bytes_per_trainable_byte=2.0,
        step_s_per_trainable_byte=0.0,
    )


def timed(what: str, actions: int, run: Callable[[], object], *, repeats: int) -> None:
    """Print the best of several runs."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    best = min(seconds)
    print(f"{what:<52} {actions:>8} actions {best:8.3f} s {actions / best:>12,.0f} actions/s")  # noqa: T201


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small cases, one run each")
    quick = parser.parse_args().quick
    repeats = 1 if quick else 3
    num_ranks, virtual, num_microbatches = (8, 2, 32) if quick else (64, 4, 512)
    shape = {"num_ranks": num_ranks, "virtual": virtual, "num_microbatches": num_microbatches}
    schedule = build(ScheduleName.INTERLEAVED, placement=Placement.LOOP, **shape)
    actions = sum(map(len, schedule))
    name = f"P={num_ranks} v={virtual} M={num_microbatches}"
    timed(
        f"build interleaved 1F1B, {name}",
        actions,
        lambda: build(ScheduleName.INTERLEAVED, placement=Placement.LOOP, **shape),
        repeats=repeats,
    )
    for linked in (False, True):
        job = job_of(num_ranks, virtual, num_microbatches, linked=linked)
        links = "links" if linked else "free links"
        timed(f"simulate, {name}, {links}", actions, lambda: simulate(job, schedule, memory=False), repeats=repeats)  # noqa: B023
    timed(f"simulate with memory, {name}, links", actions, lambda: simulate(job, schedule), repeats=repeats)
    wiring = Wiring.of(job.stages)
    timed(
        f"check, {name}",
        actions,
        lambda: check_schedule(schedule, num_microbatches=num_microbatches, wiring=wiring),
        repeats=repeats,
    )
    for ranks, chunks, count in ((4, 1, 8),) if quick else ((8, 1, 32), (8, 2, 32), (16, 4, 64)):
        walk = Walk(job_of(ranks, chunks, count, linked=True))
        rule = Rule(split=True, budget_bytes=(None,) * ranks)
        made = greedy(walk, rule)
        assert made is not None
        actions, name = sum(map(len, made)), f"P={ranks} v={chunks} M={count}"
        timed(f"list scheduling, one rule, {name}", actions, lambda: greedy(walk, rule), repeats=repeats)  # noqa: B023
        timed(
            f"swaps, {name}, actions times 10 steps",
            10 * actions,
            lambda: improve(walk, made, steps=10, budget_bytes=(None,) * ranks),  # noqa: B023
            repeats=1,
        )
        timed(f"synthesise, whole, {name}", actions, lambda: synthesise(walk), repeats=1)  # noqa: B023


if __name__ == "__main__":
    main()
