"""Nested Python values (a module's arguments or outputs) taken apart into tensors and what holds them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class _Fields:
    """Stands for a dataclass instance: an empty one of its kind, and its fields."""

    empty: Any
    held: Template


@dataclass(frozen=True, slots=True)
class Template:
    """What is left of a value without its tensors."""

    tree: pytree.TreeSpec
    entries: tuple[Any, ...]

    def filled(self, tensors: list[Tensor]) -> Any:
        """The value, with these tensors in it. Objects that can change are copied, so that each value has its own."""
        return pytree.tree_unflatten([_filled(entry, tensors) for entry in self.entries], self.tree)

    def agrees(self, other: Template) -> bool:
        """Whether the two hold the same structure and the same plain values, tensors aside."""
        return self.tree == other.tree and all(map(_agree, self.entries, other.entries))


class HiddenTensorError(Exception):
    """An object that cannot be taken apart holds tensors."""


def taken_apart(value: Any) -> tuple[list[Tensor], Template]:
    """The tensors of a value, each once, and its template.

    Raises HiddenTensorError where an object of unknown kind holds tensors.
    """
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []

    def entry(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            return _Slot(numbers[id(leaf)])
        if is_dataclass(leaf) and not isinstance(leaf, type):
            empty = copy.copy(leaf)
            for one in fields(leaf):
                object.__setattr__(empty, one.name, None)
            return _Fields(empty, template({one.name: getattr(leaf, one.name) for one in fields(leaf)}))
        if not isinstance(leaf, _CONSTANT):
            if any(True for _ in tensors_within(leaf)):
                raise HiddenTensorError(f"an object of type {type(leaf).__name__} holds tensors")
            return copy.deepcopy(leaf)
        return leaf

    def template(value: Any) -> Template:
        leaves, tree = pytree.tree_flatten(value)
        return Template(tree, tuple(entry(leaf) for leaf in leaves))

    made = template(value)
    return tensors, made


_CONSTANT = (
    *(bool, int, float, complex, str, bytes, type(None), type, Enum, slice, range, frozenset, nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, MethodType),
    type(taken_apart),
    type(len),
)
"""Kinds of values that nobody changes (or that mean one thing in a process: functions, modules)."""


def _filled(entry: Any, tensors: list[Tensor]) -> Any:
    if isinstance(entry, _Slot):
        return tensors[entry.number]
    if isinstance(entry, _Fields):
        made = copy.copy(entry.empty)
        for name, value in entry.held.filled(tensors).items():
            object.__setattr__(made, name, value)
        return made
    return entry if isinstance(entry, _CONSTANT) else copy.deepcopy(entry)


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, _Fields):
        return isinstance(other, _Fields) and type(one.empty) is type(other.empty) and one.held.agrees(other.held)
    if isinstance(one, (_Slot, bool, int, float, complex, str, bytes, type(None), Enum)):
        return bool(one == other)
    return type(one) is type(other)


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Every tensor in containers, dataclasses and plain objects; what modules hold is left out."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, Tensor):
            yield one
            continue
        if isinstance(one, _CONSTANT) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            stack.extend(one.values())
        elif isinstance(one, (tuple, list, set)):
            stack.extend(one)
        stack.extend(getattr(one, "__dict__", {}).values())
        if is_dataclass(one):  # with slots it has no __dict__
            stack.extend(getattr(one, field.name) for field in fields(one))


def backward_nodes(tensors: Iterable[Tensor]) -> set[Any]:
    """Every node of the autograd graph behind some tensors."""
    found: set[Any] = set()
    stack = [tensor.grad_fn for tensor in tensors]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack.extend(following for following, _ in node.next_functions)
    return found
