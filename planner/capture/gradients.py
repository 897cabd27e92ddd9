"""Memory of a stage's gradients that stays from step to step, so that what a plan counts is there and nothing else is.

    first backward of a step    autograd makes a new gradient -> copied to its place, and let go at once
    the others                  added there in place
    after the last one          ``.grad`` is the place itself: a part of what the replicas sum, where there are several

The first gradient is copied, not added to zeros: 0 + -0 is not -0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

_LARGE_BYTES = 1 << 16
"""Gradients of so many bytes are copied one by one as autograd makes them; smaller ones after the whole backward."""


class Gradients:
    """Where the gradients of leaves lie.

    Args:
        names: the parameter of each leaf.
        leaves: views of parameters, in the order in which their layers run.
        given: places for the gradients of parameters, laid out as these; others get one of their own.
    """

    def __init__(self, names: Sequence[str], leaves: Sequence[Tensor], given: Mapping[str, Tensor]) -> None:
        self._leaves = leaves
        last = {name: number for number, name in enumerate(names)}  # a parameter's sum begins with its last leaf
        trained = [number for number, leaf in enumerate(leaves) if leaf.requires_grad]
        self.places = {
            number: given[names[number]]
            if names[number] in given and last[names[number]] == number
            else torch.zeros_like(leaves[number])
            for number in trained
        }
        self._of = {names[number]: place for number, place in self.places.items()}  # of several the last one's
        self._open = True  # whether this step's first backward is still to come

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Around a backward: what autograd makes for leaves without a gradient goes to their places."""
        if not self._open:
            yield
            return
        self._open = False
        hooks = [
            self._leaves[number].register_post_accumulate_grad_hook(partial(self._move, number))
            for number, place in self.places.items()
            if place.nbytes >= _LARGE_BYTES
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.settle()

    def _move(self, number: int, leaf: Tensor) -> None:
        place, gradient = self.places[number], leaf.grad
        if gradient is not None and gradient is not place and gradient.layout is torch.strided:
            with torch.no_grad():
                leaf.grad = place.copy_(gradient)

    def settle(self) -> None:
        """All gradients to their places, but for sparse ones."""
        for number in self.places:
            self._move(number, self._leaves[number])

    def kept(self, name: str, total: Tensor | None) -> Tensor | None:
        """A parameter's whole gradient in its place, wherever it was summed."""
        place = self._of.get(name)
        if total is None or place is None or total is place or total.layout is not torch.strided:
            return total
        with torch.no_grad():
            return place.copy_(total)

    def begin(self) -> None:
        """A step's gradients are done: the next backward is the first of another step."""
        self._open = True
