"""What the modules of a model hold beside parameters and buffers: state kept there would be lost in a graph.

A graph changes buffers, and knows of no other state. An attribute that every forward sets anew before it is read is
none, so a second forward tells.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from planner.capture.values import backward_nodes

_OWN = ("_parameters", "_buffers", "_modules", "training", "forward", "_flat_weights")


class Attributes:
    """The attributes of all modules of a model, and what is in those that are containers, as they were at first.

    ``changed``: by module the attributes that may be state: after a forward they hold other tensors or numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = {module: (name, _plain(module)) for name, module in model.named_modules()}
        self._state = {module: _state_of(held) for module, (_, held) in self._before.items()}
        values = [value for _, held in self._before.values() for value in held.values()]
        self._contents = [(one, copy.copy(one)) for one in _within(values) if one is not values and _is_container(one)]
        self.changed: dict[str, list[str]] = {}

    def look(self) -> None:
        """A forward has ended."""
        for module, (name, _) in self._before.items():
            before, now = self._state[module], _state_of(_plain(module))
            others = [key for key in before | now if not _same(before.get(key, []), now.get(key, []))]
            if others:
                self.changed[name] = others

    def put_back(self) -> None:
        """What was set since is gone: a fake tensor that an export leaves behind is none to go on with."""
        for module, (_, held) in self._before.items():
            for key in _plain(module).keys() - held.keys():
                del vars(module)[key]
            vars(module).update(held)
        for container, content in self._contents:
            if not _same(list(_entries(container)), list(_entries(content))):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()


def _plain(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OWN and "_hooks" not in key}


def _state_of(held: dict[str, Any]) -> dict[str, list[Any]]:
    """The tensors and numbers of each attribute."""
    return {
        key: [one for one in _within(value) if isinstance(one, (Tensor, int, float)) and not isinstance(one, bool)]
        for key, value in held.items()
    }


def _same(before: list[Any], now: list[Any]) -> bool:
    def same(one: Any, other: Any) -> bool:
        return one is other or (isinstance(one, (int, float)) and isinstance(other, (int, float)) and one == other)

    return len(before) == len(now) and all(map(same, before, now))


def _within(value: Any) -> Iterator[Any]:
    """A value, and all that is in it where it is a container."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, tuple) or _is_container(one):
            if id(one) in seen:
                continue
            seen.add(id(one))
            stack.extend(_entries(one))
        yield one


def _is_container(value: Any) -> bool:
    """Whether it is one whose content may change."""
    return type(value) in (list, dict, set, deque, OrderedDict, defaultdict)


def _entries(container: Any) -> Iterator[Any]:
    yield from container
    if isinstance(container, dict):
        yield from container.values()


def is_repeatable(loss: Callable[[], Tensor], put_back: Callable[[], None]) -> bool:
    """Whether a second forward gives the loss of the first, to rounding, by a backward apart from the first's.

    ``loss`` seeds and sets back what it must, but for the attributes: ``put_back`` does that. A forward that gives
    another loss by chance alone, as kernels on a GPU may, is repeatable.
    """
    first, second = loss(), loss()
    shared = backward_nodes([first]) & backward_nodes([second])
    if any(node.next_functions for node in shared):  # more than the leaves
        return False
    if _close(first, second):
        return True
    put_back()
    return not _close(first, loss())


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-6, atol=0.0, equal_nan=True)
