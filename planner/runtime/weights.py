"""All parameters of the model on one process, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from planner.runtime.transport import HEADER_NUMBERS, Group, Layout


def whole_weights(
    own: Mapping[str, Tensor], control: Group, global_rank: int, owners: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, sorted, on the CPU, at process 0; the others only send theirs and give nothing.

    ``own``: the parameters that this process has; ``owners[name]``: the process that tells it. All processes must go
    through it to its end.
    """
    for name in sorted(owners):
        owner = owners[name]
        if owner == global_rank:
            weight = own[name].detach().cpu().contiguous()
            if global_rank == 0:
                yield name, weight
            else:
                control.send(torch.tensor(Layout.of(weight).numbers()), 0)
                if weight.numel():
                    control.send(weight.reshape(-1).view(torch.uint8), 0)
        elif global_rank == 0:
            header = torch.empty(HEADER_NUMBERS, dtype=torch.int64)
            control.receive(header, owner)
            layout = Layout.from_numbers(header.tolist())
            flat = torch.empty(layout.num_bytes, dtype=torch.uint8)
            if layout.num_bytes:
                control.receive(flat, owner)
            yield name, flat.view(layout.dtype).view(layout.shape)
