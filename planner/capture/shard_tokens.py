"""Sequence parallel: which whole tensors of a rank's graph are held in parts over the tokens, between its split ops.

    ... row linear ─▶ parts of a sum ─reduce-scatter─▶ tokens of this rank: residual, norm, dropout ... ─all-gather─▶
        column linear ...

A second pass over the plan of splits, with the same rules. What ends in a sum over the ranks leaves it in parts; ops
that the rules allow work on the parts; all others gather what they read. So a missing rule costs a gather, never
correctness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from torch import fx

from planner.capture.analysis import Analysis
from planner.capture.lifted import Role, op_of
from planner.capture.shard_rules import (
    BEGINNINGS,
    Context,
    RefusalError,
    ResectionError,
    Step,
    apply_rule,
    split_operands,
)
from planner.capture.shard_split import Shard, Split, State
from planner.capture.trace import is_getitem


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan:
    """``states``: of what is held in parts over the tokens; ``steps``: what the ops that work on such parts become.

    ``begun``: the sums that leave the ranks in parts. ``left``: those that do not, and why.
    """

    states: Mapping[fx.Node, State] = field(default_factory=dict)
    steps: Mapping[fx.Node, Step] = field(default_factory=dict)
    begun: frozenset[fx.Node] = frozenset()
    left: Mapping[fx.Node, str] = field(default_factory=dict)

    def shard(self, node: fx.Node) -> Shard | None:
        """How a node is held in parts; None where it is not."""
        state = self.states.get(node)
        return state if isinstance(state, Shard) else None


def plan_tokens(
    analysis: Analysis, context: Context, states: Mapping[fx.Node, State], steps: Mapping[fx.Node, Step], samples: int
) -> TokenPlan:
    """What of a plan of splits (``states``, ``steps``) is whole and can be held in parts.

    ``samples``: of a micro-batch; a tensor has them, and their tokens after them, on its first dimensions.
    """
    return _Tokens(analysis, context, states, steps, samples).plan()


class _Tokens:
    def __init__(
        self,
        analysis: Analysis,
        context: Context,
        states: Mapping[fx.Node, State],
        steps: Mapping[fx.Node, Step],
        samples: int,
    ) -> None:
        self._analysis = analysis
        self._states = states
        self._whole_steps = steps
        self._samples = samples
        self._context = Context(
            size=context.size,
            rank=context.rank,
            states={},
            tensors=context.tensors,
            parameters=context.parameters,
            whole={},
            sections={},
            banned=defaultdict(dict),
        )
        self._left: dict[fx.Node, str] = {}
        self._by_sample = {node for node, (role, _) in analysis.lifted.roles.items() if role is Role.INPUT}
        for node in analysis.lifted.graph.nodes:
            if any(used in self._by_sample for used in node.all_input_nodes):
                self._by_sample.add(node)
        (self._loss,) = (node.args[0] for node in analysis.lifted.graph.nodes if node.op == "output")

    def plan(self) -> TokenPlan:
        """Repeat until every sum that leaves in parts is worth it."""
        while True:
            steps, begun = self._propagated()
            useful = self._useful(steps)
            if begun <= useful:
                states = {node: state for node, state in self._context.states.items() if state is not None}
                return TokenPlan(states=states, steps=steps, begun=frozenset(begun), left=dict(self._left))
            for node in begun - useful:
                self._left[node] = "nothing works on its tokens before they are gathered again"

    def _propagated(self) -> tuple[dict[fx.Node, Step], set[fx.Node]]:
        context = self._context
        context.states = dict.fromkeys(self._analysis.lifted.roles)
        steps: dict[fx.Node, Step] = {}
        begun = set()
        for node, step in self._whole_steps.items():
            state: State = None
            if step.partial:
                state = self._begun(node)
                if state is not None:
                    begun.add(node)
            elif self._is_whole(node) and split_operands(context, node):
                found = self._worked(node)
                state = None if found is None else found.state
                if found is not None and not is_getitem(node):
                    steps[node] = found
            context.states[node] = state
        return steps, begun

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether each rank would do all of it."""
        step = self._whole_steps[node]
        operands = (self._states[used] for used in node.all_input_nodes)
        return self._states[node] is None and not step.weights and all(state is None for state in operands)

    def _begun(self, node: fx.Node) -> Shard | None:
        """The parts in which a sum over the ranks leaves them."""
        if node in self._left:
            return None
        split, reason = self._tokens_of(node)
        if split is None:
            self._left[node] = reason
            return None
        return Shard(split, frozenset({node}))

    def _tokens_of(self, node: fx.Node) -> tuple[Split | None, str]:
        """Where the tokens of a tensor lie: [samples, tokens, ...], [samples · tokens, width], or, where all samples
        have the same (as positions have), [..., tokens, width]."""
        shape, size = self._context.shape(node), self._context.size
        if self._analysis.trace.facts[node].storages & self._analysis.flow.writers.keys():
            return None, "it is changed in place"
        if node not in self._by_sample and len(shape) >= 2:
            split = Split(len(shape) - 2, (shape[-2],))
        elif len(shape) >= 3 and shape[0] == self._samples:
            split = Split(1, (shape[1],))
        elif len(shape) == 2 and shape[0] % self._samples == 0:
            split = Split(0, (shape[0] // self._samples,) * self._samples)
        else:
            return None, f"{' x '.join(map(str, shape))} does not show its tokens" if len(shape) > 1 else ""
        tokens = split.sections[0]
        if tokens % size:
            return None, f"{tokens} tokens do not divide by {size}"
        return split, ""

    def _worked(self, node: fx.Node) -> Step | None:
        """What an op becomes that works on parts; None: it gathers them."""
        context, facts = self._context, self._analysis.trace.facts
        if node is self._loss or facts[node].storages & self._analysis.flow.writers.keys():
            return None
        if not is_getitem(node) and (node.op != "call_function" or self._begins(node)):
            return None
        try:
            step = apply_rule(context, node)
        except (RefusalError, ResectionError):
            return None
        several = isinstance(step.state, tuple)
        if step.weights or (several and not all(map(is_getitem, node.users))):
            return None
        return step

    def _begins(self, node: fx.Node) -> bool:
        """Ops with weights of their own see all tokens, so that the ranks' gradients of the weights agree."""
        schema = getattr(op_of(node), "_schema", None)
        return schema is not None and schema.name in BEGINNINGS

    def _useful(self, steps: Mapping[fx.Node, Step]) -> set[fx.Node]:
        """The sums whose parts come, over ops that work on parts, to where split ops read them or other parts join."""
        states = self._context.states
        found: set[fx.Node] = set()
        for node in self._whole_steps:
            sources = [shard.sources for used in node.all_input_nodes for shard in _flat(states[used])]
            if not sources:
                continue
            joins = node in steps and (len(set(sources)) > 1 or steps[node].partial)
            if joins or not (node in steps or self._is_whole(node)):
                found.update(chain(*sources))
        return found


def _flat(state: State) -> list[Shard]:
    states = state if isinstance(state, tuple) else (state,)
    return [one for one in states if one is not None]


# --- gradients that are a rank's part of a sum ------------------------------------------------------------------------


def late_sums(
    analysis: Analysis, states: Mapping[fx.Node, State], steps: Mapping[fx.Node, Step], tokens: TokenPlan
) -> frozenset[fx.Node]:
    """Whole tensors, made of parameters and constants alone, whose gradients need no sum over the ranks when they come.

    All that read such a tensor do a part each, so each rank's gradient is a part of the sum; so it is of what the
    tensor was made of, down to the parameters: their gradients are summed over the ranks once a step. What is made of
    a tensor that is read whole too is none of them.
    """
    facts, flows, writers = analysis.trace.facts, analysis.flow.flows, analysis.flow.writers
    roles = analysis.lifted.roles
    plain: dict[fx.Node, bool] = {}  # made of parameters and constants, by every rank alike
    for node in analysis.lifted.graph.nodes:
        if node in roles:
            plain[node] = roles[node][0] is not Role.INPUT
        elif node in steps:
            step = steps[node]
            alike = states[node] is None and not step.weights and not step.partial and node not in tokens.states
            plain[node] = alike and all(plain.get(used, False) for used in node.all_input_nodes)
    able = [
        node
        for node in reversed(analysis.lifted.graph.nodes)
        if plain.get(node) and facts[node].requires_grad and not facts[node].storages & writers.keys()
    ]
    while True:
        found: set[fx.Node] = set()
        for node in able:
            readers = [user for user in node.users if user in flows]
            if readers and all(_reads_a_part(user, node, states, steps, tokens, found) for user in readers):
                found.add(node)
        kept = [
            node
            for node in able
            if node not in found or all(used in found for used in node.all_input_nodes if facts[used].requires_grad)
        ]
        if len(kept) == len(able):
            return frozenset(found)
        able = kept


def _reads_a_part(
    user: fx.Node,
    node: fx.Node,
    states: Mapping[fx.Node, State],
    steps: Mapping[fx.Node, Step],
    tokens: TokenPlan,
    late: set[fx.Node],
) -> bool:
    """Whether the gradient that an op gives for what it reads whole is the rank's part of a sum."""
    if user in late or user in tokens.steps:
        return True
    step = steps[user]
    if node in step.weights:
        return False  # held in parts
    if step.bias is node:
        return user in tokens.begun
    operands = (states[used] for used in user.all_input_nodes)
    return states[user] is not None or any(state is not None for state in operands)
