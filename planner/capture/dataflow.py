"""What kind of value each node of the lifted graph is, which nodes are live, and who changes what in place.

constant   depends on no parameter and no input: rebuilt on each stage that reads it
derived    depends on inputs alone: the same
activation depends on a parameter, on chance, or on a buffer that the model changes: made once, in its layer, and sent;
           so is a check of a value
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum

from torch import fx

from planner.capture.decided import decision_of
from planner.capture.lifted import Lifted, Role
from planner.capture.trace import Trace, is_random, returns_what_it_writes, written_nodes
from planner.errors import InputError


class Kind(IntEnum):
    """Kinds of values; an op's is the largest of its arguments'."""

    CONSTANT = 0
    DERIVED = 1
    ACTIVATION = 2


@dataclass(slots=True, kw_only=True)
class Dataflow:
    """Kinds, live nodes in execution order, and for each storage the live nodes that change it in place.

    ``flows``: ops that the loss's gradient comes back through.
    """

    order: dict[fx.Node, int]
    kinds: dict[fx.Node, Kind]
    live: list[fx.Node]
    flows: frozenset[fx.Node]
    writers: dict[int, list[fx.Node]]
    changed_buffers: frozenset[str]


def use_newest_aliases(lifted: Lifted) -> None:
    """After ``y = relu_(x)`` readers of ``x`` read ``y``: the same storage, so that no older alias crosses a cut."""
    order = {node: index for index, node in enumerate(lifted.graph.nodes)}
    for node in list(lifted.graph.nodes):
        written = returns_what_it_writes(node) if node.op == "call_function" else None
        if written is None or written.op == "placeholder":
            continue
        for user in list(written.users):
            if order[user] > order[node]:
                user.replace_input_with(written, node)


def analyse(lifted: Lifted, trace: Trace) -> Dataflow:
    """Kinds and live nodes. Raises InputError where the model changes a parameter in place."""
    nodes = [node for node in lifted.graph.nodes if node.op != "output"]
    writes = _writes(lifted, trace, nodes)
    changed = _changed_buffers(lifted, trace, writes)
    kinds = _kinds(lifted, trace, nodes, writes, changed)
    live = _live(lifted, trace, nodes, writes)
    writers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in live:
        for storage in writes.get(node, ()):
            writers[storage].append(node)
    return Dataflow(
        order={node: index for index, node in enumerate(lifted.graph.nodes)},
        kinds=kinds,
        live=live,
        flows=_flows(lifted, trace, live, writes),
        writers=dict(writers),
        changed_buffers=changed,
    )


def _writes(lifted: Lifted, trace: Trace, nodes: list[fx.Node]) -> dict[fx.Node, frozenset[int]]:
    """The storages that each op changes."""
    writes: dict[fx.Node, frozenset[int]] = {}
    for node in nodes:
        if node.op == "call_function":
            changed = [trace.facts[written].storages for written in written_nodes(node)]
            changed += [written] if (written := trace.facts[node].written) else []
            if changed:
                writes[node] = frozenset().union(*changed)
    known = frozenset().union(*writes.values())
    for node, (role, name) in lifted.roles.items():
        storages = trace.facts[node].storages
        if role is Role.BUFFER and name in trace.changed_buffers and not storages & known:
            for user in node.users:  # changed by an op whose schema does not say so: by each that reads it
                writes[user] = writes.get(user, frozenset()) | storages
        if role is Role.PARAMETER and storages & known:
            raise InputError(
                f"the model changes its parameter {name} in place in forward()",
                hint="change it in the optimizer, or keep it as a buffer",
            )
    return writes


def _changed_buffers(lifted: Lifted, trace: Trace, writes: dict[fx.Node, frozenset[int]]) -> frozenset[str]:
    written: frozenset[int] = frozenset().union(*writes.values())
    return frozenset(
        str(name)
        for node, (role, name) in lifted.roles.items()
        if role is Role.BUFFER and trace.facts[node].storages & written
    )


def _kinds(
    lifted: Lifted,
    trace: Trace,
    nodes: list[fx.Node],
    writes: dict[fx.Node, frozenset[int]],
    changed_buffers: frozenset[str],
) -> dict[fx.Node, Kind]:
    of_role = {Role.PARAMETER: Kind.ACTIVATION, Role.BUFFER: Kind.CONSTANT, Role.CONSTANT: Kind.CONSTANT}
    least: dict[int, Kind] = {}  # what is written into a storage makes all its aliases that kind
    while True:
        before = dict(least)
        kinds: dict[fx.Node, Kind] = {}
        for node in nodes:
            if node.op == "placeholder":
                role, name = lifted.roles[node]
                kind = Kind.ACTIVATION if name in changed_buffers else of_role.get(role, Kind.DERIVED)
            else:
                kind = max((kinds[used] for used in node.all_input_nodes), default=Kind.CONSTANT)
                if node.op == "call_function" and (is_random(node) or decision_of(node) is not None):
                    kind = Kind.ACTIVATION
            kind = max([kind, *(least.get(storage, kind) for storage in trace.facts[node].storages)])
            kinds[node] = kind
            for storage in writes.get(node, ()):
                least[storage] = max(kind, least.get(storage, kind))
        if least == before:
            return kinds


def _live(lifted: Lifted, trace: Trace, nodes: list[fx.Node], writes: dict[fx.Node, frozenset[int]]) -> list[fx.Node]:
    """Checks, and nodes that the loss or a buffer depends on, through values or through storages changed in place."""
    (loss,) = (node.args[0] for node in lifted.graph.nodes if node.op == "output")
    wanted: set[fx.Node] = {loss}
    storages: set[int] = set()
    for node, (role, _) in lifted.roles.items():
        if role is Role.BUFFER:
            storages |= trace.facts[node].storages
    live = []
    for node in reversed(nodes):
        if node not in wanted and decision_of(node) is None and not (writes.get(node, frozenset()) & storages):
            continue
        live.append(node)
        for used in node.all_input_nodes:
            wanted.add(used)
            storages |= trace.facts[used].storages
    return live[::-1]


def _flows(
    lifted: Lifted, trace: Trace, live: list[fx.Node], writes: dict[fx.Node, frozenset[int]]
) -> frozenset[fx.Node]:
    """Ops whose gradient is asked for: by the loss, through readers, or through a storage that they change in place."""
    (loss,) = (node.args[0] for node in lifted.graph.nodes if node.op == "output")
    wanted: set[object] = {loss}
    storages: set[int] = set()
    found = set()
    for node in reversed(live):
        if not trace.facts[node].requires_grad:
            continue
        if node in wanted or writes.get(node, frozenset()) & storages:
            found.add(node)
            for used in node.all_input_nodes:
                wanted.add(used)
                storages |= trace.facts[used].storages
    return frozenset(found)
