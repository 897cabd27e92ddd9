"""The best of all is polished and trimmed; what lies between cuts' bounds and its time is proven."""

from __future__ import annotations

import dataclasses
from typing import Final

from planner.schedules import ScheduleName
from planner.search.bound import cut_bound
from planner.search.depth import Depths1F1B, Timed
from planner.search.orders import FUSED, Order, polished, time_cut
from planner.search.state import EQUAL, OpenCut, Search
from planner.simulate import Walk, simulate

POLISH_SIMULATIONS: Final = 400
"""Simulations of the climb of the best cut of all."""
POLISH_SWAPS: Final = 40
"""Swaps on the critical path of the best synthesised order."""


class Finish:
    """What is done once the best plan is known."""

    def __init__(self, search: Search) -> None:
        self.search: Final = search

    def polish(self) -> None:
        """Go on from the best cuts, where they do not reach their bound: what is faster now is ruled out below."""
        state = self.search.state
        near = [cut for cut in state.open_cuts if cut.timed_s <= state.best_s * (1 + EQUAL) and cut.item.fused]
        for cut in sorted(near, key=lambda cut: cut.bound_s)[:2]:
            configuration = cut.item.configuration
            if configuration.virtual == 1:
                effort = POLISH_SIMULATIONS * 2 * configuration.num_microbatches * configuration.pipeline
                timing = time_cut(
                    Walk(cut.job),
                    configuration,
                    cut.item.names,
                    bound_s=cut.bound_s,
                    effort=min(effort, self.search.effort),
                )
                if timing.best is not None:
                    self.search.offer(configuration, cut.job, timing.best)
        best = state.best
        if best is None or ScheduleName.SYNTHESISED not in self.search.asked.schedules:
            return
        walk = Walk(best.job)
        bound = cut_bound(walk, fused=False)
        actions = 3 * sum(map(len, best.timeline.schedule))
        swaps = min(POLISH_SWAPS, int(self.search.effort / actions / 20) - 5)
        if best.iteration_s > bound * (1 + EQUAL) and swaps > 0:
            order = Order(
                iteration_s=best.iteration_s,
                name=best.schedule,
                warmup=best.warmup,
                schedule=best.timeline.schedule,
            )
            self.search.offer(best.configuration, best.job, polished(walk, order, bound_s=bound, steps=swaps))

    def trim(self) -> None:
        """Take off the warm-ups what costs no time: the best plan then holds less."""
        best = self.search.state.best
        if (
            best is None
            or ScheduleName.ONE_F_ONE_B not in self.search.asked.schedules
            or best.configuration.virtual > 1
        ):
            return
        count, ranks = best.configuration.num_microbatches, best.configuration.pipeline
        warmup = (count,) * ranks if best.schedule is ScheduleName.GPIPE else best.warmup
        if best.schedule not in FUSED or warmup is None:
            return
        depths = Depths1F1B(Walk(best.job), self.search.limit)
        made = depths.trimmed(warmup, POLISH_SIMULATIONS * 2 * count * ranks)
        if made != warmup:
            trimmed = dataclasses.replace(
                best,
                schedule=ScheduleName.ONE_F_ONE_B,
                warmup=made,
                timeline=simulate(best.job, depths.schedule(made), levels=False),
            )
            self.search.state.best = self.search.state.per_configuration[best.configuration] = trimmed

    def prove_depths(self) -> None:
        """Settle what lies between the bounds of timed cuts and the best time."""
        state, left = self.search.state, self.search.effort
        if state.far:
            state.complete = False
            return
        for cut in sorted(state.open_cuts, key=lambda cut: cut.bound_s):
            if state.beats(cut.bound_s):
                continue
            if not cut.item.fused or cut.item.configuration.virtual > 1 or left <= 0:
                state.complete = False
                continue
            depths = Depths1F1B(Walk(cut.job), self.search.limit)

            def found(timed: Timed, cut: OpenCut = cut, depths: Depths1F1B = depths) -> float:
                order = Order(
                    iteration_s=timed.iteration_s,
                    name=ScheduleName.ONE_F_ONE_B,
                    warmup=timed.depths,
                    schedule=depths.schedule(timed.depths),
                )
                self.search.offer(cut.item.configuration, cut.job, order)
                return min(self.search.state.best_s, timed.iteration_s)

            if depths.none_faster(state.best_s, left, found, self.search.pulse):
                state.open_cuts.remove(cut)
            else:
                state.complete = False
            left -= depths.spent
