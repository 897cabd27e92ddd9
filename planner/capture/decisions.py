"""Which modules may decide on values of tensors in the graph as they do in a few batches, and on what.

A module that does is kept whole where it is small. Where it is the model itself, the loss, or holds much of the model
in blocks, the values that it takes are seen in several batches, and the graph holds them with a check of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.capture.attributes import Attributes
from planner.capture.batch import Batch, called, leaves, to_device
from planner.capture.decided import Decision, Place, Values, decision_of, parted
from planner.capture.lifted import Lifted, Role, op_of, opaque_call
from planner.capture.made_up import computing
from planner.capture.model_file import ModelFile
from planner.capture.opaque import returned_by
from planner.capture.seeds import RandomStream
from planner.capture.watch import LOSS, Watch, alike, quiet
from planner.capture.weightless import Fakes, RealWhereItCan
from planner.errors import InputError, RunError

_SHARE_TO_CUT = 1 / 4
"""Of a model's parameters: what a module holds that is better cut than kept whole, though it decides on values."""

OUTERMOST: Mapping[str | None, str] = {LOSS: "loss()", "": "the model's own forward()"}
_BATCHES = 4
IN_A_MODULE = (
    "do what depends on the values of tensors, a loss too, in a module of its own that the model calls (it is then "
    "kept whole)"
)
_DRAWS = 1000


def decidable(model: nn.Module, place: str | None) -> frozenset[str | None]:
    """The modules that may decide on values as they do in a few batches, where the one at ``place`` does.

    That is the loss, the model itself, and a module that holds much of it in blocks, with all of its class.
    """
    if not place:
        return frozenset({place})
    found = alike(model, place)
    blocks = max(_sizes_of_blocks(model.get_submodule(name)) for name in found)
    return found if blocks > _SHARE_TO_CUT * sum(map(torch.numel, model.parameters())) else frozenset()


def _sizes_of_blocks(module: nn.Module) -> int:
    """The elements of the parameters in lists of modules within ``module``."""
    lists = [part for part in module.modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1]
    return sum(map(torch.numel, {parameter: None for part in lists for parameter in part.parameters()}))


def told_in(
    model: nn.Module,
    model_file: ModelFile,
    batch: Batch,
    whole: frozenset[str],
    decided: frozenset[str | None],
    attributes: Attributes,
    fakes: Fakes | None,
) -> dict[Place, list[Any]]:
    """The values that Python takes of tensors in the modules ``decided``, where they are the same in several batches.

    Without weights only those that hang on no weight are known, up to where fakes cannot go on. Raises InputError where
    the loss or the model itself takes others.
    """
    if not decided:
        return {}
    size, device = next((leaf.shape[0], leaf.device) for leaf in leaves(batch) if isinstance(leaf, Tensor))
    found: list[dict[Place, list[Any]]] = []

    def run() -> None:  # each goes on from the buffers of the one before, as in training
        for seed in range(_BATCHES):
            watch = Watch(model, whole, attributes, set())
            values = Values(lambda: watch.running)  # noqa: B023 - used within this turn alone
            found.append(values.found)
            with RandomStream(seed), contextlib.ExitStack() as within:
                one = to_device(model_file.batch(size), str(device)) if seed else batch
                within.enter_context(contextlib.suppress(Exception))  # the export tells what the model raises
                if fakes is not None:
                    within.enter_context(computing(fakes, model, {name: model.get_submodule(name) for name in whole}))
                    within.enter_context(RealWhereItCan())
                for context in (quiet(), watch.watching(), values):
                    within.enter_context(context)
                model_file.loss(called(model, one.inputs), one.target)

    returned_by(model, run, ())
    attributes.put_back()
    same, others = parted(found)
    for place, values in others.items():
        if not place[0] and place[0] in decided:
            raise InputError(
                f"{place[1]}:{place[2]}: {OUTERMOST[place[0]]} takes a value of a "
                f"tensor in Python that is another in each batch ({', '.join(map(str, values[:2]))})",
                hint=IN_A_MODULE,
            )
    return same


def unsure_of(lifted: Lifted) -> dict[str | None, Decision]:
    """The modules that decide on what may well be another value in another step, with the first that each does.

    What is drawn by chance alone is drawn many times. What can be kept whole decides on inputs alone; where nothing
    smaller than the model can be, it may be on parameters and on chance too (whether all is finite, say).
    """
    found: dict[str | None, Decision] = {}
    for node in lifted.graph.nodes:
        decision = decision_of(node)
        if decision is None:
            continue
        behind = _behind(node)
        roles = {lifted.roles[one][0] for one in behind if one in lifted.roles}
        draws = any(torch.Tag.nondeterministic_seeded in getattr(op_of(one), "tags", ()) for one in behind)
        hidden = any(opaque_call(one) is not None for one in behind)
        if draws and not hidden and roles <= {Role.CONSTANT}:
            unsure = not _always(lifted, behind)
        else:
            unsure = bool(decision.place[0]) and (draws or hidden or Role.PARAMETER in roles)
        if unsure:
            found.setdefault(decision.place[0], decision)
    return found


def _behind(node: fx.Node) -> list[fx.Node]:
    """A node and all that it is made of, in order."""
    found, stack = {node}, [node]
    while stack:
        for used in stack.pop().all_input_nodes:
            if used not in found:
                found.add(used)
                stack.append(used)
    return [one for one in node.graph.nodes if one in found]


def _always(lifted: Lifted, nodes: list[fx.Node]) -> bool:
    """Whether the check that ends ``nodes`` holds however often it is drawn."""
    with RandomStream(0):
        for _ in range(_DRAWS):
            made: dict[fx.Node, Any] = {}
            for node in nodes:
                if node.op == "placeholder":
                    made[node] = lifted.constants[lifted.roles[node][1]].clone()
                    continue
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
                try:
                    made[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                except RunError:
                    return False
    return True
