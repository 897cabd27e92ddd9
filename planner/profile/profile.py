"""The profile: what each layer costs, as measured, estimated or imported (no torch here)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le, MinLen

from planner.record import Bandwidth, Bytes, Count, Fraction, LayerBytes, Seconds, record

FORMAT: Final = "pipeplan-profile/1"
Provenance = Literal["measured", "estimated", "imported"]


@record
class ProfiledModel:
    """Which model was profiled. ``source`` is the model file's path relative to the profile's folder."""

    name: Annotated[str, MinLen(1)]
    source: str
    fingerprint: str


@record
class Device:
    """Where it was profiled."""

    kind: Literal["cuda", "cpu", "estimate"]
    name: str
    memory_bytes: Bytes
    software: dict[str, str]


@record
class OptimizerCost:
    """The optimizer's state and step time per byte of trainable parameters."""

    name: str
    state_bytes_per_trainable_byte: Fraction
    step_s_per_trainable_byte: Fraction

    def sharded(self, replicas: float) -> OptimizerCost:
        """Of one of several replicas that each hold and step an equal share."""
        return dataclasses.replace(
            self,
            state_bytes_per_trainable_byte=self.state_bytes_per_trainable_byte / replicas,
            step_s_per_trainable_byte=self.step_s_per_trainable_byte / replicas,
        )


@record
class ProfiledSums:
    """All-reduces of n bytes over T processes (or devices): 2(T-1) · latency + 2(T-1)/T · n / bandwidth."""

    latency_s: Seconds
    bandwidth_bytes_per_s: Bandwidth


@record
class ProfiledLinks:
    """A link between two processes (or devices) of the profiled machine; ``sums`` over tensor ranks there."""

    latency_s: Seconds
    bandwidth_bytes_per_s: Bandwidth
    overlap: bool = True
    sums: ProfiledSums | None = None


@record
class Collective:
    """All-reduces of one action of one layer: calls, and bytes summed over calls."""

    count: Fraction
    bytes: Fraction


@record
class Collectives:
    """All-reduces within the tensor group in F and in I (W has none)."""

    forward: Collective
    backward_input: Collective


@record
class Cost:
    """What one layer costs at one micro-batch size (samples) and tensor-parallel size.

    ``saved_bytes`` is held from F to B; ``saved_for_weight_bytes`` between I and W (queued output gradients too).
    ``split_s`` is what F, I and W together last longer than F and a whole B: what splitting the backward costs.
    ``spread`` is the interquartile range of the layer's F + I + W over its median, where it was measured.
    The last five belong to rows with ``tensor`` > 1, and give the sizes of one tensor rank (``shared_bytes``: of each
    tied parameter).
    """

    microbatch_size: Count
    tensor: Count = 1
    forward_s: Seconds
    backward_input_s: Seconds
    backward_weight_s: Seconds
    split_s: Seconds | None = None
    saved_bytes: LayerBytes
    saved_for_weight_bytes: LayerBytes
    workspace_bytes: LayerBytes
    spread: Fraction | None = None
    parameter_bytes: LayerBytes | None = None
    trainable_bytes: LayerBytes | None = None
    buffer_bytes: LayerBytes | None = None
    shared_bytes: dict[str, LayerBytes] | None = None
    collectives: Collectives | None = None


@record
class Accuracy:
    """What layers add up to over what runs of them took as one stage, minus 1: the median of its size, the largest."""

    microbatch_size: Count
    median_error: Fraction
    largest_error: Annotated[float, Ge(-1), Le(1e18)]


@record
class LayerSplit:
    """What of a layer is split over T tensor ranks: modules with how, and what is left whole, with the reason.

    ``tokens``, with sequence_parallel: "split" where its sums leave the ranks in parts over the tokens, or why not.
    """

    tensor: Count
    split: dict[str, str]
    whole: dict[str, str]
    tokens: str | None = None


@record
class SharedParameter:
    """A tied parameter: its size, and whether it is trained."""

    bytes: LayerBytes
    trainable: bool = True


@record
class Layer:
    """One layer. ``modules`` are fully qualified names; sizes are those of T = 1 and include ``shared`` parameters."""

    name: Annotated[str, MinLen(1)]
    kind: str
    modules: tuple[str, ...]
    parameter_bytes: LayerBytes
    trainable_bytes: LayerBytes
    buffer_bytes: LayerBytes
    costs: Annotated[tuple[Cost, ...], MinLen(1)]
    shared: dict[str, SharedParameter] | None = None
    splits: tuple[LayerSplit, ...] | None = None


@record
class TensorPart:
    """What one of ``tensor`` ranks has of a tensor that they hold in parts, in bytes as an EdgeTensor's."""

    tensor: Count
    bytes_per_sample: Fraction
    fixed_bytes: LayerBytes


@record
class EdgeTensor:
    """A tensor that a layer hands to a later one; at micro-batch size b it has bytes_per_sample · b + fixed_bytes.

    ``grad``: a gradient flows back. ``saved``: the reader's backward needs it. ``parts``: at those
    tensor sizes where each rank has a part of it.
    """

    name: Annotated[str, MinLen(1)]
    bytes_per_sample: Fraction
    fixed_bytes: LayerBytes
    grad: bool
    saved: bool = False
    parts: tuple[TensorPart, ...] | None = None


@record
class Edge:
    """Tensors that ``target`` reads from ``source`` (layer names)."""

    source: str
    target: str
    tensors: tuple[EdgeTensor, ...]


@record
class Profile:
    """Per-layer costs and the acyclic graph of layers; ``layers`` stand in a topological order of ``edges``.

    ``sequence_parallel``: at tensor > 1 activations between split ops are held in parts over the tokens.
    """

    format: Literal["pipeplan-profile/1"] = FORMAT
    model: ProfiledModel
    device: Device
    provenance: Provenance
    dtype: str
    global_batch: Count | None = None
    gradient_bytes_per_trainable_byte: Fraction
    optimizer: OptimizerCost
    links: ProfiledLinks | None = None
    accuracy: tuple[Accuracy, ...] | None = None
    sequence_parallel: bool | None = None
    layers: Annotated[tuple[Layer, ...], MinLen(1)]
    edges: tuple[Edge, ...]
