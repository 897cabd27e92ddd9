"""What a profile says of splitting layers over tensor ranks."""

from __future__ import annotations

import dataclasses
import random

from support.random_profiles import random_profile

from planner.profile import LayerSplit, Profile
from planner.report.splits import split_lines


def split_profile() -> Profile:
    """Layers of which one half is split at T = 2, and nothing else is told of T = 4."""
    profile = random_profile(random.Random(4), chain=True, most_layers=6)
    layers = []
    for index, layer in enumerate(profile.layers):
        rows = [
            dataclasses.replace(
                cost, tensor=2, parameter_bytes=layer.parameter_bytes // 2, trainable_bytes=0, buffer_bytes=0
            )
            for cost in layer.costs
        ]
        told = LayerSplit(
            tensor=2,
            split={f"blocks.{index}.up": "column", f"blocks.{index}.down": "row"},
            whole={f"blocks.{index}.gate": "softmax runs over the split dimension"},
        )
        layers.append(dataclasses.replace(layer, costs=(*layer.costs, *rows), splits=(told,)))
    return dataclasses.replace(profile, layers=tuple(layers))


def test_modules_that_differ_in_numbers_are_told_together_with_the_reasons() -> None:
    profile = split_profile()
    count = len(profile.layers)
    assert count > 1
    head, *lines = split_lines(profile)
    whole = sum(layer.parameter_bytes for layer in profile.layers)
    own = sum(layer.parameter_bytes // 2 for layer in profile.layers)
    assert head == f"T = 2: a rank holds {own / whole:.1%} of the parameters"
    assert lines == [
        f"  by column: blocks.*.up ({count})",
        f"  by row: blocks.*.down ({count})",
        f"  whole: blocks.*.gate ({count}): softmax runs over the split dimension",
    ]


def test_a_profile_of_whole_layers_says_nothing_of_it() -> None:
    assert not list(split_lines(random_profile(random.Random(1), chain=True)))
