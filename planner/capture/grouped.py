"""Grouped heads: keys and values of attention stay unrepeated where eager PyTorch leaves the groups to the kernel.

Some models repeat them where there is a mask, and pass enable_gqa where there is none. Of a mask that the export alone
made, and that was folded again, the repeats are left: only a look at the eager model tells that it makes none.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx, nn

from planner.capture.attributes import Attributes
from planner.capture.batch import Batch, called
from planner.capture.lifted import Lifted, kept_whole, op_of
from planner.capture.made_up import computing
from planner.capture.masks import mask_of
from planner.capture.model_file import ModelFile
from planner.capture.opaque import returned_by
from planner.capture.seeds import RandomStream
from planner.capture.watch import quiet
from planner.capture.weightless import Fakes, RealWhereItCan

_aten = torch.ops.aten


def group_heads(lifted: Lifted, model: nn.Module, model_file: ModelFile, batch: Batch, fakes: Fakes) -> None:
    """Leave out repeats of keys and values for attention without a mask where the eager model passes enable_gqa.

    Modules of one class do as the first of them: the look may end early, at what fakes cannot do.
    """
    calls = [node for node in lifted.graph.nodes if op_of(node) is _aten.scaled_dot_product_attention.default]
    repeated = {node: heads for node in calls if mask_of(node) is None and all(heads := _unrepeated(node))}
    if not repeated:
        return
    look = _Look()

    def run() -> None:
        with quiet(), RandomStream(0), computing(fakes, model, kept_whole(lifted)), look:
            model_file.loss(called(model, batch.inputs), batch.target)

    with Attributes(model), contextlib.suppress(Exception):
        returned_by(model, run, ())
    kinds = {node: [scope.kind for scope in lifted.scopes[node][-1:]] for node in calls}
    grouped = [kinds[node] for node, is_grouped in zip(calls, look.grouped, strict=False) if is_grouped]
    for node, heads in repeated.items():
        if kinds[node] in grouped:
            node.args = (node.args[0], *heads, *node.args[3:])
            node.kwargs = {**node.kwargs, "enable_gqa": True}


def _unrepeated(attention: fx.Node) -> tuple[fx.Node | None, ...]:
    """Keys and values as they are before they are repeated head by head, where they are; heads are dimension 1 of 4."""
    return tuple(map(_repeated_by, attention.args[1:3]))


def _repeated_by(node: Any) -> Any:
    match _name(node), node.args:
        case "aten::repeat_interleave", (heads, int(), 1):
            return heads
        case "aten::reshape" | "aten::view" | "aten::flatten", (spread, *_) if _name(spread) == "aten::expand":
            apart = spread.args[0]
            return apart.args[0] if _name(apart) == "aten::unsqueeze" and apart.args[1] == 2 else None
    return None


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(op_of(node), "_schema", None), "name", ""))


class _Look(RealWhereItCan):
    """Which calls of attention have ``grouped`` heads, in a run on fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.grouped.append((kwargs or {}).get("enable_gqa", False))
        return super().__torch_function__(func, types, args, kwargs)
