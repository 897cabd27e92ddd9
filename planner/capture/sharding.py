"""What is known of a capture that is one of T tensor ranks: its parts, what is exchanged, what is split and not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from planner.capture.shard_ops import Collectives, TensorGroup
from planner.capture.shard_split import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Sums over the tensor ranks in one action: calls, and bytes summed over calls."""

    count: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """What of a layer is split: modules by how ("column", "row", "rows of the vocabulary"); and why others are not."""

    name: str
    split: tuple[tuple[str, str], ...]
    whole: tuple[tuple[str, str], ...]
    forward: Exchanged
    backward_input: Exchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model is split over ``size`` tensor ranks, and which of them this is.

    ``parameters``: those that each rank holds a part of; all others, and their gradients, are the same on every rank.
    """

    size: int
    rank: int
    parameters: Mapping[str, Split]
    layers: tuple[LayerSharding, ...]
    collectives: Collectives = field(repr=False)

    def connect(self, group: TensorGroup) -> None:
        """From now on the graph's sums go over this group."""
        self.collectives.group = group

    def take_parts(self, module: nn.Module) -> None:
        """Put the rank's parts in the place of a module's whole parameters."""
        for name, parameter in module.named_parameters():
            if name in self.parameters:
                part = self.parameters[name].part(parameter.data, self.size, self.rank)
                parameter.data = part.clone(memory_format=torch.contiguous_format)
