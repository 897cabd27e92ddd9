"""What each op does with operands that are split over tensor ranks: a rule for every kind of op that can take them.

A rule is asked only where an operand is split, or where the op may begin a split (a linear op or an embedding with a
parameter of its own). It gives what the op becomes on one rank, or says why it cannot be: then what began the split is
left whole. So a missing rule costs a split, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from planner.capture.lifted import op_of, opaque_call
from planner.capture.shard_split import Shard, Split, State, joined
from planner.capture.shard_views import groups, ways

aten = torch.ops.aten


class RefusalError(Exception):
    """An op cannot take its operands as they are split; ``blamed`` are the operands to be whole or split otherwise.

    ``cause``: what refused first, where a view has tried all its dimensions since then.
    """

    def __init__(self, reason: str, *blamed: Shard, cause: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.blamed = blamed
        self.cause = cause or reason


class ResectionError(Exception):
    """An op could take its operand if the sources had made it in these sections."""

    def __init__(self, sources: frozenset[fx.Node], sections: tuple[int, ...]) -> None:
        super().__init__()
        self.sources = sources
        self.sections = sections


@dataclass(frozen=True, slots=True)
class Narrowed:
    """In place of an operand that is whole: the pieces (first index, length) of a dimension that a rank takes."""

    node: fx.Node
    dim: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An op on one rank.

    Args:
        state: of its output.
        changes: arguments that become others, by the names that the op's schema has for them.
        function: the name of the function of Collectives to call in its place, with ``arguments``.
        arguments: of that function.
        weights: the parameters that it takes in parts, and how these are split.
        partial: its output is a rank's part of a sum: to be added up.
        factor: what that sum is multiplied by.
        bias: what is added after that.
    """

    state: State
    changes: dict[str, Any] = field(default_factory=dict)
    function: str | None = None
    arguments: tuple[Any, ...] = ()
    weights: dict[fx.Node, Split] = field(default_factory=dict)
    partial: bool = False
    factor: float = 1.0
    bias: fx.Node | None = None


@dataclass(slots=True, kw_only=True)
class Context:
    """What rules look at. ``size``: T. ``banned``: dimensions that views must not choose, and why."""

    size: int
    rank: int
    states: dict[fx.Node, State]
    tensors: dict[fx.Node, Tensor | None]
    parameters: frozenset[fx.Node]
    whole: dict[fx.Node, str]
    sections: dict[fx.Node, tuple[int, ...]]
    banned: dict[fx.Node, dict[int, str]]

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Of the whole tensor."""
        tensor = self.tensors[node]
        assert tensor is not None
        return tuple(tensor.shape)

    def shard(self, value: Any) -> Shard | None:
        """How an argument is split, if it is a node that is."""
        state = self.states.get(value) if isinstance(value, fx.Node) else None
        if isinstance(state, tuple):
            raise RefusalError("several outputs taken as one", *(shard for shard in state if shard is not None))
        return state

    def weight(self, value: Any) -> tuple[fx.Node, tuple[int, ...]] | None:
        """The parameter that an operand is, maybe turned round, and which of its dimensions lies where."""
        if not isinstance(value, fx.Node):
            return None
        if value in self.parameters:
            return value, tuple(range(len(self.shape(value))))
        if value.op != "call_function" or getattr(op_of(value), "_schema", None) is None:
            return None
        if word_of(value) not in TURNS or (found := self.weight(value.args[0])) is None:
            return None
        weight, dims = found
        return weight, tuple(dims[dim] for dim in turned(self, value))

    def local(self, split: Split) -> int:
        """The extent that this rank holds."""
        return split.local(self.size, self.rank)

    def part(self, node: fx.Node, split: Split) -> Narrowed:
        """This rank's part of what is whole."""
        return Narrowed(node, split.dim, tuple(split.spans(self.size, self.rank)))


Rule = Callable[[Context, fx.Node, dict[str, Any]], Step]

_RULES: dict[str, Rule] = {}

BEGINNINGS: set[str] = set()
"""Ops that may begin a split."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """The rule of the ops of these names."""

    def add(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return add


def apply_rule(context: Context, node: fx.Node) -> Step:
    """What a node becomes on one rank. Raises RefusalError or ResectionError."""
    flat = split_operands(context, node)
    op = op_of(node)
    name = op._schema.name if isinstance(op, OpOverload) else getattr(op, "__name__", "op")
    if name == "getitem":
        state = context.states[node.args[0]]  # type: ignore[index]
        return Step(state=state[node.args[1]] if isinstance(state, tuple) else None)  # type: ignore[index]
    found = _RULES.get(name) if isinstance(op, OpOverload) else None
    if not flat and name not in BEGINNINGS:
        return Step(state=None)
    if found is None and isinstance(op, OpOverload) and _is_pointwise(op):
        found = pointwise
    if flat and op is not node.target:
        raise RefusalError(f"{name.rpartition('::')[2]} under no_grad or autocast has no rule", *flat)
    if found is None and opaque_call(node) is not None:
        raise RefusalError("a module reads it that is run as it is, without a look at its ops", *flat)
    if found is None:
        raise RefusalError(f"{name.rpartition('::')[2]} has no rule", *flat)
    return found(context, node, bound(node))


def bound(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names in the op's schema, defaults too."""
    found = {}
    for position, argument in enumerate(op_of(node)._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            found[argument.name] = node.args[position]
        else:
            found[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return found


def _is_pointwise(op: OpOverload) -> bool:
    packet = op.overloadpacket
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


# --- elementwise ------------------------------------------------------------------------------------------------------


def aligned(context: Context, operands: Sequence[fx.Node], dims: int) -> tuple[Shard, list[Any]]:
    """Operands that are broadcast against each other: how the output is split, and each as a rank takes it."""
    found = {}
    for operand in operands:
        shard = context.shard(operand)
        if shard is not None:
            found[operand] = shard.at(shard.dim + dims - len(context.shape(operand)))
    first = next(iter(found.values()))
    for shard in found.values():
        if shard.split != first.split:
            raise RefusalError("operands split in different ways", _smaller(context, shard, first))
    given: list[Any] = []
    for operand in operands:
        dim = first.dim - (dims - len(context.shape(operand)))
        needs_part = operand not in found and dim >= 0 and context.shape(operand)[dim] != 1
        given.append(context.part(operand, Split(dim, first.sections)) if needs_part else operand)
    return joined(list(found.values())), given


def _smaller(context: Context, one: Shard, other: Shard) -> Shard:
    """The one with less behind it."""

    def weight(shard: Shard) -> int:
        return sum(
            prod(context.shape(used)) for s in shard.sources for used in s.all_input_nodes if used in context.parameters
        )

    return one if weight(one) < weight(other) else other


@rule("aten::to", "aten::contiguous", "aten::clone", "aten::alias", "aten::detach", "aten::_to_copy",
       "aten::lift_fresh_copy", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like",
       "aten::masked_fill", "aten::where", "aten::copy_", "aten::silu", "aten::gelu")  # fmt: skip
def pointwise(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """Entry by entry, operands broadcast against each other."""
    operands = {name: value for name, value in given.items() if isinstance(value, fx.Node)}
    tensor = context.tensors[node]
    if tensor is None or any(
        isinstance(value, (tuple, list)) and any(isinstance(one, fx.Node) for one in value) for value in given.values()
    ):
        raise RefusalError(f"{word_of(node)} has no rule for lists", *split_operands(context, node))
    names = list(operands)
    state, taken = aligned(context, [operands[name] for name in names], tensor.dim())
    changes = {name: value for name, value in zip(names, taken, strict=True) if isinstance(value, Narrowed)}
    for argument in op_of(node)._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and argument.name in operands and context.states[operands[argument.name]] is None:
            raise RefusalError(f"{word_of(node)} changes a whole tensor in place", state)
    return Step(state=state, changes=changes)


def word_of(node: fx.Node) -> str:
    """The op's own name."""
    return str(op_of(node)._schema.name).rpartition("::")[2]


def split_operands(context: Context, node: fx.Node) -> list[Shard]:
    """How a node's operands are split, those that are."""
    states = [context.states[used] for used in node.all_input_nodes]
    return [one for state in states for one in (state if isinstance(state, tuple) else (state,)) if one is not None]


@rule("aten::dropout", "aten::dropout_", "aten::feature_dropout")
def _dropout(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    shard = context.shard(given["input"])
    assert shard is not None
    if word_of(node) != "dropout":
        raise RefusalError(f"{word_of(node)} has no rule", shard)
    if not given["train"] or given["p"] == 0:
        return Step(state=shard)
    tensor = context.tensors[given["input"]]
    assert tensor is not None
    laid_out = torch.empty_like(tensor)  # as torch lays out the noise
    arguments = (
        given["input"],
        given["p"],
        list(tensor.shape),
        list(laid_out.stride()),
        shard.dim,
        list(shard.sections),
    )
    return Step(state=shard, function="dropout", arguments=arguments)


# --- views ------------------------------------------------------------------------------------------------------------


@rule("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten", "aten::squeeze",
       "aten::unsqueeze")  # fmt: skip
def viewed(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """The same entries in another shape."""
    source = given["self"]
    shard = context.shard(source)
    assert shard is not None
    if word_of(node) == "view" and "dtype" in given:
        raise RefusalError("view as another type has no rule", shard)
    shape, into = context.shape(source), context.shape(node)
    banned = context.banned.get(node, {})
    way = next((way for way in ways(shard, shape, into, context.size) if way.dim not in banned), None)
    if way is None:
        (_, dims) = next(group for group in groups(shape, into) if shard.dim in group[0])
        extents, size = " x ".join(str(into[dim]) for dim in dims), context.size
        odd = next((into[dim] for dim in dims if into[dim] % size), None)
        why = f"which {size} ranks cannot share out" if odd is None else f"and {odd} does not divide by {size}"
        cause = next(iter(banned.values()), None)
        tried = f" ({cause})" if cause else ""
        raise RefusalError(f"it is viewed as {extents}, {why}{tried}", shard, cause=cause)
    if way.source is not None:
        raise ResectionError(shard.sources, way.source)
    made = shard.cut(way.dim, way.sections)
    is_same = shape[shard.dim] == into[way.dim] and way.sections == shard.sections
    made = replace(made, raw=shard.raw and is_same, choices=(*shard.choices, (node, way.dim)))
    local = list(into)
    local[way.dim] = context.local(made.split)
    return Step(state=made, function="reshape", arguments=(source, local))


TURNS = ("permute", "transpose", "t", "swapaxes", "movedim", "mT", "numpy_T")


def turned(context: Context, node: fx.Node) -> list[int]:
    """Where each dimension of a permuted tensor comes from."""
    rank = len(context.shape(node))
    marks = torch.empty([1] * rank, device="meta").expand(*range(2, 2 + rank))  # an extent of its own for each
    moved = op_of(node)(marks, *list(bound(node).values())[1:])
    return [extent - 2 for extent in moved.shape]


@rule(*(f"aten::{word}" for word in TURNS))
def _permute(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    shard = context.shard(given["self"])
    assert shard is not None
    return Step(state=shard.at(turned(context, node).index(shard.dim)))


@rule("aten::expand", "aten::broadcast_to")
def _expand(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    source = given["self"]
    shard = context.shard(source)
    assert shard is not None
    into = context.shape(node)
    made = shard.at(shard.dim + len(into) - len(context.shape(source)))
    local = list(into)
    local[made.dim] = context.local(made.split)
    return Step(state=made, changes={"size": local})


@rule("aten::slice", "aten::narrow", "aten::select", "aten::unbind")
def _slice(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    source = given["self"]
    shard = context.shard(source)
    assert shard is not None
    rank = len(context.shape(source))
    dim = given["dim"] % rank
    if word_of(node) in ("select", "unbind"):
        if dim == shard.dim:
            raise RefusalError(f"{word_of(node)} takes single entries of the split dimension", shard)
        made = shard.at(shard.dim - (dim < shard.dim))
        return Step(state=made if word_of(node) == "select" else (made,) * context.shape(source)[dim])
    if dim != shard.dim:
        return Step(state=shard)
    if word_of(node) != "slice":
        raise RefusalError(f"{word_of(node)} cuts the split dimension", shard)
    start, end, _ = slice(given["start"], given["end"]).indices(shard.split.extent)
    if given["step"] != 1:
        return _strided(context, shard, start, end, given["step"])
    if (start, end) == (0, shard.split.extent):
        return Step(state=shard, changes={"start": None, "end": None})
    (_, (wanted, first), _) = pieces(context, shard, (0, start, end, shard.split.extent))
    local_start = context.local(Split(0, shard.sections[:first]))
    made = shard.cut(dim, wanted)
    return Step(state=made, changes={"start": local_start, "end": local_start + context.local(made.split)})


def _strided(context: Context, shard: Shard, start: int, end: int, step: int) -> Step:
    """x[start::step] of the split dimension, where every rank's part begins at a multiple of the step."""
    if start >= step or end != shard.split.extent or any(section % (step * context.size) for section in shard.sections):
        raise RefusalError("slice cuts the split dimension", shard)
    made = shard.cut(shard.dim, tuple(section // step for section in shard.sections))
    return Step(state=made, changes={"start": start, "end": context.local(shard.split)})


def pieces(context: Context, shard: Shard, bounds: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """The sections between each two bounds of the split dimension, and the number of the first of them.

    Asks the sources for a bound that is none.
    """
    edges = [0, *accumulate(shard.sections)]
    if missing := set(bounds) - set(edges):
        if not shard.raw:
            raise RefusalError("the split dimension is cut elsewhere than between its sections", shard)
        refined = sorted({*edges, *missing})
        sections = tuple(after - before for before, after in pairwise(refined))
        if any(section < context.size for section in sections):
            raise RefusalError(f"a piece of {min(sections)} is too small for {context.size} ranks", shard)
        raise ResectionError(shard.sources, sections)
    places = [edges.index(bound) for bound in bounds]
    return [(shard.sections[first:last], first) for first, last in pairwise(places)]


@rule("aten::split", "aten::split_with_sizes", "aten::chunk")
def _cut(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    source = given["self"]
    shard = context.shard(source)
    assert shard is not None
    shape = context.shape(source)
    dim = given["dim"] % len(shape)
    extent = shape[dim]
    if "split_sizes" in given:
        sizes = list(given["split_sizes"])
    else:
        step = given["split_size"] if "split_size" in given else -(-extent // given["chunks"])
        sizes = [min(step, extent - start) for start in range(0, extent, step)]
    if dim != shard.dim:
        return Step(state=(shard,) * len(sizes))
    bounds = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    made = tuple(shard.cut(dim, sections) for sections, _ in pieces(context, shard, bounds))
    local = [context.local(one.split) for one in made]
    return Step(state=made, function="split_with_sizes", arguments=(source, local, dim))


@rule("aten::cat", "aten::stack")
def _together(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    tensors = list(given["tensors"])
    dims = len(context.shape(node))
    dim = given["dim"] % dims
    if word_of(node) == "cat":
        states = [context.shard(one) for one in tensors]
        along = [state for state in states if state is not None and state.dim == dim]
        if along:
            if len(along) < len(states):
                raise RefusalError("cat of whole and split tensors along the split dimension", *along)
            sections = tuple(section for state in along for section in state.sections)
            return Step(state=joined(along).cut(dim, sections))
        state, taken = aligned(context, tensors, dims)
        return Step(state=state, changes={"tensors": taken})
    state, taken = aligned(context, tensors, dims - 1)
    return Step(state=state.at(state.dim + (dim <= state.dim)), changes={"tensors": taken})


@rule("aten::pad", "aten::constant_pad_nd")
def _pad(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    shard = context.shard(given["self"])
    assert shard is not None
    padded = {len(context.shape(node)) - 1 - index // 2 for index, width in enumerate(given["pad"]) if width}
    if shard.dim in padded:
        raise RefusalError("pad widens the split dimension", shard)
    return Step(state=shard)


# --- along a dimension ------------------------------------------------------------------------------------------------


def _dims(value: Any, rank: int) -> set[int]:
    if value is None or value == []:
        return set(range(rank))
    return {dim % rank for dim in (value if isinstance(value, (tuple, list)) else [value])}


@rule("aten::softmax", "aten::log_softmax", "aten::cumsum", "aten::_softmax", "aten::flip", "aten::roll",
       "aten::sort", "aten::topk")  # fmt: skip
def along(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """Over dimensions that are not split, with as many entries left."""
    shard = context.shard(given["self"])
    assert shard is not None
    dims = _dims(given.get("dim", given.get("dims")), len(context.shape(given["self"])))
    if shard.dim in dims:
        raise RefusalError(f"{word_of(node)} runs over the split dimension", shard)
    return Step(state=(shard, shard) if word_of(node) in ("sort", "topk") else shard)


@rule("aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var", "aten::std", "aten::logsumexp",
       "aten::linalg_vector_norm", "aten::norm", "aten::prod")  # fmt: skip
def _reduce(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    shard = context.shard(given["self"])
    assert shard is not None
    rank = len(context.shape(given["self"]))
    dims = _dims(given.get("dim"), rank)
    if shard.dim not in dims:
        gone = 0 if given.get("keepdim") else sum(dim < shard.dim for dim in dims)
        return Step(state=shard.at(shard.dim - gone))
    if word_of(node) == "sum":
        return Step(state=None, partial=True)
    if word_of(node) == "mean" and shard.split.is_even(context.size):
        return Step(state=None, partial=True, factor=1 / context.size)
    raise RefusalError(f"{word_of(node)} runs over the split dimension", shard)


@rule("aten::layer_norm", "aten::rms_norm", "aten::_fused_rms_norm")
def _norm(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    shard = context.shard(given["input"])
    assert shard is not None
    if shard.dim >= len(context.shape(given["input"])) - len(given["normalized_shape"]):
        raise RefusalError(f"{word_of(node)} runs over the split dimension", shard)
    return Step(state=shard)
