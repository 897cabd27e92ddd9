"""A stage that runs: forward, backward whole (B) or split (I, W), gradients per layer, keyed by micro-batch.

What makes it equal to one process, to the bit: gradients of skips are relayed from the last reader to the first, each
adding its own as autograd would; a received gradient is taken where it arrives, before any accumulation; every layer
has its own leaf of a tied parameter, and those are added once a step in descending order of layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from planner.capture.batch import Batch, leaves
from planner.capture.gradients import Gradients
from planner.capture.program import Boundary, StageProgram
from planner.capture.seeds import RandomKey
from planner.capture.split import WeightQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """What a forward hands on: detached tensors by name, and the loss (detached) where the stage has it."""

    sent: dict[str, Tensor]
    loss: Tensor | None


class _Receive(torch.autograd.Function):
    """A received tensor's place in the autograd graph: its gradient is put into a box, with the layout it came in.

    What makes it a place is ``token``, which requires a gradient: were the tensor a leaf that does, its memory would be
    held as long as the graph, though no backward reads it.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, tensor: Tensor, box: dict[str, Tensor], name: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.box, ctx.name = box, name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None:
            ctx.box[ctx.name] = gradient
        return None, None, None, None


@dataclass(slots=True, kw_only=True)
class _Pending:
    """One micro-batch between its forward and its last backward action."""

    edges: dict[str, GradientEdge] = field(default_factory=dict)  # of tensors sent or relayed
    loss: GradientEdge | None = None
    box: dict[str, Tensor] = field(default_factory=dict)
    queue: WeightQueue | None = None
    again: Callable[[], _Pending] | None = None  # a recomputing stage's forward
    late: tuple[dict[str, Tensor], float] | None = None  # a backward left whole to W


class Stage:
    """A stage program bound to the weights of a module, which it trains in place.

    Args:
        program: the stage.
        module: holds the parameters and buffers under the names of the program.
        recompute: keep only what was received, and run the forward again for the backward.
        defer: whether W does the whole backward; by default where no gradient is handed on, so that there is no I.
    """

    def __init__(
        self, program: StageProgram, module: nn.Module, *, recompute: bool = False, defer: bool | None = None
    ) -> None:
        self.program = program
        self.recompute = recompute
        self._defer = not program.returns if defer is None else defer
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self._parameters = {name: parameters[name] for name in program.parameters}
        self._leaves = [_leaf_of(parameters[leaf.parameter]) for leaf in program.leaves]
        self._gradients: Gradients | None = None
        self._buffers = [buffers[name] for name in program.buffers]
        self._changed = [name in program.changed_buffers for name in program.buffers]
        self._token = torch.zeros((), requires_grad=True)
        self._pending: dict[int, _Pending] = {}
        self._detached: list[Tensor] = []
        self._loss_gradient: tuple[float, Tensor] | None = None

    def keep_gradients(self, places: Mapping[str, Tensor]) -> Gradients:
        """From now on gradients gather in memory that stays from step to step: a parameter's in ``places``, or its own.

        What ``finish_gradients`` sets as ``.grad`` lies there, and is written over by the next step.
        """
        names = [leaf.parameter for leaf in self.program.leaves]
        self._gradients = Gradients(names, self._leaves, places)
        return self._gradients

    # --- actions ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        inputs: Any,
        target: Any,
        received: Mapping[str, Tensor],
        key: RandomKey,
        *,
        split: bool = False,
    ) -> Forwarded:
        """F of one micro-batch. ``split``: its backward will be I and W (``backward_input``), not B.

        ``inputs`` and ``target`` are those of this micro-batch; ``received`` holds a tensor for each of
        ``program.receives``, and is kept (not copied) until the backward needs it no more.
        """
        assert microbatch not in self._pending, f"micro-batch {microbatch} is under way in stage {self.program.index}"
        split = split and not self._defer
        flat = leaves(Batch(inputs, target)) if self.program.inputs else ()
        given = [flat[number] for number in self.program.inputs]
        tensors = [received[boundary.name] for boundary in self.program.receives]
        if not self.recompute:
            with self._keeping():
                self._pending[microbatch], outputs = self._run(self._buffers, given, tensors, key, split)
            return self._forwarded(outputs)
        before = [b.clone() if changed else b for b, changed in zip(self._buffers, self._changed, strict=True)]

        def again() -> _Pending:
            with self._keeping():
                return self._run(before, given, tensors, key, split)[0]

        self._pending[microbatch] = _Pending(again=again)
        # with its autograd graph, since kernels are chosen by it, but nothing is saved
        with torch.autograd.graph.saved_tensors_hooks(_drop, _drop):
            _, outputs = self._run(self._buffers, given, tensors, key, split)
        return self._forwarded(outputs)

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """B of one micro-batch: gradients accumulate on the leaves; returns those to hand on.

        ``gradients``: for each of ``program.roots`` and ``program.relays`` what came from the next reader. Returned:
        for each of ``program.returns`` the gradient for the reader before this stage, or for the producer.
        ``loss_scale``: the gradient of the loss itself, 1 / (number of micro-batches in the step).
        """
        pending = self._back(microbatch, gradients, loss_scale)
        if pending.queue is not None:
            self._work_off(pending.queue)
        return self._handed_on(pending)

    def backward_input(self, microbatch: int, gradients: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """I of one micro-batch: as ``backward``, but the weight gradients of the split ops wait for W.

        Where no gradient is handed on it only takes what W needs. ``gradients`` may be held until W.
        """
        if self._defer:
            self._pending[microbatch].late = (dict(gradients), loss_scale)
            return {}
        pending = self._back(microbatch, gradients, loss_scale)
        assert pending.queue is not None, f"the forward of micro-batch {microbatch} was not told that I follows"
        pending.queue.detach()
        self._pending[microbatch] = _Pending(queue=pending.queue)
        return self._handed_on(pending)

    def backward_weight(self, microbatch: int) -> None:
        """W of one micro-batch: what I left."""
        late = self._pending[microbatch].late
        if late is not None:
            self.backward(microbatch, *late)
            return
        queue = self._pending.pop(microbatch).queue
        assert queue is not None, f"micro-batch {microbatch} had no I"
        self._work_off(queue)

    def waiting_for_weight(self, microbatch: int) -> list[Tensor]:
        """The tensors held between I and W."""
        queue = self._pending[microbatch].queue
        return [] if queue is None else queue.tensors()

    # --- at the end of a step -----------------------------------------------------------------------------------------

    def tied_gradient(self, name: str, partial: Tensor | None) -> Tensor | None:
        """This stage's gradients of a parameter added, last layer first, onto what came from the stages after it.

        The sum is dense where its parts are sparse too: so it is sent, and so it has the same bits on any cut.
        """
        if self._gradients is not None:
            self._gradients.settle()
        total, own = partial, False
        for tensor in reversed(self._leaves_of(name)):
            gradient = tensor.grad
            if gradient is None:
                continue
            if total is None:
                total, own = gradient.to_dense(), gradient.is_sparse or self._gradients is not None
            else:
                total = total.add_(gradient) if own else total + gradient
        return total

    def _leaves_of(self, name: str) -> list[Tensor]:
        leaves = zip(self.program.leaves, self._leaves, strict=True)
        return [tensor for leaf, tensor in leaves if leaf.parameter == name]

    def _own_gradient(self, name: str) -> Tensor | None:
        """The gradient of a parameter that no other stage uses, as autograd made it where one layer uses it."""
        first, *others = self._leaves_of(name)
        return self.tied_gradient(name, None) if others else first.grad

    def finish_gradients(
        self,
        tied_totals: Mapping[str, Tensor | None] | None = None,
        *,
        names: Collection[str] | None = None,
    ) -> None:
        """Set ``.grad`` of the parameters for the optimizer, and clear the leaves.

        ``tied_totals``: the whole sums of parameters that other stages use too. ``names``: those parameters alone.
        """
        totals = tied_totals or {}
        for name, parameter in self._parameters.items():
            if names is None or name in names:
                total = totals[name] if name in totals else self._own_gradient(name)
                parameter.grad = total if self._gradients is None else self._gradients.kept(name, total)
        if self.program.sharding is not None:
            self.program.sharding.sum_late(
                {name: value for name, value in self._parameters.items() if names is None or name in names}
            )
        for leaf, tensor in zip(self.program.leaves, self._leaves, strict=True):
            if names is None or leaf.parameter in names:
                tensor.grad = None
        if self._gradients is not None:
            self._gradients.begin()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _call(
        self,
        weights: list[Tensor],
        buffers: list[Tensor],
        given: list[Any],
        tensors: list[Tensor],
        key: RandomKey,
        queue: WeightQueue | None,
    ) -> tuple[Tensor, ...]:
        arguments = (*weights, *buffers, *self.program.constants, *given, *tensors, key)
        if queue is None:
            return self.program.run(*arguments)
        return self.program.run_split(*arguments, self._token, queue)

    def _run(
        self, buffers: list[Tensor], given: list[Any], tensors: list[Tensor], key: RandomKey, split: bool
    ) -> tuple[_Pending, tuple[Tensor, ...]]:
        """The forward with its autograd graph."""
        program = self.program
        pending = _Pending(queue=WeightQueue() if split else None)
        split = split and bool(program.split or program.derived)
        aliases = []
        with torch.enable_grad(), program.autocast():
            for boundary, tensor in zip(program.receives, tensors, strict=True):
                if program.index in boundary.grad_readers:
                    tensor = _Receive.apply(self._token, tensor.detach(), pending.box, boundary.name)  # type: ignore[no-untyped-call]
                    if boundary.grad_readers[-1] > program.index:
                        pending.edges[boundary.name] = get_gradient_edge(tensor)
                aliases.append(tensor)
            weights = self._split_weights() if split else self._leaves
            outputs = self._call(weights, buffers, given, aliases, key, pending.queue if split else None)
        for boundary, tensor in zip(program.sends, outputs, strict=False):
            if boundary.grad:
                pending.edges[boundary.name] = get_gradient_edge(tensor)
        if program.has_loss:
            pending.loss = get_gradient_edge(outputs[-1])
        return pending, outputs

    def _keeping(self) -> contextlib.AbstractContextManager[Any]:
        """How a forward keeps tensors for its backward: what tensor ranks gathered as their parts alone."""
        sharding = self.program.sharding
        if sharding is None or not sharding.sequence:
            return contextlib.nullcontext()
        return sharding.collectives.keeping_parts()

    def _split_weights(self) -> list[Tensor]:
        if not self._detached:
            late = self.program.split_leaves
            self._detached = [leaf.detach() if n in late else leaf for n, leaf in enumerate(self._leaves)]
        return self._detached

    def _forwarded(self, outputs: tuple[Tensor, ...]) -> Forwarded:
        sends = self.program.sends
        sent = {boundary.name: tensor.detach() for boundary, tensor in zip(sends, outputs, strict=False)}
        return Forwarded(sent=sent, loss=outputs[-1].detach() if self.program.has_loss else None)

    def _back(self, microbatch: int, gradients: Mapping[str, Tensor], loss_scale: float) -> _Pending:
        pending = self._pending.pop(microbatch)
        if pending.again is not None:
            pending = pending.again()
        roots = [edge for name, edge in pending.edges.items() if name in gradients]
        given: list[Tensor | None] = [gradients[name] for name in pending.edges if name in gradients]
        if pending.loss is not None:
            roots.append(pending.loss)
            given.append(self._gradient_of_loss(loss_scale))
        pending.edges.clear()
        pending.loss = None
        if roots:
            with contextlib.nullcontext() if self._gradients is None else self._gradients.gathering():
                # what torch.autograd.backward calls, after checks of shapes that take as long as a small stage's own
                _engine_run_backward(
                    tuple(roots), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        return pending

    def _gradient_of_loss(self, loss_scale: float) -> Tensor:
        if self._loss_gradient is None or self._loss_gradient[0] != loss_scale:
            made = torch.tensor(loss_scale, dtype=self.program.loss_dtype, device=self.program.device)
            self._loss_gradient = (loss_scale, made)
        return self._loss_gradient[1]

    def _handed_on(self, pending: _Pending) -> dict[str, Tensor]:
        """What arrived at the received tensors; zeros where nothing did."""
        found = {}
        for boundary in self.program.receives:
            if self.program.index in boundary.grad_readers:
                gradient = pending.box.pop(boundary.name, None)
                found[boundary.name] = self._zeros(boundary) if gradient is None else gradient
        return found

    def _zeros(self, boundary: Boundary) -> Tensor:
        made = torch.empty_strided(boundary.shape, boundary.stride, dtype=boundary.dtype, device=self.program.device)
        return made.zero_()

    def _work_off(self, queue: WeightQueue) -> None:
        """Add the queued gradients to their leaves, freeing each entry as it is done.

        A leaf that several ops of its layer read gets their sum at once, as autograd adds them: the last op first.
        """
        items = queue.items[::-1]
        queue.items = []
        left: dict[int, int] = {}
        for numbers, _, _ in items:
            for number in numbers:
                left[number] = left.get(number, 0) + 1
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            while items:
                numbers, function, arguments = items.pop()
                for number, gradient in zip(numbers, function(*arguments), strict=True):
                    left[number] -= 1
                    if gradient is not None:
                        sums[number] = gradient if number not in sums else sums[number] + gradient
                    if left[number] == 0 and number in sums:
                        self._accumulate(number, sums.pop(number))
                del arguments

    def _accumulate(self, number: int, gradient: Tensor) -> None:
        """As autograd does it: the first gradient in the layout of the leaf, the others added in place."""
        leaf = self._leaves[number]
        if leaf.grad is not None:
            leaf.grad.add_(gradient)
        elif self._gradients is not None:
            leaf.grad = self._gradients.places[number].copy_(gradient)
        elif gradient.stride() == leaf.stride() and gradient.dtype == leaf.dtype:
            leaf.grad = gradient
        else:
            leaf.grad = torch.empty_like(leaf, memory_format=torch.preserve_format).copy_(gradient)


def _drop(_: Any) -> Any:
    """Instead of saving a tensor."""


def _leaf_of(parameter: Tensor) -> Tensor:
    """A leaf that shares the parameter's memory, and collects gradients of its own."""
    return parameter.detach().requires_grad_(parameter.requires_grad)
