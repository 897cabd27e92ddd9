"""Runs one rank's actions: any checked table, keyed by (stage, micro-batch), never by arrival."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.capture import Batch, RandomKey, Stage
from planner.runtime.board import State, Writer
from planner.runtime.messages import Key, RankProgram
from planner.runtime.transport import Transport
from planner.schedules import Action, Letter

_SPLIT = (Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT)

Mark = Any
"""A moment: seconds of the clock, or a CUDA event."""


class Stopwatch(Protocol):
    """Marks moments without stopping the device, and says later how far apart they were."""

    def mark(self) -> Mark:
        """Now, or when the device gets here."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two moments; waits until the second has passed."""


class HostStopwatch:
    """Where the host runs the actions itself."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, start: float, end: float) -> float:
        """Between two moments."""
        return end - start


class CudaStopwatch:
    """Where the host only queues them."""

    def mark(self) -> torch.cuda.Event:
        """When the compute stream gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Between two events; waits for the second."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class Span:
    """When an action ran: after its messages were there, until its own were handed over."""

    __slots__ = ("end", "start")

    def __init__(self, start: Mark, end: Mark) -> None:
        self.start = start
        self.end = end


class Executor:
    """One rank's stages, links and actions."""

    def __init__(
        self,
        program: RankProgram,
        *,
        stages: Mapping[int, Stage],
        transport: Transport | None,
        stopwatch: Stopwatch,
        board: Writer,
        loss_scale: float,
    ) -> None:
        self._steps = program.steps
        self._tied = program.tied
        self._stages = stages
        self._transport = transport
        self._stopwatch = stopwatch
        self._board = board
        self._loss_scale = loss_scale
        self._split = {(k, m) for k, letter, m in (step.action for step in program.steps) if letter in _SPLIT}
        self._held: dict[Key, Any] = {}

    def run(
        self, microbatches: Sequence[Batch], keys: Sequence[RandomKey]
    ) -> tuple[dict[int, Tensor], tuple[Span, ...]]:
        """All actions of one training step: the losses of the micro-batches that end here, and when each action ran.

        Gradients stay in the stages; ``sum_tied`` and the stages' finish_gradients come next.
        """
        board, held, transport, mark = self._board, self._held, self._transport, self._stopwatch.mark
        losses: dict[int, Tensor] = {}
        spans: list[Span] = []
        for position, step in enumerate(self._steps):
            if step.waits:
                assert transport is not None, "messages need a transport"
                board.at(State.WAITING, position)
                for sender, place, key in step.waits:
                    held[key] = transport.take(sender, place)
                transport.post_ahead()
            board.at(State.RUNNING, position)
            start = mark()
            made = self._act(step.action, step.reads, microbatches, keys, losses)
            for key in step.drops:
                del held[key]
            for key in step.keeps:
                held[key] = made[key.name]
            for receiver, key in step.sends:
                transport.send(receiver, key, made[key.name])  # type: ignore[union-attr]
            del made
            spans.append(Span(start, mark()))
        return losses, tuple(spans)

    def _act(
        self,
        action: Action,
        reads: Sequence[Key],
        microbatches: Sequence[Batch],
        keys: Sequence[RandomKey],
        losses: dict[int, Tensor],
    ) -> Mapping[str, Tensor]:
        """One action; what it makes for other stages, by name."""
        number, letter, m = action
        stage = self._stages[number]
        given = {key.name: self._held[key] for key in reads}
        if letter is Letter.FORWARD:
            inputs, target = microbatches[m]
            forwarded = stage.forward(m, inputs, target, given, keys[m], split=(number, m) in self._split)
            if forwarded.loss is not None:
                losses[m] = forwarded.loss
            return forwarded.sent
        if letter is Letter.BACKWARD:
            return stage.backward(m, given, self._loss_scale)
        if letter is Letter.BACKWARD_INPUT:
            return stage.backward_input(m, given, self._loss_scale)
        stage.backward_weight(m)
        return {}

    def sum_tied(self) -> dict[str, Tensor | None]:
        """The whole gradients of the tied parameters used on this rank and elsewhere, by name.

        Each is summed down the stages that use it, last to first, as one process sums over layers, and sent back up.
        """
        held, transport = self._held, self._transport
        totals: dict[str, Tensor | None] = {}
        for step in self._tied:
            if step.waits:
                assert transport is not None, "messages need a transport"
                arrived: Tensor | None = transport.take(*step.waits)
            else:
                arrived = held.pop(step.reads) if step.reads else None
            if step.upwards:
                total = totals[step.name] = totals[step.name] if arrived is None else arrived
            else:
                total = self._stages[step.stage].tied_gradient(step.name, arrived)
                if step.hands_over is None:
                    totals[step.name] = total
            if step.hands_over is not None:
                if self._transport is not None and step.leaves:
                    self._transport.send(step.to_rank, step.hands_over, total)
                else:
                    held[step.hands_over] = total
        return totals

    def next_step(self) -> None:
        """All messages of the step are taken."""
        assert not self._held, "every tensor that was received has been read"
        if self._transport is not None:
            self._transport.next_step()
            self._transport.post_ahead()
