"""The time model a second time, as a plain event simulation with explicit links, and memory as a sum at each instant.

Slow and literal; shares nothing with planner.simulate but the input.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import count, pairwise

from planner.cluster import link_between, ring_link
from planner.schedules import Schedule
from planner.simulate import Job

Key = tuple[int, str, int]


class Naive:
    """One simulated iteration: starts and ends by (stage, letter, micro-batch), its end, each rank's peak."""

    def __init__(self, job: Job, schedule: Schedule) -> None:
        self.job, self.schedule = job, schedule
        self.starts: dict[Key, float] = {}
        self.ends: dict[Key, float] = {}
        self.there: set[tuple[str, int, int, int]] = set()
        self.holds: list[list[tuple[float, float, int]]] = [[] for _ in schedule]
        self.in_transit: list[tuple[int, int, str, int, int, float, float]] = []
        self.queues: dict[tuple[int, int], deque[Callable[[float], None]]] = defaultdict(deque)
        self.serving: set[tuple[int, int]] = set()
        self.at = [0] * len(schedule)
        self.running = [False] * len(schedule)
        self.heap: list[tuple[float, int, Callable[[float], None]]] = []
        self.counter = count()
        for rank in range(len(schedule)):
            self.try_next(rank, 0.0)
        while self.heap:
            now, _, event = heapq.heappop(self.heap)
            event(now)
        assert self.at == [len(order) for order in schedule], "the schedule blocks"
        self.iteration_s = self.close()
        self.peaks = [self.peak(rank) for rank in range(len(schedule))]

    def later(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self.heap, (time, next(self.counter), event))

    # --- actions and messages -----------------------------------------------------------------------------------------

    def ready(self, stage: int, letter: str, m: int) -> bool:
        stages = self.job.stages
        if letter == "F":
            sources = [other.stage for other in stages if any(entry.to_stage == stage for entry in other.sends)]
            return all(("F", source, stage, m) in self.there for source in sources)
        if letter == "W":
            return (stage, "I", m) in self.ends
        sources = [other.stage for other in stages if any(entry.to_stage == stage for entry in other.returns)]
        return (stage, "F", m) in self.ends and all(("B", source, stage, m) in self.there for source in sources)

    def seconds(self, stage_number: int, letter: str) -> float:
        stage = self.job.stages[stage_number]
        again = stage.forward_s if stage.recompute else 0.0
        both = stage.backward_input_s + stage.backward_weight_s + again
        base = {
            "F": stage.forward_s,
            "B": both,
            "I": stage.backward_input_s + (stage.split_s or 0.0) + again if stage.returns else 0.0,
            "W": stage.backward_weight_s if stage.returns else both,
        }[letter]
        if self.job.cluster.overlap is False and letter != "W":
            for entry in stage.sends if letter == "F" else stage.returns:
                link = self.link(stage.rank, self.job.stages[entry.to_stage].rank)
                if link and entry.bytes and self.job.stages[entry.to_stage].rank != stage.rank:
                    base += link.latency_s + entry.bytes / link.bandwidth_bytes_per_s
        return base

    def link(self, sender: int, receiver: int):  # type: ignore[no-untyped-def]
        return link_between(sender, receiver, data=self.job.data, tensor=self.job.tensor, cluster=self.job.cluster)

    def try_next(self, rank: int, now: float) -> None:
        if self.running[rank] or self.at[rank] == len(self.schedule[rank]):
            return
        stage, letter, m = self.schedule[rank][self.at[rank]]
        if self.ready(stage, letter.value, m):
            self.running[rank] = True
            self.starts[stage, letter.value, m] = now
            self.later(now + self.seconds(stage, letter.value), lambda end: self.finish(rank, end))

    def finish(self, rank: int, now: float) -> None:
        stage, letter, m = self.schedule[rank][self.at[rank]]
        self.ends[stage, letter.value, m] = now
        self.running[rank] = False
        self.at[rank] += 1
        if letter.value != "W":
            self.hand_over(stage, "F" if letter.value == "F" else "B", m, now)
        self.try_next(rank, now)

    def hand_over(self, stage_number: int, kind: str, m: int, now: float) -> None:
        stage = self.job.stages[stage_number]
        entries = stage.sends if kind == "F" else stage.returns
        crossing = [entry for entry in entries if self.job.stages[entry.to_stage].rank != stage.rank and entry.bytes]
        for entry in entries:
            goal = self.job.stages[entry.to_stage].rank
            to_goal = [other for other in crossing if self.job.stages[other.to_stage].rank == goal]
            if entry in crossing:
                with_it = []
                if entry is to_goal[-1]:
                    with_it = [
                        other.to_stage
                        for other in entries
                        if self.job.stages[other.to_stage].rank == goal and not other.bytes
                    ]
                self.put(stage_number, entry.to_stage, entry.bytes, kind, m, now, with_it)
            elif goal == stage.rank or not to_goal:
                self.deliver(kind, stage_number, entry.to_stage, m, now)

    def put(self, source: int, goal: int, size: int, kind: str, m: int, now: float, with_it: list[int]) -> None:
        ranks = (self.job.stages[source].rank, self.job.stages[goal].rank)
        link = self.link(*ranks)
        free = link is None or self.job.cluster.overlap is False
        busy = 0.0 if free else size / link.bandwidth_bytes_per_s
        latency = 0.0 if free else link.latency_s

        def serve(start: float) -> None:
            def leave(left: float) -> None:
                self.in_transit.append((source, goal, kind, m, size, now, left))
                for stage in (goal, *with_it):
                    self.later(left + latency, lambda at, stage=stage: self.deliver(kind, source, stage, m, at))
                self.serving.discard(ranks)
                if self.queues[ranks]:
                    self.serving.add(ranks)
                    self.queues[ranks].popleft()(left)

            self.later(start + busy, leave)

        if ranks in self.serving:
            self.queues[ranks].append(serve)
        else:
            self.serving.add(ranks)
            serve(now)

    def deliver(self, kind: str, source: int, goal: int, m: int, now: float) -> None:
        self.there.add((kind, source, goal, m))
        self.try_next(self.job.stages[goal].rank, now)

    # --- what closes the iteration ------------------------------------------------------------------------------------

    def close(self) -> float:
        job = self.job
        done, gathered = [0.0] * job.num_ranks, [0.0] * job.num_ranks
        for (stage, _, _), end in self.ends.items():
            done[job.stages[stage].rank] = max(done[job.stages[stage].rank], end)
        for rank in range(job.num_ranks):
            lasts = (
                sorted(
                    (
                        max(
                            end
                            for (stage, letter, _), end in self.ends.items()
                            if stage == own.stage and letter in "BW"
                        ),
                        max(place for place, action in enumerate(self.schedule[rank]) if action.stage == own.stage),
                        own,
                    )
                    for own in job.stages
                    if own.rank == rank
                )
                if job.data > 1
                else []
            )
            clock = 0.0
            for ready, _, own in lasts:
                ring = ring_link(rank, data=job.data, tensor=job.tensor, cluster=job.cluster)
                size = own.trainable_bytes * job.gradient_bytes_per_trainable_byte
                spent = 0.0
                if ring and size:
                    spent = 2 * (job.data - 1) * ring.latency_s
                    spent += 2 * (job.data - 1) / job.data * size / ring.bandwidth_bytes_per_s
                clock = max(clock, ready) + (spent / 2 if job.zero1 else spent)  # the other half: parameters gathered
                gathered[rank] += spent / 2 if job.zero1 else 0.0
            done[rank] = max(done[rank], clock)
        for tie in sorted(job.ties, key=lambda tie: tie.name):
            path = [job.stages[stage].rank for stage in reversed(tie.stages)]
            if not tie.trainable or len(set(path)) == 1:
                continue
            clock = max(done[rank] for rank in path)
            size = tie.bytes * job.gradient_bytes_per_trainable_byte
            for sender, receiver in [*pairwise(path), *pairwise(path[::-1])]:
                link = self.link(sender, receiver)
                if sender != receiver and link:
                    clock += link.latency_s + size / link.bandwidth_bytes_per_s
            for rank in path:
                done[rank] = clock
        steps = [self.stepped(rank) * job.step_s_per_trainable_byte for rank in range(job.num_ranks)]
        return max(map(sum, zip(done, steps, gathered, strict=True)))

    def stepped(self, rank: int) -> int:
        return sum(stage.trainable_bytes for stage in self.job.stages if stage.rank == rank) - self.doubles(rank, True)

    def doubles(self, rank: int, trainable_only: bool) -> int:
        doubles = 0
        for tie in self.job.ties:
            here = [stage for stage in tie.stages if self.job.stages[stage].rank == rank]
            if here and (tie.trainable or not trainable_only):
                doubles += (len(here) - 1) * tie.bytes
        return doubles

    # --- memory -------------------------------------------------------------------------------------------------------

    def peak(self, rank: int) -> int:
        job = self.job
        own = [stage for stage in job.stages if stage.rank == rank]
        base = sum(stage.parameter_bytes + stage.buffer_bytes for stage in own) - self.doubles(rank, False)
        base += int(sum(stage.trainable_bytes for stage in own) * job.gradient_bytes_per_trainable_byte)
        base += int(self.stepped(rank) * job.state_bytes_per_trainable_byte)
        holds: list[tuple[float, float, int]] = []
        for stage in own:
            for m in range(job.num_microbatches):
                split = (stage.stage, "I", m) in self.ends
                first = self.starts[stage.stage, "F", m]
                again = "B" if not split else "I" if stage.returns else "W"
                begin, end = self.starts[stage.stage, again, m], self.ends[stage.stage, again, m]
                if stage.recompute:
                    holds += [(first, begin, stage.input_bytes), (begin, end, stage.saved_bytes)]
                else:
                    holds.append((first, end, stage.saved_bytes))
                if split and stage.returns:
                    holds.append((end, self.ends[stage.stage, "W", m], stage.saved_for_weight_bytes))
                for letter in "FBIW":
                    if (stage.stage, letter, m) in self.ends:
                        span = self.starts[stage.stage, letter, m], self.ends[stage.stage, letter, m]
                        holds.append((*span, stage.workspace_bytes))
        for source, goal, kind, m, size, handed, left in self.in_transit:
            if job.stages[source].rank == rank:
                holds.append((handed, left, size))
            if job.stages[goal].rank == rank:
                taken = next(
                    self.starts[goal, letter, m]
                    for letter in ("F" if kind == "F" else "BI")
                    if (goal, letter, m) in self.starts
                )
                holds.append((left, taken, size))
        times = sorted({time for hold in holds for time in hold[:2]})
        return max([base, *(base + sum(size for begin, end, size in holds if begin <= now < end) for now in times)])
