"""The user's model and loss as one lifted graph: parameters, buffers, batch are arguments; ops know their modules.

torch.export (non-strict, training mode) does the tracing. What follows here is small: asserts go, regions under no_grad
or autocast are inlined op by op, tied parameters hang off one placeholder, and modules that export cannot take or would
change are kept whole.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import transformer
from torch.utils import checkpoint

from planner.capture.attributes import Attributes, is_repeatable
from planner.capture.batch import Batch, leaves, rebuilt
from planner.capture.made_up import computing
from planner.capture.model_file import ModelFile, lacks_memory, library_line, user_line
from planner.capture.opaque import OPAQUE, OpaqueCall, Returned, StandIns, function_of, returned_by
from planner.capture.seeds import RandomStream
from planner.capture.values import HiddenTensorError
from planner.capture.watch import LOSS, Watch, reached_apart
from planner.capture.weightless import Fakes
from planner.errors import InputError, words_of


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
class Autocast:
    """What forwards run under: their matrix products in ``dtype``."""

    device: str
    dtype: torch.dtype

    def __call__(self) -> torch.autocast:
        """The context."""
        return torch.autocast(self.device, dtype=self.dtype)


def autocast_of(lifted: Lifted) -> contextlib.AbstractContextManager[Any]:
    """The context that a graph runs under."""
    return contextlib.nullcontext() if lifted.autocast is None else lifted.autocast()


@dataclass(slots=True, kw_only=True)
class Lifted:
    """The graph. ``roles``: each placeholder's role and name (an index for inputs); the one output is the loss."""

    graph: fx.Graph
    roles: dict[fx.Node, tuple[Role, str]]
    scopes: dict[fx.Node, tuple[Scope, ...]]
    copies: set[fx.Node] = field(default_factory=set)  # inserted by us: they stay with what they copy
    again: set[str] = field(default_factory=set)  # modules with buffers that plain PyTorch runs again in the backward
    sized_by_values: set[fx.Node] = field(default_factory=set)  # tensors whose shapes are another at every batch
    constants: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)  # sub-graphs that higher-order ops are called with
    autocast: Autocast | None = None  # what the whole graph runs under


class WithLoss(nn.Module):
    """The model and its loss as one module: outputs of any kind, caches and unused outputs then do not matter."""

    def __init__(self, model: nn.Module, model_file: ModelFile, watch: Watch) -> None:
        super().__init__()
        self.model = model
        self.model_file = model_file
        self.watch = watch

    def forward(self, inputs: Any, target: Any) -> Tensor:
        """The scalar loss of one batch."""
        self.watch.begin()
        loss = self.model_file.loss(called(self.model, inputs), target)
        self.watch.look(loss)
        self.watch.end()
        return loss


def called(model: nn.Module, inputs: Any) -> Any:
    """The model's output: a dict of inputs is passed by keyword, a tuple by position."""
    try:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called") from error


def export(model: nn.Module, model_file: ModelFile, batch: Batch, fakes: Fakes | None = None) -> Lifted:
    """The lifted graph of model and loss at the size of ``batch``. Raises InputError where there is none to be had.

    What torch.export cannot take or would lose is kept whole, in the smallest module around it: export is tried again
    until nothing is found any more. ``fakes``: where the model has no weights.
    """
    with Attributes(model) as attributes:
        lifted = _export(model, model_file, batch, fakes, attributes)
        if attributes.changed and fakes is None:
            _refuse_state(lifted, model, model_file, batch, attributes)
    return lifted


def _export(
    model: nn.Module, model_file: ModelFile, batch: Batch, fakes: Fakes | None, attributes: Attributes
) -> Lifted:
    whole = _whole(model, model_file.leaves)
    again: set[str] = set()
    while True:
        returned: Mapping[str, list[Returned | HiddenTensorError]] = {}
        if whole:
            try:
                returned = _returned(model, model_file, batch, whole, fakes, attributes)
            except _StoppedError as stopped:
                whole = _whole(model, whole | stopped.modules)
                continue
            _refuse_uncalled(model_file, model, whole, returned)
        stand_ins = StandIns(model=model, names=whole, returned=returned)
        watch = Watch(model, whole, attributes, again)
        try:
            exported = _exported(model, model_file, batch, stand_ins, watch, fakes)
        except Exception as error:
            place = watch.innermost
            if not place and not watch.lost:
                raise _refusal(error, model, model_file, batch, fakes) from error
            found = _alike(model, place) if place else frozenset()
        else:
            for place in _transformed(exported.graph_module):
                watch.lost.setdefault(place, "calls vmap or another of torch.func's transforms")
            if not watch.lost:
                try:
                    lifted = _Copy(exported, model, stand_ins.calls).lifted
                except InputError as fault:
                    raise InputError(f"{model_file.path}: {fault.message}", hint=fault.hint) from None
                lifted.again = again
                return lifted
            found = frozenset()
        for place, what in watch.lost.items():
            if not place:
                raise _lost(model_file, "loss()" if place is LOSS else "the model's own forward()", what)
            found |= {place}
        before, whole = whole, _whole(model, whole | found)
        assert whole != before, f"{sorted(found)} cannot be kept whole"


def _exported(
    model: nn.Module, model_file: ModelFile, batch: Batch, stand_ins: StandIns, watch: Watch, fakes: Fakes | None
) -> torch.export.ExportedProgram:
    # One tensor object given twice (labels that are the inputs) would become one placeholder: clone.
    copies = (leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves(batch))
    apart = rebuilt(batch, copies)
    wrapper = WithLoss(model, model_file, watch).train()
    faked = contextlib.nullcontext() if fakes is None else fakes.exporting(model)
    try:
        with quiet(), faked, stand_ins.placed(), watch.watching(), _plainly():
            return torch.export.export(wrapper, (apart.inputs, apart.target), strict=False)
    finally:
        watch.attributes.put_back()


def _whole(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """The modules of these names, under the first name of each, without those that only lie within another."""
    chosen = {model.get_submodule(name) for name in names}
    reached = reached_apart(model, chosen)
    return frozenset(name for name, module in model.named_modules() if module in chosen & reached)


def _alike(model: nn.Module, place: str) -> frozenset[str]:
    """All modules of the class of the one at ``place``: they would fail for the same reason, one export after another.

    Torch's own modules only hold others, so that one says nothing of the next.
    """
    kind = type(model.get_submodule(place))
    if kind.__module__.partition(".")[0] == "torch":
        return frozenset({place})
    return frozenset(name for name, module in model.named_modules() if name and type(module) is kind)


class _StoppedError(Exception):
    """An eager run on fakes stopped in ``modules``, which must really run."""

    def __init__(self, modules: frozenset[str]) -> None:
        super().__init__(modules)
        self.modules = modules


def _returned(
    model: nn.Module,
    model_file: ModelFile,
    batch: Batch,
    whole: frozenset[str],
    fakes: Fakes | None,
    attributes: Attributes,
) -> Mapping[str, list[Returned | HiddenTensorError]]:
    """What each call of each module gives in an eager run. Raises _StoppedError where fakes cannot tell."""
    watch = Watch(model, whole, attributes, set())

    def run() -> None:
        if fakes is None:
            model_file.loss(called(model, batch.inputs), batch.target)
            attributes.look()
            return
        with computing(fakes, model, {name: model.get_submodule(name) for name in whole}), watch.watching():
            inputs, target = rebuilt(batch, map(fakes.of_leaf, leaves(batch)))
            model_file.loss(called(model, inputs), target)

    try:
        return returned_by(model, run, whole)
    except InputError:
        raise
    except Exception as fault:
        if fakes is not None and watch.innermost:
            raise _StoppedError(_alike(model, watch.innermost)) from fault
        if lacks_memory(fault):  # a smaller micro-batch may do
            raise
        if "saved tensor hooks" in str(fault):
            raise InputError(
                f"{model_file.path}: torch.func.grad and its kin let nobody see what is saved for a backward",
                hint="take torch.autograd.grad, in a module of its own that the model calls (it is then kept whole)",
            ) from fault
        raise model_file.raised(fault, "model()'s forward") from fault
    finally:
        attributes.put_back()


def _refuse_state(
    lifted: Lifted, model: nn.Module, model_file: ModelFile, batch: Batch, attributes: Attributes
) -> None:
    """Refuse a model whose forward hangs on what earlier ones left in attributes."""

    def loss() -> Tensor:
        found: list[Tensor] = []

        def run() -> None:
            with RandomStream(0):
                found.append(model_file.loss(called(model, batch.inputs), batch.target))

        returned_by(model, run, kept_whole(lifted))
        return found[0]

    if not is_repeatable(loss, attributes.put_back):
        module, names = next(iter(attributes.changed.items()))
        raise InputError(
            f"{model_file.path}: a forward hangs on what the one before left in {module or 'model()'}, in an attribute "
            f"that is no buffer ({', '.join(names)})",
            hint=f"make it a tensor, self.register_buffer({names[0]!r}, ...), and change it in forward() as before",
        )


def _refuse_uncalled(
    model_file: ModelFile, model: nn.Module, whole: Iterable[str], returned: Mapping[str, object]
) -> None:
    uncalled = {model.get_submodule(name) for name in whole if name not in returned}
    for name in model_file.leaves:
        if model.get_submodule(name) in uncalled:
            raise InputError(
                f"{model_file.path}: leaves names {name!r}, which is never called in the model's forward()",
                hint="name a module that is called, such as one of its children or what holds it",
            )


def _lost(model_file: ModelFile, place: str, what: str) -> InputError:
    mend = "do it in a module of its own that the model calls (it is then kept whole)"
    for kind, by in {"autograd.Function": "with register_autograd", "random": "that draws them"}.items():
        if kind in what:
            mend += f", or in a torch.library.custom_op {by}"
    return InputError(f"{model_file.path}: {place} {what}, which the capture would lose", hint=mend)


def _transformed(module: fx.GraphModule) -> set[str]:
    """The modules whose ops work on what torch.func's transforms make of tensors, which are no tensors with memory."""
    return {
        scopes[-1].module if (scopes := _scopes(node)) else ""
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("torch._functorch")
    }


def _refusal(
    error: Exception, model: nn.Module, model_file: ModelFile, batch: Batch, fakes: Fakes | None
) -> InputError:
    """Why there is no graph: the model itself raises, or torch.export cannot take it."""
    try:
        with contextlib.nullcontext() if fakes is None else computing(fakes, model, {}):
            model_file.loss(called(model, batch.inputs), batch.target)
    except InputError as fault:
        return fault
    except Exception as fault:  # noqa: BLE001 - the user's code may raise anything
        if fakes is None or not isinstance(fault, _VALUES_WANTED):
            return model_file.raised(fault, "model()'s forward")
    if isinstance(error, InputError) and error.__cause__ is None:
        return error
    error = (
        error.__cause__ if isinstance(error.__cause__, Exception) else error
    )  # raised by loss(), in the export alone
    line = user_line(error, model_file.path)
    where = f"{model_file.path}:{line}" if line else str(model_file.path)
    inside = None if line else library_line(error)
    return InputError(
        f"{where}: torch.export cannot take the model, and no smaller module holds what it stops at "
        f"({words_of(error)}{f', at {inside}' if inside else ''})",
        hint="do what depends on the values of tensors, a loss too, in a module of its own that the model calls (it is "
        "then kept whole)",
    )


_VALUES_WANTED = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
"""What fakes raise where they would need values."""


_patching = threading.Lock()


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Within it torch leaves out what means nothing in a graph, and what export would trip over.

    nn.TransformerEncoder and -Decoder do not branch on whether the values of a mask are causal: it is passed on as it
    is, which means the same; where it is a constant, masks.py finds out what it says. Non-reentrant checkpoints keep
    nothing for a backward: what they do for it is no op, yet one within another left all that follows without gradient.
    """

    def told(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    def only_forward(*_: Any, **__: Any) -> Iterator[None]:
        yield

    places = (
        (transformer, "_detect_is_causal_mask", told),
        (checkpoint, "_checkpoint_without_reentrant_generator", only_forward),
    )
    with _patching, contextlib.ExitStack() as restored:
        for module, name, stand_in in places:
            restored.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in)
        yield


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


# --- copying the exported graph ---------------------------------------------------------------------------------------

_ASSERTS = ("_assert", "sym_constrain_range")


_TO_THAT_OF_ANOTHER = (torch.ops.aten.type_as.default, torch.ops.aten.to.other)
"""Ops that read nothing of a second tensor but its type and device, which are known: it need not be there."""


class _Copy:
    """Copies an exported program's graph into one of ours."""

    def __init__(
        self, exported: torch.export.ExportedProgram, model: nn.Module, calls: Mapping[int, OpaqueCall]
    ) -> None:
        self.lifted = Lifted(graph=fx.Graph(), roles={}, scopes={})
        self._model, self._calls = model, calls
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
        if target in _TO_THAT_OF_ANOTHER and isinstance(args[1], fx.Node):
            like = node.meta["val"]
            target, args = torch.ops.aten.to.device, (args[0], like.device, like.dtype, *args[2:])
        made = self.lifted.graph.create_node("call_function", _within(target, contexts), args, kwargs, name=node.name)
        self.lifted.scopes[made] = _scopes(node)
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


def op_of(node: fx.Node) -> Any:
    """The op that a node calls, without the regions around it."""
    return getattr(node.target, "wrapped", node.target)


def opaque_call(node: fx.Node) -> OpaqueCall | None:
    """The call of a module kept whole, where the node is one."""
    call = getattr(op_of(node), "call", None)
    return call if isinstance(call, OpaqueCall) else None


def kept_whole(lifted: Lifted) -> dict[str, nn.Module]:
    """The modules kept whole, by name."""
    return {call.name: call.module for call in map(opaque_call, lifted.graph.nodes) if call is not None}
