"""Split backward: ops whose backward gives the input's gradient at once (I) and queues the weights' gradient (W).

Each computes with the very calls that autograd's own formulas make, so that I and W give the bits that B gives.
The weights enter detached, beside a token that requires grad: without it the backward of a first layer would not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Gradients = tuple[Tensor | None, ...]


class WeightQueue:
    """The weight gradients of one micro-batch that wait for W, in the order in which I met them.

    An entry: the leaves (by number), the function that gives their gradients, and what it needs.
    """

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[tuple[tuple[int, ...], Callable[..., Gradients], tuple[Any, ...]]] = []

    def detach(self) -> None:
        """Let go of the autograd graph, which would keep alive what W does not need."""
        self.items = [
            (leaves, function, tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments))
            for leaves, function, arguments in self.items
        ]

    def tensors(self) -> list[Tensor]:
        """What the queue holds."""
        return [value for _, _, arguments in self.items for value in arguments if isinstance(value, Tensor)]


class SplitMatmul(torch.autograd.Function):
    """``x @ weight`` or ``x @ weight.t()``, plus a bias: linear, addmm, mm and matmul with a matrix of parameters.

    Shapes: x [..., n], weight [n, m] ([m, n] where transposed), bias [m] or None; leading dimensions are folded into
    one, as torch does it where a weight requires grad.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        token: Tensor,
        queue: WeightQueue,
        leaves: tuple[int, ...],
    ) -> Tensor:
        """F; the context keeps what I and W need."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.queue, ctx.leaves = transposed, queue, leaves
        ctx.bias_shape = None if bias is None or len(leaves) == 1 else bias.shape
        flat = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x
        factor = weight.t() if transposed else weight
        out = torch.mm(flat, factor) if bias is None else torch.addmm(bias, flat, factor)
        return aten._unsafe_view(out, [*x.shape[:-1], factor.shape[1]]) if x.dim() > 2 else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """I, which also queues W; the bias's gradient is summed here, while the output's lies in the caches."""
        if gradient is None:
            return (None,) * 7
        x, weight = ctx.saved_tensors
        flat = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x
        factor = weight.t() if ctx.transposed else weight
        gradient = gradient.reshape(-1, factor.shape[1]) if x.dim() > 2 else gradient
        of_bias = None if ctx.bias_shape is None else gradient.sum_to_size(ctx.bias_shape)
        of_x = None
        if ctx.needs_input_grad[0]:
            # torch's mm_mat1_backward: a column-major operand gets a column-major gradient
            if flat.stride(0) == 1 and flat.stride(1) == flat.shape[0]:
                of_x = factor.mm(gradient.t()).t()
            else:
                of_x = gradient.mm(factor.t())
            of_x = of_x.reshape(x.shape)
        column_major = factor.stride(0) == 1 and factor.stride(1) == factor.shape[0]
        arguments = (gradient, flat, column_major, ctx.transposed, of_bias)
        ctx.queue.items.append((ctx.leaves, _matmul_weight, arguments))
        return (of_x,) + (None,) * 6


def _matmul_weight(
    gradient: Tensor, flat: Tensor, column_major: bool, transposed: bool, of_bias: Tensor | None
) -> Gradients:
    """torch's mm_mat2_backward, and the bias's gradient, which I has summed."""
    of_factor = gradient.t().mm(flat).t() if column_major else flat.t().mm(gradient)
    of_weight = of_factor.t() if transposed else of_factor
    return (of_weight,) if of_bias is None else (of_weight, of_bias)


class SplitConvolution(torch.autograd.Function):
    """A convolution of any number of dimensions, transposed or not; x [samples, channels, ...]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: tuple[Any, ...],
        token: Tensor,
        queue: WeightQueue,
        leaves: tuple[int, ...],
    ) -> Tensor:
        """F; the context keeps what I and W need."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.queue, ctx.leaves = settings, queue, leaves
        ctx.bias_shape = None if bias is None else list(bias.shape)
        out: Tensor = aten.convolution(x, weight, bias, *settings)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """I, which also queues W."""
        if gradient is None:
            return (None,) * 7
        x, weight = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            only_input = (True, False, False)
            of_x, _, _ = aten.convolution_backward(gradient, x, weight, ctx.bias_shape, *ctx.settings, only_input)
        arguments = (gradient, x, weight, ctx.bias_shape, ctx.settings, len(ctx.leaves) > 1)
        ctx.queue.items.append((ctx.leaves, _convolution_weight, arguments))
        return (of_x,) + (None,) * 6


def _convolution_weight(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_shape: list[int] | None,
    settings: tuple[Any, ...],
    with_bias: bool,
) -> Gradients:
    wanted = (False, True, with_bias)
    _, of_weight, of_bias = aten.convolution_backward(gradient, x, weight, bias_shape, *settings, wanted)
    return (of_weight, of_bias) if with_bias else (of_weight,)


class SplitEmbedding(torch.autograd.Function):
    """Rows of a weight by index."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        indices: Tensor,
        padding: int,
        by_frequency: bool,
        token: Tensor,
        queue: WeightQueue,
        leaves: tuple[int, ...],
    ) -> Tensor:
        """F; the context keeps what I and W need."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        ctx.settings = (weight.shape[0], padding, by_frequency)
        ctx.queue, ctx.leaves = queue, leaves
        out: Tensor = aten.embedding(weight, indices, padding, by_frequency, False)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """I, which also queues W."""
        if gradient is not None:
            (indices,) = ctx.saved_tensors
            ctx.queue.items.append((ctx.leaves, _embedding_weight, (gradient, indices, ctx.settings)))
        return (None,) * 7


def _embedding_weight(gradient: Tensor, indices: Tensor, settings: tuple[int, int, bool]) -> Gradients:
    return (aten.embedding_dense_backward(gradient, indices, *settings),)
