"""Gradients clipped by their norm over the whole model, as torch.nn.utils.clip_grad_norm_ clips them in one process.

Each rank takes the norms of the gradients that it counts (a tied parameter counts on its first rank) and writes them
into a vector with a place for every parameter; the ranks' vectors are added, zeros to a norm, which is exact; and the
norm of that vector is the same bits on every rank, whatever the number of ranks. The squared norms of a parameter's
parts are added over the tensor ranks that hold them before that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from planner.errors import InputError
from planner.runtime.groups import Group
from planner.runtime.parts import TensorParts

_EPSILON = 1e-6
"""What torch adds to the norm before it divides by it."""


class Clipping:
    """Clips the gradients of one rank's parameters.

    Args:
        max_norm: the largest norm that the gradients of the whole model may have.
        names: all trainable parameters of the model, in its order.
        counted: those of them that this rank counts.
        group: of the pipeline's ranks, where there are several.
        parts: which parameters the tensor ranks hold in parts, where there are several.
        shared: of replicas that each have but their share of the gradients, and the parameters that are in pieces.
    """

    def __init__(
        self,
        max_norm: float,
        *,
        names: Sequence[str],
        counted: Collection[str],
        group: Group | None,
        device: torch.device,
        parts: TensorParts | None = None,
        shared: tuple[Group, Collection[str]] | None = None,
    ) -> None:
        self._max_norm = max_norm
        self._places = {name: place for place, name in enumerate(names)}
        self._counted = frozenset(counted)
        self._group = group
        self._parts = parts
        self._shared = None if shared is None else shared[0]
        pieces = () if shared is None else shared[1]
        self._in_pieces = [self._places[name] for name in sorted(pieces) if name in self._counted]
        self._device = device

    def clip(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Scale the gradients down to the norm, where they are over it; the norm that they had.

        Raises:
            InputError: a gradient is sparse.
        """
        gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
        for name, gradient in gradients.items():
            if gradient.is_sparse:
                raise InputError(
                    f"clip_norm: the gradient of {name} is sparse, of which torch takes no norm",
                    hint="leave out sparse=True, or clip_norm",
                )
        norms = self._norms({name: gradient for name, gradient in gradients.items() if name in self._counted})
        total: Tensor = torch.linalg.vector_norm(norms, 2.0)
        factor = torch.clamp(self._max_norm / (total + _EPSILON), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient.dtype) if gradient.dtype is not factor.dtype else factor)
        return total

    def _norms(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norms of all parameters that have a gradient, in the model's order, on every rank."""
        row = torch.zeros(len(self._places), device=self._device)
        norms = [torch.linalg.vector_norm(gradient, 2.0) for gradient in gradients.values()]
        places = [self._places[name] for name in gradients]
        if norms:
            row[places] = torch.stack(norms).to(row.dtype)
        if self._parts is not None:
            split = [self._places[name] for name in sorted(self._parts.splits) if name in self._counted]
            squares = row[split].square()
            self._parts.group.sum(squares)
            row[split] = squares.sqrt()
        if self._shared is not None:
            row[self._in_pieces] = row[self._in_pieces].square()
            self._shared.sum(row)
            row[self._in_pieces] = row[self._in_pieces].sqrt()
        # asked in every step: which experts a batch reaches changes
        there = torch.zeros_like(row)
        there[places] = 1.0
        if self._shared is not None:
            self._shared.sum(there)
        if self._group is not None:
            both = torch.cat([row, there])
            self._group.sum(both)
            row, there = both.chunk(2)
        found: Tensor = row[there.nonzero().flatten()]
        return found
