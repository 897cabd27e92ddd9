"""How long ranks with several stages wait until gradients come back: while a pipeline fills there are only F's.

The first micro-batch passes over all ranks once for each chunk j of stages, a wave:  s_j(r + 1) >= s_j(r) + f_j(r).
Before it a rank can have done what rank r had done when it began with the wave, n F's of each earlier chunk: what it is
handed by a rank that is in the wave comes behind it. With l_j(r) = sum of f_j(q) for q < r, less n · sum of f_i(r) for
i < j, the seconds w_j(r) that rank r has waited when wave j comes by are at least

    w_0(r) = l_0(r),    w_j(r) >= w_(j-1)(r),    w_j(r) >= w_j(q) + l_j(r) - l_j(q) for q < r

so a rank waits where a wave is slower than the chunks before it were (a short first chunk), or an earlier rank is.
Greedy orders of a loop placement wait hardly longer; n is P, for then the first micro-batch is back at rank 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.search.lattice import Floats


class Waves(NamedTuple):
    """Arrays (cut, chunk, rank), in seconds: w_j(r) >= l_j(r) + what came before, which includes w_j(q) - l_j(q)."""

    waited: Floats
    level: Floats
    before: Floats


def waves(forward: Floats, sends: Floats, count: int) -> Waves:
    """The waits of some cuts; ``forward``, ``sends``: of each stage's F and its message, (cut, chunk, rank)."""
    handed = forward + sends
    level = np.cumsum(handed, axis=2) - handed
    works = count * (np.cumsum(forward, axis=1) - forward)
    level -= works
    waited, before = level.copy(), np.full_like(level, -np.inf)
    for chunk in range(1, forward.shape[1]):
        now = waited[:, chunk - 1] - level[:, chunk]
        back = waited[:, chunk - 1, -1] + works[:, chunk - 1, -1] + handed[:, chunk - 1, -1]
        now[:, 0] = np.maximum(now[:, 0], back)
        most = np.maximum.accumulate(now, axis=1)
        before[:, chunk, 0], before[:, chunk, 1:] = back, most[:, :-1]
        waited[:, chunk] = level[:, chunk] + most
    return Waves(waited, level, before)
