"""From a cut to its stages: every figure of a plan's stages follows from the profile.

A tensor made in stage 0 and read in stages 1, 3 and 4, where 1 and 3 are on one rank and 4 on the producer's:

    sends of 0:   [1: bytes]  [3: 0]  [4: 0]          a rank receives it once, at its lowest reading stage
    returns:      4 ─bytes▶ 3 ─0▶ 1 ─bytes▶ 0         each reader adds its gradient to what came from the reader after
                                                      it, as one process adds them; every hop to another rank has bytes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from planner.cluster import Cluster
from planner.errors import InputError, nearest
from planner.graph.layers import LayerGraph, Tensor
from planner.graph.stage import Stage, Tie, Transfer

Cut = Sequence[Sequence[str]]
"""The layer names of each stage; stages are numbered along the data flow."""


def derive_stages(
    graph: LayerGraph,
    cut: Cut,
    *,
    ranks: Sequence[int],
    microbatch_size: int,
    tensor: int = 1,
    recompute: Sequence[bool] | None = None,
    cluster: Cluster | None = None,
) -> tuple[Stage, ...]:
    """The stages of a cut, with times, sizes, sends and returns, at one micro-batch size and tensor size.

    ``ranks[k]`` is the pipeline rank of stage k; ``recompute[k]`` whether it recomputes (default: none does). Times are
    sums of the layers' rows at exactly this size. Raises InputError where the cut is none, or a row is missing.
    """
    stage_of = stage_of_layers(graph, cut)
    costs = graph.costs(microbatch_size=microbatch_size, tensor=tensor, cluster=cluster)
    flow = _Flow(graph, stage_of, ranks, microbatch_size, tensor)
    made = []
    for number, names in enumerate(cut):
        members = sorted(graph.index[name] for name in names)
        rows = [costs[layer] for layer in members]
        twice, twice_trainable = _counted_twice(graph, members, tensor)
        made.append(
            Stage(
                stage=number,
                rank=ranks[number],
                layers=tuple(graph.names[layer] for layer in members),
                recompute=bool(recompute and recompute[number]),
                forward_s=sum(row.forward_s for row in rows),
                backward_input_s=sum(row.backward_input_s for row in rows),
                backward_weight_s=sum(row.backward_weight_s for row in rows),
                split_s=sum(row.split_s for row in rows) or None,
                parameter_bytes=sum(row.parameter_bytes for row in rows) - twice,
                trainable_bytes=sum(row.trainable_bytes for row in rows) - twice_trainable,
                buffer_bytes=sum(row.buffer_bytes for row in rows),
                input_bytes=flow.input_bytes[number],
                saved_bytes=sum(row.saved_bytes for row in rows) + flow.saved_again_bytes[number],
                saved_for_weight_bytes=sum(row.saved_for_weight_bytes for row in rows),
                workspace_bytes=max(row.workspace_bytes for row in rows),
                sends=tuple(Transfer(to_stage=to, bytes=size) for to, size in sorted(flow.sends[number].items())),
                returns=tuple(
                    Transfer(to_stage=to, bytes=size) for to, size in sorted(flow.returns[number].items(), reverse=True)
                ),
            )
        )
    return tuple(made)


def ties(graph: LayerGraph, cut: Cut, *, tensor: int = 1) -> tuple[Tie, ...]:
    """The parameters that more than one stage of the cut uses, by name."""
    stage_of = stage_of_layers(graph, cut)
    users: dict[str, set[int]] = defaultdict(set)
    entries: dict[str, tuple[int, bool]] = {}
    for layer in range(len(graph)):
        for name, size, trainable in _shared(graph, layer, tensor):
            users[name].add(stage_of[layer])
            entries.setdefault(name, (size, trainable))
    return tuple(
        Tie(name=name, bytes=entries[name][0], trainable=entries[name][1], stages=tuple(sorted(users[name])))
        for name in sorted(users)
        if len(users[name]) > 1
    )


def stage_of_layers(graph: LayerGraph, cut: Cut) -> list[int]:
    """The stage of every layer, by index.

    Raises InputError where a stage is empty, a layer stands in none or in two, or an edge goes to an earlier stage.
    """
    stage_of = [-1] * len(graph)
    for number, names in enumerate(cut):
        if not names:
            raise InputError(f"stage {number} has no layers", hint="give it one, or remove it")
        for name in names:
            if name not in graph.index:
                raise InputError(f"stage {number}: the profile has no layer {name!r}", hint=nearest(name, graph.index))
            layer = graph.index[name]
            if stage_of[layer] >= 0:
                raise InputError(f"layer {name!r} is in stages {stage_of[layer]} and {number}", hint="remove one")
            stage_of[layer] = number
    if -1 in stage_of:
        raise InputError(f"layer {graph.names[stage_of.index(-1)]!r} is in no stage", hint="add it to one")
    for source, target in graph.edges:
        if stage_of[source] > stage_of[target]:
            raise InputError(
                f"layer {graph.names[target]!r} in stage {stage_of[target]} reads from {graph.names[source]!r} "
                f"in stage {stage_of[source]}",
                hint="stages are numbered along the data flow: move one of the two",
            )
    return stage_of


class _Flow:
    """What passes between the stages of one cut, per stage."""

    def __init__(
        self, graph: LayerGraph, stage_of: Sequence[int], ranks: Sequence[int], microbatch_size: int, tensor: int
    ) -> None:
        self.sends: list[dict[int, int]] = [{} for _ in ranks]
        self.returns: list[dict[int, int]] = [{} for _ in ranks]
        self.input_bytes = [0] * len(ranks)
        self.saved_again_bytes = [0] * len(ranks)
        for made in graph.tensors:
            source = stage_of[made.source]
            readers = {stage_of[reader.layer] for reader in made.readers} - {source}
            if readers:
                self._add(made, made.bytes(microbatch_size, tensor), source, readers, stage_of, ranks)

    def _add(
        self, made: Tensor, size: int, source: int, readers: set[int], stage_of: Sequence[int], ranks: Sequence[int]
    ) -> None:
        has_it = {ranks[source]}
        for reader in sorted(readers):
            self._move(self.sends, source, reader, 0 if ranks[reader] in has_it else size)
            has_it.add(ranks[reader])
            self.input_bytes[reader] += size
        for reader in {stage_of[reader.layer] for reader in made.readers if reader.saved} - {source}:
            self.saved_again_bytes[reader] += size
        relay = sorted({stage_of[reader.layer] for reader in made.readers if reader.grad} - {source}, reverse=True)
        for reader, before in zip(relay, [*relay[1:], source], strict=True) if relay else ():
            self._move(self.returns, reader, before, 0 if ranks[reader] == ranks[before] else size)

    @staticmethod
    def _move(transfers: list[dict[int, int]], origin: int, to_stage: int, size: int) -> None:
        transfers[origin][to_stage] = transfers[origin].get(to_stage, 0) + size


def _shared(graph: LayerGraph, layer: int, tensor: int) -> Iterable[tuple[str, int, bool]]:
    """Name, bytes and trainable of the tied parameters that a layer uses: of one tensor rank.

    Where the profile's rows do not tell them at T > 1 they shrink as the layer does.
    """
    profiled = graph.layers[layer]
    shares = profiled.shared or {}
    row = next((row for row in profiled.costs if row.tensor == tensor), None)
    if tensor == 1 or row is None or not profiled.parameter_bytes:
        return [(name, entry.bytes, entry.trainable) for name, entry in shares.items()]
    told, scale = row.shared_bytes or {}, (row.parameter_bytes or 0) / profiled.parameter_bytes
    return [(name, told.get(name, round(entry.bytes * scale)), entry.trainable) for name, entry in shares.items()]


def _counted_twice(graph: LayerGraph, members: Sequence[int], tensor: int) -> tuple[int, int]:
    """Bytes, and trainable bytes, of tied parameters that the members' sums count more than once."""
    seen: set[str] = set()
    twice = twice_trainable = 0
    for layer in members:
        for name, size, trainable in _shared(graph, layer, tensor):
            if name in seen:
                twice += size
                twice_trainable += size if trainable else 0
            seen.add(name)
    return twice, twice_trainable
