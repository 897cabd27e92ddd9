"""The rules of products, attention, embeddings and losses: where splits begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import fx

from planner.capture.shard_rules import (
    BEGINNINGS,
    Context,
    Narrowed,
    RefusalError,
    Step,
    aligned,
    bound,
    rule,
    split_operands,
    word_of,
)
from planner.capture.shard_split import Shard, Split, joined, portion

BEGINNINGS |= {
    "aten::linear",
    "aten::addmm",
    "aten::mm",
    "aten::matmul",
    "aten::bmm",
    "aten::einsum",
    "aten::embedding",
}
BEGINNINGS |= {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}


def _begun(context: Context, node: fx.Node, dim: int, extent: int) -> Shard | None:
    """The split that an op begins along the last dimension of its output."""
    if node in context.whole:
        return None
    if extent < context.size:
        context.whole[node] = f"its {extent} outputs are fewer than {context.size} ranks"
        return None
    return Shard(Split(dim, context.sections.get(node, (extent,))), frozenset({node}), raw=True)


def _dense(
    context: Context, node: fx.Node, x: fx.Node, weight: Any, bias: Any, *, names: tuple[str, str], outputs: int
) -> Step:
    """x @ weight + bias with a matrix, or one for each expert; ``outputs``: the weight's dimension that the output has.

    Split by columns (outputs) where x is whole; where x is split along its last dimension by rows (inputs), whose sums
    are added up before the bias is. ``names``: of the weight and the bias in the op's schema.
    """
    shard, own = context.shard(x), context.weight(weight)
    if context.shard(weight) is not None or context.shard(bias) is not None:
        raise RefusalError("a weight that is split", *split_operands(context, node))
    last = len(context.shape(x)) - 1
    inputs = 1 - outputs if len(context.shape(weight)) == 2 else 3 - outputs
    if shard is None:
        begun = _begun(context, node, last, context.shape(weight)[outputs]) if own else None
        if begun is None:
            return Step(state=None)
        weights = _weights(context, weight, Split(outputs, begun.sections))
        if bias is not None:
            if context.weight(bias) is None or len(context.shape(bias)) != 1:
                raise RefusalError("a bias that is no parameter", begun)
            weights |= _weights(context, bias, Split(0, begun.sections))
        return Step(state=begun, weights=weights)
    if shard.dim != last:
        if inputs > 1 or outputs > 1:
            raise RefusalError(f"{word_of(node)} over split rows", shard)
        return Step(state=shard)
    part = Split(inputs, shard.sections)
    weights = _weights(context, weight, part) if own else {}
    taken = weight if own else context.part(weight, part)
    if bias is None:
        return Step(state=None, changes={names[0]: taken}, weights=weights, partial=True)
    if word_of(node) == "addmm":
        return Step(state=None, function="mm", arguments=(x, taken), weights=weights, partial=True, bias=bias)
    return Step(state=None, changes={names[0]: taken, names[1]: None}, weights=weights, partial=True, bias=bias)


def _weights(context: Context, operand: fx.Node, split: Split) -> dict[fx.Node, Split]:
    """An operand that is a parameter, and the parameter itself, where the one is the other turned round."""
    found = context.weight(operand)
    assert found is not None
    weight, dims = found
    return {operand: split, weight: Split(dims[split.dim], split.sections)}


@rule("aten::linear")
def _linear(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    if len(context.shape(given["weight"])) != 2:
        raise RefusalError("linear with a vector has no rule", *split_operands(context, node))
    x, weight, bias = given["input"], given["weight"], given["bias"]
    return _dense(context, node, x, weight, bias, names=("weight", "bias"), outputs=0)


@rule("aten::addmm")
def _addmm(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    if given["beta"] != 1 or given["alpha"] != 1:
        if shards := split_operands(context, node):
            raise RefusalError("addmm with factors has no rule", *shards)
        return Step(state=None)
    return _dense(context, node, given["mat1"], given["mat2"], given["self"], names=("mat2", "self"), outputs=1)


@rule("aten::_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """Rows of x in groups, each with a matrix of its own (experts)."""
    name_x, name_weight, *_ = given
    x, weight = given[name_x], given[name_weight]
    if given.get("bias") is not None or len(context.shape(x)) != 2 or len(context.shape(weight)) != 3:
        if shards := split_operands(context, node):
            raise RefusalError(f"{word_of(node)} of this form has no rule", *shards)
        return Step(state=None)
    return _dense(context, node, x, weight, None, names=(name_weight, ""), outputs=2)


@rule("aten::mm", "aten::matmul", "aten::bmm")
def _matmul(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    one = given["self"]
    second = "mat2" if "mat2" in given else "other"
    two = given[second]
    ranks = [len(context.shape(operand)) for operand in (one, two)]
    if context.weight(two) is not None and ranks[1] == 2 and ranks[0] > 1:
        return _dense(context, node, one, two, None, names=(second, ""), outputs=1)
    if context.weight(two) is not None and ranks == [3, 3] and not _is_split_in_front(context, one):
        return _dense(context, node, one, two, None, names=(second, ""), outputs=2)
    if not split_operands(context, node):
        return Step(state=None)
    if min(ranks) < 2:
        raise RefusalError("a product with a vector has no rule", *split_operands(context, node))
    dims = len(context.shape(node))
    left, right = context.shard(one), context.shard(two)
    # rows of the first, columns of the second: the other operand is whole
    if left is not None and left.dim == ranks[0] - 2 and right is None:
        return Step(state=left.at(dims - 2))
    if right is not None and right.dim == ranks[1] - 1 and left is None:
        return Step(state=right.at(dims - 1))
    if _sums_over_split(context, node, one, two):
        return Step(state=None, partial=True)
    if any(shard is not None and shard.dim >= rank - 2 for shard, rank in zip((left, right), ranks, strict=True)):
        raise RefusalError("operands split in different ways", *split_operands(context, node))
    state, taken = aligned(context, [one, two], dims)
    return Step(state=state, changes=dict(zip(("self", second), taken, strict=True)))


def _is_split_in_front(context: Context, operand: fx.Node) -> bool:
    """Over the dimension that a batched product has one matrix for each entry of."""
    shard = context.shard(operand)
    return shard is not None and shard.dim == 0


def _sums_over_split(context: Context, node: fx.Node, one: fx.Node, two: fx.Node) -> bool:
    """Whether a product runs over the dimension that both operands are split in, and makes less than it reads."""
    left, right = context.shard(one), context.shard(two)
    if left is None or right is None or left.sections != right.sections:
        return False
    shapes = [context.shape(operand) for operand in (one, two)]
    runs = (left.dim, right.dim) == (len(shapes[0]) - 1, len(shapes[1]) - 2)
    return runs and prod(context.shape(node)) <= min(map(prod, shapes))


@rule("aten::baddbmm")
def _baddbmm(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """Products of pairs of matrices, split over the pairs."""
    operands = [given[name] for name in ("self", "batch1", "batch2")]
    shards = [context.shard(operand) for operand in operands]
    if any(
        shard is not None and shard.dim != len(context.shape(x)) - 3 for shard, x in zip(shards, operands, strict=True)
    ):
        raise RefusalError("baddbmm over split rows or columns", *split_operands(context, node))
    state, taken = aligned(context, operands, 3)
    return Step(state=state, changes=dict(zip(("self", "batch1", "batch2"), taken, strict=True)))


@rule("aten::einsum")
def _einsum(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    """Each operand has its dimensions named by letters: the split one is split wherever it stands."""
    tensors = list(given["tensors"])
    inputs, arrow, output = given["equation"].replace(" ", "").partition("->")
    names = inputs.split(",")
    shards = [context.shard(operand) for operand in tensors]
    found = [(word[shard.dim], shard) for word, shard in zip(names, shards, strict=False) if shard is not None]
    if not arrow or "." in inputs or any(len(set(word)) < len(word) for word in names):
        if not found:
            return Step(state=None)
        raise RefusalError("einsum of this form has no rule", *split_operands(context, node))
    if not found:
        begun = _letter_begun(context, node, names, output)
        if begun is None:
            return Step(state=None)
        found = [(output[begun.dim], begun)]
    letter, first = found[0]
    for other, one in found:
        if other != letter or one.sections != first.sections:
            raise RefusalError("operands split in different ways", one, first)
    taken: list[Any] = list(tensors)
    weights: dict[fx.Node, Split] = {}
    for place, (operand, word, shard) in enumerate(zip(tensors, names, shards, strict=True)):
        if shard is None and letter in word:
            part = Split(word.index(letter), first.sections)
            if context.weight(operand) is None:
                taken[place] = context.part(operand, part)
            else:
                weights |= _weights(context, operand, part)
    changes = {"tensors": taken}
    if letter in output:
        state = joined([one for _, one in found]).at(output.index(letter))
        return Step(state=state, changes=changes, weights=weights)
    sizes = [prod(context.shape(operand)) for operand in (*tensors, node)]
    if len(found) < sum(letter in word for word in names) or sizes.pop() <= min(sizes):
        return Step(state=None, changes=changes, weights=weights, partial=True)
    raise RefusalError("einsum over the split dimension", *split_operands(context, node))


def _letter_begun(context: Context, node: fx.Node, names: Sequence[str], output: str) -> Shard | None:
    """The split that an einsum begins with a parameter of its own, over a letter that is in nothing else it reads."""
    tensors: Any = bound(node)["tensors"]
    own = [place for place, operand in enumerate(tensors) if context.weight(operand) is not None]
    if len(own) != 1 or node in context.whole:
        return None
    others = "".join(word for place, word in enumerate(names) if place != own[0])
    banned = context.banned.get(node, {})
    letters = [letter for letter in names[own[0]] if letter in output and letter not in others]
    dims = [dim for dim in map(output.index, letters) if dim not in banned]
    shape = context.shape(node)
    if not dims:
        if letters:
            context.whole[node] = next(iter(banned.values()))
        return None
    dim = next((dim for dim in dims if shape[dim] % context.size == 0), dims[-1])
    begun = _begun(context, node, dim, shape[dim])
    return None if begun is None else replace(begun, choices=((node, dim),))


@rule("aten::scaled_dot_product_attention")
def _attention(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    for operand in (query, key, value):
        shard = context.shard(operand)
        if shard is not None and shard.dim >= len(context.shape(operand)) - 2:
            raise RefusalError("attention over a split dimension", shard)
    if (other := context.shard(mask)) is not None and other.dim >= len(context.shape(mask)) - 2:
        raise RefusalError("attention over a split dimension", other)
    dims = len(context.shape(node))
    heads = {"query": query, "key": key, "value": value} | ({"attn_mask": mask} if isinstance(mask, fx.Node) else {})
    state, changes = _heads(context, heads, dims, grouped=bool(given["enable_gqa"]))
    if not given["dropout_p"]:
        return Step(state=state, changes=changes)
    scores = [*context.shape(node)[:-1], context.shape(key)[-2]]
    taken = [changes.get(name, given[name]) for name in ("query", "key", "value", "attn_mask")]
    arguments = (*taken, given["dropout_p"], given["is_causal"], given["scale"], bool(given["enable_gqa"]))
    return Step(state=state, function="attention", arguments=(*arguments, scores, state.dim, list(state.sections)))


def _heads(
    context: Context, operands: dict[str, fx.Node], dims: int, *, grouped: bool
) -> tuple[Shard, dict[str, Narrowed]]:
    """Operands of attention: batch and heads line up, but for keys and values that several queries share."""
    query = operands["query"]
    shared = grouped and context.shape(operands["key"])[dims - 3] != context.shape(query)[dims - 3]
    if not shared:
        state, taken = aligned(context, list(operands.values()), dims)
        named = zip(operands, taken, strict=True)
        return state, {name: value for name, value in named if isinstance(value, Narrowed)}
    heads = context.shape(query)[dims - 3]
    split = Split(dims - 3, (heads,))
    states = {name: context.shard(operand) for name, operand in operands.items()}
    changes: dict[str, Narrowed] = {}
    for name, operand in operands.items():
        own, extent = states[name], context.shape(operand)[dims - 3] if len(context.shape(operand)) >= 3 else 1
        if own is not None and (own.dim != dims - 3 or len(own.sections) > 1 or extent % context.size):
            raise RefusalError("grouped attention split other than over whole heads", own)
        if own is None and extent > 1:
            changes[name] = _shared_heads(context, operand, dims - 3, heads)
    found = [state for state in states.values() if state is not None]
    if heads % context.size:
        raise RefusalError(f"{heads} heads do not divide by {context.size}", *found)
    return replace(joined(found), split=split, raw=False), changes


def _shared_heads(context: Context, operand: fx.Node, dim: int, heads: int) -> Narrowed:
    """Of keys or values that are whole, those that this rank's queries share."""
    extent = context.shape(operand)[dim]
    first, length = portion(heads, context.size, context.rank)
    shared = heads // extent
    if length % shared and shared % length:
        raise RefusalError(f"{extent} heads of keys go with {heads} of queries over {context.size} ranks")
    return Narrowed(operand, dim, ((first // shared, max(1, length // shared)),))


# --- the ends of a model ----------------------------------------------------------------------------------------------


@rule("aten::embedding")
def _embedding(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    weight, indices = given["weight"], given["indices"]
    if shards := split_operands(context, node):
        raise RefusalError("embedding of split indices", *shards)
    if weight not in context.parameters or given["scale_grad_by_freq"] or given["sparse"]:
        return Step(state=None)
    rows, _ = context.shape(weight)
    if node in context.whole:
        return Step(state=None)
    if rows < context.size:
        context.whole[node] = f"its {rows} rows are fewer than {context.size} ranks"
        return Step(state=None)
    split = Split(0, (rows,))
    ((first, length),) = split.spans(context.size, context.rank)
    padding = given["padding_idx"] - first if first <= given["padding_idx"] < first + length else -1
    return Step(
        state=None,
        function="embedding",
        arguments=(weight, indices, first, length, padding),
        weights={weight: split},
        partial=True,
    )


@rule("aten::cross_entropy_loss")
def _cross_entropy(context: Context, node: fx.Node, given: dict[str, Any]) -> Step:
    logits, target = given["self"], given["target"]
    shard = context.shard(logits)
    if shard is None:
        raise RefusalError("cross entropy of split targets", *split_operands(context, node))
    of_target, of_loss = context.tensors[target], context.tensors[node]
    assert of_target is not None
    assert of_loss is not None
    classes = 1 if len(context.shape(logits)) > 1 else 0
    if shard.dim != classes or len(shard.sections) > 1:
        raise RefusalError("cross entropy over other than one run of classes", shard)
    if given["weight"] is not None or of_target.is_floating_point() or context.shard(target) is not None:
        raise RefusalError("cross entropy with weights or probabilities has no rule", shard)
    ((first, _),) = shard.split.spans(context.size, context.rank)
    smoothing = given["label_smoothing"]
    arguments = (
        logits,
        target,
        first,
        shard.split.extent,
        given["reduction"],
        given["ignore_index"],
        smoothing,
        of_loss.dtype,
    )
    return Step(state=None, function="cross_entropy", arguments=arguments)
