"""One real forward of the lifted graph, watched: shapes, strides, aliases, gradients, what is saved.

What the run saves for its backward is looked at and dropped at once, so it needs no more memory than inference does.
Storages are told apart by weak references, which keep an address from being used twice without keeping the memory.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import ctc_loss
from torch.utils.flop_counter import FlopCounterMode

from planner.capture.decided import longest_ctc_loss
from planner.capture.lifted import Lifted, Role, autocast_of, op_of, opaque_call
from planner.capture.made_up import RealCall
from planner.capture.model_file import lacks_memory, library_line
from planner.capture.opaque import OpaqueCall
from planner.capture.weightless import Fakes
from planner.errors import InputError, PipeplanError, words_of


@dataclass(slots=True, kw_only=True)
class Facts:
    """What one node gave. ``tensor`` is None where that is no tensor; ``storages`` are those of all its tensors."""

    tensor: torch.Tensor | None  # on meta: shape, stride, dtype without memory
    dense: bool
    requires_grad: bool
    storages: frozenset[int]
    saved: frozenset[int] = frozenset()  # storages that this op saves for its backward
    flops: int = 0
    written: frozenset[int] = frozenset()  # storages that a module kept whole changes in place, buffers left out


@dataclass(slots=True, kw_only=True)
class Trace:
    """Facts per node, and the sizes of storages (bytes) with the node that made each."""

    facts: dict[fx.Node, Facts]
    storage_bytes: dict[int, int]
    maker: dict[int, fx.Node]
    changed_buffers: frozenset[str]


class _Storages:
    """Numbers for storages, by first sight."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[StorageWeakRef] = []
        self.sizes: dict[int, int] = {}
        self.maker: dict[int, fx.Node] = {}

    def number(self, tensor: Tensor, node: fx.Node) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            self._alive.append(StorageWeakRef(storage))
            number = self._numbers[storage._cdata] = len(self._numbers)
            self.sizes[number] = storage.nbytes()
            self.maker[number] = node
        return number


def trace(
    lifted: Lifted,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: tuple[Any, ...],
    fakes: Fakes | None = None,
) -> Trace:
    """Run the graph once, on real values or on ``fakes``. Parameters, buffers and inputs are left as they are.

    Raises InputError where no gradient reaches the loss.
    """
    if fakes is not None:
        fakes.renew()
    copied = fakes.of if fakes is not None else torch.clone
    own_buffers = {name: copied(buffers[name]) for role, name in lifted.roles.values() if role is Role.BUFFER}
    given = {
        Role.PARAMETER: {
            name: (tensor if fakes is None else fakes.of(tensor)).detach().requires_grad_(tensor.requires_grad)
            for name, tensor in parameters.items()
        },
        Role.BUFFER: own_buffers,
        Role.INPUT: {str(index): copied(leaf) for index, leaf in enumerate(inputs) if isinstance(leaf, Tensor)},
        Role.CONSTANT: {name: copied(tensor) for name, tensor in lifted.constants.items()},
    }
    run = _Run(lifted, lambda node: given[lifted.roles[node][0]][lifted.roles[node][1]], fakes)
    with torch.enable_grad():
        loss = run.run()
    if not loss.requires_grad:
        raise InputError(
            "no gradient reaches the loss", hint="compute it from the output, which must come from trainable parameters"
        )
    changed = {
        name for name, t in own_buffers.items() if t._version or (fakes is None and not torch.equal(t, buffers[name]))
    }
    return Trace(
        facts=run.facts,
        storage_bytes=run.storages.sizes,
        maker=run.storages.maker,
        changed_buffers=frozenset(changed),
    )


class _Run:
    def __init__(self, lifted: Lifted, placeholder: Callable[[fx.Node], Any], fakes: Fakes | None) -> None:
        self._lifted = lifted
        self._fakes = fakes
        self._placeholder = placeholder
        self.facts: dict[fx.Node, Facts] = {}
        self.storages = _Storages()

    def run(self) -> Tensor:
        values: dict[fx.Node, Any] = {}
        last_use = {used: node for node in self._lifted.graph.nodes for used in node.all_input_nodes}
        counter = FlopCounterMode(display=False)
        with contextlib.nullcontext() if self._fakes is None else self._fakes.mode, autocast_of(self._lifted), counter:
            for node in self._lifted.graph.nodes:
                if node.op == "output":
                    loss: Tensor = values[node.args[0]]
                    return loss
                values[node] = self._value(node, values, counter)
                if node not in last_use:
                    del values[node]
                for used in node.all_input_nodes:
                    if last_use[used] is node:
                        del values[used]
        raise AssertionError("a graph without an output")

    def _value(self, node: fx.Node, values: dict[fx.Node, Any], counter: FlopCounterMode) -> Any:
        saved: set[int] = set()
        given: list[tuple[Tensor, int]] = []
        flops = counter.get_total_flops()
        if node.op == "placeholder":
            value = self._placeholder(node)
        elif node.op == "get_attr":
            value = self._lifted.modules[str(node.target)]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            call = opaque_call(node)
            given = [(tensor, tensor._version) for tensor in _tensors(args[:2])] if call else []

            def pack(tensor: Tensor) -> None:
                saved.add(self.storages.number(tensor, node))

            with _refusing(call):
                if self._fakes is not None and (call is not None or op_of(node) is ctc_loss):
                    function, arguments = (node.target, args) if call else _of_longest(args)
                    real = RealCall(function, arguments, self._fakes)  # type: ignore[arg-type]
                    saved |= {self.storages.number(fake, node) for fake in real.saved}
                    value = real.outputs if call else real.outputs[0]
                else:
                    with torch.autograd.graph.saved_tensors_hooks(pack, _never):
                        value = node.target(*args, **kwargs)  # type: ignore[operator]
        if self._fakes is not None:
            value = self._fakes.with_sizes(value, list(_tensors(list(map(values.get, node.all_input_nodes)))))
        tensors = list(_tensors(value))
        single = value if isinstance(value, Tensor) else None
        self.facts[node] = Facts(
            tensor=None if single is None else _on_meta(single),
            dense=single is None or is_dense(single),
            requires_grad=any(tensor.requires_grad for tensor in tensors),
            storages=frozenset(self.storages.number(tensor, node) for tensor in tensors),
            saved=frozenset(saved),
            flops=counter.get_total_flops() - flops,
            written=frozenset(
                self.storages.number(tensor, node) for tensor, version in given if tensor._version != version
            ),
        )
        return value


def _of_longest(args: tuple[Any, ...]) -> tuple[Callable[..., list[Tensor]], tuple[list[Tensor], ...]]:
    """A CTC loss, whose kernel reads lengths, as RealCall takes it."""
    *tensors, _, reduction, _ = args
    return functools.partial(longest_ctc_loss, reduction), (tensors, [], [])


@contextlib.contextmanager
def _refusing(call: OpaqueCall | None) -> Iterator[None]:
    """Raise InputError where a module kept whole raises in the graph what it did not in the eager model."""
    try:
        yield
    except PipeplanError:
        raise
    except Exception as fault:
        if call is None or lacks_memory(fault):  # a smaller micro-batch may do
            raise
        place = library_line(fault)
        raise InputError(
            f"module {call.name}, which is kept whole, raised {words_of(fault)}{f' ({place})' if place else ''}, as it "
            "does not in the model as written",
            hint=_GRADIENT_TAKEN if _is_of_gradients(fault) else _WATCHED,
        ) from fault


_GRADIENT_TAKEN = (
    "what one module kept whole gives another takes a gradient, detached or not: detach() it where it is read too, "
    "before numpy() or a change in place"
)
_WATCHED = (
    "its ops are watched one by one, which torch.cond, torch.compile and reversible layers cannot bear: do without "
    "(a plain if will do in a module kept whole)"
)


def _is_of_gradients(fault: Exception) -> bool:
    """Whether torch says that a tensor must not take a gradient."""
    words = str(fault).lower()
    return isinstance(fault, RuntimeError) and any(word in words for word in ("requires grad", "requires_grad", "leaf"))


def _never(_: Any) -> Any:
    raise AssertionError("the watched forward has no backward")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)


def _on_meta(tensor: Tensor) -> Tensor:
    with unset_fake_temporarily():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills a stretch of memory without gaps or overlaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


# --- what an op's schema says -----------------------------------------------------------------------------------------


def written_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The argument nodes that the op changes in place."""
    op = op_of(node)
    if not isinstance(op, OpOverload):
        return
    for value, argument in _arguments(node, op):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _nodes(value)
    if op in _RUNNING_STATISTICS:  # their schemas do not say that the running statistics change
        trained, statistics = _RUNNING_STATISTICS[op]
        if len(node.args) > trained and node.args[trained]:
            for position in statistics:
                yield from _nodes(node.args[position])


_RUNNING_STATISTICS = {
    torch.ops.aten.batch_norm.default: (5, (3, 4)),
    torch.ops.aten.native_batch_norm.default: (5, (3, 4)),
    torch.ops.aten.instance_norm.default: (5, (3, 4)),
}


def returns_what_it_writes(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place op changes and returns, where it is one node."""
    op = op_of(node)
    if not isinstance(op, OpOverload) or len(op._schema.returns) != 1:
        return None
    info = op._schema.returns[0].alias_info
    if info is None or not info.is_write:
        return None
    written = list(written_nodes(node))
    return written[0] if len(written) == 1 else None


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from torch's generator (one of unknown origin and a module kept whole are taken to)."""
    op = op_of(node)
    if opaque_call(node) is not None:
        return True
    if not isinstance(op, OpOverload) or op.namespace not in ("aten", "prims"):
        return isinstance(op, OpOverload) or getattr(op, "draws", False)
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for value, argument in _arguments(node, op):
        if (argument.name in ("p", "dropout_p", "dropout") and value == 0) or (
            argument.name == "train" and value is False
        ):
            return False
    return not (op is torch.ops.aten.scaled_dot_product_attention.default and _dropout_of(node) == 0)


def _dropout_of(node: fx.Node) -> Any:
    return node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)


def _arguments(node: fx.Node, op: OpOverload) -> Iterable[tuple[Any, Any]]:
    for position, argument in enumerate(op._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            yield node.args[position], argument
        elif argument.name in node.kwargs:
            yield node.kwargs[argument.name], argument


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _nodes(entry)


def is_getitem(node: fx.Node) -> bool:
    """Whether the node picks one output of an op that has several."""
    return node.op == "call_function" and node.target is operator.getitem
