"""What is asked for alone is never answered better than when everything is asked for."""

from __future__ import annotations

import dataclasses
import random

import pytest

from planner.errors import InputError
from planner.profile import Profile
from planner.schedules import ScheduleName
from planner.search import Asked, Found
from tests.search.test_brute_force import found_for, random_question


def answer(profile: Profile, asked: Asked) -> Found | None:
    """What is found; None where nothing fits or nothing has such sizes."""
    try:
        return found_for(profile, asked)
    except InputError:
        return None


def check_that_the_whole_is_best(seed: int) -> None:
    """Three narrowed searches of a random question against the search of all of it."""
    rng = random.Random(seed)
    profile, asked = random_question(rng)
    whole = answer(profile, asked)
    sizes = tuple(range(1, asked.gpus + 1))
    for _ in range(3):
        narrowed = dataclasses.replace(
            asked,
            pipeline=(rng.choice(asked.pipeline or sizes),),
            virtual=(rng.choice(asked.virtual or (1, 2)),),
            data=(rng.choice(asked.data or (1,)),),
        )
        if rng.random() < 0.3 and ScheduleName.SYNTHESISED in asked.schedules:
            narrowed = dataclasses.replace(narrowed, schedules=(rng.choice(asked.schedules),))
        part = answer(profile, narrowed)
        if part is not None:
            assert whole is not None, (seed, narrowed)
            assert whole.best.iteration_s <= part.best.iteration_s * (1 + 1e-9), (seed, narrowed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_no_narrowed_search_is_better_than_the_whole(seed: int) -> None:
    check_that_the_whole_is_best(seed)
