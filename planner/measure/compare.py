"""How far two profiles of one model are from each other."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from planner.profile import Cost, Profile


class Difference(NamedTuple):
    """Of F + I + W per layer and micro-batch size: the later over the earlier, minus 1."""

    median: float
    """Of the absolute values."""
    largest: float
    layer: str
    microbatch_size: int
    """Where the largest is."""


def difference(earlier: Profile, later: Profile) -> Difference | None:
    """None where they are not of the same model on the same device, or have no row in common."""
    if earlier.model.fingerprint != later.model.fingerprint or earlier.device.name != later.device.name:
        return None
    before = {layer.name: {_key(cost): _seconds(cost) for cost in layer.costs} for layer in earlier.layers}
    found = [
        Difference(0.0, _seconds(cost) / was - 1, layer.name, cost.microbatch_size)
        for layer in later.layers
        for cost in layer.costs
        if (was := before.get(layer.name, {}).get(_key(cost)))
    ]
    if not found:
        return None
    largest = max(found, key=lambda entry: abs(entry.largest))
    return largest._replace(median=median(abs(entry.largest) for entry in found))


def _key(cost: Cost) -> tuple[int, int]:
    return cost.microbatch_size, cost.tensor


def _seconds(cost: Cost) -> float:
    return cost.forward_s + cost.backward_input_s + cost.backward_weight_s
