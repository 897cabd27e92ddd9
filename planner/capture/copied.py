"""An exported program's graph copied into one of ours.

Asserts go, regions under no_grad or autocast are inlined op by op, tied parameters hang off one placeholder, and what
stood in for modules kept whole and for values taken in Python becomes their calls and checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.capture.decided import CTC_LOSS, DECIDED, Values, check_of
from planner.capture.lifted import Lifted, Role, Scope
from planner.capture.opaque import OPAQUE, OpaqueCall, function_of
from planner.errors import InputError

_ASSERTS = ("_assert", "sym_constrain_range")
_TO_THAT_OF_ANOTHER = (torch.ops.aten.type_as.default, torch.ops.aten.to.other)
"""Ops that read nothing of a second tensor but its type and device, which are known: it need not be there."""


class Copy:
    """Copies an exported program's graph into one of ours."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        model: nn.Module,
        calls: Mapping[int, OpaqueCall],
        values: Values,
    ) -> None:
        self.lifted = Lifted(graph=fx.Graph(), roles={}, scopes={})
        self._model, self._calls, self._values = model, calls, values
        self._exported = exported
        self._parameters = _canonical(dict(model.named_parameters(remove_duplicate=False)), "model.")
        self._buffers = _canonical(dict(model.named_buffers(remove_duplicate=False)), "model.")
        module = exported.graph_module
        env = self._placeholders(module.graph)
        loss, *_ = self._nodes(module, env, ())
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
                if isinstance(self._exported.constants.get(name), torch._C.Generator):
                    raise InputError(
                        "the model draws from a torch.Generator of its own, which would not be the same on every rank",
                        hint="draw from torch's default one: it is seeded by step, micro-batch and layer",
                    )
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
        if target is OPAQUE:
            key, args = args[0], args[1:]
            target = function_of(self._calls[key], self._model)
        if target is DECIDED:
            target, args = check_of(self._values.decisions[args[1]]), args[:1]
        if target is CTC_LOSS:
            target = nn.functional.ctc_loss
        if target in _TO_THAT_OF_ANOTHER and isinstance(args[1], fx.Node):
            like = node.meta["val"]
            target, args = torch.ops.aten.to.device, (args[0], like.device, like.dtype, *args[2:])
        made = self.lifted.graph.create_node("call_function", _within(target, contexts), args, kwargs, name=node.name)
        self.lifted.scopes[made] = scopes_of(node)
        value = node.meta.get("val")
        if isinstance(value, Tensor) and any(isinstance(extent, torch.SymInt) for extent in value.shape):
            self.lifted.sized_by_values.add(made)
        return made

    def _with_modules(self, value: Any) -> Any:
        """Sub-graphs among the arguments become attributes of ours."""
        if isinstance(value, nn.Module):
            name = f"region_{len(self.lifted.modules)}"
            self.lifted.modules[name] = value
            node = self.lifted.graph.create_node("get_attr", name)
            node.meta["code"] = str(getattr(value, "code", type(value).__name__))
            return node
        if isinstance(value, (tuple, list)):
            return type(value)(self._with_modules(entry) for entry in value)
        return value


def _canonical(named: dict[str, Tensor], prefix: str) -> dict[str, str]:
    """Every name of a (possibly tied) tensor, under ``prefix``, to the first name it has."""
    first: dict[int, str] = {}
    return {prefix + name: first.setdefault(id(tensor), name) for name, tensor in named.items()}


def scopes_of(node: fx.Node) -> tuple[Scope, ...]:
    """The calls of the user's modules that an exported op lies in."""
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

    context.__name__ = f"autocast {device} {dtype} {enabled}"
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
    within.regions = tuple(context.__name__ for context in contexts)  # type: ignore[attr-defined]
    return within
