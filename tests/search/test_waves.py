"""What ranks wait while a pipeline fills, against a plain walk over the first micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.search.waves import waves

RANKS, CHUNKS = 4, 3
NONE = np.zeros((1, CHUNKS, RANKS))


def test_even_stages_wait_for_their_first_input_alone() -> None:
    made = waves(np.ones((1, CHUNKS, RANKS)), NONE, RANKS)
    assert made.waited[0, -1].tolist() == [0, 1, 2, 3]


def test_a_short_first_chunk_makes_ranks_wait_for_the_second() -> None:
    forward = np.ones((1, CHUNKS, RANKS))
    forward[:, 0] = 0.5
    made = waves(forward, NONE, RANKS)
    assert made.waited[0, 0].tolist() == [0, 0.5, 1, 1.5]
    assert made.waited[0, 1].tolist() == pytest.approx([0, 1, 2, 3])


@given(st.lists(st.floats(0.5, 2.0), min_size=CHUNKS * RANKS, max_size=CHUNKS * RANKS))
def test_no_order_that_takes_p_at_a_time_waits_less(seconds: list[float]) -> None:
    forward = np.array(seconds).reshape(CHUNKS, RANKS)
    ended = np.zeros((CHUNKS, RANKS, RANKS))
    free, worked, waited = np.zeros(RANKS), np.zeros(RANKS), np.zeros((CHUNKS, RANKS))
    for chunk in range(CHUNKS):
        for rank in range(RANKS):
            for one in range(RANKS):
                before = ended[chunk, rank - 1, one] if rank else ended[chunk - 1, -1, one] if chunk else 0.0
                start = max(free[rank], before)
                if one == 0:
                    waited[chunk, rank] = start - worked[rank]
                free[rank] = ended[chunk, rank, one] = start + forward[chunk, rank]
                worked[rank] += forward[chunk, rank]
    made = waves(forward[None], np.zeros((1, CHUNKS, RANKS)), RANKS)
    assert (made.waited[0] <= waited + 1e-9).all()
