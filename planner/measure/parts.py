"""A captured model as one of several tensor ranks runs it, beside the whole: what is measured at each micro-batch size.

The sums over the ranks are left out of what is timed; their calls and bytes are counted in the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from planner.capture import Capture
from planner.capture.shard import shard
from planner.capture.sharding import Exchanged
from planner.errors import InputError
from planner.profile import Collective, Collectives, LayerSplit, TensorPart


class Parts:
    """Rank 0 of each tensor size asked for; ``left_out``: sizes at which nothing can be split, with the reason.

    ``sequence``: what is whole between split ops is held in parts over the tokens.
    """

    def __init__(self, sizes: Sequence[int], *, sequence: bool = False) -> None:
        self._sequence = sequence
        self._sizes = sorted({size for size in sizes if size > 1})
        self._modules: dict[int, nn.Module] = {}
        self.left_out: dict[int, str] = {}

    def of(self, captured: Capture) -> list[Capture]:
        """The capture, and those of its parts; parts of all micro-batch sizes share one set of weights."""
        found = [captured]
        for size in self._sizes:
            if size in self.left_out:
                continue
            try:
                part = shard(captured, tensor=size, sequence=self._sequence)
            except InputError as fault:
                self.left_out[size] = fault.message.partition(": ")[2] or fault.message
                continue
            found.append(replace(part, module=self._modules.setdefault(size, part.module)))
        return found


def tensor_size(captured: Capture) -> int:
    """T; 1 where nothing is split."""
    return 1 if captured.sharding is None else captured.sharding.size


def collectives_of(captured: Capture, layer: int) -> Collectives | None:
    """The all-reduces of a layer's F and I; None where nothing is split."""
    if captured.sharding is None:
        return None
    own = captured.sharding.layers[layer]
    return Collectives(forward=_counted(own.forward), backward_input=_counted(own.backward_input))


def shared_bytes_of(captured: Capture, layer: int) -> dict[str, int] | None:
    """Of a layer's tied parameters what one rank holds; None where nothing is split."""
    if captured.sharding is None:
        return None
    users = Counter(name for one in captured.layers for name in one.parameters)
    sizes = {name: parameter.nbytes for name, parameter in captured.module.named_parameters()}
    return {name: sizes[name] for name in captured.layers[layer].parameters if users[name] > 1} or None


def _counted(exchanged: Exchanged) -> Collective:
    return Collective(count=exchanged.count, bytes=exchanged.bytes)


def splits_of(captures: Sequence[Capture], layer: int) -> tuple[LayerSplit, ...] | None:
    """What of a layer is split at each tensor size, and how, and why other modules are not."""
    found = {}
    for captured in captures:
        if captured.sharding is not None and captured.sharding.size not in found:
            own = captured.sharding.layers[layer]
            found[captured.sharding.size] = LayerSplit(
                tensor=captured.sharding.size, split=dict(own.split), whole=dict(own.whole), tokens=own.tokens
            )
    return tuple(found.values()) or None


def edge_parts_of(captures: Sequence[Capture], edge: int, tensor: int) -> tuple[TensorPart, ...] | None:
    """What one rank has of an edge's tensor, at the tensor sizes where that is a part of it."""
    whole, found = captures[0].edges[edge].tensors[tensor], {}
    for captured in captures:
        part = captured.edges[edge].tensors[tensor]
        sizes = (part.bytes_per_sample, part.fixed_bytes)
        if captured.sharding is not None and sizes != (whole.bytes_per_sample, whole.fixed_bytes):
            size = captured.sharding.size
            found[size] = TensorPart(tensor=size, bytes_per_sample=sizes[0], fixed_bytes=sizes[1])
    return tuple(found.values()) or None
