"""The captured graph rewritten to one tensor rank's part: smaller constants, collectives, parts of what is whole."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from planner.capture.analysis import Analysis
from planner.capture.lifted import Lifted, op_of
from planner.capture.shard_ops import Collectives
from planner.capture.shard_plan import ShardPlan
from planner.capture.shard_rules import Narrowed, Step
from planner.capture.trace import is_getitem

aten = torch.ops.aten


class Rewriter:
    """Writes a rank's graph.

    ``layer_of``: of each op that it made, the layer of the op that it was made for.
    """

    def __init__(self, analysis: Analysis, plan: ShardPlan, collectives: Collectives) -> None:
        self._analysis = analysis
        self._plan = plan
        self._collectives = collectives
        self._made: dict[fx.Node, fx.Node] = {}
        self._entered: dict[tuple[fx.Node, int, frozenset[fx.Node]], fx.Node] = {}
        self._writes: dict[fx.Node, list[int]] = defaultdict(list)  # storages that an op changes in place
        for storage, writers in analysis.flow.writers.items():
            for writer in writers:
                self._writes[writer].append(storage)
        self._written: dict[int, list[fx.Node]] = defaultdict(list)  # by which ops a storage was changed so far
        self._gathered: dict[tuple[fx.Node, int | None, bool], fx.Node] = {}
        self._parts: dict[tuple[Any, ...], fx.Node] = {}
        self._user: fx.Node | None = None
        old = analysis.lifted
        self.lifted = Lifted(
            graph=fx.Graph(),
            roles={},
            scopes={},
            constants=dict(old.constants),
            modules=dict(old.modules),
            autocast=old.autocast,
        )
        self.layer_of: dict[fx.Node, int] = {}
        self._write()

    def made(self, node: fx.Node) -> fx.Node:
        """What a node of the whole graph has become."""
        return self._made[node]

    def _write(self) -> None:
        old, new = self._analysis.lifted, self.lifted
        live = set(self._analysis.flow.live)
        for node in old.graph.nodes:
            if node.op == "placeholder":
                self._made[node] = new.graph.placeholder(node.name)
                new.roles[self._made[node]] = old.roles[node]
            elif node.op == "output":
                self._user = node.args[0]
                new.graph.output(self._whole(node.args[0]))
            elif node in live or node.op == "get_attr":
                self._user = node
                step = self._plan.steps[node] if node in live else Step(state=None)
                self._made[node] = made = self._op(node, step)
                for storage in self._writes[node]:
                    self._written[storage].append(node)
                if node in old.copies:
                    new.copies.add(made)
                if node in old.sized_by_values:
                    new.sized_by_values.add(made)

    def _note(self, made: fx.Node) -> fx.Node:
        """A new node lies where the op lies that it is made for."""
        assert self._user is not None
        self.lifted.scopes[made] = self._analysis.lifted.scopes.get(self._user, ())
        if (layer := self._analysis.layer_of.get(self._user)) is not None:
            self.layer_of[made] = layer
        return made

    def _call(self, function: Any, *arguments: Any) -> fx.Node:
        return self._note(self.lifted.graph.call_function(function, arguments))

    def _op(self, node: fx.Node, step: Step) -> fx.Node:
        step = self._plan.tokens.steps.get(node, step)
        if not self._is_split(node, step):
            return self._note(self.lifted.graph.node_copy(node, self._whole))
        if step.function == "embedding":
            made = self._embedding(*step.arguments)
        elif step.function is not None:
            function = _FUNCTIONS.get(step.function) or getattr(self._collectives, step.function)
            made = self._call(function, *self._taken(step.arguments, step))
        else:
            made = self._note(self._changed(node, step))
        if step.partial:
            made = self._left(node, made)
        if step.factor != 1:
            made = self._call(aten.mul.Tensor, made, step.factor)
        if step.bias is not None:
            made = self._call(aten.add.Tensor, made, self._in_type_of(node, step.bias))
        return made

    def _in_type_of(self, node: fx.Node, bias: fx.Node) -> fx.Node:
        """What is added to an op's output, in the type of that (autocast would have cast it within the op)."""
        facts = self._analysis.trace.facts
        made, given = facts[node].tensor, facts[bias].tensor
        assert made is not None
        assert given is not None
        read = self._entering(bias) if node in self._plan.tokens.begun else self._made[bias]
        return read if made.dtype == given.dtype else self._call(aten.to.dtype, read, made.dtype)

    def _is_split(self, node: fx.Node, step: Step) -> bool:
        if is_getitem(node):
            return False
        if node in self._plan.tokens.steps:
            return True
        operands = (self._plan.states[used] for used in node.all_input_nodes)
        return step.state is not None or bool(step.weights) or any(state is not None for state in operands)

    def _changed(self, node: fx.Node, step: Step) -> fx.Node:
        """The op with its arguments as a rank takes them."""
        args, kwargs = list(node.args), dict(node.kwargs)
        names = [argument.name for argument in op_of(node)._schema.arguments if not argument.kwarg_only]
        for name, value in step.changes.items():
            if name in names[: len(args)]:
                args[names.index(name)] = value
            else:
                kwargs[name] = value
        taken = self._taken((tuple(args), kwargs), step)
        return self.lifted.graph.call_function(node.target, *taken)  # type: ignore[arg-type]

    def _taken(self, arguments: Any, step: Step) -> Any:
        def take(value: Any) -> Any:
            if isinstance(value, Narrowed):
                return self._part(value)
            if isinstance(value, fx.Node):
                return self._made[value] if value in step.weights else self._entering(value)
            return value

        return fx.node.map_aggregate(arguments, take)

    def _left(self, node: fx.Node, part: fx.Node) -> fx.Node:
        """The sum of the ranks' parts: whole, or this rank's tokens of it."""
        if node not in self._plan.tokens.begun:
            return self._call(self._collectives.leave, part)
        shard = self._plan.tokens.shard(node)
        assert shard is not None
        return self._call(self._collectives.leave_in_parts, part, shard.dim, list(shard.sections))

    def _whole(self, node: fx.Node, *, entering: bool = False) -> fx.Node:
        """A tensor as ops read it that see all of it: gathered where each rank has its tokens, once a layer.

        ``entering``: they do a part each, so that the gradients that they give are to be summed over the ranks.
        """
        shard = self._plan.tokens.shard(node)
        if shard is None:
            return self._made[node]
        assert self._user is not None
        entering = entering and self._analysis.trace.facts[node].requires_grad
        key = node, self._analysis.layer_of.get(self._user), entering
        if key not in self._gathered:
            function = self._collectives.gather_entering if entering else self._collectives.gather
            self._gathered[key] = self._call(function, self._made[node], shard.dim, list(shard.sections))
        return self._gathered[key]

    def _entering(self, node: fx.Node) -> fx.Node:
        """A tensor as this layer's split ops read it: the gradient of a whole one is summed over the ranks.

        That is once a layer, or once a step for what is made of parameters alone, where no other ops read it.
        """
        if self._plan.tokens.shard(node) is not None:
            is_part = self._user in self._plan.tokens.steps
            return self._made[node] if is_part else self._whole(node, entering=True)
        changes, facts = self._changes(node), self._analysis.trace.facts
        requires_grad = any(facts[one].requires_grad for one in (node, *changes))
        if self._plan.states[node] is not None or not requires_grad or node in self._plan.late:
            return self._made[node]
        assert self._user is not None
        key = node, self._analysis.layer_of[self._user], changes
        if key not in self._entered:
            self._entered[key] = self._call(self._collectives.enter, self._made[node])
        return self._entered[key]

    def _changes(self, node: fx.Node) -> frozenset[fx.Node]:
        """The ops so far that have changed a tensor in place, maybe through a view."""
        storages = self._analysis.trace.facts[node].storages
        return frozenset(writer for storage in storages for writer in self._written[storage])

    def _part(self, wanted: Narrowed) -> fx.Node:
        source = self._entering(wanted.node)
        assert self._user is not None
        key = source, self._analysis.layer_of.get(self._user), wanted.dim, wanted.spans, self._changes(wanted.node)
        if key not in self._parts:
            pieces = [self._call(aten.narrow.default, source, wanted.dim, *span) for span in wanted.spans]
            self._parts[key] = pieces[0] if len(pieces) == 1 else self._call(aten.cat.default, pieces, wanted.dim)
        return self._parts[key]

    def _embedding(self, weight: fx.Node, indices: fx.Node, first: int, length: int, padding: int) -> fx.Node:
        """Rows of the part that is here; zeros for all others."""
        place = self._call(aten.sub.Tensor, self._made[indices], first)
        elsewhere = self._call(
            aten.logical_or.default, self._call(aten.lt.Scalar, place, 0), self._call(aten.ge.Scalar, place, length)
        )
        place = self._call(aten.clamp.default, place, 0, length - 1)
        rows = self._call(aten.embedding.default, self._made[weight], place, padding, False, False)
        return self._call(aten.masked_fill.Scalar, rows, self._call(aten.unsqueeze.default, elsewhere, -1), 0.0)


_FUNCTIONS = {
    "reshape": aten.reshape.default,
    "expand": aten.expand.default,
    "split_with_sizes": aten.split_with_sizes.default,
    "mm": aten.mm.default,
}
