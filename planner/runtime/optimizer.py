"""The user's optimizer over one rank's parameters, with its state under the parameters' names.

What a checkpoint keeps of it is plain data in which each tensor is replaced by its name among the checkpoint's tensors:
the state of each parameter, and those of its group's settings that training changed (a learning rate that the optimizer
itself lowers, say). All other settings stay those of the model file, which may have been edited in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import InputError

PREFIX = "optimizer"
"""Names of the optimizer's tensors in a checkpoint: ``optimizer/PARAMETER/KEY``."""


class NamedOptimizer:
    """An optimizer whose parameters have names."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        *,
        cut: Callable[[str, Any], Any] | None = None,
    ) -> None:
        """``cut``: this process's part of what is kept of a whole parameter, where it steps pieces."""
        self.optimizer = optimizer
        self.parameters = parameters
        self._cut = cut
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._given = [_settings(group) for group in optimizer.param_groups]

    def step(self) -> None:
        """Update the parameters by their gradients."""
        self.optimizer.step()

    # --- to a checkpoint and back -------------------------------------------------------------------------------------

    def kept(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """By parameter name what a checkpoint keeps, and the tensors that stand in it by their names."""
        entries: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for group, given in zip(self.optimizer.param_groups, self._given, strict=True):
            changed = {key: value for key, value in _settings(group).items() if not _same(value, given.get(key))}
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None:
                    continue
                state = self.optimizer.state.get(parameter, {})
                entries[name] = {
                    "state": {key: _packed(value, f"{PREFIX}/{name}/{key}", tensors) for key, value in state.items()},
                    "settings": {
                        key: _packed(value, f"{PREFIX}/{name}/settings/{key}", tensors)
                        for key, value in changed.items()
                    },
                }
        return entries, tensors

    def restore(self, entries: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what a checkpoint kept."""
        for group in self.optimizer.param_groups:
            names = [self._names[id(parameter)] for parameter in group["params"] if id(parameter) in self._names]
            for parameter in group["params"]:
                name = self._names.get(id(parameter), "")
                entry = entries.get(name)
                if entry is None:
                    continue
                if entry["state"]:
                    self.optimizer.state[parameter] = {
                        key: _placed(key, self._own(name, _unpacked(value, tensors)), parameter, group)
                        for key, value in entry["state"].items()
                    }
            told: Mapping[str, Any] = next((entries[name]["settings"] for name in names if name in entries), {})
            group.update({key: _unpacked(value, tensors) for key, value in told.items()})

    def _own(self, name: str, value: Any) -> Any:
        return value if self._cut is None else self._cut(name, value)


def tensors_in(entry: Any) -> list[str]:
    """The names of the tensors that stand in what a checkpoint keeps."""
    if isinstance(entry, list):
        return [name for part in entry for name in tensors_in(part)]
    if isinstance(entry, dict):
        if isinstance(entry.get("tensor"), str):
            return [entry["tensor"]]
        return [name for part in entry.values() for name in tensors_in(part)]
    return []


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as they are now."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Plain data for a value; tensors are put under names that begin with ``name``."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, dict):
        return {"items": [[key, _packed(part, f"{name}/{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        parts = [_packed(part, f"{name}/{index}", tensors) for index, part in enumerate(value)]
        return {type(value).__name__ if type(value) in (list, tuple) else "tuple": parts}
    raise InputError(
        f"the optimizer keeps a {type(value).__name__} ({name}), which a checkpoint cannot hold",
        hint="run without --checkpoint, or keep tensors and numbers in its state",
    )


def _unpacked(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(data, dict):
        return data
    (kind, content), *_ = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "items":
        return {key: _unpacked(part, tensors) for key, part in content}
    parts = [_unpacked(part, tensors) for part in content]
    return parts if kind == "list" else tuple(parts)


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A state's tensor on the device, and in the layout, in which the optimizer would have made it."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value.cpu()
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value.to(parameter.device)
