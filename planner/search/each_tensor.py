"""What every number of tensor ranks can do: those that a search ruled out by their bounds are searched alone."""

from __future__ import annotations

import dataclasses

from planner.errors import InputError, NothingFitsError
from planner.profile import Profile
from planner.search.choose import solve
from planner.search.clock import Watch
from planner.search.result import Found
from planner.search.space import tensor_left_out


def with_each_tensor_size(found: Found, profile: Profile, watch: Watch | None = None) -> Found:
    """The same answer; its ``alternatives`` hold a plan of each tensor size asked for, where one fits.

    A search that was ended, or given a time, is left as it is.
    """
    asked = found.asked
    if found.interrupted or asked.max_seconds is not None:
        return found
    sizes = {size for _, size in found.graph.rows() if asked.tensor is None or size in asked.tensor}
    sizes -= {one.configuration.tensor for one in (found.best, *found.alternatives)}
    sizes -= tensor_left_out(found.graph, asked).keys()
    more = []
    for size in sorted(sizes):
        try:
            alone = solve(profile, dataclasses.replace(asked, tensor=(size,)), watch)
        except (InputError, NothingFitsError):
            continue
        more.append(alone.best)
    every = sorted((*found.alternatives, *more), key=lambda one: one.iteration_s)
    return dataclasses.replace(found, alternatives=tuple(every))
