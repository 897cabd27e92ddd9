"""The lifted graph: parameters, buffers and batch are its arguments, and its ops know the modules they lie in."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.capture.opaque import OpaqueCall


class Role(StrEnum):
    """What a placeholder of the lifted graph stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One module call that an op lies in; ``call`` tells the calls of one module apart (0, 1, ...)."""

    module: str
    kind: str
    call: int


@dataclass(slots=True, kw_only=True)
class Autocast:
    """What forwards run under: their matrix products in ``dtype``."""

    device: str
    dtype: torch.dtype

    def __call__(self) -> torch.autocast:
        """The context."""
        return torch.autocast(self.device, dtype=self.dtype)


def autocast_of(lifted: Lifted) -> contextlib.AbstractContextManager[Any]:
    """The context that a graph runs under."""
    return contextlib.nullcontext() if lifted.autocast is None else lifted.autocast()


@dataclass(slots=True, kw_only=True)
class Lifted:
    """The graph. ``roles``: each placeholder's role and name (an index for inputs); the one output is the loss."""

    graph: fx.Graph
    roles: dict[fx.Node, tuple[Role, str]]
    scopes: dict[fx.Node, tuple[Scope, ...]]
    copies: set[fx.Node] = field(default_factory=set)  # inserted by us: they stay with what they copy
    again: set[str] = field(default_factory=set)  # modules with buffers that plain PyTorch runs again in the backward
    sized_by_values: set[fx.Node] = field(default_factory=set)  # tensors whose shapes are another at every batch
    constants: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)  # sub-graphs that higher-order ops are called with
    autocast: Autocast | None = None  # what the whole graph runs under


def op_of(node: fx.Node) -> Any:
    """The op that a node calls, without the regions around it."""
    return getattr(node.target, "wrapped", node.target)


def opaque_call(node: fx.Node) -> OpaqueCall | None:
    """The call of a module kept whole, where the node is one."""
    call = getattr(op_of(node), "call", None)
    return call if isinstance(call, OpaqueCall) else None


def kept_whole(lifted: Lifted) -> dict[str, nn.Module]:
    """The modules kept whole, by name."""
    return {call.name: call.module for call in map(opaque_call, lifted.graph.nodes) if call is not None}
