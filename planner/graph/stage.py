"""A stage as plans, simulations and the search know it: its layers and what running them costs."""

from __future__ import annotations

from planner.record import Bytes, Index, Seconds, record


@record
class Transfer:
    """A message of one action to another stage (0 bytes: a dependency, no traffic)."""

    to_stage: Index
    bytes: Bytes


@record
class Stage:
    """One stage at a plan's micro-batch size and tensor-parallel size.

    Times already contain the tensor group's collectives. ``split_s``: what splitting its backward adds to I. ``sends``:
    activations, after F, nearest reader first; ``returns``: gradients, after B or I, highest stage first.
    ``input_bytes``: what a recomputing stage keeps; ``workspace_bytes``: that of its largest layer. Each parameter
    counts once, tied ones too.
    """

    stage: Index
    rank: Index
    layers: tuple[str, ...]
    recompute: bool = False
    forward_s: Seconds
    backward_input_s: Seconds
    backward_weight_s: Seconds
    split_s: Seconds | None = None
    parameter_bytes: Bytes
    trainable_bytes: Bytes
    buffer_bytes: Bytes
    input_bytes: Bytes
    saved_bytes: Bytes
    saved_for_weight_bytes: Bytes
    workspace_bytes: Bytes
    sends: tuple[Transfer, ...] = ()
    returns: tuple[Transfer, ...] = ()


@record
class Tie:
    """A parameter that several stages use: its gradients are summed once a step, down ``stages`` (ascending here)."""

    name: str
    bytes: Bytes
    trainable: bool
    stages: tuple[int, ...]
