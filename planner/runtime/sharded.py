"""The optimizer's state spread over a stage's replicas (ZeRO-1): each holds, and steps, an equal share.

    a stage's bucket   | w0 | w1 .......... | w2 | w3 | pad |      gradients, in memory order
    D = 2 replicas     |         0         |         1      |      w1 is stepped in two pieces

A step: the buckets are reduce-scattered, each as soon as its stage's last backward has run; every replica clips and
steps its pieces, which share the parameters' memory; then the stepped parameters are gathered. An optimizer that does
not treat each element by itself gets whole parameters: the largest first, each to the replica with the least so far.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.runtime.groups import Group
from planner.runtime.optimizer import NamedOptimizer, tensors_in
from planner.runtime.parts import receive, send

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
    )
)  # fmt: skip
"""Optimizers that step a piece of a parameter as they would step it within the whole."""


_ALIGNED = 64
"""Pieces begin at multiples of so many elements, where kernels treat an element as they would within the whole."""


class Piece(NamedTuple):
    """Elements ``first`` to ``last`` (not itself) of a parameter in memory order, on one replica."""

    replica: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def end(self) -> int:
        return self.start + self.parameter.numel()


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters whose gradients are summed together; replica d has elements d · chunk to (d+1) · chunk.

    ``flat``: where the gradients lie; a replica's part of their sum comes where its own lay.
    """

    places: tuple[_Place, ...]
    chunk: int
    flat: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    def chunk_of(self, replica: int) -> Tensor:
        """A replica's gradients."""
        return self.flat[replica * self.chunk : (replica + 1) * self.chunk]

    @classmethod
    def of(cls, places: tuple[_Place, ...], chunk: int, replicas: int) -> _Bucket:
        like = places[0].parameter.detach()
        return cls(places, chunk, like.new_zeros(chunk * replicas))

    def pieces(self, place: _Place, replicas: int) -> list[Piece]:
        """Of one of its parameters."""
        found = []
        for replica in range(replicas):
            first, last = max(place.start, replica * self.chunk), min(place.end, (replica + 1) * self.chunk)
            if first < last:
                found.append(Piece(replica, first - place.start, last - place.start))
        return found


class _Flying(NamedTuple):
    """A bucket's sum under way, and that of ``given``: how many replicas have a gradient of each parameter."""

    bucket: _Bucket
    given: Tensor
    work: Any
    counting: Any


class Shards:
    """What one of ``replicas`` replicas steps of its rank's parameters.

    Args:
        rows: the trainable parameters by name, those in a row summed together.
        optimizer: the user's, over all of them; it keeps the pieces of this replica alone.
        group: of the replicas.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        *,
        replica: int,
        replicas: int,
        group: Group,
    ) -> None:
        self._replica, self._replicas, self._group = replica, replicas, group
        by_element = type(optimizer) in _ELEMENTWISE
        self._buckets = [bucket for row in rows for bucket in _buckets(row, replicas, by_element=by_element)]
        self._flying: list[_Flying] = []
        self.places = {
            place.name: bucket.flat.as_strided(place.parameter.shape, place.parameter.stride(), place.start)
            for bucket in self._buckets
            for place in bucket.places
        }
        """Where the gradient of each parameter is summed: best made there."""
        self._of = {place.name: (bucket, place) for bucket in self._buckets for place in bucket.places}
        self._layout = {name: bucket.pieces(place, replicas) for name, (bucket, place) in self._of.items()}
        self.pieces: dict[str, nn.Parameter] = {}
        """By the name of its parameter, what this replica steps; whole parameters are themselves."""
        for name, (_, place) in self._of.items():
            own = self._own(name)
            if own is not None:
                whole = own.last - own.first == place.parameter.numel()
                part = _flat(place.parameter)[own.first : own.last]
                self.pieces[name] = place.parameter if whole else nn.Parameter(part)
        self._take_over(optimizer)

    @property
    def divided(self) -> frozenset[str]:
        """The parameters that several replicas step in pieces."""
        return frozenset(name for name, pieces in self._layout.items() if len(pieces) > 1)

    def _own(self, name: str) -> Piece | None:
        return next((piece for piece in self._layout[name] if piece.replica == self._replica), None)

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave this replica's pieces alone to the optimizer, with what it keeps of them already."""
        names = {id(place.parameter): name for name, (_, place) in self._of.items()}
        for group in optimizer.param_groups:
            kept = []
            for parameter in group["params"]:
                name = names.get(id(parameter))
                state = optimizer.state.pop(parameter, None)
                if name is None or name not in self.pieces:
                    continue
                kept.append(self.pieces[name])
                if state:
                    optimizer.state[self.pieces[name]] = {key: self.cut(name, value) for key, value in state.items()}
            group["params"] = kept

    def cut(self, name: str, value: Any) -> Any:
        """This replica's part of what an optimizer keeps of a whole parameter."""
        own, (_, place) = self._own(name), self._of[name]
        if own is None or self.pieces[name] is place.parameter or not isinstance(value, Tensor):
            return value
        if value.shape != place.parameter.shape:
            return value
        alike = torch.empty_like(place.parameter, dtype=value.dtype, device=value.device).copy_(value)
        return _flat(alike)[own.first : own.last].clone()

    # --- a step -------------------------------------------------------------------------------------------------------

    def start(self, names: Iterable[str]) -> None:
        """Begin to sum the gradients of whole rows over the replicas; each ``.grad`` is let go. Does not wait."""
        wanted = set(names)
        for bucket in self._buckets:
            if bucket.places[0].name not in wanted:
                continue
            given = torch.ones(len(bucket.places), dtype=torch.int32, device=bucket.flat.device)
            for number, place in enumerate(bucket.places):
                gradient, place.parameter.grad = place.parameter.grad, None
                there = self.places[place.name]
                if gradient is None:
                    there.zero_()
                    given[number] = 0
                elif gradient is not there:
                    there.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            counting = self._group.start_sum(given)
            work = self._group.start_scatter(bucket.chunk_of(self._replica), bucket.flat)
            self._flying.append(_Flying(bucket, given, work, counting))

    def finish(self) -> None:
        """Wait for all sums: they are the ``.grad`` of the pieces whose parameters had one on any replica."""
        for bucket, given, work, counting in self._flying:
            self._group.finish_sum(counting)
            self._group.finish_sum(work)
            found = given.tolist()
            own = bucket.chunk_of(self._replica)
            offset = self._replica * bucket.chunk
            for place, replicas in zip(bucket.places, found, strict=True):
                piece = self._own(place.name)
                if piece is None or not replicas:
                    continue
                begin = place.start + piece.first - offset
                gradient = own[begin : begin + piece.last - piece.first]
                mine = self.pieces[place.name]
                if mine is place.parameter:
                    gradient = gradient.as_strided(mine.shape, mine.stride(), gradient.storage_offset())
                mine.grad = gradient
        self._flying.clear()

    def gather(self) -> None:
        """Let every replica have all parameters as they were stepped."""
        for bucket in self._buckets:
            offset = self._replica * bucket.chunk
            own = torch.zeros(bucket.chunk, dtype=bucket.dtype, device=bucket.places[0].parameter.device)
            for place in bucket.places:
                piece = self._own(place.name)
                if piece is not None:
                    begin = place.start + piece.first - offset
                    own[begin : begin + piece.last - piece.first] = _flat(place.parameter)[piece.first : piece.last]
            chunks = self._group.gather(own, self._replicas)
            for place in bucket.places:
                for replica, first, last in self._layout[place.name]:
                    if replica != self._replica:
                        begin = place.start + first - replica * bucket.chunk
                        _flat(place.parameter)[first:last] = chunks[replica][begin : begin + last - first]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def whole_state(
        self, optimizer: NamedOptimizer, names: Sequence[str], *, control: Group, processes: Sequence[int]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint keeps of the optimizer, whole, by turns on each replica. All must call it together.

        ``names``: of the parameters that are written; the one numbered i is put together on replica i mod D.
        ``processes[d]``: the process that is replica d.
        """
        own_entries, own_tensors = optimizer.kept()
        entries: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for number, name in enumerate(names):
            writer = number % self._replicas
            if name not in self._layout:
                continue
            told = []
            for replica, _, _ in self._layout[name]:
                if replica == self._replica:
                    row = [own_tensors[key] for key in tensors_in(own_entries[name])]
                    if writer == self._replica:
                        told.append((own_entries[name], row))
                    else:
                        _send_entry(own_entries[name], row, control, to=processes[writer])
                elif writer == self._replica:
                    told.append(_receive_entry(control, processes[replica]))
            if told:
                entries[name] = told[0][0]
                tensors |= zip(tensors_in(entries[name]), self._joined(name, [row for _, row in told]), strict=True)
        return entries, tensors

    def _joined(self, name: str, rows: list[list[Tensor]]) -> Iterable[Tensor]:
        """An optimizer's tensors of a whole parameter from those of its pieces, in their order."""
        parameter = self._of[name][1].parameter
        sizes = [last - first for _, first, last in self._layout[name]]
        for parts in zip(*rows, strict=True):
            if len(parts) > 1 and [part.numel() for part in parts] == sizes and parts[0].dim():
                flat = torch.cat([part.detach().cpu().reshape(-1) for part in parts])
                yield flat.as_strided(parameter.shape, parameter.stride())
            else:
                yield parts[0]


def _send_entry(entry: Any, row: Sequence[Tensor], control: Group, *, to: int) -> None:
    send(torch.tensor(list(json.dumps([entry, len(row)]).encode()), dtype=torch.uint8), control, to=to)
    for tensor in row:
        send(tensor, control, to=to)


def _receive_entry(control: Group, source: int) -> tuple[Any, list[Tensor]]:
    entry, count = json.loads(bytes(receive(control, source).tolist()))
    return entry, [receive(control, source) for _ in range(count)]


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _buckets(row: Mapping[str, nn.Parameter], replicas: int, *, by_element: bool) -> list[_Bucket]:
    """A row's buckets, one for each type, with a place for each parameter."""
    made = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in row.values()):
        named = {name: parameter for name, parameter in row.items() if parameter.dtype is dtype and parameter.numel()}
        if named:
            made.append(_by_element(named, replicas) if by_element else _by_whole(named, replicas))
    return made


def _by_element(named: Mapping[str, nn.Parameter], replicas: int) -> _Bucket:
    places, end = [], 0
    for name, parameter in named.items():
        places.append(_Place(name, parameter, end))
        end = _aligned(end + parameter.numel())
    return _Bucket.of(tuple(places), _aligned(-(-end // replicas)), replicas)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _by_whole(named: Mapping[str, nn.Parameter], replicas: int) -> _Bucket:
    loads = [0] * replicas
    owners: dict[str, tuple[int, int]] = {}
    for name in sorted(named, key=lambda name: -named[name].numel()):
        owner = loads.index(min(loads))
        owners[name] = (owner, loads[owner])
        loads[owner] += named[name].numel()
    chunk = max(loads)
    places = [_Place(name, named[name], owner * chunk + start) for name, (owner, start) in owners.items()]
    return _Bucket.of(tuple(places), chunk, replicas)
