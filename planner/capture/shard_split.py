"""A dimension held in parts by T tensor ranks, and what a node of the graph is: whole on every rank, or so split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, fx


def portion(extent: int, size: int, rank: int) -> tuple[int, int]:
    """First index and length of the part that ``rank`` of ``size`` holds; the first ones hold one more where uneven."""
    base, rest = divmod(extent, size)
    return rank * base + min(rank, rest), base + (rank < rest)


@dataclass(frozen=True, slots=True)
class Split:
    """Dimension ``dim`` consists of ``sections`` (extents); each rank holds its part of every one, one after another.

    A fused query, key, value has three sections: a rank's part is its queries, its keys, its values.
    """

    dim: int
    sections: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Of the whole dimension."""
        return sum(self.sections)

    def spans(self, size: int, rank: int) -> list[tuple[int, int]]:
        """First index in the whole dimension and length of each piece that a rank holds."""
        starts = [0, *accumulate(self.sections)]
        pieces = (portion(extent, size, rank) for extent in self.sections)
        return [(start + first, length) for start, (first, length) in zip(starts, pieces, strict=False)]

    def local(self, size: int, rank: int) -> int:
        """The extent that a rank holds."""
        return sum(length for _, length in self.spans(size, rank))

    def is_even(self, size: int) -> bool:
        """Whether all ranks hold the same extent."""
        return all(extent % size == 0 for extent in self.sections)

    def part(self, whole: Tensor, size: int, rank: int) -> Tensor:
        """What a rank holds of a tensor: a view where it is one piece."""
        pieces = [whole.narrow(self.dim, start, length) for start, length in self.spans(size, rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, given what each rank holds, in their order."""
        size = len(parts)
        cut = [parts[rank].split([length for _, length in self.spans(size, rank)], self.dim) for rank in range(size)]
        return torch.cat([cut[rank][n] for n in range(len(self.sections)) for rank in range(size)], self.dim)


@dataclass(frozen=True, slots=True)
class Shard:
    """A node's value split over the ranks.

    Args:
        split: how.
        sources: the ops where the splitting began; left whole, they would take it away.
        choices: the views on the way that could have split another of their dimensions, with the one they chose.
        raw: the split dimension is the output of the sources as they made it, so that they could still cut it in
            other sections.
    """

    split: Split
    sources: frozenset[fx.Node]
    choices: tuple[tuple[fx.Node, int], ...] = ()
    raw: bool = False

    @property
    def dim(self) -> int:
        """The split dimension."""
        return self.split.dim

    @property
    def sections(self) -> tuple[int, ...]:
        """Of the split dimension."""
        return self.split.sections

    def at(self, dim: int) -> Shard:
        """The same, where the dimension comes to lie elsewhere."""
        return replace(self, split=Split(dim, self.sections))

    def cut(self, dim: int, sections: tuple[int, ...]) -> Shard:
        """Another split out of this one; the sources can no longer change its sections."""
        return replace(self, split=Split(dim, sections), raw=False)


State = Shard | None | tuple["Shard | None", ...]
"""Of a node: split, whole (None), or for an op with several outputs that of each."""


def joined(shards: Sequence[Shard]) -> Shard:
    """Of an op's operands, which are split alike: where its output comes from."""
    first = shards[0]
    return Shard(
        split=first.split,
        sources=frozenset().union(*(shard.sources for shard in shards)),
        choices=tuple(dict.fromkeys(choice for shard in shards for choice in shard.choices)),
        raw=all(shard.raw for shard in shards),
    )
