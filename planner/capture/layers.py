"""Which ops form a layer: by the user's own modules, in execution order.

A layer is a run of consecutive ops. At granularity ``block`` it is the call of a child of the shallowest repeated
container (``blocks.3``) or of a module that holds no such container (``head``). A layer with too much of the whole
work is opened in its turn, and the small parts that come out (norms) join their larger neighbours; where there are
hundreds of layers small ones join too. Ops outside any module, and modules without a parameter, join the layer before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from torch import fx, nn

from planner.capture.lifted import Lifted, Scope, op_of, opaque_call
from planner.capture.trace import is_getitem

Granularity = Literal["op", "module", "block"]

LARGEST_SHARE: Final = 1 / 16
"""Of the whole work: a layer above it is opened, so that four stages and more can be made about equal."""
LEAST_SHARE: Final = 1 / 256
"""Of the whole work and of all parameters: a layer under it may join its neighbour."""


@dataclass(slots=True, kw_only=True)
class Segment:
    """The ops of one layer, in execution order. ``modules``: the modules called in it, outermost first."""

    name: str
    kind: str
    modules: list[str]
    nodes: list[fx.Node] = field(default_factory=list)


_Unit = tuple[str, int]  # a module's name, and which of its calls


class _Calls:
    """The calls of modules that the graph shows."""

    def __init__(self, nodes: Iterable[fx.Node], lifted: Lifted, root: nn.Module) -> None:
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self.chains = {node: tuple(scope for scope in lifted.scopes.get(node, ()) if scope.module) for node in nodes}
        self._copies = lifted.copies
        self.whole = {node: chain for node, chain in self.chains.items() if opaque_call(node) is not None and chain}
        self.whole_modules = {chain[-1].module for chain in self.whole.values()}
        self.kinds = {scope.module: scope.kind for chain in self.chains.values() for scope in chain}
        self.children: dict[str, set[str]] = defaultdict(set)
        for chain in self.chains.values():
            for outer, inner in zip(("", *(scope.module for scope in chain)), chain, strict=False):
                if inner.module != outer:
                    self.children[outer].add(inner.module)
        called = Counter(_parent(module) for module in self.kinds)
        self._repeated = {
            name
            for name, count in called.items()
            if count > 1 and isinstance(self._modules.get(name), (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        }

    def in_repeated(self, module: str) -> bool:
        """Whether the module is a child of a container that has several children called."""
        return _parent(module) in self._repeated

    def is_repeated(self, module: str) -> bool:
        """Whether the module is such a container."""
        return module in self._repeated

    def holds_repeated(self, module: str) -> bool:
        """Whether such a container lies in what the module calls."""
        return any(self.in_repeated(child) or self.holds_repeated(child) for child in self.children[module])

    def stays(self, node: fx.Node) -> bool:
        """Whether the node belongs to the op before it: one of its outputs, or a copy of it."""
        return is_getitem(node) or node in self._copies

    def stateless(self, module: str) -> bool:
        """Whether the module has neither parameters nor buffers, and is not kept whole."""
        if module in self.whole_modules:
            return False
        held = self._modules.get(module)
        return held is not None and not any(True for _ in held.parameters()) and not any(True for _ in held.buffers())


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def segments(
    nodes: list[fx.Node],
    *,
    lifted: Lifted,
    root: nn.Module,
    work: Callable[[fx.Node], float],
    granularity: Granularity,
) -> list[Segment]:
    """Cut ``nodes`` (the activation ops, in order) into layers; a module kept whole is one of its own."""
    calls = _Calls(nodes, lifted, root)
    if granularity == "op":
        return _named(_op_segments(nodes, calls))
    opened = _opened(calls, granularity)
    if granularity == "module":
        return _named(_module_segments(nodes, calls, opened, keep_stateless=True))
    _open_what_is_too_large(opened, calls, work)
    made = _module_segments(nodes, calls, opened, keep_stateless=False)
    return _named(_without_crumbs(made, calls, _Shares(made, root, work)))


def _opened(calls: _Calls, granularity: Granularity) -> set[str]:
    opened = {""}
    if granularity == "module":
        opened |= {module for module, children in calls.children.items() if children}
    else:
        stack = [""]
        while stack:
            for child in calls.children[stack.pop()]:
                if child not in opened and not calls.in_repeated(child) and calls.holds_repeated(child):
                    opened.add(child)
                    stack.append(child)
    for chain in calls.whole.values():  # what lies around it is opened, so that it is a layer of its own
        opened |= {scope.module for scope in chain[:-1]}
    return opened - calls.whole_modules


def _unit(chain: tuple[Scope, ...], opened: set[str]) -> _Unit | None:
    """The outermost call that is not opened."""
    for scope in chain:
        if scope.module not in opened:
            return scope.module, scope.call
    return None


def _open_what_is_too_large(opened: set[str], calls: _Calls, work: Callable[[fx.Node], float]) -> None:
    costs = {node: work(node) for node in calls.chains}
    limit = LARGEST_SHARE * sum(costs.values())
    while True:
        loads: Counter[str] = Counter()
        for node, chain in calls.chains.items():
            unit = _unit(chain, opened)
            if unit is not None:
                loads[unit[0]] += costs[node]  # type: ignore[assignment]
        large = {module for module, load in loads.items() if load > limit and calls.children[module]}
        if not large:
            return
        opened |= large


def _module_segments(nodes: list[fx.Node], calls: _Calls, opened: set[str], *, keep_stateless: bool) -> list[Segment]:
    made: list[Segment] = []
    current: _Unit | None = None
    leading: list[fx.Node] = []  # ops before any module: they join the first one
    for node in nodes:
        unit = _unit(calls.chains[node], opened)
        if made and calls.stays(node):
            unit = None
        joins = unit is None or unit == current or (bool(made) and not keep_stateless and calls.stateless(unit[0]))
        if unit is None and not made:
            leading.append(node)
            continue
        if joins and made:
            if unit is not None and unit[0] not in made[-1].modules:
                made[-1].modules.append(unit[0])
        else:
            assert unit is not None
            made.append(Segment(name=unit[0], kind=calls.kinds[unit[0]], modules=[unit[0]], nodes=leading))
            leading, current = [], unit
        made[-1].nodes.append(node)
    if leading:
        made.append(Segment(name="model", kind="model", modules=[""], nodes=leading))
    return made


class _Shares:
    """Of the whole: a segment's part of the work, or of the parameters' elements where that is larger."""

    def __init__(self, made: list[Segment], root: nn.Module, work: Callable[[fx.Node], float]) -> None:
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self.work = {id(segment): sum(map(work, segment.nodes)) for segment in made}
        self._held = {id(segment): self._elements(segment) for segment in made}
        self._totals = sum(self.work.values()) or 1, sum(self._held.values()) or 1

    def _elements(self, segment: Segment) -> int:
        held = {p: None for name in segment.modules if name for p in self._modules[name].parameters()}
        return sum(parameter.numel() for parameter in held)

    def __call__(self, *segments: Segment) -> float:
        work, held = (sum(found[id(segment)] for segment in segments) for found in (self.work, self._held))
        return max(work / self._totals[0], held / self._totals[1])


def _without_crumbs(made: list[Segment], calls: _Calls, share: _Shares) -> list[Segment]:
    """Parts of one module that are small together are one layer; a tiny part joins the nearer of its neighbours.

    Where there are hundreds of layers, tiny ones join whatever comes after them.
    """
    many = len(made) > 1 / LEAST_SHARE
    groups: list[list[Segment]] = []
    for segment, following in zip(made, [*made[1:], None], strict=True):
        group = groups[-1] if groups else []
        if group and not any(set(one.modules) & calls.whole_modules for one in (*group, segment)):
            around, after = (_around(group[-1], segment), _around(segment, following) if following else "")
            both = share(*group, segment)
            is_tiny = share(segment) < LEAST_SHARE
            joins_back = is_tiny and len(around) > len(after)
            together = not is_tiny and both <= LARGEST_SHARE / 2 and not calls.is_repeated(around)
            near = around and (share(*group) < LEAST_SHARE or joins_back or together)
            if near or (many and both <= 2 * LEAST_SHARE):
                group.append(segment)
                continue
        groups.append([segment])
    return [_joined(group, share) for group in groups]


def _around(one: Segment, other: Segment) -> str:
    """The smallest module around both, by name; the model itself is ``""``."""
    shared = []
    for first, second in zip(one.name.split("."), other.name.split("."), strict=False):
        if first != second:
            break
        shared.append(first)
    return ".".join(shared)


def _joined(group: list[Segment], share: _Shares) -> Segment:
    """One segment out of several, under the name of the one with the most work."""
    main = max(group, key=lambda segment: share.work[id(segment)])
    return Segment(
        name=main.name,
        kind=main.kind,
        modules=list(dict.fromkeys(module for segment in group for module in segment.modules)),
        nodes=[node for segment in group for node in segment.nodes],
    )


def _op_segments(nodes: list[fx.Node], calls: _Calls) -> list[Segment]:
    made: list[Segment] = []
    for node in nodes:
        chain = calls.chains[node]
        module = chain[-1].module if chain else ""
        op = op_of(node)
        word = op._schema.name.rpartition("::")[2] if hasattr(op, "_schema") else getattr(op, "__name__", "op")
        free = calls.stays(node) or (hasattr(op, "_schema") and any(r.alias_info for r in op._schema.returns))
        if not (free and made):
            name = f"{module}.{word}" if module else word
            made.append(Segment(name=name, kind=word, modules=[module]))
        elif module not in made[-1].modules:
            made[-1].modules.append(module)
        made[-1].nodes.append(node)
    return made


def _named(made: list[Segment]) -> list[Segment]:
    """Tell layers of one name apart: ``blocks``, ``blocks@1``, ..."""
    seen: Counter[str] = Counter()
    for segment in made:
        count = seen[segment.name]
        seen[segment.name] += 1
        if count:
            segment.name = f"{segment.name}@{count}"
    return made


def merged(parts: list[Segment], spans: Iterable[tuple[int, int]]) -> list[Segment]:
    """Segments with those of each span (first to last, both in) made one, under the first one's name."""
    last_of = list(range(len(parts)))
    for first, last in spans:
        last_of[first] = max(last_of[first], last)
    made: list[Segment] = []
    end = -1
    for index, part in enumerate(parts):
        if index <= end:
            made[-1].nodes.extend(part.nodes)
            made[-1].modules.extend(module for module in part.modules if module not in made[-1].modules)
        else:
            made.append(Segment(name=part.name, kind=part.kind, modules=list(part.modules), nodes=list(part.nodes)))
        end = max(end, last_of[index])
    return made
