"""Made-up values where a model has no weights: for modules that must really run, and for layers that are timed.

Values do not matter for what they are, but they must be ordinary numbers: no layer gets faster or slower by them.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from planner.capture.values import taken_apart
from planner.capture.weightless import Fakes


def made_up(like: Tensor, device: torch.device | str) -> Tensor:
    """A tensor laid out as ``like``: normal numbers; zeros where they are integers, which may be indices; True."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if made.dtype.is_floating_point or made.dtype.is_complex:
        return made.normal_()
    return made.fill_(made.dtype is torch.bool)


def made_up_parameter(name: str, like: Tensor, device: torch.device | str) -> nn.Parameter:
    """A weight as layers start out: about 1 / sqrt(fan-in) where it is a matrix, else ones, and zeros for a bias."""
    with torch.no_grad():
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        if like.dim() < 2:
            made.fill_(0 if name.endswith("bias") else 1)
        else:
            made.uniform_(-1, 1).mul_(math.sqrt(3 * like.shape[0] / like.numel()))
    return nn.Parameter(made, requires_grad=like.requires_grad)


class RealCall:
    """One call of a module kept whole, run on made-up values in place of fakes.

    ``outputs``: fakes of what came back; ``saved``: fakes of what it keeps for its backward.
    """

    def __init__(self, function: Callable[..., list[Tensor]], arguments: tuple[list[Tensor], ...], fakes: Fakes):
        self._fakes = fakes
        self._fake_of: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # so that no storage's place is used again
        self.saved: list[Tensor] = []
        with unset_fake_temporarily():
            given = [self._reals(tensors, is_weight=group == 1) for group, tensors in enumerate(arguments)]
            before = [buffer.clone() for buffer in given[2]]
            versions = [tensor._version for tensor in given[0]]
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _never):
                made = function(*given)
            self.outputs = [self._fake(tensor) for tensor in made]
            changed = [tensor._version != was for tensor, was in zip(given[0], versions, strict=True)]
            changed += [not torch.equal(one, other) for one, other in zip(before, given[2], strict=True)]
        for fake, differs in zip((*arguments[0], *arguments[2]), changed, strict=True):
            if differs:
                torch.autograd.graph.increment_version(fake)

    def _reals(self, tensors: list[Tensor], *, is_weight: bool) -> list[Tensor]:
        made = []
        for tensor in tensors:
            real: Tensor = (
                made_up_parameter("", tensor, self._fakes.device) if is_weight else _alike(tensor, self._fakes)
            )
            self._fake_of[real.untyped_storage()._cdata] = tensor
            self._kept.append(real)
            made.append(real)
        return made

    def _pack(self, tensor: Tensor) -> None:
        self._kept.append(tensor)
        self.saved.append(self._fake(tensor))

    def _fake(self, real: Tensor) -> Tensor:
        key = real.untyped_storage()._cdata
        known = self._fake_of.get(key)
        if known is None:
            with self._fakes.mode:
                made = torch.empty(real.untyped_storage().nbytes() // real.element_size(), dtype=real.dtype)
            known = self._fake_of[key] = made
            self._kept.append(real)
        if known.dtype != real.dtype:
            return known
        return known.as_strided(real.shape, real.stride(), real.storage_offset()).requires_grad_(real.requires_grad)


def _alike(tensor: Tensor, fakes: Fakes) -> Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor.detach().clone()
    made = made_up(tensor, fakes.device)
    return made.requires_grad_().clone() if tensor.requires_grad else made  # no leaf: it may be changed in place


def _never(_: Any) -> Any:
    raise AssertionError("there is no backward")


@contextlib.contextmanager
def computing(fakes: Fakes, model: nn.Module, whole: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within it the model can be called on fakes; modules of ``whole`` (by name) really run, on made-up values."""
    try:
        with fakes.exporting(model):
            for module in whole.values():
                module.__dict__["forward"] = _real_forward(module, fakes)
            with fakes.mode:
                yield
    finally:
        for module in whole.values():
            module.__dict__.pop("forward", None)


def _real_forward(module: nn.Module, fakes: Fakes) -> Callable[..., Any]:
    def forward(*arguments: Any, **keywords: Any) -> Any:
        tensors, template = taken_apart((arguments, keywords))
        with unset_fake_temporarily():
            real = _materialised(module, fakes.device)
            given, named = template.filled([_alike(tensor, fakes) for tensor in tensors])
            made, returned = taken_apart(real(*given, **named))
            outputs = [fakes.of(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in made]
        return returned.filled(outputs)

    return forward


def _materialised(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module, its forward its own, with made-up weights."""
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = made_up_parameter(name, parameter, device)
    stand_ins = {part: part.__dict__.pop("forward") for part in module.modules() if "forward" in part.__dict__}
    try:
        return copy.deepcopy(module, memo)
    finally:
        for part, forward in stand_ins.items():
            part.__dict__["forward"] = forward
