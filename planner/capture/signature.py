"""What tells two stages apart for whoever measures them: ops, settings, shapes, strides, dtypes; names do not count."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.capture.analysis import Analysis
from planner.capture.lifted import op_of, opaque_call
from planner.capture.program import StageProgram


def signature(program: StageProgram) -> str:
    """The same for two stages that do the same to tensors of the same kind, as blocks of one model do."""
    source = program.source
    facts = source.analysis.trace.facts
    numbers: dict[fx.Node, int] = {}
    given: list[Any] = []

    def place(kind: str, node: fx.Node, *more: Any) -> None:
        numbers.setdefault(node, len(numbers))
        tensor = facts[node].tensor
        given.append([kind, numbers[node], laid_out(tensor), facts[node].requires_grad, *more])

    for node, _ in source.leaves:
        place("parameter", node)
    for node, name in zip(source.buffers, program.buffers, strict=True):
        place("buffer", node, name in program.changed_buffers)
    for node in source.constants:
        place("constant", node)
    for node in source.inputs:
        place("input", node)
    for node, boundary in zip(source.receives, program.receives, strict=True):
        place("received", node, boundary.name in program.returns, boundary.name in program.relays)
    ops = []
    for node in program.nodes:
        numbers.setdefault(node, len(numbers))
        ops.append([called(node), *(settings(value, numbers) for value in (node.args, dict(node.kwargs)))])
    ends = [[numbers[node], boundary.grad] for node, boundary in zip(source.sends, program.sends, strict=True)]
    return digest([given, ops, ends, program.has_loss])


def graph_signature(analysis: Analysis) -> str:
    """Of a whole captured graph, with its layers: it changes with whatever can change what the layers cost."""
    numbers = {node: number for number, node in enumerate(analysis.lifted.graph.nodes)}
    facts, roles = analysis.trace.facts, analysis.lifted.roles
    given = [[*roles[node], laid_out(facts[node].tensor), facts[node].requires_grad] for node in roles]
    ops = [
        [called(node), *(settings(value, numbers) for value in (node.args, dict(node.kwargs)))]
        for node in analysis.flow.live
        if node not in roles
    ]
    parts = [[part.name, [numbers[node] for node in part.nodes]] for part in analysis.segments]
    return digest([given, ops, parts])


def digest(value: Any) -> str:
    """A short name for nested lists of numbers and words."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def laid_out(tensor: Tensor | None) -> Any:
    """Shape, strides and dtype, without values."""
    return None if tensor is None else [list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]


def called(node: fx.Node) -> str:
    """What a node calls, in words: the op and the regions around it, or all there is to know of a module kept whole."""
    call = opaque_call(node)
    if call is not None:
        return f"{type(call.module).__qualname__} {call.given.entries} {[*_plain_attributes(call.module)]}"
    if node.op == "get_attr":
        return "region"
    regions = getattr(node.target, "regions", ())
    op = op_of(node)
    name = str(op) if hasattr(op, "_schema") else getattr(op, "__name__", repr(op))
    return " ".join((*regions, name))


def settings(value: Any, numbers: dict[fx.Node, int]) -> Any:
    """Arguments as plain lists; nodes by their numbers, a sub-graph by its code."""
    if isinstance(value, fx.Node):
        return ["region", value.meta["code"]] if value.op == "get_attr" else ["node", numbers.get(value, -1)]
    if isinstance(value, (tuple, list)):
        return [settings(entry, numbers) for entry in value]
    if isinstance(value, dict):
        return [[name, settings(entry, numbers)] for name, entry in sorted(value.items())]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value if value == value else "nan"
    return str(value)


def _plain_attributes(module: nn.Module) -> Iterable[str]:
    """Settings of a module and of those in it: numbers, words, shapes of what it holds."""
    for name, part in module.named_modules():
        for key, value in sorted(vars(part).items()):
            if isinstance(value, (bool, int, float, str, tuple, torch.dtype)):
                yield f"{name}.{key}={value}"
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            yield f"{name}.{key}={laid_out(tensor)}"
