"""Tensor parallel: a captured model as one of T ranks runs it that share every layer.

The split is found from the graph alone. A rank's capture has the layers, edges and names of the whole one, so that
stages, measuring and runs take it as any other; its module holds the rank's parts of the parameters.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from planner.capture.analysis import Analysis, settled_as
from planner.capture.capture import Capture, CapturedEdge, CapturedTensor, layers_of
from planner.capture.seeds import RandomStream
from planner.capture.shard_ops import Collectives
from planner.capture.shard_plan import ShardPlan, plan_shards
from planner.capture.shard_rewrite import Rewriter
from planner.capture.sharding import Exchanged, LayerSharding, Sharding
from planner.errors import InputError


def shard(captured: Capture, *, tensor: int, rank: int = 0, sequence: bool = False) -> Capture:
    """The capture of one of T = ``tensor`` ranks; its sums over the ranks do nothing until a group is connected.

    ``sequence``: what is whole between the split ops is held in parts over the tokens, where the graph lets it.
    Raises InputError where nothing in the model can be split.
    """
    samples = captured.microbatch_size if sequence else None
    plan = plan_shards(captured.analysis, size=tensor, rank=rank, samples=samples)
    if not plan.parameters:
        reason = next(iter(plan.whole.values()), "it has no weights")
        raise InputError(
            f"{captured.model_file.path}: no layer can be split over {tensor} tensor ranks ({reason})",
            hint="plan with --tensor 1",
        )
    collectives, roles = Collectives(tensor, rank), captured.analysis.lifted.roles
    rewriter = Rewriter(captured.analysis, plan, collectives)
    sharding = Sharding(
        size=tensor,
        rank=rank,
        parameters=plan.parameters,
        late=tuple(sorted(roles[node][1] for node in plan.late if node in roles)),
        layers=(),
        collectives=collectives,
        sequence=sequence,
    )
    module = _part_of(captured.module, sharding)
    with RandomStream(captured.seed):
        analysis = settled_as(
            captured.analysis, rewriter.lifted, rewriter.layer_of, module, captured.batch, captured.fakes
        )
    sharding = replace(sharding, layers=_told(captured.analysis, plan, analysis, collectives))
    sizes = {captured.analysis.names[node]: rewriter.made(node) for node in captured.analysis.crossing}
    return replace(
        captured,
        module=module,
        analysis=analysis,
        layers=layers_of(analysis, module, gathered=collectives.gather_entering),
        edges=_local_edges(captured, {name: _bytes_of(analysis, node) for name, node in sizes.items()}),
        sharding=sharding,
    )


def _local_edges(captured: Capture, sizes: Mapping[str, int]) -> tuple[CapturedEdge, ...]:
    """The edges with what of each tensor one rank has."""

    def local(tensor: CapturedTensor) -> CapturedTensor:
        if tensor.bytes_per_sample:
            return replace(tensor, bytes_per_sample=sizes[tensor.name] // captured.microbatch_size)
        return replace(tensor, fixed_bytes=sizes[tensor.name])

    return tuple(replace(edge, tensors=tuple(map(local, edge.tensors))) for edge in captured.edges)


def _part_of(module: nn.Module, sharding: Sharding) -> nn.Module:
    """A copy of a module that holds the rank's parts alone, without ever copying the whole."""
    memo: dict[int, object] = {}
    for name, parameter in module.named_parameters():
        data = parameter.data
        if name in sharding.parameters:
            data = sharding.parameters[name].part(data, sharding.size, sharding.rank)
        memo[id(parameter)] = nn.Parameter(data.clone(), requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


# --- what is told -----------------------------------------------------------------------------------------------------


def _told(whole: Analysis, plan: ShardPlan, local: Analysis, collectives: Collectives) -> tuple[LayerSharding, ...]:
    split: dict[int, list[tuple[str, str]]] = defaultdict(list)
    left: dict[int, list[tuple[str, str]]] = defaultdict(list)
    tokens: dict[int, str] = {}
    for node, step in plan.steps.items():
        layer = whole.layer_of.get(node)
        if layer is None:
            continue
        if node in plan.tokens.begun:
            tokens.setdefault(layer, "split")
        elif plan.tokens.left.get(node):
            tokens[layer] = plan.tokens.left[node]
        if step.weights:
            how = "vocabulary" if step.function == "embedding" else "row" if step.partial else "column"
            split[layer].append((_module(whole, node), how))
        elif node in plan.whole:
            left[layer].append((_module(whole, node), plan.whole[node]))
    forward, backward = _exchanged(local, collectives)
    return tuple(
        LayerSharding(
            name=part.name,
            split=tuple(dict.fromkeys(split[index])),
            whole=tuple(dict.fromkeys(left[index])),
            tokens=tokens.get(index),
            forward=forward[index],
            backward_input=backward[index],
        )
        for index, part in enumerate(whole.segments)
    )


def _module(analysis: Analysis, node: fx.Node) -> str:
    scopes = analysis.lifted.scopes.get(node, ())
    return scopes[-1].module if scopes else node.name


def _bytes_of(analysis: Analysis, node: Any) -> int:
    tensor = analysis.trace.facts[node].tensor
    assert tensor is not None
    return tensor.nbytes


def _exchanged(local: Analysis, collectives: Collectives) -> tuple[list[Exchanged], list[Exchanged]]:
    """Of every layer, in F and in I."""
    halves: dict[str, Counter[int]] = {name: Counter() for name in ("F", "F bytes", "I", "I bytes")}

    def add(action: str, layer: int, num_bytes: int, *, half: bool = False) -> None:
        halves[action][layer] += 1 if half else 2
        halves[f"{action} bytes"][layer] += num_bytes if half else 2 * num_bytes

    for node, layer in local.layer_of.items():
        flows = node in local.flow.flows
        if node.target == collectives.enter and flows:
            add("I", layer, _bytes_of(local, node))
        elif node.target == collectives.leave:
            add("F", layer, _bytes_of(local, node))
        elif node.target in (collectives.gather, collectives.gather_entering):
            add("F", layer, _bytes_of(local, node), half=True)
            if node.target == collectives.gather_entering and flows:
                for _ in ("gathered again", "summed"):
                    add("I", layer, _bytes_of(local, node), half=True)
        elif node.target == collectives.leave_in_parts:
            add("F", layer, _bytes_of(local, node.args[0]), half=True)
            if flows:
                add("I", layer, _bytes_of(local, node.args[0]), half=True)
        elif node.target == collectives.cross_entropy:
            logits = local.trace.facts[node.args[0]].tensor  # type: ignore[index]
            assert logits is not None
            rows = logits.numel() // logits.shape[1] * max(4, logits.element_size())
            add("F", layer, rows)
            add("F", layer, rows * (3 if node.args[6] else 2))
    layers = range(len(local.segments))
    return tuple(  # type: ignore[return-value]
        [Exchanged(count=halves[action][n] / 2, bytes=halves[f"{action} bytes"][n] // 2) for n in layers]
        for action in ("F", "I")
    )
