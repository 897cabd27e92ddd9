"""The user's model and loss as one lifted graph: parameters, buffers, batch are arguments; ops know their modules.

torch.export (non-strict, training mode) does the tracing. Modules that it cannot take or would change are kept whole.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import transformer
from torch.utils import checkpoint

from planner.capture.attributes import Attributes, is_repeatable
from planner.capture.batch import Batch, called, leaves, rebuilt
from planner.capture.copied import Copy, scopes_of
from planner.capture.decided import Place, Values
from planner.capture.decisions import IN_A_MODULE, OUTERMOST, decidable, told_in, unsure_of
from planner.capture.lifted import Lifted, kept_whole
from planner.capture.made_up import computing
from planner.capture.model_file import ModelFile, lacks_memory, library_line, user_line
from planner.capture.opaque import Returned, StandIns, returned_by
from planner.capture.seeds import RandomStream
from planner.capture.values import HiddenTensorError
from planner.capture.watch import Watch, alike, quiet, reached_apart
from planner.capture.weightless import Fakes
from planner.errors import InputError, words_of


class WithLoss(nn.Module):
    """The model and its loss as one module: outputs of any kind, caches and unused outputs then do not matter."""

    def __init__(self, model: nn.Module, model_file: ModelFile, watch: Watch, values: Values) -> None:
        super().__init__()
        self.model = model
        self.model_file = model_file
        self.watch = watch
        self.values = values

    def forward(self, inputs: Any, target: Any) -> tuple[Tensor, ...]:
        """The scalar loss of one batch, and what keeps the checks of values in the graph."""
        self.watch.begin()
        with self.values:
            loss = self.model_file.loss(called(self.model, inputs), target)
        self.watch.look(loss)
        self.watch.end()
        return loss, *self.values.checks


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
    decided, undecided = frozenset[str | None](), frozenset[str | None]()
    while True:
        told = told_in(model, model_file, batch, whole, decided, attributes, fakes)
        returned: Mapping[str, list[Returned | HiddenTensorError]] = {}
        if whole:
            try:
                returned = _returned(model, model_file, batch, whole, told, decided, fakes, attributes)
            except _StoppedError as stopped:
                around = decidable(model, stopped.place) - undecided
                if around and not around <= decided:
                    decided |= around
                elif stopped.place:
                    whole = _whole(model, whole | alike(model, stopped.place))
                else:
                    raise _refusal(stopped.fault, model, model_file, batch, fakes) from stopped.fault
                continue
            _refuse_uncalled(model_file, model, whole, returned)
        stand_ins = StandIns(model=model, names=whole, returned=returned)
        watch = Watch(model, whole, attributes, again)
        values = Values(lambda: watch.running, told, decided)  # noqa: B023 - used within this turn alone
        try:
            exported = _exported(model, model_file, batch, stand_ins, watch, values, fakes)
        except Exception as error:
            place = watch.innermost
            around = frozenset() if watch.lost else decidable(model, place) - undecided
            if around and not around <= decided:
                decided |= around
                continue
            if not place and not watch.lost:
                raise _refusal(error, model, model_file, batch, fakes) from error
            found = alike(model, place) if place else frozenset()
        else:
            for place in _transformed(exported.graph_module):
                watch.lost.setdefault(place, "calls vmap or another of torch.func's transforms")
            if not watch.lost:
                try:
                    lifted = Copy(exported, model, stand_ins.calls, values).lifted
                except InputError as fault:
                    raise InputError(f"{model_file.path}: {fault.message}", hint=fault.hint) from None
                unsure = unsure_of(lifted)
                if not unsure:
                    lifted.again = again
                    return lifted
                for place, decision in unsure.items():
                    if not place:
                        raise InputError(f"{decision.line}: {OUTERMOST[place]} decides by chance", hint=IN_A_MODULE)
                    around = decidable(model, place)
                    undecided, decided = undecided | around, decided - around
                continue
            found = frozenset()
        for place, what in watch.lost.items():
            if not place:
                raise _lost(model_file, OUTERMOST[place], what)
            found |= {place}
        before, whole = whole, _whole(model, whole | found)
        assert whole != before, f"{sorted(found)} cannot be kept whole"


def _exported(
    model: nn.Module,
    model_file: ModelFile,
    batch: Batch,
    stand_ins: StandIns,
    watch: Watch,
    values: Values,
    fakes: Fakes | None,
) -> torch.export.ExportedProgram:
    # One tensor object given twice (labels that are the inputs) would become one placeholder: clone.
    copies = (leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves(batch))
    apart = rebuilt(batch, copies)
    wrapper = WithLoss(model, model_file, watch, values).train()
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


class _StoppedError(Exception):
    """An eager run on fakes stopped at ``place``, a module, or the loss: what it wants of values must be known."""

    def __init__(self, place: str | None, fault: Exception) -> None:
        super().__init__(place)
        self.place, self.fault = place, fault


def _returned(
    model: nn.Module,
    model_file: ModelFile,
    batch: Batch,
    whole: frozenset[str],
    told: dict[Place, list[Any]],
    decided: frozenset[str | None],
    fakes: Fakes | None,
    attributes: Attributes,
) -> Mapping[str, list[Returned | HiddenTensorError]]:
    """What each call of each module gives in an eager run. Raises _StoppedError where fakes cannot tell."""
    watch = Watch(model, whole, attributes, set())
    values = Values(lambda: watch.running, told, decided)

    def run() -> None:
        if fakes is None:
            model_file.loss(called(model, batch.inputs), batch.target)
            attributes.look()
            return
        modules = {name: model.get_submodule(name) for name in whole}
        with computing(fakes, model, modules), watch.watching(), values:
            inputs, target = rebuilt(batch, map(fakes.of_leaf, leaves(batch)))
            model_file.loss(called(model, inputs), target)

    try:
        return returned_by(model, run, whole)
    except InputError:
        raise
    except Exception as fault:
        if fakes is not None:
            raise _StoppedError(watch.innermost, fault) from fault
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
        scopes[-1].module if (scopes := scopes_of(node)) else ""
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
        hint=IN_A_MODULE,
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
