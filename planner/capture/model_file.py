"""The user's model file: run, checked, and its functions called so that a fault names function, line and mend.

def model() -> nn.Module                              required
def batch(size) -> (inputs, target)                   required
def loss(output, target) -> scalar tensor             unless the output has .loss or is a scalar
def optimizer(params) -> Optimizer                    default AdamW
def data(size) -> iterable of (inputs, target)        default: batch(size) under a seed per step
global_batch = 64                                     samples per optimizer step
leaves = ["blocks.3.attn"]                            modules to keep whole
clip_norm = 1.0                                       gradients are clipped by their norm over the whole model
autocast = "bfloat16"                                 forwards run under torch.autocast; "float16": with loss scaling
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.jit._script import RecursiveScriptModule
from torch.jit._trace import TopLevelTracedModule
from torch.nn.parameter import is_lazy

from planner.capture.batch import Batch, check, shown
from planner.capture.seeds import RandomStream, folded
from planner.errors import InputError, words_of
from planner.files import read_text

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model file that has been run. Its functions raise InputError where the user's raise or return what is wrong."""

    path: Path
    global_batch: int | None
    leaves: tuple[str, ...]
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    functions: Mapping[str, Callable[..., Any]] = field(repr=False)

    @property
    def name(self) -> str:
        """The model's name: that of its file."""
        return self.path.stem

    def model(self) -> nn.Module:
        """A new model, in training mode."""
        made = self._call("model")
        if not isinstance(made, nn.Module):
            raise self.fault("model", f"returned {shown(made)}, no module", "return a torch.nn.Module")
        for name, part in made.named_modules():
            if isinstance(part, RecursiveScriptModule) and not isinstance(part, TopLevelTracedModule):
                place = f"scripted its module {name}" if name else "returned a scripted module"
                raise self.fault("model", place, "take the module itself, without torch.jit.script")
        if shapeless := next((name for name, one in made.named_parameters() if is_lazy(one)), None):
            raise self.fault(
                "model",
                f"gave {shapeless} no shape yet",
                "call the module in model(), once, on inputs as batch() has them",
            )
        if not any(True for _ in made.parameters()):
            raise self.fault("model", "returned a module without parameters", "there is nothing to train")
        if not any(parameter.requires_grad for parameter in made.parameters()):
            raise self.fault("model", "returned a module whose parameters are all frozen", "leave some to train")
        for name, parameter in made.named_parameters():
            if (
                parameter._backward_hooks or parameter._post_accumulate_grad_hooks
            ):  # it would never run: stages have leaves of their own
                raise self.fault("model", f"put a hook on the gradient of {name}", "change gradients in the optimizer")
        return made.train()

    def batch(self, size: int) -> Batch:
        """Example data of ``size`` samples."""
        return check(self._call("batch", size), size=size, where=self.place("batch"))

    @property
    def has_loss(self) -> bool:
        """Whether the file has a loss() of its own."""
        return "loss" in self.functions

    def loss(self, output: Any, target: Any) -> Tensor:
        """The scalar that is trained: loss(output, target), else the output's own ``loss``, else the output itself."""
        if self.has_loss:
            value, source = self._call("loss", output, target), "loss"
        else:
            value, source = _own_loss(output), "model"
        if value is None:
            raise self.fault("model", "returned no scalar and nothing with .loss", "add loss(output, target)")
        if not isinstance(value, Tensor):
            raise self.fault(source, f"gave a loss of type {type(value).__name__}", "return a scalar tensor")
        if value.dim() != 0:
            shape = list(value.shape)
            raise self.fault(source, f"gave a loss of shape {shape}, no scalar", "return its mean over the samples")
        if not value.is_floating_point():
            raise self.fault(source, f"gave a loss of {value.dtype}", "return a floating-point scalar")
        return value

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The file's optimizer over ``parameters``; AdamW where it has none."""
        if "optimizer" not in self.functions:
            return torch.optim.AdamW(list(parameters))
        made = self._call("optimizer", list(parameters))
        if not isinstance(made, torch.optim.Optimizer):
            raise self.fault("optimizer", f"returned {shown(made)}", "return a torch.optim.Optimizer")
        return made

    def data(
        self, size: int, *, seed: int = 0, first: int = 0, skipped: Callable[[], None] = lambda: None
    ) -> Iterator[Batch]:
        """Endless training data, ``size`` samples an item, the same on every rank for one seed.

        data() that ends is started again. What it draws at random comes from a stream of its own, so that neither the
        model's dropout nor the order in which ranks ask can change it. ``first``: the number of the item to begin with;
        ``skipped`` is called for each one before it that data() gave.
        """
        if "data" not in self.functions:
            for step in itertools.count(first):
                with RandomStream(folded(seed, step)):
                    batch = self.batch(size)
                yield batch
        stream = RandomStream(seed)
        left = first
        while True:
            with stream:
                items = self._iterate(size)
            empty = True
            while True:
                with stream, self._blamed("data"):
                    item = next(items, None)
                if item is None:
                    break
                empty = False
                if left:
                    left -= 1
                    skipped()
                    continue
                yield check(item, size=size, where=self.place("data"))
            if empty:
                raise self.fault("data", "gave nothing", f"yield (inputs, target) of {size} samples each")

    def _iterate(self, size: int) -> Iterator[Any]:
        given = self._call("data", size)
        try:
            return iter(given)
        except TypeError:
            raise self.fault("data", f"returned {shown(given)}, no iterable", "yield (inputs, target)") from None

    def place(self, function: str) -> str:
        """``file:line: function()``, for messages."""
        code = getattr(self.functions.get(function), "__code__", None)
        line = f":{code.co_firstlineno}" if code is not None and code.co_filename == str(self.path) else ""
        return f"{self.path}{line}: {function}()"

    def fault(self, function: str, fact: str, mend: str) -> InputError:
        """An error about what a function of the file did."""
        return InputError(f"{self.place(function)} {fact}", hint=mend)

    def _call(self, function: str, *arguments: Any) -> Any:
        with self._blamed(function):
            return self.functions[function](*arguments)

    @contextmanager
    def _blamed(self, function: str) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise self.raised(error, function) from error

    def raised(self, error: BaseException, function: str) -> InputError:
        """The user's exception as one line, at the line of the file where it came through."""
        line = user_line(error, self.path)
        where = f"{self.path}:{line}: {function}()" if line else self.place(function)
        hint = "mend it in the model file"
        if "more than 1 value per channel" in str(error):
            hint = "batch norm needs more samples in a micro-batch, such as --microbatch 2,4"
        return InputError(f"{where} raised {words_of(error)}", hint=hint)


def load_model_file(path: Path) -> ModelFile:
    """Run a model file and check what it defines. Raises InputError in one line."""
    path = Path(os.path.realpath(path))  # unlike resolve() it takes a ring of links for what it is
    namespace = _run(path)
    functions: dict[str, Callable[..., Any]] = {}
    for name, needed in {"model": True, "batch": True, "loss": False, "optimizer": False, "data": False}.items():
        value = namespace.get(name)
        if callable(value):
            functions[name] = value
        elif value is not None:
            raise InputError(f"{path}: {name} is {value!r}, no function", hint=f"write def {name}(...)")
        elif needed:
            raise InputError(f"{path}: has no {name}()", hint=_WANTED[name])
    size = namespace.get("global_batch")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise InputError(f"{path}: global_batch is {size!r}", hint="it is the samples per optimizer step, 1 or more")
    kept = namespace.get("leaves", ())
    if not isinstance(kept, (list, tuple)) or not all(isinstance(name, str) for name in kept):
        raise InputError(f"{path}: leaves is {kept!r}", hint='it lists module names, e.g. leaves = ["blocks.3.attn"]')
    norm = namespace.get("clip_norm")
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or not 0 < norm < math.inf):
        raise InputError(f"{path}: clip_norm is {norm!r}", hint="it is the largest norm of the gradients, over 0")
    cast = namespace.get("autocast")
    if cast is not None and (not isinstance(cast, str) or cast not in AUTOCASTS):
        raise InputError(f"{path}: autocast is {cast!r}", hint=f"one of {', '.join(map(repr, AUTOCASTS))}")
    return ModelFile(
        path=path,
        global_batch=size,
        leaves=tuple(kept),
        clip_norm=None if norm is None else float(norm),
        autocast=None if cast is None else AUTOCASTS[cast],
        functions=functions,
    )


AUTOCASTS: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""What the model file may ask for."""


_WANTED = {
    "model": "write def model(): return the torch.nn.Module to train",
    "batch": "write def batch(size): return (inputs, target) with size samples",
}


def _run(path: Path) -> dict[str, Any]:
    source = read_text(path)
    module = types.ModuleType(f"pipeplan_model_{next(_numbers)}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # so that its classes can be found by name (dataclasses, custom ops)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as python itself does for a script
    given, sys.argv = sys.argv, [str(path)]  # its own, should it parse arguments: not those of this command
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.filename == str(path) and error.lineno else ""
        raise InputError(f"{path}{line}: is no valid Python ({error.msg})", hint="mend the syntax") from None
    except (Exception, SystemExit) as error:
        line_number = user_line(error, path)
        where = f"{path}:{line_number}" if line_number else str(path)
        raise InputError(f"{where}: raised {words_of(error)}", hint=_mend(error)) from error
    finally:
        sys.argv = given
    return module.__dict__


def _mend(error: BaseException) -> str:
    """What to do about an error that the file's own lines raise."""
    if not isinstance(error, ImportError):
        return "mend it in the model file"
    if "relative import" in str(error):
        return "a model file is no part of a package: import what lies beside it by its name alone"
    return "install it in this environment"


def user_line(error: BaseException, path: Path) -> int | None:
    """The innermost line of the user's file that an exception (or what caused it) came through."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for link in reversed(chain):
        lines = [frame.lineno for frame in traceback.extract_tb(link.__traceback__) if frame.filename == str(path)]
        if lines:
            return lines[-1]
    return None


def library_line(error: BaseException) -> str | None:
    """``file:line`` of the innermost line that is neither torch's nor ours: where in a library an error began."""
    ours = tuple(f"{Path(place).resolve()}{os.sep}" for place in (torch.__path__[0], Path(__file__).parents[1]))
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if frame.lineno and Path(frame.filename).is_file()]
    found = [frame for frame in places if not str(Path(frame.filename).resolve()).startswith(ours)]
    return f"{found[-1].filename}:{found[-1].lineno}" if found else None


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory: of the device, or of this process."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error).lower()


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", None)
