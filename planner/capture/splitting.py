"""Which ops of a stage are split into I and W: those whose weights are read by such ops alone.

A leaf that one op splits and another does not would add its gradients in another order than B, so it is left whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from planner.capture.analysis import Analysis
from planner.capture.lifted import Role
from planner.capture.split import SplitConvolution, SplitEmbedding, SplitMatmul

aten = torch.ops.aten

_Function = Callable[..., Tensor]
_LeafKey = tuple[str, int]  # the parameter's name, the layer's number


def split_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """SplitMatmul as a function that a graph can call."""
    return _cast_and_apply(SplitMatmul, x, weight, bias, *rest)


def split_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """SplitConvolution as a function that a graph can call."""
    return _cast_and_apply(SplitConvolution, x, weight, bias, *rest)


def _cast_and_apply(
    function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Any, dtype: torch.dtype | None, *rest: Any
) -> Tensor:
    """Apply a function; ``dtype``: what autocast has it compute in, so that what comes in is cast before it.

    The weights' gradients then come in that type; they are cast as they are added to the leaves, as autograd does it.
    """
    if dtype is None:
        return function.apply(x, weight, bias, settings, *rest)  # type: ignore[no-any-return]
    with torch.autocast(x.device.type, enabled=False):
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return function.apply(x, weight, bias, settings, *rest)  # type: ignore[no-any-return]


def split_embedding(*arguments: Any) -> Tensor:
    """SplitEmbedding as a function that a graph can call."""
    return SplitEmbedding.apply(*arguments)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOp:
    """A call of ``function``: values (nodes, None), settings, then token, queue and the numbers of its leaves.

    ``weights``: the parameters whose gradients it queues (weight, then bias).
    """

    function: _Function
    values: tuple[fx.Node | None, ...]
    settings: tuple[Any, ...]
    weights: tuple[fx.Node, ...]

    def arguments(self, made: Callable[[fx.Node], fx.Node]) -> tuple[Any, ...]:
        """Values and settings, each node replaced by what ``made`` gives for it."""
        return (*(None if value is None else made(value) for value in self.values), *self.settings)


def split_ops(analysis: Analysis, nodes: list[fx.Node], leaves: dict[_LeafKey, int]) -> dict[fx.Node, SplitOp]:
    """The ops among ``nodes`` that are split."""
    match = _Match(analysis)
    found = {node: op for node in nodes if node in analysis.flow.flows and (op := match(node)) is not None}
    while True:
        unsplit = {
            key for node in nodes if node not in found for key in _read_leaves(analysis, node, found) if key in leaves
        }
        mixed = [node for node, op in found.items() if any(key in unsplit for key in _keys(analysis, node, op))]
        if not mixed:
            return found
        for node in mixed:
            del found[node]


def leaf_numbers(analysis: Analysis, node: fx.Node, op: SplitOp, leaves: dict[_LeafKey, int]) -> tuple[int, ...]:
    """The numbers of the leaves whose gradients ``op`` queues."""
    return tuple(leaves[key] for key in _keys(analysis, node, op))


def _keys(analysis: Analysis, node: fx.Node, op: SplitOp) -> list[_LeafKey]:
    return [(analysis.lifted.roles[weight][1], analysis.layer_of[node]) for weight in op.weights]


def _read_leaves(analysis: Analysis, node: fx.Node, found: dict[fx.Node, SplitOp]) -> list[_LeafKey]:
    """The leaves that an unsplit op reads; none where it only turns a weight round for split ops of its layer."""
    layer_of, roles = analysis.layer_of, analysis.lifted.roles
    if _is_turned(node) and all(user in found and layer_of[user] == layer_of[node] for user in node.users):
        return []
    return [
        (roles[used][1], layer_of[node])
        for used in node.all_input_nodes
        if used in roles and roles[used][0] is Role.PARAMETER
    ]


def _is_turned(node: fx.Node) -> bool:
    """Whether the node is the transpose of a matrix."""
    if node.target is aten.t.default:
        return True
    if node.target is aten.transpose.int:
        return sorted(int(dim) % 2 for dim in node.args[1:3]) == [0, 1]  # type: ignore[arg-type]
    return node.target is aten.permute.default and list(node.args[1]) in ([1, 0], [-1, -2], [1, -2], [-1, 0])  # type: ignore[arg-type]


class _Match:
    """Finds the split form of one op."""

    def __init__(self, analysis: Analysis) -> None:
        self._facts = analysis.trace.facts
        self._roles = analysis.lifted.roles
        self._layer_of = analysis.layer_of

    def __call__(self, node: fx.Node) -> SplitOp | None:
        """The split form of ``node``, or None."""
        args = tuple(node.args)
        target = node.target
        tensors = [self._facts[one].tensor for one in (node, *node.all_input_nodes)]
        if any(tensor is not None and tensor.is_complex() for tensor in tensors):
            return None  # its gradients would need conjugates
        if node.kwargs and target is not aten.addmm.default:
            return None
        if target is aten.linear.default:
            return self._matmul(node, args[0], args[1], args[2] if len(args) > 2 else None, transposed=True)
        if target is aten.addmm.default and not node.kwargs and len(args) == 3:
            return self._matmul(node, args[1], args[2], args[0], transposed=False)
        if target in (aten.mm.default, aten.matmul.default):
            return self._matmul(node, args[0], args[1], None, transposed=False)
        if target in _CONVOLUTIONS:
            return self._convolution(node, _CONVOLUTIONS[target], args, transposed=False)
        if target in _TRANSPOSED_CONVOLUTIONS:
            return self._convolution(node, _TRANSPOSED_CONVOLUTIONS[target], args, transposed=True)
        if target is aten.embedding.default:
            return self._embedding(args)
        return None

    def _trained(self, value: Any) -> bool:
        return self._is_parameter(value) and self._facts[value].requires_grad

    def _is_parameter(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and value in self._roles and self._roles[value][0] is Role.PARAMETER

    def _is_parameter_turned(self, value: Any, layer: int) -> bool:
        if not isinstance(value, fx.Node) or not _is_turned(value) or self._layer_of.get(value) != layer:
            return False
        return self._is_parameter(value.args[0])

    def _bias(self, bias: Any) -> tuple[bool, tuple[fx.Node, ...]]:
        """Whether the op can be split with this bias, and the bias where W makes its gradient."""
        if bias is None:
            return True, ()
        return self._is_parameter(bias), (bias,) if self._trained(bias) else ()

    def _matmul(self, node: fx.Node, x: Any, weight: Any, bias: Any, *, transposed: bool) -> SplitOp | None:
        if self._is_parameter_turned(weight, self._layer_of[node]):
            weight, transposed = weight.args[0], not transposed
        splits, biases = self._bias(bias)
        if not (splits and self._trained(weight)) or self._is_parameter(x) or not isinstance(x, fx.Node):
            return None
        values, weights = self._facts[x].tensor, self._facts[weight].tensor
        assert values is not None
        assert weights is not None
        if weights.dim() != 2 or values.dim() < 2 or (bias is not None and self._facts[bias].tensor.dim() != 1):  # type: ignore[union-attr]
            return None
        if bias is not None and values.dim() > 2 and not values.is_contiguous():
            return None  # torch then adds the bias after the product, not within
        return SplitOp(
            function=split_matmul,
            values=(x, weight, bias),
            settings=(transposed, self._cast(node, x, weight)),
            weights=(weight, *biases),
        )

    def _cast(self, node: fx.Node, *given: fx.Node) -> torch.dtype | None:
        """The type that autocast turned the op's tensors into."""
        (made, *types) = (tensor.dtype for n in (node, *given) if (tensor := self._facts[n].tensor) is not None)
        return None if all(dtype == made for dtype in types) else made

    def _convolution(
        self, node: fx.Node, dimensions: int, args: tuple[Any, ...], *, transposed: bool
    ) -> SplitOp | None:
        ones, zeros = [1] * dimensions, [0] * dimensions
        if transposed:  # input, weight, bias, stride, padding, output_padding, groups, dilation
            given = (*args, *(None, ones, zeros, zeros, 1, ones)[len(args) - 2 :])
            x, weight, bias, stride, padding, output_padding, groups, dilation = given
        else:  # input, weight, bias, stride, padding, dilation, groups
            given = (*args, *(None, ones, zeros, ones, 1)[len(args) - 2 :])
            x, weight, bias, stride, padding, dilation, groups = given
            output_padding = zeros
        splits, biases = self._bias(bias)
        if not (splits and self._trained(weight)) or self._is_parameter(x):
            return None
        values = self._facts[x].tensor
        if values is None or values.dim() != dimensions + 2:
            return None
        lists = [list(value) for value in (stride, padding, dilation, output_padding)]
        settings = (lists[0], lists[1], lists[2], transposed, lists[3], groups)
        return SplitOp(
            function=split_convolution,
            values=(x, weight, bias),
            settings=(settings, self._cast(node, x, weight)),
            weights=(weight, *biases),
        )

    def _embedding(self, args: tuple[Any, ...]) -> SplitOp | None:
        given: tuple[Any, ...] = args + (-1, False, False)[len(args) - 2 :]
        weight, indices, padding, by_frequency, sparse = given
        if not self._trained(weight) or sparse or not isinstance(indices, fx.Node):
            return None
        return SplitOp(
            function=split_embedding,
            values=(weight, indices),
            settings=(padding, by_frequency),
            weights=(weight,),
        )


_CONVOLUTIONS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_TRANSPOSED_CONVOLUTIONS = {
    aten.conv_transpose1d.default: 1,
    aten.conv_transpose2d.input: 2,
    aten.conv_transpose3d.input: 3,
}
