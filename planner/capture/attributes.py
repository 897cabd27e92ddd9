"""Plain attributes that modules set in forward(): put back after the capture, and found out where they are state.

What a module keeps of one forward for the next has to be a buffer: a graph, and the copies of a model that ranks hold,
know of no other. An attribute that is set anew in every forward before it is read is none of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

_OWN = ("_parameters", "_buffers", "_modules", "training", "forward")


class Attributes:
    """The attributes of all modules of a model; after ``with`` they are what they were.

    ``changed``: by module the attributes that were tensors or numbers before, and others after a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: (module, dict(vars(module))) for name, module in model.named_modules()}
        self.changed: dict[str, list[str]] = {}

    def look(self) -> None:
        """A forward has ended."""
        for name, (module, held) in self._before.items():
            others = [key for key, value in _plain(held).items() if _is_other(value, vars(module).get(key))]
            if others:
                self.changed[name] = others

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for module, held in self._before.values():
            for key in [key for key in _plain(vars(module)) if key not in held]:
                del vars(module)[key]
            vars(module).update(_plain(held))


def _plain(held: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in held.items() if key not in _OWN and not key.endswith("_hooks")}


def _is_other(before: Any, now: Any) -> bool:
    if isinstance(before, bool) or not isinstance(before, (Tensor, int, float)) or before is now:
        return False
    return isinstance(before, Tensor) or bool(before != now)


def is_repeatable(loss: Callable[[], Tensor]) -> bool:
    """Whether a second forward gives the loss of the first, to rounding; ``loss`` seeds and sets back what it must."""
    first, second = loss(), loss()
    return torch.allclose(first, second, rtol=1e-6, atol=0.0, equal_nan=True)
