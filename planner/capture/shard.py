"""Tensor parallel: a captured model as one of T ranks runs it that share every layer.

The split is found from the graph alone. A rank's capture has the layers, edges and names of the whole one, so that
stages, measuring and runs take it as any other; its module holds the rank's parts of the parameters.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from dataclasses import replace

from torch import fx, nn

from planner.capture.analysis import Analysis, settled_as
from planner.capture.capture import Capture, layers_of
from planner.capture.seeds import RandomStream
from planner.capture.shard_ops import Collectives
from planner.capture.shard_plan import ShardPlan, plan_shards
from planner.capture.shard_rewrite import Rewriter
from planner.capture.sharding import Exchanged, LayerSharding, Sharding
from planner.errors import InputError


def shard(captured: Capture, *, tensor: int, rank: int = 0) -> Capture:
    """The capture of one of T = ``tensor`` ranks; its sums over the ranks do nothing until a group is connected.

    Raises InputError where nothing in the model can be split.
    """
    plan = plan_shards(captured.analysis, size=tensor, rank=rank)
    if not plan.parameters:
        reason = next(iter(plan.whole.values()), "it has no linear layers")
        raise InputError(
            f"{captured.model_file.path}: no layer can be split over {tensor} tensor ranks ({reason})",
            hint="plan with --tensor 1",
        )
    collectives = Collectives(tensor, rank)
    rewriter = Rewriter(captured.analysis, plan, collectives)
    sharding = Sharding(size=tensor, rank=rank, parameters=plan.parameters, layers=(), collectives=collectives)
    module = _part_of(captured.module, sharding)
    with RandomStream(captured.seed):
        analysis = settled_as(
            captured.analysis, rewriter.lifted, rewriter.layer_of, module, captured.batch, captured.fakes
        )
    sharding = replace(sharding, layers=_told(captured.analysis, plan, analysis, collectives))
    return replace(captured, module=module, analysis=analysis, layers=layers_of(analysis, module), sharding=sharding)


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
    for node, step in plan.steps.items():
        layer = whole.layer_of.get(node)
        if layer is None:
            continue
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
            forward=forward[index],
            backward_input=backward[index],
        )
        for index, part in enumerate(whole.segments)
    )


def _module(analysis: Analysis, node: fx.Node) -> str:
    scopes = analysis.lifted.scopes.get(node, ())
    return scopes[-1].module if scopes else node.name


def _exchanged(local: Analysis, collectives: Collectives) -> tuple[list[Exchanged], list[Exchanged]]:
    """Of every layer, in F and in I."""
    counts: dict[str, Counter[int]] = {name: Counter() for name in ("F", "F bytes", "I", "I bytes")}

    def add(action: str, layer: int, num_bytes: int) -> None:
        counts[action][layer] += 1
        counts[f"{action} bytes"][layer] += num_bytes

    for node, layer in local.layer_of.items():
        tensor = local.trace.facts[node].tensor
        if node.target == collectives.enter and node in local.flow.flows:
            assert tensor is not None
            add("I", layer, tensor.nbytes)
        elif node.target == collectives.leave:
            assert tensor is not None
            add("F", layer, tensor.nbytes)
        elif node.target == collectives.cross_entropy:
            logits = local.trace.facts[node.args[0]].tensor  # type: ignore[index]
            assert logits is not None
            rows = logits.numel() // logits.shape[1] * max(4, logits.element_size())
            add("F", layer, rows)
            add("F", layer, rows * (3 if node.args[6] else 2))
    layers = range(len(local.segments))
    return (
        [Exchanged(count=counts["F"][layer], bytes=counts["F bytes"][layer]) for layer in layers],
        [Exchanged(count=counts["I"][layer], bytes=counts["I bytes"][layer]) for layer in layers],
    )
