"""What a model does while it is exported, module by module: which one runs, and what the graph would lose of it.

Buffers that a module assigns anew (``self.seen = self.seen + 1``) are lost too; the new value is written into the old
buffer instead, as the module is left.


Lost are backwards of custom autograd Functions (Python or C++), found by the nodes that they leave in the autograd
graph, and numbers drawn from Python's or NumPy's generators, which a graph freezes, found by the generators' states:
both are looked for whenever a module is entered or left. Hooks on gradients, and backwards within the forward, are seen
as they come. All is put down to the innermost module that is running.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Set
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from planner.capture.attributes import Attributes
from planner.capture.values import tensors_within
from planner.errors import InputError

LOSS = None
"""The place of what happens in no module: the user's loss()."""


class Watch:
    """Hooks on every module of ``model`` but those ``within`` which nobody looks.

    ``lost``: module (None: the loss) -> what of it the graph would lose, in words. ``again``: gets the modules with
    buffers that run within a checkpoint, which plain PyTorch runs again in the backward.
    """

    def __init__(self, model: nn.Module, opaque: frozenset[str], attributes: Attributes, again: set[str]) -> None:
        self._model = model
        self.attributes = attributes
        self._again = again
        self._opaque = opaque
        self._running: list[str | None] = [LOSS]
        self._seen: set[Any] = set()
        self._drawn = _generators()
        self._buffers: dict[nn.Module, dict[str, Tensor | None]] = {}
        self.lost: dict[str | None, str] = {}

    @property
    def running(self) -> str | None:
        """The module that runs."""
        return self._running[-1]

    @property
    def innermost(self) -> str | None:
        """The module that runs, or that raised; the innermost that is not kept whole already."""
        return next(name for name in reversed(self._running) if name is None or name not in self._opaque)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the model is watched."""
        handles = []
        seen = reached_apart(self._model, {self._model.get_submodule(name) for name in self._opaque})
        for name, module in self._model.named_modules():
            if module not in seen:
                continue
            handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving(name)))
        self._drawn = _generators()
        noted = (
            self._noting(Tensor, "register_hook", "puts a hook on a gradient"),
            self._noting(torch.autograd, "_engine_run_backward", "runs a backward within its forward"),
        )
        try:
            with noted[0], noted[1]:
                yield
        finally:
            for handle in handles:
                handle.remove()
            for module, buffers in self._buffers.items():
                module._buffers.update({name: None for name, buffer in buffers.items() if buffer is None})

    @contextlib.contextmanager
    def _noting(self, place: Any, name: str, what: str) -> Iterator[None]:
        """Within it calls of this function put ``what`` down to the module that runs."""
        function = getattr(place, name)

        def noted(*arguments: Any, **keywords: Any) -> Any:
            self.lost.setdefault(self._running[-1], what)
            return function(*arguments, **keywords)

        setattr(place, name, noted)
        try:
            yield
        finally:
            setattr(place, name, function)

    def begin(self) -> None:
        """The buffers are now those that the graph has."""
        modules = (module for module in self._model.modules() if not isinstance(module, torch.jit.ScriptModule))
        self._buffers = {module: dict(module._buffers) for module in modules}

    def end(self) -> None:
        """The forward is over: what was assigned to buffers from outside their modules is written too."""
        self._write_buffers(self._model)
        self.attributes.look()

    def _write_buffers(self, module: nn.Module) -> None:
        """Those of ``module`` and of all within it."""
        for part in module.modules():
            for name, before in self._buffers.get(part, {}).items():
                now = part._buffers.get(name)
                if before is None or now is None:
                    continue  # made in the forward, and again in the next
                if now is not before:
                    part._buffers[name] = before
                    before.copy_(same_kind(name, part, now.detach(), before))

    def look(self, value: Any) -> None:
        """Put what is new since the last look down to the module that runs; ``value``: what it gives or takes."""
        here = self._running[-1]
        drawn = _generators()
        if drawn != self._drawn:
            self._drawn = drawn
            self.lost.setdefault(here, "draws random numbers from Python's or NumPy's generator")
        stack = [tensor.grad_fn for tensor in tensors_within(value)]
        while stack:
            node = stack.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            if _loses_its_backward(node):
                self.lost.setdefault(here, f"uses the autograd.Function {_function_name(node)}")
            stack.extend(following for following, _ in node.next_functions)

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            self.look((arguments, keywords))
            self._running.append(name)
            if module._buffers and _in_checkpoint():
                self._again.add(name)

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            while self._running[-1] != name:  # left by exceptions that the model itself catches
                self._running.pop()
            self.look(output)
            self._write_buffers(module)
            self._running.pop()

        return hook


def same_kind(name: str, module: nn.Module, value: Tensor, buffer: Tensor) -> Tensor:
    """``value``, which ``module`` assigns to its buffer. Raises InputError where that is of another shape or dtype."""
    if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
        kinds = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in (buffer, value)]
        raise InputError(
            f"{type(module).__name__} assigns {kinds[1]} to its buffer {name} in forward(), which was {kinds[0]}",
            hint="keep its shape and dtype: each micro-batch changes the buffer of the one before",
        )
    return value


def reached_apart(model: nn.Module, whole: Set[nn.Module]) -> set[nn.Module]:
    """The modules that do not lie within ones of ``whole`` alone; a module may have several parents."""
    found, stack = {model}, [model]
    while stack:
        for child in stack.pop().children():
            if child not in found:
                found.add(child)
                if child not in whole:
                    stack.append(child)
    return found


def alike(model: nn.Module, place: str) -> frozenset[str]:
    """All modules of the class of the one at ``place``: they would fail for the same reason, one export after another.

    Torch's own modules only hold others, so that one says nothing of the next.
    """
    kind = type(model.get_submodule(place))
    if kind.__module__.partition(".")[0] == "torch":
        return frozenset({place})
    return frozenset(name for name, module in model.named_modules() if name and type(module) is kind)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Export prints the graph where it fails, and warns of what does not matter here: keep both off the terminal."""
    noise = io.StringIO()
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _in_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), state and (state[1].tobytes(), *state[2:])


def _loses_its_backward(node: Any) -> bool:
    kind = type(node).__name__
    if kind == "CppFunction":  # written in C++, or an op that has no backward at all, in eager PyTorch either
        return not str(node.name()).endswith("::WarnNotImplemented")
    registered = kind.startswith("GeneratedBackwardFor_")  # torch.library.register_autograd: export keeps the op
    return isinstance(node, torch.autograd.function.BackwardCFunction) and not registered


def _function_name(node: Any) -> str:
    kind = type(node).__name__
    return kind.removesuffix("Backward") if kind != "CppFunction" else str(node.name())
