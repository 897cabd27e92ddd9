"""Which linear ops and embeddings of a captured graph are split over T tensor ranks, and how every node then is.

Every one that can begin a split does; splits spread through the graph by the ops' rules; where an op cannot take one,
what began it is left whole, or a view on the way splits another dimension. Repeated until nothing is refused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from planner.capture import shard_picks as _picks  # noqa: F401 - its rules come with it
from planner.capture import shard_products as _products  # noqa: F401 - its rules come with it
from planner.capture.analysis import Analysis
from planner.capture.dataflow import Kind
from planner.capture.lifted import Role, op_of, opaque_call
from planner.capture.shard_rules import Context, RefusalError, ResectionError, Step, apply_rule, split_operands
from planner.capture.shard_split import Shard, Split, State
from planner.capture.shard_tokens import TokenPlan, late_sums, plan_tokens

SMALL_SHARE, TINY_SHARE = 1 / 200, 1 / 1000
"""Of all parameters: an embedding below it (of what does not depend on the input, of what does) is not worth a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Every live node's state and what it becomes; ``whole``: what could have begun a split, and why it does not.

    ``tokens``: what of the rest is held in parts over the tokens. ``late``: whole tensors whose gradients are each a
    rank's part of a sum, down to parameters, where they are added up.
    """

    states: dict[fx.Node, State]
    steps: dict[fx.Node, Step]
    parameters: dict[str, Split]
    whole: dict[fx.Node, str]
    tokens: TokenPlan
    late: frozenset[fx.Node]


def plan_shards(analysis: Analysis, *, size: int, rank: int, samples: int | None = None) -> ShardPlan:
    """Find the split for T = ``size``; the same on every rank, but for the extents of uneven parts.

    ``samples``: of a micro-batch, where what is whole is held in parts over the tokens too.
    """
    return _Planner(analysis, size, rank, samples).plan()


class _Planner:
    def __init__(self, analysis: Analysis, size: int, rank: int, samples: int | None) -> None:
        self._samples = samples
        roles = analysis.lifted.roles
        self._roles = roles
        self._analysis = analysis
        live = set(analysis.flow.live)
        self._nodes = [node for node in analysis.lifted.graph.nodes if node in live and node.op != "placeholder"]
        self._context = Context(
            size=size,
            rank=rank,
            states={},
            tensors={node: facts.tensor for node, facts in analysis.trace.facts.items()},
            parameters=frozenset(node for node, (role, _) in roles.items() if role is Role.PARAMETER),
            whole={},
            sections={},
            banned=defaultdict(dict),
        )
        (self._loss,) = (node.args[0] for node in analysis.lifted.graph.nodes if node.op == "output")
        self._leave_small_embeddings()

    def _leave_small_embeddings(self) -> None:
        """Positions and the like are looked up alike for every sample: split only where they are large."""
        context, kinds = self._context, self._analysis.flow.kinds
        sizes = {node: context.tensors[node].numel() for node in context.parameters}  # type: ignore[union-attr]
        for weight, numel in sizes.items():
            for user in weight.users:
                if op_of(user) is not torch.ops.aten.embedding.default:
                    continue
                share = SMALL_SHARE if kinds[user.args[1]] is Kind.CONSTANT else TINY_SHARE  # type: ignore[index]
                if numel < share * sum(sizes.values()):
                    context.whole[user] = "so small that a sum over the ranks costs more"

    def plan(self) -> ShardPlan:
        """Repeat until nothing is refused."""
        while True:
            steps, refusals = self._propagated()
            if not refusals:
                return self._planned(dict(self._context.states), steps)
            for refusal in refusals:
                self._settle(refusal)

    def _planned(self, states: dict[fx.Node, State], steps: dict[fx.Node, Step]) -> ShardPlan:
        parameters = self._splits(steps)
        self._tell_of_others(steps, parameters)
        tokens = TokenPlan()
        if self._samples is not None:
            tokens = plan_tokens(self._analysis, self._context, states, steps, self._samples)
        return ShardPlan(
            states=states,
            steps=steps,
            parameters=parameters,
            whole=dict(self._context.whole),
            tokens=tokens,
            late=late_sums(self._analysis, states, steps, tokens),
        )

    def _propagated(self) -> tuple[dict[fx.Node, Step], list[RefusalError | ResectionError]]:
        """One way through the graph; a node that refuses counts as whole for the rest of it."""
        context = self._context
        context.states = dict.fromkeys(self._roles)
        steps: dict[fx.Node, Step] = {}
        refusals: list[RefusalError | ResectionError] = []
        for node in self._nodes:
            try:
                step = apply_rule(context, node) if node.op == "call_function" else Step(state=None)
            except ResectionError as wish:
                refusals.append(wish)
                context.states[node] = None
                continue
            except RefusalError as refusal:
                refusals.append(
                    refusal if refusal.blamed else RefusalError(refusal.reason, *split_operands(context, node))
                )
                context.states[node] = None
                continue
            steps[node], context.states[node] = step, step.state
        end = context.states[self._loss]
        if isinstance(end, Shard):
            refusals.append(RefusalError("it is the loss", end))
        return steps, refusals or self._disagreements(steps)

    def _disagreements(self, steps: dict[fx.Node, Step]) -> list[RefusalError | ResectionError]:
        """Parameters that several ops read have to be split alike for all of them."""
        asked: dict[fx.Node, dict[fx.Node, Split | None]] = defaultdict(dict)
        for node, step in steps.items():
            for used in node.all_input_nodes:
                weight = self._context.weight(used)
                if weight is not None and self._context.weight(node) is None:
                    asked[weight[0]][node] = step.weights.get(weight[0])
        found: list[RefusalError | ResectionError] = []
        for readers in asked.values():
            if len(set(readers.values())) > 1:
                blamed = {reader: self._beginning(reader, steps[reader]) for reader, split in readers.items() if split}
                # what comes split to a reader gives way first: alone, it may take the weight as the others do
                led = [shard for reader, shard in blamed.items() if reader not in shard.sources]
                found.append(RefusalError("its weight is read in another way too", *(led or blamed.values())))
        return found

    def _beginning(self, node: fx.Node, step: Step) -> Shard:
        """What brought about that ``node`` takes a weight in parts."""
        shards = [state for used in node.all_input_nodes if isinstance(state := self._context.states[used], Shard)]
        if shards:
            return shards[0]
        split = next(iter(step.weights.values()))
        return Shard(split, frozenset({node}))

    def _settle(self, refusal: RefusalError | ResectionError) -> None:
        context = self._context
        if isinstance(refusal, ResectionError):
            for source in refusal.sources:
                context.sections[source] = refusal.sections
            return
        for shard in refusal.blamed:
            if any(source in context.whole for source in shard.sources):
                continue  # settled by another refusal of this round
            if shard.choices:
                view, dim = shard.choices[-1]
                context.banned[view][dim] = refusal.cause
                continue
            for source in shard.sources:
                context.whole[source] = refusal.reason

    def _tell_of_others(self, steps: dict[fx.Node, Step], parameters: dict[str, Split]) -> None:
        """Why matrices stay whole that are read by ops which can begin no split."""
        context = self._context
        for node, step in steps.items():
            for used in node.all_input_nodes:
                found = context.weight(used)
                if found is None or len(found[1]) < 2 or self._roles[found[0]][1] in parameters:
                    continue
                if step.weights or node in context.whole or context.weight(node) is not None:
                    continue
                name = str(getattr(op_of(node), "_schema", node).name).rpartition("::")[2]
                context.whole[node] = f"{name} has no rule that splits its weight"
                if opaque_call(node) is not None:
                    context.whole[node] = "it is run as it is, without a look at its ops"

    def _splits(self, steps: dict[fx.Node, Step]) -> dict[str, Split]:
        asked = (entry for step in steps.values() for entry in step.weights.items())
        return {self._roles[weight][1]: split for weight, split in asked if weight in self._roles}
