"""A model without the memory of its weights: built with parameters on meta, captured with fake tensors.

A fake tensor has shape, strides, dtype and device, and no values: what an op does to these is all that capturing needs.
Buffers are real (they are small, and tables and masks in them have values that count).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from planner.capture.values import tensors_within

_patching = threading.Lock()


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it parameters lose their memory as soon as a module takes them; initialising them then takes no time."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            parameter = made
        register(module, name, parameter)

    with _patching:
        nn.Module.register_parameter = registered  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


class Fakes:
    """Fake tensors on one device, and how to compute with them."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.renew()

    def renew(self) -> None:
        """Forget what went before: sizes without a value that an export which failed has left would stop the next."""
        self.mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)

    def of(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor; a parameter's is one too."""
        if isinstance(tensor, FakeTensor):
            return tensor
        alike = tensor.detach()
        if not alike.is_meta:
            alike = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake: Tensor = FakeTensor(self.mode, alike, self.device)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def of_leaf(self, leaf: Any) -> Any:
        """The fake of a tensor; anything else as it is."""
        return self.of(leaf) if isinstance(leaf, Tensor) else leaf

    def with_sizes(self, value: Any, given: list[Tensor]) -> Any:
        """``value`` where its sizes are known; where they hang on the values of ``given``: as large as can be."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.with_sizes(entry, given) for entry in value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return 1
        if not isinstance(value, Tensor) or not any(isinstance(size, torch.SymInt) for size in value.shape):
            return value
        most = min((tensor.numel() for tensor in given if not tensor.dtype.is_floating_point), default=1)
        shape = [most if isinstance(size, torch.SymInt) else size for size in value.shape]
        made = torch.empty(shape, dtype=value.dtype, device=self.device)
        return made.requires_grad_(value.requires_grad)

    @contextlib.contextmanager
    def exporting(self, module: nn.Module) -> Iterator[None]:
        """Within it ``module`` has fake parameters in place of its own, and torch.export works with these fakes."""
        self.renew()
        places = [
            (part._parameters, name, parameter)
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        made: dict[int, Any] = {id(parameter): self.of(parameter) for _, _, parameter in places}
        try:
            for held, name, parameter in places:
                held[name] = made[id(parameter)]
            with tracing(TracingContext(self.mode)):
                yield
        finally:
            for held, name, parameter in places:
                held[name] = parameter


class RealWhereItCan(TorchFunctionMode):
    """Within it what is computed from no fake is computed really: a model branches on it as it does in training."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors_within((args, kwargs)))
        with contextlib.nullcontext() if fake else unset_fake_temporarily():
            return func(*args, **kwargs)


def buffers_to(module: nn.Module, device: torch.device | str) -> None:
    """Move the buffers alone; one that is made from weights, and so has no values, gets zeros."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
