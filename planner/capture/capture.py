"""Model file -> layers, edges between them, and stages for any cut."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor, fx, nn

from planner.capture.analysis import Analysis, needed, settled
from planner.capture.batch import Batch, to_device
from planner.capture.dataflow import use_newest_aliases
from planner.capture.export import export
from planner.capture.grouped import group_heads
from planner.capture.layers import Granularity
from planner.capture.lifted import Autocast, Role
from planner.capture.masks import fold_masks
from planner.capture.model_file import ModelFile
from planner.capture.program import StageProgram, build_program
from planner.capture.seeds import RandomStream
from planner.capture.sharding import Sharding
from planner.capture.weightless import Fakes, buffers_to, parameters_on_meta
from planner.errors import InputError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLayer:
    """One layer. Sizes in bytes; ``saved_bytes``: what its forward keeps for backward at this micro-batch size.

    Parameters and buffers stand under the first name that the model gives them; a tied one is listed by each layer
    that uses it. A storage that a later layer saves is counted here, where it was made.
    """

    name: str
    kind: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    saved_bytes: int
    forward_flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTensor:
    """A tensor on an edge; at micro-batch size b it has ``bytes_per_sample * b + fixed_bytes``.

    ``grad``: a gradient flows back through this reader. ``saved``: the reader's backward needs the tensor.
    """

    name: str
    bytes_per_sample: int
    fixed_bytes: int
    grad: bool
    saved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedEdge:
    """Tensors that ``target`` reads from ``source``; none where only the order of the two matters (in-place ops)."""

    source: str
    target: str
    tensors: tuple[CapturedTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A captured model: layers in execution order, the acyclic graph of edges, and ``module`` with the weights.

    ``sharding``: where it is that of one tensor rank, how the model is split over them.
    ``fakes``: where it was captured without the memory of its weights, which are on meta then.
    """

    model_file: ModelFile
    module: nn.Module
    device: torch.device
    microbatch_size: int
    seed: int
    batch: Batch
    layers: tuple[CapturedLayer, ...]
    edges: tuple[CapturedEdge, ...]
    fingerprint: str
    analysis: Analysis = field(repr=False)
    sharding: Sharding | None = None
    fakes: Fakes | None = field(default=None, repr=False)

    @property
    def counted_once(self) -> list[str]:
        """Modules within a checkpoint that change buffers: plain PyTorch does it again in the backward, a graph not."""
        changed = {name.rpartition(".")[0] for name in self.analysis.trace.changed_buffers}
        return sorted(changed & self.analysis.lifted.again)

    def stages(self, cut: Sequence[Sequence[str]]) -> tuple[StageProgram, ...]:
        """One program for each stage, given the layers' names stage by stage.

        Raises InputError where a layer is missing or doubled, or an edge would go back to an earlier stage.
        """
        number = {layer.name: index for index, layer in enumerate(self.layers)}
        stage_of: dict[int, int] = {}
        for stage, names in enumerate(cut):
            for name in names:
                if name not in number:
                    raise InputError(f"stage {stage}: there is no layer {name!r}", hint=nearest(name, number))
                if number[name] in stage_of:
                    raise InputError(f"stage {stage}: layer {name!r} stands in stage {stage_of[number[name]]} too")
                stage_of[number[name]] = stage
        if missing := [layer.name for layer in self.layers if number[layer.name] not in stage_of]:
            raise InputError(f"no stage holds layer {missing[0]!r}", hint="every layer belongs to one stage")
        for edge in self.edges:
            source, target = stage_of[number[edge.source]], stage_of[number[edge.target]]
            if source > target:
                raise InputError(
                    f"stage {target} holds layer {edge.target!r}, which needs {edge.source!r} of stage {source}",
                    hint="edges go to the same stage or a later one",
                )
        return tuple(
            build_program(self.analysis, stage_of, index, self.device, self.sharding) for index in range(len(cut))
        )

    def program(self, names: Sequence[str]) -> StageProgram:
        """Some layers alone as one stage (number 1), between all layers before their last (0) and all others (2)."""
        number = {layer.name: index for index, layer in enumerate(self.layers)}
        chosen = {number[name] for name in names}
        last = max(chosen)
        stage_of = {index: 1 if index in chosen else 0 if index < last else 2 for index in range(len(self.layers))}
        return build_program(self.analysis, stage_of, 1, self.device, self.sharding)


def capture(
    model_file: ModelFile,
    *,
    microbatch_size: int,
    device: str = "cpu",
    granularity: Granularity = "block",
    seed: int = 0,
    weightless: bool = False,
) -> Capture:
    """Capture a model at one micro-batch size, its weights those of model() after manual_seed(seed).

    ``weightless``: without the memory and the values of the weights: nothing is computed, and the layers are the same.
    Raises InputError, in one line, where the model file or the model is not what it has to be.
    """
    if granularity not in get_args(Granularity):
        raise InputError(f"there is no granularity {granularity!r}", hint="one of op, module, block")
    fakes = Fakes(device) if weightless else None
    module = _module(model_file, device, seed=seed, weightless=weightless)
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in model_file.leaves:
        if not name or name not in modules:
            raise InputError(f"{model_file.path}: leaves names {name!r}, which is no module", hint="correct the name")
    with RandomStream(seed):
        batch = to_device(model_file.batch(microbatch_size), device)
        lifted = export(module, model_file, batch, fakes)
    if model_file.autocast is not None:
        lifted.autocast = Autocast(device=torch.device(device).type, dtype=model_file.autocast)
    fold_masks(lifted)
    group_heads(lifted, module, model_file, batch, fakes or Fakes(device))
    use_newest_aliases(lifted)
    try:
        with RandomStream(seed):
            analysis = settled(lifted, module, batch, granularity, fakes)
    except InputError as fault:
        raise InputError(f"{model_file.path}: {fault.message}", hint=fault.hint) from None
    layers = layers_of(analysis, module)
    edges = _edges(analysis, microbatch_size)
    return Capture(
        model_file=model_file,
        module=module,
        device=torch.device(device),
        microbatch_size=microbatch_size,
        seed=seed,
        batch=batch,
        layers=layers,
        edges=edges,
        fingerprint=_fingerprint(layers, edges, module, model_file.autocast),
        analysis=analysis,
        fakes=fakes,
    )


def _module(model_file: ModelFile, device: str, *, seed: int, weightless: bool) -> nn.Module:
    with RandomStream(seed):
        if not weightless:
            return model_file.model().to(device)
        try:
            with parameters_on_meta():
                module = model_file.model()
        except InputError as fault:
            hint = "model() may not need the values of parameters, which have none here; else --whole measures it"
            raise InputError(fault.message, hint=hint) from fault
    buffers_to(module, device)
    return module


_GRANULARITIES: tuple[Granularity, ...] = ("block", "module", "op")


def capture_as(
    model_file: ModelFile,
    *,
    fingerprint: str,
    microbatch_size: int,
    device: str = "cpu",
    seed: int = 0,
    weightless: bool = False,
) -> Capture:
    """Capture a model at the granularity that gives this fingerprint; at ``block`` where none does."""
    captures = (
        capture(
            model_file,
            microbatch_size=microbatch_size,
            device=device,
            granularity=granularity,
            seed=seed,
            weightless=weightless,
        )
        for granularity in _GRANULARITIES
    )
    first = next(captures)
    if first.fingerprint == fingerprint:
        return first
    return next((captured for captured in captures if captured.fingerprint == fingerprint), first)


# --- records ----------------------------------------------------------------------------------------------------------


def layers_of(analysis: Analysis, module: nn.Module, *, gathered: object = None) -> tuple[CapturedLayer, ...]:
    """The record of every layer. ``gathered``: the function whose outputs backward makes anew instead of keeping."""
    roles = analysis.lifted.roles
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    saved = _saved_bytes(analysis, gathered)
    made = []
    for index, part in enumerate(analysis.segments):
        held: dict[Role, list[str]] = {Role.PARAMETER: [], Role.BUFFER: []}
        for used in needed(analysis, part.nodes):
            role, name = roles.get(used, (Role.INPUT, 0))
            if role in held and name not in held[role]:
                held[role].append(str(name))
        parameters = [tensors[name] for name in held[Role.PARAMETER]]
        made.append(
            CapturedLayer(
                name=part.name,
                kind=part.kind,
                modules=tuple(part.modules),
                parameters=tuple(held[Role.PARAMETER]),
                buffers=tuple(held[Role.BUFFER]),
                parameter_bytes=_bytes(parameters),
                trainable_bytes=_bytes(tensor for tensor in parameters if tensor.requires_grad),
                buffer_bytes=_bytes(tensors[name] for name in held[Role.BUFFER]),
                saved_bytes=saved[index],
                forward_flops=sum(analysis.trace.facts[node].flops for node in part.nodes),
            )
        )
    return tuple(made)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _saved_bytes(analysis: Analysis, gathered: object) -> list[int]:
    """What each layer's forward keeps: storages once, where they were made; not parameters, buffers, inputs."""
    trace, layer_of = analysis.trace, analysis.layer_of
    owned: list[set[int]] = [set() for _ in analysis.segments]
    for index, part in enumerate(analysis.segments):
        for node in part.nodes:
            for storage in trace.facts[node].saved:
                maker = trace.maker[storage]
                if maker.op != "placeholder" and (gathered is None or maker.target != gathered):
                    owned[layer_of.get(maker, index)].add(storage)
    return [sum(trace.storage_bytes[storage] for storage in storages) for storages in owned]


def _edges(analysis: Analysis, microbatch_size: int) -> tuple[CapturedEdge, ...]:
    from_inputs = _from_inputs(analysis)
    tensors: dict[tuple[int, int], list[CapturedTensor]] = {pair: [] for pair in analysis.order_only}
    for node, readers in analysis.crossing.items():
        facts = analysis.trace.facts[node]
        assert facts.tensor is not None
        size = facts.tensor.numel() * facts.tensor.element_size()
        scales = node in from_inputs and any(extent % microbatch_size == 0 for extent in facts.tensor.shape)
        for reader, grad in readers.items():
            saved = any(analysis.trace.facts[user].saved & facts.storages for user in analysis.segments[reader].nodes)
            tensors.setdefault((analysis.layer_of[node], reader), []).append(
                CapturedTensor(
                    name=analysis.names[node],
                    bytes_per_sample=size // microbatch_size if scales else 0,
                    fixed_bytes=0 if scales else size,
                    grad=grad,
                    saved=saved,
                )
            )
    parts = analysis.segments
    return tuple(
        CapturedEdge(source=parts[source].name, target=parts[target].name, tensors=tuple(entries))
        for (source, target), entries in sorted(tensors.items())
    )


def _from_inputs(analysis: Analysis) -> set[fx.Node]:
    """Nodes that depend on the batch."""
    found = {node for node, (role, _) in analysis.lifted.roles.items() if role is Role.INPUT}
    for node in analysis.lifted.graph.nodes:
        if any(used in found for used in node.all_input_nodes):
            found.add(node)
    return found


def _fingerprint(
    layers: tuple[CapturedLayer, ...],
    edges: tuple[CapturedEdge, ...],
    module: nn.Module,
    autocast: torch.dtype | None,
) -> str:
    """sha256 over layers, parameters and edges; the same at every micro-batch size and in every process."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = [[name, list(t.shape), str(t.dtype), t.requires_grad] for name, t in sorted(held.items())]
    parts = [[layer.name, layer.kind, layer.modules, layer.parameters, layer.buffers] for layer in layers]
    ways = [[edge.source, edge.target, [[tensor.name, tensor.grad] for tensor in edge.tensors]] for edge in edges]
    told = [tensors, parts, ways] + ([] if autocast is None else [str(autocast)])
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
