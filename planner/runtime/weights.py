"""All parameters of the model on one process, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from planner.capture.shard_split import Split
from planner.runtime.groups import Group
from planner.runtime.parts import receive, send


def whole_weights(
    own: Mapping[str, Tensor],
    control: Group,
    global_rank: int,
    owners: Mapping[str, int],
    *,
    splits: Mapping[str, Split],
    tensor: int,
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, sorted, on the CPU, at process 0; the others only send theirs and give nothing.

    ``own``: the parameters that this process has; ``owners[name]``: the process that tells it, the first of its
    ``tensor`` ranks, which gathers the parts of one in ``splits``. All processes must go through it to its end.
    """
    for name in sorted(owners):
        owner = owners[name]
        others = range(owner + 1, owner + tensor) if name in splits else range(0)
        if global_rank in others:
            send(own[name], control, to=owner)
        if owner == global_rank:
            weight = own[name].detach().cpu().contiguous()
            if name in splits:
                weight = splits[name].whole([weight, *(receive(control, source) for source in others)])
            if global_rank == 0:
                yield name, weight
            else:
                send(weight, control, to=0)
        elif global_rank == 0:
            yield name, receive(control, owner)
