"""Where nothing fits: what it says is missing is missing, and each change that it names makes it fit."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
from support.random_profiles import random_cluster, random_profile

from planner.cluster import memory_limit, resolve
from planner.errors import NothingFitsError
from planner.graph import LayerGraph
from planner.profile import Profile
from planner.schedules import ScheduleName
from planner.search import EVERY, Asked, solve
from planner.search.lean import leanest
from planner.search.shortfall import NoPlanFitsError
from planner.units import parse_bytes

CHANGE = re.compile(r"(--zero1 --data|--[a-z]+) (\S+)")


def random_question(rng: random.Random, most_layers: int = 5) -> tuple[Profile, Asked]:
    """Little memory, and often something narrowed that need not be."""
    profile = random_profile(rng, chain=rng.random() < 0.5, most_layers=most_layers)
    cluster = dataclasses.replace(
        random_cluster(rng, memory=int(10 ** rng.uniform(1.8, 2.8))), memory_reserve_fraction=rng.choice((0.0, 0.1))
    )
    asked = Asked(gpus=rng.randint(1, 4), global_batch=rng.choice((2, 4)), cluster=resolve(cluster, profile))
    if rng.random() < 0.3:
        return profile, asked
    return profile, dataclasses.replace(
        asked,
        schedules=rng.choice((EVERY, (ScheduleName.GPIPE,), (ScheduleName.ONE_F_ONE_B,))),
        pipeline=rng.choice((None, (1,), (1, 2))),
        microbatch=rng.choice((None, (2,))),
        virtual=rng.choice((None, (1,))),
        recompute=rng.choice(("auto", "none")),
    )


def changed(asked: Asked, option: str, value: str) -> Asked:
    match option:
        case "--memory":
            cluster = dataclasses.replace(asked.cluster, memory_bytes=parse_bytes(value))
            return dataclasses.replace(asked, cluster=cluster)
        case "--gpus":
            return dataclasses.replace(asked, gpus=int(value))
        case "--recompute":
            return dataclasses.replace(asked, recompute=value)
        case "--zero1 --data":
            return dataclasses.replace(asked, zero1=True, data=(int(value),))
        case "--schedule":
            return dataclasses.replace(asked, schedules=(ScheduleName(value),))
        case _:
            return dataclasses.replace(asked, **{option.removeprefix("--"): (int(value),)})


def refusal(profile: Profile, asked: Asked) -> NoPlanFitsError | None:
    try:
        found = solve(profile, asked)
    except NoPlanFitsError as error:
        return error
    limit = memory_limit(asked.cluster)
    assert limit is None or found.best.peak_memory_bytes <= limit
    return None


def check_each_change(seed: int, most_layers: int = 5, state_bytes: float | None = None) -> set[str]:
    """The options that were named, all of which helped; ``state_bytes``: of the optimizer, a trainable byte."""
    profile, asked = random_question(random.Random(seed), most_layers)
    if state_bytes is not None:
        optimizer = dataclasses.replace(profile.optimizer, state_bytes_per_trainable_byte=state_bytes)
        profile = dataclasses.replace(profile, optimizer=optimizer)
    error = refusal(profile, asked)
    if error is None:
        return set()
    limit, stages = memory_limit(asked.cluster), 4 * asked.gpus
    assert error.missing
    for entry in error.missing:
        assert entry.bytes > 0
        assert 0 <= entry.rank < asked.gpus
        assert 0 <= entry.stage < stages
    assert error.exit_code == 3
    changes = CHANGE.findall(error.smallest_change)
    assert changes[-1][0] == "--memory"
    for option, value in changes:
        assert refusal(profile, changed(asked, option, value)) is None, (option, value)
    assert limit is not None
    gpus = dict(changes).get("--gpus")
    if gpus is not None:
        assert int(gpus) > asked.gpus
    return {option for option, _ in changes}


def test_each_change_makes_it_fit() -> None:
    named = set().union(*map(check_each_change, range(12)))
    assert {"--memory", "--gpus"} <= named


@pytest.mark.slow
def test_an_optimizer_that_is_shared_out_is_among_the_changes() -> None:
    named = [check_each_change(seed, state_bytes=20.0) for seed in range(40)]
    assert any("--zero1 --data" in options for options in named)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_each_change_makes_it_fit_at_length(chunk: int) -> None:
    seeds = range(1000 + 50 * chunk, 1050 + 50 * chunk)
    named = set().union(*(check_each_change(seed, 8) for seed in seeds))
    assert {"--memory", "--gpus", "--recompute", "--schedule", "--microbatch", "--virtual", "--pipeline"} & named


@pytest.mark.parametrize("seed", range(10))
def test_what_is_missing_is_that_of_the_leanest_plan(seed: int) -> None:
    """The amounts are those of a plan that can be made; a hair less memory than it needs, and it does not fit."""
    profile, asked = random_question(random.Random(seed))
    plenty = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, memory_bytes=None))
    closest = leanest(LayerGraph.of(profile), plenty)
    if closest is None or closest.peak_memory_bytes < 2:
        return
    cluster = dataclasses.replace(asked.cluster, memory_bytes=closest.peak_memory_bytes, memory_reserve_fraction=0.0)
    assert refusal(profile, dataclasses.replace(asked, cluster=cluster)) is None
    tiny = dataclasses.replace(cluster, memory_bytes=1)
    with pytest.raises(NothingFitsError) as caught:
        solve(profile, dataclasses.replace(asked, cluster=tiny))
    assert isinstance(caught.value, NoPlanFitsError)
    assert max(entry.bytes for entry in caught.value.missing) == closest.peak_memory_bytes - 1
