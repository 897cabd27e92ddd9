"""The tensor sizes (T) that a profile has costs at, those that its model cannot be split at, and why one is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from planner.profile.profile import Profile

LEFT_OUT: Final = "tensor_left_out"
"""The key of the device's notes that holds the sizes at which nothing can be split: ``2: why; 4: why``."""


def noted(left_out: Mapping[int, str]) -> str:
    """What the notes hold of the sizes at which nothing can be split."""
    return "; ".join(f"{size}: {why}" for size, why in sorted(left_out.items()))


def left_out(profile: Profile) -> dict[int, str]:
    """The sizes at which nothing in the model can be split, and why."""
    found = re.findall(r"(?:^|; )(\d+)(?:: )?(.*?)(?=; \d+|$)", profile.device.software.get(LEFT_OUT, ""))
    return {int(size): why for size, why in found}


def sizes_of(profile: Profile) -> tuple[int, ...]:
    """The sizes that all layers have rows for, at one micro-batch size at least, ascending."""
    rows = [{(cost.microbatch_size, cost.tensor) for cost in layer.costs} for layer in profile.layers]
    return tuple(sorted({tensor for _, tensor in set.intersection(*rows)}))


def why_missing(profile: Profile, size: int) -> tuple[str, str] | None:
    """Why a plan cannot have so many tensor ranks, and the mend; None where the profile has rows for them."""
    known = sizes_of(profile)
    if size in known:
        return None
    if (why := left_out(profile).get(size)) is not None:
        return why or f"no layer can be split over {size} tensor ranks", "plan with --tensor 1"
    listed = ", ".join(map(str, known)) or "none"
    asked = ",".join(map(str, sorted({*known, size})))
    return (
        f"the profile has no costs at tensor size {size} for all layers (it has {listed})",
        f"pipeplan profile --tensor {asked} measures them",
    )
