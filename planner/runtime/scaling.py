"""Losses in float16 are scaled up so that their gradients do not vanish, as torch.amp.GradScaler does it.

A step whose gradients overflow on any rank is left out on all of them, and the scale halved; after many good steps in
a row it is doubled. The scale is a power of two: it changes no bit of what neither vanishes nor overflows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from planner.runtime.groups import Group

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""So many good steps in a row double the scale."""
LEAST_SCALE = 2.0**-16
"""Where every step overflows, as it does with a loss that is no number, the scale ends here: 0 could not be undone."""


class LossScaling:
    """The scale of a whole run, the same on every rank.

    ``groups``: of the pipeline's ranks, of the tensor ranks, of replicas that see other gradients; None: there is one.
    """

    def __init__(self, *, groups: Sequence[Group | None] = (), device: torch.device) -> None:
        self.scale = INITIAL_SCALE
        self._good_steps = 0
        self._groups = [one for one in groups if one is not None]
        self._device = device

    def unscale(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide the gradients by the scale, and choose the next one; whether they are finite on every rank."""
        overflow = torch.zeros((), device=self._device)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)
                overflow += parameter.grad.isfinite().logical_not().any()
        for group in self._groups:
            group.sum(overflow)
        finite = not overflow.item()
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, LEAST_SCALE)
        elif self._good_steps == GROWTH_INTERVAL:
            self.scale *= 2
            self._good_steps = 0
        return finite

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self.scale, self._good_steps = float(kept["scale"]), int(kept["good_steps"])
