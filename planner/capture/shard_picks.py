"""The rules of ops that pick, repeat, halve or pair entries: index, gather, repeat, glu, complex numbers, losses."""

from __future__ import annotations

from typing import Any

from torch import fx

from planner.capture.shard_rules import (
    Context,
    RefusalError,
    Step,
    aligned,
    along,
    pieces,
    pointwise,
    rule,
    split_operands,
    viewed,
    word_of,
)
from planner.capture.shard_split import Shard


@rule("aten::index")
def _index(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """x[:, :, indices]: entries of one dimension, the split one is another."""
    shard = context.shard(given["self"])
    picked = [(dim, index) for dim, index in enumerate(given["indices"]) if index is not None]
    (dim, index), *others = picked
    of_index = context.tensors[index]
    assert of_index is not None
    if shard is None or others or context.shard(index) is not None or not of_index.dtype.is_signed:
        raise RefusalError("index of this form has no rule", *split_operands(context, node))
    if shard.dim == dim:
        raise RefusalError("index picks entries of the split dimension", shard)
    return Step(state=shard.at(shard.dim + (of_index.dim() - 1 if shard.dim > dim else 0)))


@rule("aten::index_select")
def _index_select(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    shard = context.shard(given["self"])
    if shard is None or shard.dim == given["dim"] % len(context.shape(given["self"])):
        raise RefusalError("index_select picks entries of the split dimension", *split_operands(context, node))
    return Step(state=shard)


@rule("aten::gather", "aten::take_along_dim")
def _gather(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    name = "index" if "index" in given else "indices"
    source, index = given["self"], given[name]
    shape, of_index = context.shape(source), context.shape(index)
    (first, *_) = split_operands(context, node)
    if given["dim"] is None or len(shape) != len(of_index) or shape[first.dim] != of_index[first.dim]:
        raise RefusalError(f"{word_of(node)} of this form has no rule", *split_operands(context, node))
    state, (taken, picks) = aligned(context, [source, index], len(shape))
    if state.dim == given["dim"] % len(shape):
        raise RefusalError(f"{word_of(node)} picks entries of the split dimension", state)
    return Step(state=state, changes={"self": taken, name: picks})


@rule("aten::repeat")
def _repeat(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """A dimension written one after another r times: each of its sections stands there r times."""
    shard = context.shard(given["self"])
    assert shard is not None
    dim = shard.dim + len(given["repeats"]) - len(context.shape(given["self"]))
    times = given["repeats"][dim]
    return Step(state=shard.at(dim) if times == 1 else shard.cut(dim, shard.sections * times))


@rule("aten::max", "aten::min", "aten::median", "aten::mode", "aten::kthvalue")
def _largest(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    if "other" in given:
        return pointwise(context, node, given)
    shard = context.shard(given["self"])
    assert shard is not None
    if "dim" not in given:
        raise RefusalError(f"{word_of(node)} runs over the split dimension", shard)
    found = along(context, node, given).state
    assert isinstance(found, Shard)
    gone = 0 if given["keepdim"] else given["dim"] % len(context.shape(given["self"])) < shard.dim
    return Step(state=(found.at(shard.dim - gone),) * 2)


@rule("aten::glu")
def _glu(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """The first half of a dimension times the sigmoid of the second."""
    shard = context.shard(given["self"])
    assert shard is not None
    extent = context.shape(given["self"])[shard.dim]
    if shard.dim != given["dim"] % len(context.shape(given["self"])):
        return Step(state=shard)
    (first, _), (second, _) = pieces(context, shard, (0, extent // 2, extent))
    if first != second:
        raise RefusalError("the halves of glu are split in different ways", shard)
    return Step(state=shard.cut(shard.dim, first))


@rule("aten::view_as", "aten::reshape_as")
def _view_as(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    if context.shard(given["self"]) is None:
        raise RefusalError(f"{word_of(node)} of a whole tensor has no rule", *split_operands(context, node))
    return viewed(context, node, given)


@rule("aten::expand_as")
def _expand_as(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    shard = context.shard(given["self"])
    if shard is None:
        raise RefusalError("expand_as of a whole tensor has no rule", *split_operands(context, node))
    local = list(context.shape(node))
    made = shard.at(shard.dim + len(local) - len(context.shape(given["self"])))
    local[made.dim] = context.local(made.split)
    return Step(state=made, function="expand", arguments=(given["self"], local))


@rule("aten::broadcast_tensors", "aten::meshgrid")
def _broadcast(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    tensors = list(given["tensors"])
    if word_of(node) == "meshgrid" or len({context.shape(one) for one in tensors}) > 1:
        raise RefusalError(f"{word_of(node)} of this form has no rule", *split_operands(context, node))
    state, taken = aligned(context, tensors, len(context.shape(tensors[0])))
    return Step(state=(state,) * len(tensors), changes={"tensors": taken})


@rule("aten::view_as_complex", "aten::view_as_real")
def _complex(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """Two numbers of the last dimension as one, and back: no rank may hold one of the two."""
    shard = context.shard(given["self"])
    assert shard is not None
    if word_of(node) == "view_as_complex" and shard.dim == len(context.shape(node)):
        raise RefusalError("view_as_complex puts two entries of the split dimension together", shard)
    return Step(state=shard)


LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
          "binary_cross_entropy_with_logits", "soft_margin_loss", "kl_div")  # fmt: skip


@rule(*(f"aten::{word}" for word in LOSSES))
def _loss(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """Element by element, and then added up, or the mean taken."""
    operands = {name: value for name, value in given.items() if isinstance(value, fx.Node)}
    dims = len(context.shape(given["self"]))
    state, taken = aligned(context, list(operands.values()), dims)
    if len({context.shape(given[name]) for name in ("self", "target")}) > 1:
        raise RefusalError(f"{word_of(node)} of this form has no rule", state)
    changes = {name: value for (name, _), value in zip(operands.items(), taken, strict=True)}
    if given["reduction"] == _NONE:
        return Step(state=state, changes=changes)
    if given["reduction"] == _SUM:
        return Step(state=None, changes=changes, partial=True)
    if not state.split.is_even(context.size):
        raise RefusalError(f"{word_of(node)} is a mean over uneven parts", state)
    return Step(state=None, changes=changes, partial=True, factor=1 / context.size)


_NONE, _SUM = 0, 2
