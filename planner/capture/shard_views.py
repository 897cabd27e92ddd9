"""How a split dimension comes through a view: which dimension of the new shape is split, and in which sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from planner.capture.shard_split import Shard


@dataclass(frozen=True, slots=True)
class Way:
    """Dimension ``dim`` of the new shape is split in ``sections``."""

    dim: int
    sections: tuple[int, ...]
    source: tuple[int, ...] | None
    """Other sections of the split dimension itself that this takes; None: as it is."""


def groups(shape: Sequence[int], into: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of both shapes that hold the same elements, the smallest there are; dimensions of 1 aside."""
    these = [dim for dim, extent in enumerate(shape) if extent != 1]
    those = [dim for dim, extent in enumerate(into) if extent != 1]
    found = []
    while these:
        left, right = [these.pop(0)], [those.pop(0)]
        while (before := prod(shape[dim] for dim in left)) != (after := prod(into[dim] for dim in right)):
            if before < after:
                left.append(these.pop(0))
            else:
                right.append(those.pop(0))
        found.append((left, right))
    return found


def ways(shard: Shard, shape: Sequence[int], into: Sequence[int], size: int) -> Iterator[Way]:
    """All ways, those that take the split as it is first.

    The elements of the group lie in one row: [before, split dimension, after]. Its sections are the pieces of that row
    that are each shared out over the ranks; a dimension of the new shape is split in the same pieces where they are its
    own, over all that comes before it.
    """
    left, right = next(group for group in groups(shape, into) if shard.dim in group[0])
    position = left.index(shard.dim)
    before = prod(shape[dim] for dim in left[:position])
    after = prod(shape[dim] for dim in left[position + 1 :])
    if after > 1 and not shard.split.is_even(size):
        return
    row = [section * after for section in shard.sections] * before
    for place, dim in enumerate(right):
        outer = prod(into[other] for other in right[:place])
        inner = prod(into[other] for other in right[place + 1 :])
        if (sections := _fits(row, into[dim], outer, inner, size)) is not None:
            yield Way(dim, sections, None)
    if not shard.raw or before > 1 or after > 1:
        return
    for place, dim in enumerate(right):
        outer = prod(into[other] for other in right[:place])
        inner = prod(into[other] for other in right[place + 1 :])
        wanted = (into[dim] * inner,) * outer
        if wanted != shard.sections and _fits(list(wanted), into[dim], outer, inner, size) is not None:
            yield Way(dim, (into[dim],), wanted)


def _fits(row: list[int], extent: int, outer: int, inner: int, size: int) -> tuple[int, ...] | None:
    """The sections of a dimension with ``outer`` elements before and ``inner`` after it, if ``row`` is made of them."""
    period, rest = divmod(len(row), outer)
    if rest or row != row[:period] * outer or sum(row[:period]) != extent * inner:
        return None
    if any(section % inner for section in row[:period]):
        return None
    sections = tuple(section // inner for section in row[:period])
    if any(section < size or (inner > 1 and section % size) for section in sections):
        return None
    return sections
