"""A batch, as ``batch()`` and ``data()`` of a model file give it: flattened in one order, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.errors import InputError


class Batch(NamedTuple):
    """``inputs``: a tensor, tuple or dict of tensors, to call the model with; ``target``: what loss() compares."""

    inputs: Any
    target: Any


def leaves(batch: Batch) -> tuple[Any, ...]:
    """The tensors (and None, numbers, strings) of a batch; dictionaries in the order of their sorted keys."""
    return tuple(value for _, value in named_leaves(batch))


def named_leaves(batch: Batch) -> Iterator[tuple[str, Any]]:
    """The leaves with their places, e.g. ``inputs['ids']``."""
    yield from _walk("inputs", batch.inputs)
    yield from _walk("target", batch.target)


def _walk(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _walk(f"{place}[{key!r}]", value[key])
    elif isinstance(value, (tuple, list)):
        for index, entry in enumerate(value):
            yield from _walk(f"{place}[{index}]", entry)
    else:
        yield place, value


def rebuilt(batch: Batch, entries: Iterator[Any]) -> Batch:
    """The same structure over other leaves: tuples (those with names keep them), dictionaries with sorted keys."""
    return Batch(_rebuild(batch.inputs, entries), _rebuild(batch.target, entries))


def _rebuild(value: Any, entries: Iterator[Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _rebuild(value[key], entries) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        made = tuple(_rebuild(entry, entries) for entry in value)
        return value._make(made) if hasattr(value, "_make") else made  # a named tuple's fields are read by name
    return next(entries)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch with its tensors on a device."""
    moved = (leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves(batch))
    return rebuilt(batch, moved)


def microbatch(batch: Batch, index: int, *, size: int) -> Batch:
    """Samples ``index * size`` to ``(index + 1) * size - 1`` of a batch (views, no copies)."""
    cut = (leaf[index * size : (index + 1) * size] if isinstance(leaf, Tensor) else leaf for leaf in leaves(batch))
    return rebuilt(batch, cut)


def check(item: object, *, size: int, where: str) -> Batch:
    """The batch that ``item`` is. Raises InputError, starting with ``where``, unless all of it has ``size`` samples."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise InputError(f"{where} gave {shown(item)}, no pair", hint="return (inputs, target)")
    batch = Batch(*item)
    for place, leaf in named_leaves(batch):
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            continue
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"{where}: {place} is of type {type(leaf).__name__}",
                hint="inputs and target are a tensor, a tuple or a dict of tensors",
            )
        if leaf.is_meta:
            raise InputError(f"{where}: {place} is on the device meta, without values", hint="make it on the CPU")
        if leaf.dim() == 0 or leaf.shape[0] != size:
            shape = list(leaf.shape)
            raise InputError(
                f"{where}: {place} has shape {shape}, where {size} samples were asked for",
                hint=f"dimension 0 of every tensor holds the samples, so it must be {size}",
            )
    if not any(isinstance(leaf, Tensor) for leaf in leaves(Batch(batch.inputs, None))):
        raise InputError(f"{where}: inputs hold no tensor", hint="return the model's input tensors as inputs")
    return rebuilt(batch, iter(leaves(batch)))


def shown(value: object) -> str:
    """A value in a message: ``int 3``, ``tuple of 3``, ``Tensor``, ``None``."""
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, (tuple, list)):
        return f"{kind} of {len(value)}"
    return f"{kind} {value!r}" if isinstance(value, (bool, int, float, str)) else kind


def called(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's output: a dict of inputs is passed by keyword, a tuple by position."""
    try:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called") from error
