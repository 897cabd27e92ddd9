"""Parameters that tensor ranks hold in parts: put together for a checkpoint, cut again when one is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.capture.shard_split import Split
from planner.errors import InputError
from planner.runtime.groups import Group
from planner.runtime.optimizer import PREFIX
from planner.runtime.transport import HEADER_NUMBERS, Layout


@dataclass(frozen=True, kw_only=True)
class TensorParts:
    """What one of ``size`` tensor ranks holds: parts of the parameters in ``splits``, all else as the others do.

    ``group``: of these ranks, on the device.
    """

    splits: Mapping[str, Split]
    size: int
    rank: int
    group: Group

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter, or of what the optimizer keeps of one, under its name in a checkpoint."""
        split = self.splits.get(_parameter(name))
        return whole if split is None or not whole.dim() else split.part(whole, self.size, self.rank).clone()

    def wholes(
        self, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor], control: Group, global_rank: int
    ) -> dict[str, Tensor]:
        """A checkpoint's tensors, whole, on the first of the ranks; nothing on the others. All must call it together.

        ``held``: the parameters as this rank holds them. Raises InputError where the optimizer keeps something of a
        part that is not shaped as the part is.
        """
        first = global_rank - self.rank
        made = {}
        for name in sorted(tensors):
            own, split = tensors[name], self.splits.get(_parameter(name))
            if split is None or not own.dim():
                made[name] = own
                continue
            if own.shape != held[_parameter(name)].shape:
                raise InputError(
                    f"the optimizer keeps {name.rpartition('/')[2]} of shape {list(own.shape)} for a part of "
                    f"{_parameter(name)}, which cannot be put together",
                    hint="run without --checkpoint, or solve with --tensor 1",
                )
            if self.rank:
                send(own, control, to=first)
            else:
                others = range(first + 1, first + self.size)
                made[name] = split.whole([own.detach().cpu(), *(receive(control, source) for source in others)])
        return {} if self.rank else made


def _parameter(name: str) -> str:
    """The parameter that a tensor in a checkpoint belongs to."""
    return name.split("/")[1] if name.startswith(f"{PREFIX}/") else name


def send(tensor: Tensor, control: Group, *, to: int) -> None:
    """Send a tensor, with its layout, to another process."""
    tensor = tensor.detach().cpu().contiguous()
    control.send(torch.tensor(Layout.of(tensor).numbers()), to)
    if tensor.numel():
        control.send(tensor.reshape(-1).view(torch.uint8), to)


def receive(control: Group, source: int) -> Tensor:
    """What ``send`` sends, on the CPU."""
    header = torch.empty(HEADER_NUMBERS, dtype=torch.int64)
    control.receive(header, source)
    layout = Layout.from_numbers(header.tolist())
    flat = torch.empty(layout.num_bytes, dtype=torch.uint8)
    if layout.num_bytes:
        control.receive(flat, source)
    return flat.view(layout.dtype).view(layout.shape)
