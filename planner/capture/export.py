"""The user's model and loss as one lifted graph: parameters, buffers, batch are arguments; ops know their modules.

torch.export (non-strict, training mode) does the tracing. What follows here is small: asserts go, regions under no_grad
or autocast are inlined op by op, tied parameters hang off one placeholder, and what export would lose is refused.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook

from planner.capture.batch import Batch, leaves, rebuilt
from planner.capture.model_file import ModelFile, user_line
from planner.errors import InputError


class Role(StrEnum):
    """What a placeholder of the lifted graph stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One module call that an op lies in; ``call`` tells the calls of one module apart (0, 1, ...)."""

    module: str
    kind: str
    call: int


@dataclass(slots=True, kw_only=True)
class Lifted:
    """The graph. ``roles``: each placeholder's role and name (an index for inputs); the one output is the loss."""

    graph: fx.Graph
    roles: dict[fx.Node, tuple[Role, str]]
    scopes: dict[fx.Node, tuple[Scope, ...]]
    copies: set[fx.Node] = field(default_factory=set)  # inserted by us: they stay with what they copy
    constants: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)  # sub-graphs that higher-order ops are called with


class WithLoss(nn.Module):
    """The model and its loss as one module: outputs of any kind, caches and unused outputs then do not matter."""

    def __init__(self, model: nn.Module, model_file: ModelFile) -> None:
        super().__init__()
        self.model = model
        self.model_file = model_file

    def forward(self, inputs: Any, target: Any) -> Tensor:
        """The scalar loss of one batch."""
        return self.model_file.loss(called(self.model, inputs), target)


def called(model: nn.Module, inputs: Any) -> Any:
    """The model's output: a dict of inputs is passed by keyword, a tuple by position."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def export(model: nn.Module, model_file: ModelFile, batch: Batch) -> Lifted:
    """The lifted graph of model and loss at the size of ``batch``. Raises InputError where there is none to be had."""
    # One tensor object given twice (labels that are the inputs) would become one placeholder: clone.
    copies = (leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves(batch))
    apart = rebuilt(batch, copies)
    wrapper = WithLoss(model, model_file).train()
    lost = _LostBackwards(wrapper)
    noise = io.StringIO()
    try:
        with _quiet(noise), lost.watched():
            exported = torch.export.export(wrapper, (apart.inputs, apart.target), strict=False)
    except Exception as error:
        raise _refusal(error, model, model_file, batch) from error
    if lost.found:
        module, function = lost.found
        where = f"module {module}" if module else "the model"
        raise InputError(
            f"{model_file.path}: {where} uses the autograd.Function {function}, whose backward the capture would lose",
            hint="write it as a torch.library.custom_op with register_autograd, or in plain torch",
        )
    return _Copy(exported, model).lifted


def _refusal(error: Exception, model: nn.Module, model_file: ModelFile, batch: Batch) -> InputError:
    """Why there is no graph: the model itself raises, or torch.export cannot take it."""
    try:
        with torch.no_grad():
            model_file.loss(called(model, batch.inputs), batch.target)
    except InputError as fault:
        return fault
    except Exception as fault:  # noqa: BLE001 - the user's code may raise anything
        return model_file.raised(fault, "model()'s forward")
    if isinstance(error, InputError):
        return error
    line = user_line(error, model_file.path)
    where = f"{model_file.path}:{line}" if line else str(model_file.path)
    words = str(error).strip().splitlines() or [type(error).__name__]
    return InputError(
        f"{where}: torch.export cannot take the model ({type(error).__name__}: {words[0]})",
        hint="no branch and no shape may depend on the values of tensors",
    )


@contextlib.contextmanager
def _quiet(noise: io.StringIO) -> Iterator[None]:
    """Export prints the graph where it fails, and warns of what does not matter here: keep both off the terminal."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class _LostBackwards:
    """Finds custom autograd Functions, by the nodes they leave in the autograd graph while the model is exported."""

    def __init__(self, root: nn.Module) -> None:
        self._names = {module: name for name, module in root.named_modules()}
        self._seen: set[Any] = set()
        self.found: tuple[str, str] | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it every module's output is looked at as the module returns, the innermost first."""
        handle = register_module_forward_hook(self._look)
        try:
            yield
        finally:
            handle.remove()

    def _look(self, module: nn.Module, _: Any, output: Any) -> None:
        if self.found is not None or module not in self._names:
            return
        stack = [tensor.grad_fn for tensor in _tensors(output)]
        while stack:
            node = stack.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            if _loses_its_backward(node):
                self.found = (self._names[module].removeprefix("model").removeprefix("."), _function_name(node))
                return
            stack.extend(following for following, _ in node.next_functions)


def _loses_its_backward(node: Any) -> bool:
    kind = type(node).__name__
    registered = kind.startswith("GeneratedBackwardFor_")  # torch.library.register_autograd: export keeps the op
    return (isinstance(node, torch.autograd.function.BackwardCFunction) and not registered) or kind == "CppFunction"


def _function_name(node: Any) -> str:
    kind = type(node).__name__
    return kind.removesuffix("Backward") if kind != "CppFunction" else str(node.name())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))


# --- copying the exported graph ---------------------------------------------------------------------------------------

_ASSERTS = ("_assert", "sym_constrain_range")


class _Copy:
    """Copies an exported program's graph into one of ours."""

    def __init__(self, exported: torch.export.ExportedProgram, model: nn.Module) -> None:
        self.lifted = Lifted(graph=fx.Graph(), roles={}, scopes={})
        self._exported = exported
        self._parameters = _canonical(dict(model.named_parameters(remove_duplicate=False)), "model.")
        self._buffers = _canonical(dict(model.named_buffers(remove_duplicate=False)), "model.")
        module = exported.graph_module
        env = self._placeholders(module.graph)
        (loss,) = self._nodes(module, env, ())
        self.lifted.graph.output(loss)

    def _placeholders(self, graph: fx.Graph) -> dict[fx.Node, Any]:
        made: dict[tuple[Role, str], fx.Node] = {}
        env: dict[fx.Node, Any] = {}
        inputs = 0
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        for node, spec in zip(nodes, self._exported.graph_signature.input_specs, strict=True):
            kind, name = spec.kind.name, spec.target or ""
            role: tuple[Role, str]
            if kind == "PARAMETER":
                role = (Role.PARAMETER, self._parameters[name])
            elif kind == "BUFFER":
                role = (Role.BUFFER, self._buffers[name])
            elif kind == "USER_INPUT":
                role = (Role.INPUT, str(inputs))
                inputs += 1
                if not isinstance(node.meta.get("val"), Tensor):
                    env[node] = node.meta.get("val", getattr(spec.arg, "value", None))  # None, numbers: constants
                    continue
            elif kind == "CONSTANT_TENSOR":
                role = (Role.CONSTANT, name)
                self.lifted.constants[name] = self._exported.constants[name].detach().clone()
            else:
                raise InputError(f"the model holds a {kind.lower()} {name!r}", hint="hold tensors and modules alone")
            if role not in made:
                made[role] = self.lifted.graph.placeholder(node.name)
                self.lifted.roles[made[role]] = role
            env[node] = made[role]
        return env

    def _nodes(self, module: fx.GraphModule, env: dict[fx.Node, Any], contexts: tuple[_Context, ...]) -> list[Any]:
        """Copy every op of ``module``'s graph; ``env`` maps its nodes to ours. Returns its outputs."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return [env[value] if isinstance(value, fx.Node) else value for value in node.args[0]]
            if node.op == "get_attr":
                env[node] = getattr(module, str(node.target))
                continue
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda value: env[value])
            name = getattr(node.target, "__name__", "")
            if name.startswith(_ASSERTS):
                continue
            if name in _REGIONS:
                context, region, given = _REGIONS[name](*arguments[0])
                inner = dict(zip((n for n in region.graph.nodes if n.op == "placeholder"), given, strict=True))
                env[node] = self._nodes(region, inner, (*contexts, context))
            elif name == "getitem" and not isinstance(arguments[0][0], fx.Node):
                env[node] = arguments[0][0][arguments[0][1]]
            else:
                env[node] = self._op(node, *arguments, contexts)
        raise AssertionError("a graph without an output")

    def _op(self, node: fx.Node, args: Any, kwargs: Any, contexts: tuple[_Context, ...]) -> fx.Node:
        args, kwargs = (self._with_modules(value) for value in (args, kwargs))
        target = node.target
        assert callable(target)
        made = self.lifted.graph.create_node("call_function", _within(target, contexts), args, kwargs, name=node.name)
        self.lifted.scopes[made] = _scopes(node)
        return made

    def _with_modules(self, value: Any) -> Any:
        """Sub-graphs among the arguments become attributes of ours."""
        if isinstance(value, nn.Module):
            name = f"region_{len(self.lifted.modules)}"
            self.lifted.modules[name] = value
            return self.lifted.graph.create_node("get_attr", name)
        if isinstance(value, (tuple, list)):
            return type(value)(self._with_modules(entry) for entry in value)
        return value


def _canonical(named: dict[str, Tensor], prefix: str) -> dict[str, str]:
    """Every name of a (possibly tied) tensor, under ``prefix``, to the first name it has."""
    first: dict[int, str] = {}
    return {prefix + name: first.setdefault(id(tensor), name) for name, tensor in named.items()}


def _scopes(node: fx.Node) -> tuple[Scope, ...]:
    found = []
    for key, (name, kind) in (node.meta.get("nn_module_stack") or {}).items():
        if not name.startswith("model"):
            continue
        _, _, call = str(key).partition("@")
        module = name.removeprefix("model").removeprefix(".").partition("@")[0]
        short = kind if isinstance(kind, str) else kind.__name__
        found.append(Scope(module=module, kind=short.rpartition(".")[2], call=int(call) if call.isdigit() else 0))
    return tuple(found)


# --- regions under no_grad, enable_grad, autocast ---------------------------------------------------------------------

_Context = Callable[[], contextlib.AbstractContextManager[Any]]


def _grad_region(enabled: bool, region: fx.GraphModule, *given: Any) -> tuple[_Context, fx.GraphModule, Any]:
    return (torch.enable_grad if enabled else torch.no_grad), region, given


def _autocast_region(
    device: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None, region: fx.GraphModule, *given: Any
) -> tuple[_Context, fx.GraphModule, Any]:
    def context() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)

    return context, region, given


_REGIONS: dict[str, Callable[..., tuple[_Context, fx.GraphModule, Any]]] = {
    "wrap_with_set_grad_enabled": _grad_region,
    "wrap_with_autocast": _autocast_region,
}


def _within(op: Callable[..., Any], contexts: tuple[_Context, ...]) -> Callable[..., Any]:
    """``op`` called within ``contexts``."""
    if not contexts:
        return op

    def within(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return op(*args, **kwargs)

    within.wrapped = op  # type: ignore[attr-defined]
    return within


def op_of(node: fx.Node) -> Any:
    """The op that a node calls, without the regions around it."""
    return getattr(node.target, "wrapped", node.target)
