"""A stage as a program: one functional graph whose arguments are weights, inputs and what earlier stages sent.

A leaf per (parameter, layer) lets the gradients of a tied parameter be added in one order whatever the cut; constants
and values derived from inputs are rebuilt here; a seed goes before the first random op of each random layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from planner.capture.analysis import Analysis, needed
from planner.capture.derived import derived_weights, split_derived
from planner.capture.lifted import Role, autocast_of, opaque_call
from planner.capture.seeds import salt_of, seed_layer, seed_layer_cuda, seed_opaque, seed_opaque_cuda
from planner.capture.sharding import Sharding
from planner.capture.splitting import SplitOp, leaf_numbers, split_ops
from planner.capture.trace import is_random


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A tensor made in one stage and read in later ones; ``readers`` are those later stages, ascending.

    It fills its memory without gaps, in the order that ``stride`` says. Its gradient goes from the last of
    ``grad_readers`` to the one before it, and so on to the producer.
    """

    name: str
    producer: int
    readers: tuple[int, ...]
    grad_readers: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def grad(self) -> bool:
        """Whether a gradient comes back."""
        return bool(self.grad_readers)

    def example(self) -> Tensor:
        """A tensor of its kind, on meta."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A parameter as one layer reads it; ``layer`` is the layer's number in execution order."""

    parameter: str
    layer: int


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """One stage of a cut, without weights. Names of parameters and buffers are the first that the model gives them."""

    index: int
    layers: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    buffers: tuple[str, ...]
    changed_buffers: tuple[str, ...]
    inputs: tuple[int, ...]  # which leaves of the batch are read, by number
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    loss_dtype: torch.dtype | None  # of the loss, where it is made here
    device: torch.device
    constants: tuple[Tensor, ...] = field(repr=False)
    source: _Source = field(repr=False)
    sharding: Sharding | None = field(default=None, repr=False)  # where it is one tensor rank's

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters this stage uses; tied ones are used by other stages too."""
        return tuple(dict.fromkeys(leaf.parameter for leaf in self.leaves))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What a forward runs under."""
        return autocast_of(self.source.analysis.lifted)

    @property
    def has_loss(self) -> bool:
        """Whether the loss is made here."""
        return self.loss_dtype is not None

    @property
    def nodes(self) -> list[fx.Node]:
        """The ops of the captured graph that run here, in order."""
        order = self.source.analysis.flow.order
        return sorted({*self.source.nodes, *self.source.rebuilt}, key=order.__getitem__)

    @cached_property
    def roots(self) -> tuple[str, ...]:
        """Tensors made here whose gradient comes from a later stage, in the order of ``sends``."""
        return tuple(boundary.name for boundary in self.sends if boundary.grad)

    @cached_property
    def relays(self) -> tuple[str, ...]:
        """Tensors received here whose gradient comes from a later reader, to go on to the one before this stage."""
        return tuple(
            boundary.name
            for boundary in self.receives
            if self.index in boundary.grad_readers and boundary.grad_readers[-1] > self.index
        )

    @cached_property
    def returns(self) -> tuple[str, ...]:
        """Tensors received here whose gradient this stage hands on."""
        return tuple(boundary.name for boundary in self.receives if self.index in boundary.grad_readers)

    @cached_property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        """``run(*leaves, *buffers, *constants, *inputs, *received, key)`` -> tensors of ``sends``, then the loss."""
        return _compiled(self.source, {}, frozenset())

    @cached_property
    def split(self) -> dict[fx.Node, SplitOp]:
        """The ops whose weight gradients I leaves to W."""
        return split_ops(self.source.analysis, self.source.nodes, self.source.leaf_numbers)

    @cached_property
    def derived(self) -> frozenset[fx.Node]:
        """The weights made out of parameters alone whose backward I leaves to W."""
        return derived_weights(self.source.analysis, self.source.nodes, set(self.split))

    @cached_property
    def run_split(self) -> Callable[..., tuple[Tensor, ...]]:
        """As ``run``, followed by a token that requires grad and a WeightQueue; the leaves of W come detached."""
        return _compiled(self.source, self.split, self.derived)

    @cached_property
    def split_leaves(self) -> frozenset[int]:
        """The leaves whose gradients W makes, by number."""
        source = self.source
        found = (leaf_numbers(source.analysis, node, op, source.leaf_numbers) for node, op in self.split.items())
        return frozenset(number for numbers in found for number in numbers)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Source:
    """What a stage's graph is written from: nodes of the captured graph."""

    analysis: Analysis
    nodes: list[fx.Node]  # of the stage's layers, in execution order
    rebuilt: list[fx.Node]  # constants and derived values
    leaves: list[tuple[fx.Node, int]]
    buffers: list[fx.Node]
    constants: list[fx.Node]
    inputs: list[fx.Node]
    receives: list[fx.Node]
    sends: list[fx.Node]
    loss: fx.Node | None
    on_cuda: bool

    @cached_property
    def leaf_numbers(self) -> dict[tuple[str, int], int]:
        """Each leaf's number, by its parameter's name and its layer."""
        roles = self.analysis.lifted.roles
        return {(roles[node][1], layer): number for number, (node, layer) in enumerate(self.leaves)}


def build_program(
    analysis: Analysis, stage_of: dict[int, int], index: int, device: torch.device, sharding: Sharding | None = None
) -> StageProgram:
    """The program of stage ``index``, where ``stage_of`` gives the stage of every layer."""
    roles, layer_of = analysis.lifted.roles, analysis.layer_of
    layers = [layer for layer in range(len(analysis.segments)) if stage_of[layer] == index]
    nodes = [node for layer in layers for node in analysis.segments[layer].nodes]
    beside = needed(analysis, nodes)
    of_role = {role: [node for node in beside if node in roles and roles[node][0] is role] for role in Role}
    leaves = [
        (node, layer)
        for layer in layers
        for node in of_role[Role.PARAMETER]
        if any(layer_of.get(user) == layer for user in node.users)
    ]
    (loss,) = (node.args[0] for node in analysis.lifted.graph.nodes if node.op == "output")
    boundaries = {node: _boundary(analysis, node, stage_of) for node in analysis.crossing}
    receives = [node for node, boundary in boundaries.items() if index in boundary.readers]
    sends = [node for node, boundary in boundaries.items() if boundary.producer == index and boundary.readers]
    source = _Source(
        analysis=analysis,
        nodes=nodes,
        rebuilt=[node for node in beside if node not in roles],
        leaves=leaves,
        buffers=of_role[Role.BUFFER],
        constants=of_role[Role.CONSTANT],
        inputs=of_role[Role.INPUT],
        receives=receives,
        sends=sends,
        loss=loss if layer_of.get(loss) in layers else None,
        on_cuda=device.type == "cuda",
    )
    buffers = tuple(roles[node][1] for node in source.buffers)
    return StageProgram(
        index=index,
        layers=tuple(analysis.segments[layer].name for layer in layers),
        leaves=tuple(Leaf(parameter=roles[node][1], layer=layer) for node, layer in leaves),
        buffers=buffers,
        changed_buffers=tuple(name for name in buffers if name in analysis.flow.changed_buffers),
        inputs=tuple(int(roles[node][1]) for node in source.inputs),
        receives=tuple(boundaries[node] for node in receives),
        sends=tuple(boundaries[node] for node in sends),
        loss_dtype=None if source.loss is None else analysis.trace.facts[source.loss].tensor.dtype,  # type: ignore[union-attr]
        device=device,
        constants=tuple(analysis.lifted.constants[roles[node][1]] for node in source.constants),
        source=source,
        sharding=sharding,
    )


def _boundary(analysis: Analysis, node: fx.Node, stage_of: dict[int, int]) -> Boundary:
    producer = stage_of[analysis.layer_of[node]]
    readers = analysis.crossing[node]
    tensor = analysis.trace.facts[node].tensor
    assert tensor is not None
    return Boundary(
        name=analysis.names[node],
        producer=producer,
        readers=tuple(sorted({stage_of[layer] for layer in readers} - {producer})),
        grad_readers=tuple(sorted({stage_of[layer] for layer, grad in readers.items() if grad} - {producer})),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=tensor.dtype,
    )


# --- writing the graph ------------------------------------------------------------------------------------------------


def _compiled(
    source: _Source, split: dict[fx.Node, SplitOp], derived: frozenset[fx.Node]
) -> Callable[..., tuple[Tensor, ...]]:
    root = torch.nn.Module()
    for name, module in source.analysis.lifted.modules.items():
        root.add_module(name, module)
    graph = _Writer(source, split, derived).graph
    return fx.GraphModule(root, graph).forward


class _Writer:
    """Writes a stage's graph."""

    def __init__(self, source: _Source, split: dict[fx.Node, SplitOp], derived: frozenset[fx.Node]) -> None:
        self._source = source
        self._split = split
        self._derived = derived
        self.graph = fx.Graph()
        self._leaves = {key: self.graph.placeholder(f"{key[0].name}_{key[1]}") for key in source.leaves}
        arguments = (*source.buffers, *source.constants, *source.inputs, *source.receives)
        self._made: dict[fx.Node, fx.Node] = {node: self.graph.placeholder(node.name) for node in arguments}
        self._key = self.graph.placeholder("random_key")
        if split or derived:
            self._token = self.graph.placeholder("token")
            self._queue = self.graph.placeholder("weight_queue")
        self._copy_what_is_changed()
        self._ops()
        ends = [*source.sends, *([source.loss] if source.loss is not None else [])]
        self.graph.output(tuple(self._made[node] for node in ends))

    def _copy_what_is_changed(self) -> None:
        """A received tensor that this stage changes in place is copied first: others read it too."""
        facts, writers = self._source.analysis.trace.facts, self._source.analysis.flow.writers
        own = set(self._source.nodes)
        for node in self._source.receives:
            if any(writer in own for storage in facts[node].storages for writer in writers.get(storage, ())):
                self._made[node] = self.graph.call_function(torch.ops.aten.clone.default, (self._made[node],))

    def _ops(self) -> None:
        analysis = self._source.analysis
        on_cuda = self._source.on_cuda
        seed = seed_layer_cuda if on_cuda else seed_layer
        seed_whole = seed_opaque_cuda if on_cuda else seed_opaque
        seeded: set[int] = set()
        nodes = sorted({*self._source.nodes, *self._source.rebuilt}, key=analysis.flow.order.__getitem__)
        for node in nodes:
            layer = analysis.layer_of.get(node)
            if (call := opaque_call(node)) is not None:
                self.graph.call_function(seed_whole, (self._key, salt_of(call.label)))
            elif layer is not None and layer not in seeded and is_random(node):
                seeded.add(layer)
                self.graph.call_function(seed, (self._key, salt_of(analysis.segments[layer].name)))
            self._made[node] = self._op(node, layer)
            if node in self._derived:
                arguments = (self._made[node], self._token, self._queue)
                self._made[node] = self.graph.call_function(split_derived, arguments)

    def _op(self, node: fx.Node, layer: int | None) -> fx.Node:
        def argument(used: fx.Node) -> fx.Node:
            found = self._leaves.get((used, layer)) if layer is not None else None
            return self._made[used] if found is None else found

        if (op := self._split.get(node)) is not None:
            leaves = leaf_numbers(self._source.analysis, node, op, self._source.leaf_numbers)
            arguments = (*op.arguments(argument), self._token, self._queue, leaves)
            return self.graph.call_function(op.function, arguments)
        return self.graph.node_copy(node, argument)
