"""Modules kept whole: each call is one op of the captured graph, which runs the real module in eager PyTorch.

While the model is exported a stand-in takes the place of the module: it passes its tensors, with the module's
parameters and buffers, through an op that only knows the shapes of what comes back, seen in an eager run before. In the
captured graph that op becomes a call of the module (a copy without weights of its own) on those tensors, so that
autograd, recompute and weights of another stage need nothing special.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from planner.capture.attributes import Attributes
from planner.capture.values import HiddenTensorError, Template, backward_nodes, taken_apart, tensors_within
from planner.capture.watch import same_kind
from planner.errors import InputError, RunError

_library = torch.library.Library("pipeplan", "DEF")
_library.define("opaque(int key, Tensor[] given, Tensor[] parameters, Tensor(a!)[] buffers) -> Tensor[]")
OPAQUE = torch.ops.pipeplan.opaque.default

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What one call of a module gave, without the values of its tensors."""

    layouts: tuple[_Layout, ...]
    template: Template


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueCall:
    """One call of a module that is kept whole."""

    name: str
    number: int  # which of the module's calls in a forward
    module: nn.Module
    given: Template  # (arguments, keyword arguments)
    returned: Returned

    @property
    def label(self) -> str:
        """What its random numbers hang on."""
        return f"opaque:{self.name}@{self.number}"

    def check(self, tensors: list[Tensor], template: Template) -> None:
        """Raise RunError where another kind of value comes back than when the model was captured."""
        seen = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        noted = tuple((shape, dtype) for shape, _, dtype, _ in self.returned.layouts)
        if seen != noted or not template.agrees(self.returned.template):
            raise RunError(
                f"module {self.name} returned {_said(seen)} where it returned {_said(noted)} when it was captured",
                hint="what a module returns may not depend on the values of tensors: pad it, or keep a larger module "
                "whole (leaves)",
            )


def _said(tensors: tuple[tuple[torch.Size, torch.dtype], ...]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in tensors) or "no tensor"


class _Bound:
    """A copy of a call's module that holds the tensors it is given, until the next call gives others.

    They stay after the call, since a checkpoint within the module runs it again in the backward.
    """

    def __init__(self, call: OpaqueCall, model: nn.Module) -> None:
        self._call = call
        self.module = _without_copying_tensors(call.module, model)
        numbers: dict[int, int] = {}
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            numbers.setdefault(id(tensor), len(numbers))
        self._places = [
            (held, name, numbers[id(tensor)])
            for part in self.module.modules()
            for held in (part._parameters, part._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        self._recurrent = [part for part in self.module.modules() if isinstance(part, nn.RNNBase)]
        self._attributes, self._is_new = Attributes(self.module), True
        self._changed: set[int] = set()  # buffers that a call was seen to change in place, by number

    def __call__(self, given: list[Tensor], parameters: list[Tensor], buffers: list[Tensor]) -> list[Tensor]:
        tensors = [*parameters, *buffers]
        for number in self._changed:  # a backward may need what is there now, when later calls have changed it
            tensors[number] = tensors[number].clone()
        versions = [tensor._version for tensor in tensors]
        for held, name, number in self._places:
            held[name] = tensors[number]  # type: ignore[assignment]
        for part in self._recurrent:  # which keep their weights in a list of their own too
            part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
        arguments, keywords = self._call.given.filled(given)
        if self._attributes.changed:  # by the call before; what resets them is in the model around it, and no op
            self._attributes.put_back()
        with _saving():
            output = self.module(*arguments, **keywords)
        if self._is_new:  # looked at once: it takes time
            self._attributes.look()
            self._check_parameters(output)
            self._is_new = False
        for held, name, number in self._places:
            value = held[name]
            if value is not tensors[number] and value is not None:  # a buffer assigned anew in forward
                with torch.no_grad():
                    tensors[number].copy_(same_kind(name, self.module, value, tensors[number]))
                held[name] = tensors[number]  # type: ignore[assignment]
        for number, tensor in enumerate(buffers, len(parameters)):
            if number in self._changed:
                with torch.no_grad():
                    tensor.copy_(tensors[number])
            elif tensor._version != versions[number]:
                self._changed.add(number)
        made, template = taken_apart(output)
        self._call.check(made, template)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*given, *parameters)):
            return [_with_gradient(tensor) for tensor in made]
        return made

    def _check_parameters(self, output: Any) -> None:
        """Raise InputError where a function that is bound to the user's module took the parameters of that one."""
        read = {id(getattr(node, "variable", None)) for node in backward_nodes(tensors_within(output))}
        for name, parameter in self._call.module.named_parameters():
            if id(parameter) in read:
                raise InputError(
                    f"module {self._call.name}, which is kept whole, reads its {name} in a function that was made of "
                    "it before (by torch.compile, or a closure)",
                    hint="name the module in that function's arguments, or call the method itself in forward()",
                )


@contextlib.contextmanager
def _saving() -> Iterator[None]:
    """Within it what is saved for a backward is there for one, though hooks around it may drop it; they get it too."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield
        return
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> tuple[int, Any]:
        kept.append(tensor)
        return len(kept) - 1, hooks[0](tensor)

    def unpack(packed: tuple[int, Any]) -> Any:
        return kept[packed[0]] if kept else hooks[1](packed[1])

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        kept.clear()


class _Cut(torch.autograd.Function):
    """A tensor that takes a gradient, and drops it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


def _with_gradient(tensor: Tensor) -> Tensor:
    """What a module returns, as a tensor that takes a gradient whatever the values that it was given.

    Which of its outputs do may hang on them, and what passes between stages may not.
    """
    if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    made: Tensor = _Cut.apply(tensor, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
    return made


def _without_copying_tensors(module: nn.Module, model: nn.Module) -> nn.Module:
    inside = set(module.modules())
    memo: dict[int, Any] = {}
    for part in model.modules():
        if part not in inside:
            memo[id(part)] = part
        for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(value, Tensor):
                memo[id(value)] = value
    return copy.deepcopy(module, memo)


def function_of(call: OpaqueCall, model: nn.Module) -> Callable[..., list[Tensor]]:
    """The call as a function that a graph can hold; ``model`` is the whole."""
    bound = _Bound(call, model)

    def opaque(given: list[Tensor], parameters: list[Tensor], buffers: list[Tensor]) -> list[Tensor]:
        return bound(given, parameters, buffers)

    opaque.call, opaque.module = call, bound.module  # type: ignore[attr-defined]
    return opaque


# --- in place of the modules, while the model is exported -------------------------------------------------------------

_calls: dict[int, OpaqueCall] = {}


def _shapes(key: int, given: list[Tensor], parameters: list[Tensor], buffers: list[Tensor]) -> list[Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=dtype, device=device)
        for shape, stride, dtype, device in _calls[key].returned.layouts
    ]


torch.library.register_fake("pipeplan::opaque", _shapes, lib=_library)


class CannotStandInError(Exception):
    """A module cannot be kept whole: what goes in or comes out cannot be passed on."""


@dataclass(slots=True, kw_only=True)
class StandIns:
    """Stand-ins for some modules of a model, by name. ``calls``: those made since they were put in place, by key."""

    model: nn.Module
    names: frozenset[str]
    returned: Mapping[str, list[Returned | HiddenTensorError]]
    calls: dict[int, OpaqueCall] = field(default_factory=dict)

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Within it the modules are stood in for; the user's own hooks on them wait for the real call."""
        held = {name: (module := self.model.get_submodule(name), dict(module.__dict__)) for name in self.names}
        try:
            for name, (module, _) in held.items():
                for hooks in _HOOKS:
                    module.__dict__[hooks] = type(module.__dict__[hooks])()
                module.__dict__["forward"] = self._stand_in(name, module)
            yield
        finally:
            for module, before in held.values():
                if "forward" not in before:
                    module.__dict__.pop("forward", None)
                module.__dict__.update({key: before[key] for key in (*_HOOKS, "forward") if key in before})
            for key in self.calls:
                _calls.pop(key, None)

    def _stand_in(self, name: str, module: nn.Module) -> Callable[..., Any]:
        made = 0

        def forward(*arguments: Any, **keywords: Any) -> Any:
            nonlocal made
            returned = self.returned[name][made] if made < len(self.returned[name]) else None
            if returned is None:
                raise CannotStandInError(f"module {name} is called more often in the capture than in eager PyTorch")
            if isinstance(returned, HiddenTensorError):
                raise CannotStandInError(str(returned))
            try:
                given, template = taken_apart((arguments, keywords))
            except HiddenTensorError as error:
                raise CannotStandInError(str(error)) from error
            key = max(_calls, default=0) + 1
            _calls[key] = self.calls[key] = OpaqueCall(
                name=name,
                number=made,
                module=module,
                given=template,
                returned=returned,
            )
            made += 1
            tensors = OPAQUE(key, given, list(module.parameters()), list(module.buffers()))
            return returned.template.filled(tensors)

        return forward


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


def returned_by(
    model: nn.Module, run: Callable[[], object], whole: Iterable[str]
) -> dict[str, list[Returned | HiddenTensorError]]:
    """What each call of the modules ``whole`` gives in one eager ``run`` of the model, whose buffers stay as they are.

    Calls within another of them are no calls of the graph.
    """
    found: dict[str, list[Returned | HiddenTensorError]] = defaultdict(list)
    depth = 0
    saving = contextlib.ExitStack()  # where sys.exit() ends a forward, no hook is called that would close it

    def entered(module: nn.Module, given: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            saving.enter_context(_saving())

    def noted(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth:
                return
            saving.close()
            try:
                tensors, template = taken_apart(output)
            except HiddenTensorError as error:
                found[name].append(error)
                return
            layouts = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
            found[name].append(Returned(layouts=layouts, template=template))

        return hook

    kept = [
        (module, [(name, buffer, copy.deepcopy(buffer)) for name, buffer in module._buffers.items()])
        for module in model.modules()
    ]
    modules = {name: model.get_submodule(name) for name in whole}
    hooks = [module.register_forward_pre_hook(entered) for module in modules.values()]
    hooks += [module.register_forward_hook(noted(name), always_call=True) for name, module in modules.items()]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(drop, drop), saving:
            run()
    finally:
        for hook in hooks:
            hook.remove()
        for module, buffers in kept:
            for name, buffer, value in buffers:
                if buffer is not None and value is not None:
                    buffer.detach().copy_(value)
                module._buffers[name] = buffer
    return found


def drop(_: Any) -> Any:
    """Nothing is saved: there is no backward."""
