"""What a schedule must respect: which rank runs each stage, and whose messages each action waits for."""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph.stage import Stage
from planner.record import record


@record
class Wiring:
    """Stages 0..K-1: their ranks, the stages that each sends activations to after F, and gradients to after B or I."""

    ranks: tuple[int, ...]
    sends: tuple[tuple[int, ...], ...]
    returns: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> Wiring:
        """The wiring of a plan's stages."""
        return cls(
            ranks=tuple(stage.rank for stage in stages),
            sends=tuple(tuple(entry.to_stage for entry in stage.sends) for stage in stages),
            returns=tuple(tuple(entry.to_stage for entry in stage.returns) for stage in stages),
        )

    @classmethod
    def chain(cls, ranks: Sequence[int]) -> Wiring:
        """Stages in a row: each sends to the next and returns to the one before."""
        last = len(ranks) - 1
        return cls(
            ranks=tuple(ranks),
            sends=tuple((stage + 1,) if stage < last else () for stage in range(last + 1)),
            returns=tuple((stage - 1,) if stage else () for stage in range(last + 1)),
        )

    @property
    def senders(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose activations each stage's F waits for."""
        return _turned(self.sends)

    @property
    def returners(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose gradients each stage's B or I waits for."""
        return _turned(self.returns)


def _turned(targets: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    sources: list[list[int]] = [[] for _ in targets]
    for source, row in enumerate(targets):
        for target in row:
            sources[target].append(source)
    return tuple(map(tuple, sources))
