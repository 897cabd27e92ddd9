"""What is known of a capture that is one of T tensor ranks: its parts, what is exchanged, what is split and not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from planner.capture.shard_ops import Collectives, TensorGroup
from planner.capture.shard_split import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """All-reduces over the tensor ranks in one action: calls, and bytes summed over calls.

    A reduce-scatter or an all-gather is half of one.
    """

    count: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """What of a layer is split: modules by how ("column", "row", "rows of the vocabulary"); and why others are not.

    ``tokens``: where activations are to be held in parts over the tokens, whether its sums over the ranks leave them so
    ("split"), or why one does not; None where they are not to be, or there is no such sum.
    """

    name: str
    split: tuple[tuple[str, str], ...]
    whole: tuple[tuple[str, str], ...]
    tokens: str | None
    forward: Exchanged
    backward_input: Exchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model is split over ``size`` tensor ranks, and which of them this is.

    ``parameters``: those that each rank holds a part of; all others are the same on every rank, and so are their
    gradients but for those of ``late``, which are to be summed over the ranks once a step. ``sequence``: what is whole
    between split ops is held in parts over the tokens.
    """

    size: int
    rank: int
    parameters: Mapping[str, Split]
    late: tuple[str, ...]
    layers: tuple[LayerSharding, ...]
    collectives: Collectives = field(repr=False)
    sequence: bool = False

    def connect(self, group: TensorGroup) -> None:
        """From now on the graph's sums go over this group."""
        self.collectives.group = group

    def sum_late(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put into ``.grad`` of those of ``late`` the sum of all ranks' gradients.

        Added in the order of the ranks, entry by entry: the same bits whatever is summed together.
        """
        group = self.collectives.group
        if group is None:
            return
        rows: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for name, parameter in parameters.items():
            if name in self.late and parameter.grad is not None:
                rows[parameter.grad.dtype].append((parameter, parameter.grad))
        for row in rows.values():
            total, *others = group.gather(torch.cat([gradient.reshape(-1) for _, gradient in row]), self.size)
            for other in others:
                total = total + other
            parts = total.split([gradient.numel() for _, gradient in row])
            for (parameter, _), part in zip(row, parts, strict=True):
                parameter.grad = part.view(parameter.shape)

    def take_parts(self, module: nn.Module) -> None:
        """Put the rank's parts in the place of a module's whole parameters."""
        for name, parameter in module.named_parameters():
            if name in self.parameters:
                part = self.parameters[name].part(parameter.data, self.size, self.rank)
                parameter.data = part.clone(memory_format=torch.contiguous_format)
