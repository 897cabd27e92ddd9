"""Orders of actions at random, for what has to hold under every order."""

from __future__ import annotations

import random

from planner.schedules import Action, Letter, Schedule, Wiring
from planner.simulate import Job


def random_order(rng: random.Random, job: Job, *, split: bool) -> Schedule:
    """Any order that respects the dependencies: by turns at random, backwards first, or forwards first."""
    wiring = Wiring.of(job.stages)
    back = Letter.BACKWARD_INPUT if split else Letter.BACKWARD
    letters = (Letter.FORWARD, back, Letter.BACKWARD_WEIGHT) if split else (Letter.FORWARD, back)
    left = [
        Action(stage.stage, letter, m)
        for stage in job.stages
        for letter in letters
        for m in range(job.num_microbatches)
    ]
    done: set[Action] = set()
    orders: list[list[Action]] = [[] for _ in range(job.num_ranks)]
    habit = rng.choice((0.0, 0.5, 0.95))
    backwards_first = rng.random() < 0.7

    def ready(action: Action) -> bool:
        stage, letter, m = action
        if letter is Letter.FORWARD:
            return all(Action(k, letter, m) in done for k in wiring.senders[stage])
        if letter is Letter.BACKWARD_WEIGHT:
            return Action(stage, back, m) in done
        returned = all(Action(k, letter, m) in done for k in wiring.returners[stage])
        return returned and Action(stage, Letter.FORWARD, m) in done

    while left:
        able = [action for action in left if ready(action)]
        liked = [action for action in able if (action.letter is not Letter.FORWARD) == backwards_first]
        chosen = rng.choice(liked if liked and rng.random() < habit else able)
        left.remove(chosen)
        done.add(chosen)
        orders[job.stages[chosen.stage].rank].append(chosen)
    return tuple(map(tuple, orders))
