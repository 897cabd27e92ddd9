"""Runs one rank's actions: any checked table, keyed by (stage, micro-batch), never by arrival."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.capture import Batch, RandomKey, Stage
from planner.runtime.board import State, Writer
from planner.runtime.messages import Key, Post, RankProgram, Step
from planner.runtime.transport import Transport
from planner.schedules import Letter

_SPLIT = (Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT)
_ENDS = (Letter.BACKWARD, Letter.BACKWARD_WEIGHT)

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


class _Move:
    """A step made ready to run: tensors that other actions read lie in numbered places of the rank."""

    __slots__ = ("drops", "is_last", "keeps", "letter", "microbatch", "posts", "reads", "sends", "stage", "waits")

    def __init__(
        self, step: Step, stage: Stage, posts: Sequence[Post], place_of: Callable[[Key], int], *, is_last: bool
    ) -> None:
        """``is_last``: the stage's gradients are whole after this step."""
        _, self.letter, self.microbatch = step.action
        self.stage = stage
        self.is_last = is_last
        self.posts = posts
        self.waits = tuple((sender, number, place_of(key)) for sender, number, key in step.waits)
        self.reads = tuple((key.name, place_of(key)) for key in step.reads)
        self.drops = tuple(map(place_of, step.drops))
        self.keeps = tuple((place_of(key), key.name) for key in step.keeps)
        self.sends = step.sends


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
        self._tied = program.tied
        self._stages = stages
        self._transport = transport
        self._stopwatch = stopwatch
        self._board = board
        self.loss_scale = loss_scale
        """The gradient of each micro-batch's loss."""
        self._split = {(k, m) for k, letter, m in (step.action for step in program.steps) if letter in _SPLIT}
        last = {step.action.stage: step for step in program.steps if step.action.letter in _ENDS}
        places: dict[Key, int] = {}
        self._moves = [
            _Move(
                step,
                stages[step.action.stage],
                posts,
                lambda key: places.setdefault(key, len(places)),
                is_last=last.get(step.action.stage) is step,
            )
            for step, posts in zip(program.steps, program.posts or ((),) * len(program.steps), strict=True)
        ]
        self._held: list[Tensor | None] = [None] * len(places)

    def run(
        self, microbatches: Sequence[Batch], keys: Sequence[RandomKey], *, done: Callable[[Stage], None] | None = None
    ) -> tuple[dict[int, Tensor], tuple[Span, ...]]:
        """All actions of one training step: the losses of the micro-batches that end here, and when each action ran.

        Gradients stay in the stages; ``sum_tied`` and the stages' finish_gradients come next. ``done`` is called with
        each stage after its last backward. What an action waits for
        goes straight into it, and what it made goes straight out; all bookkeeping comes after that.
        """
        board, held, transport, mark = self._board, self._held, self._transport, self._stopwatch.mark
        losses: dict[int, Tensor] = {}
        spans: list[Span] = []
        for position, move in enumerate(self._moves):
            for sender, count in move.posts:
                transport.post(sender, count)  # type: ignore[union-attr]
            if move.waits:
                assert transport is not None, "messages need a transport"
                board.at(State.WAITING, position)
                for sender, number, place in move.waits:
                    held[place] = transport.take(sender, number)
            board.at(State.RUNNING, position)
            start = mark()
            made = self._act(move, microbatches, keys, losses)
            for receiver, key in move.sends:
                transport.send(receiver, key, made[key.name])  # type: ignore[union-attr]
            spans.append(Span(start, mark()))
            for place in move.drops:
                held[place] = None
            for place, name in move.keeps:
                held[place] = made[name]
            del made
            if move.is_last and done is not None:
                done(move.stage)
        return losses, tuple(spans)

    def _act(
        self,
        move: _Move,
        microbatches: Sequence[Batch],
        keys: Sequence[RandomKey],
        losses: dict[int, Tensor],
    ) -> Mapping[str, Tensor]:
        """One action; what it makes for other stages, by name."""
        stage, letter, m, held = move.stage, move.letter, move.microbatch, self._held
        given: dict[str, Any] = {name: held[place] for name, place in move.reads}
        if letter is Letter.FORWARD:
            inputs, target = microbatches[m]
            split = (stage.program.index, m) in self._split
            forwarded = stage.forward(m, inputs, target, given, keys[m], split=split)
            if forwarded.loss is not None:
                losses[m] = forwarded.loss
            return forwarded.sent
        if letter is Letter.BACKWARD:
            return stage.backward(m, given, self.loss_scale)
        if letter is Letter.BACKWARD_INPUT:
            return stage.backward_input(m, given, self.loss_scale)
        stage.backward_weight(m)
        return {}

    def sum_tied(self) -> dict[str, Tensor | None]:
        """The whole gradients of the tied parameters used on this rank and elsewhere, by name.

        Each is summed down the stages that use it, last to first, as one process sums over layers, and sent back up.
        """
        transport = self._transport
        held: dict[Key, Tensor | None] = {}
        totals: dict[str, Tensor | None] = {}
        for step in self._tied:
            if step.waits:
                assert transport is not None, "messages need a transport"
                arrived: Tensor | None = transport.take(*step.waits)
            else:
                arrived = held.pop(step.reads) if step.reads else None
            if step.upwards:
                total = totals[step.name] = arrived if step.reads else totals[step.name]
            else:
                total = self._stages[step.stage].tied_gradient(step.name, arrived)
                if step.hands_over is None:
                    if arrived is None and total is not None:
                        total = total.clone()  # else the optimizer may change it while it is still on its way up
                    totals[step.name] = total
            if step.hands_over is not None:
                if transport is not None and step.leaves:
                    transport.send(step.to_rank, step.hands_over, total)
                else:
                    held[step.hands_over] = total
        return totals

    def next_step(self) -> None:
        """All messages of the step are taken."""
        assert not any(tensor is not None for tensor in self._held), "every tensor that was received has been read"
        if self._transport is not None:
            self._transport.next_step()
