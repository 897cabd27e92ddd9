"""What to measure a model at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.capture.layers import Granularity


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Micro-batch sizes, where, and how."""

    microbatch_sizes: Sequence[int]
    device: str
    """``cpu`` or ``cuda``."""
    granularity: Granularity
    neighbours: int
    """Processes kept busy beside, where the model fits (CPU)."""
    layerwise: bool | None = None
    """Whether to measure layer by layer without ever holding the model; None: where it does not fit."""
    tensor: Sequence[int] = (1,)
    """Tensor sizes (T): beside the whole, each layer as one of T ranks has it."""
    sequence: bool = False
    """Whether at T > 1 activations between split ops are held in parts over the tokens."""
    estimate: str | None = None
    """Another device, for which the figures are estimated."""
