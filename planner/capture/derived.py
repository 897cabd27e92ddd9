"""Weights that ops make out of parameters alone (a weight's norm, a mask on it, a custom op): their backward is W's.

    weight ──▶ derived ──▶ op(x, derived) ──▶ ...

I ends at the derived tensor: the gradient that arrives there is queued, and W takes it on to the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge, get_gradient_edge

from planner.capture.analysis import Analysis
from planner.capture.lifted import Role
from planner.capture.split import Gradients, WeightQueue

_UNTRAINED = (Role.CONSTANT, Role.BUFFER)
_CHEAP = {torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype, torch.ops.aten.detach.default}


class _SplitDerived(torch.autograd.Function):
    """Hands a derived weight on; its backward queues the gradient instead of passing it on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, edge: GradientEdge, token: Tensor, queue: WeightQueue) -> Tensor:
        """F; ``token`` requires grad, so that the backward runs."""
        ctx.set_materialize_grads(False)
        ctx.edge, ctx.queue = edge, queue
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """I, which also queues W."""
        if gradient is not None:
            ctx.queue.items.append(((), _derived_weight, (ctx.edge, gradient)))
        return None, None, None, None


def split_derived(value: Tensor, token: Tensor, queue: WeightQueue) -> Tensor:
    """A derived weight whose own backward waits for W."""
    return _SplitDerived.apply(value.detach(), get_gradient_edge(value), token, queue)  # type: ignore[no-any-return,no-untyped-call]


def _derived_weight(edge: GradientEdge, gradient: Tensor) -> Gradients:
    """The backward from a derived weight to its parameters, which accumulates on their leaves by itself."""
    torch.autograd.backward([edge], [gradient])
    return ()


def derived_weights(analysis: Analysis, nodes: list[fx.Node], split: set[fx.Node]) -> frozenset[fx.Node]:
    """The derived weights among a stage's ops whose backward can wait for W.

    Each is made out of parameters that nothing else reads, is read in its own layer alone, and takes more than a view
    or a cast: for those W would cost more than it takes off I. ``split``: ops that make their weights' gradients in W.
    """
    roles, facts, layer_of = analysis.lifted.roles, analysis.trace.facts, analysis.layer_of
    made_of: dict[fx.Node, frozenset[fx.Node]] = {}  # parameters, and the ops between
    for node in nodes:
        sources = [used for used in node.all_input_nodes if used not in roles or roles[used][0] not in _UNTRAINED]
        if node.op != "call_function" or not sources or facts[node].tensor is None or not facts[node].requires_grad:
            continue
        if all(used in made_of or (used in roles and roles[used][0] is Role.PARAMETER) for used in sources):
            made_of[node] = frozenset({node, *sources}.union(*(made_of.get(used, ()) for used in sources)))

    def may_wait(node: fx.Node) -> bool:
        inside, layer = made_of[node], layer_of[node]
        ops = [part for part in inside if part not in roles]
        readers = [user for user in node.users if user not in split]
        return (
            bool(readers)
            and all(layer_of.get(user) == layer for user in node.users)
            and all(
                user in inside or layer_of.get(user, layer) != layer
                for part in inside
                if part is not node
                for user in part.users
            )
            and all(layer_of[op] == layer for op in ops)
            and not any(facts[op].storages & analysis.flow.writers.keys() for op in ops)
            and not any(getattr(op.target, "exchanges", False) for op in ops)
            and not all(_is_cheap(op) for op in ops)
        )

    ends = [node for node in made_of if any(user not in made_of for user in node.users)]
    return frozenset(node for node in ends if may_wait(node))


def _is_cheap(node: fx.Node) -> bool:
    target = node.target
    return target in _CHEAP or (isinstance(target, OpOverload) and target.is_view)
