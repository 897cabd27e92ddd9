"""Micro-batches through the stages of a cut in one process: the very stages that a run executes, action by action.

all stages    F0 F1 ... FK-1   then   IK-1 WK-1 ... I0 W0   (split)   or   BK-1 ... B0   (fused)
one, timed    Fk  Fk Ik Wk  Fk Bk  Fk Ik Wk  Fk Bk ...      what the others hand to it is kept
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from planner.capture import Batch, Capture, RandomKey, Stage, StageProgram
from planner.measure.clock import Clock
from planner.schedules import Letter

SPLIT_FORWARD = "F before I"
"""A forward whose backward is I and W: it takes what Python adds at every op that is split."""
TIMED = (*Letter, SPLIT_FORWARD)
"""What is told apart."""


class Act(Protocol):
    """Runs one action of a stage, in the way it is measured."""

    def __call__(self, letter: Letter, stage: int, action: Any, *given: Any) -> Any:
        """What ``action(*given)`` returns."""


class Handed(NamedTuple):
    """The tensors and gradients that one stage is given from the others."""

    received: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


class Pipeline:
    """All stages of one cut, bound to the model's weights; gradients pile up in the stages as over micro-batches.

    I and W are told apart in stages that hand no gradient on, too: with other layers before them they would.
    """

    def __init__(self, captured: Capture, cut: Sequence[Sequence[str]], batch: Batch) -> None:
        self.programs: tuple[StageProgram, ...] = captured.stages(cut)
        self._module = captured.module
        self.stages = [Stage(program, captured.module, defer=False) for program in self.programs]
        self._batch = batch
        self._key = RandomKey(0, 0, 0)
        self.loss = 0.0
        """Of the last pass through all stages."""

    def handed(self) -> list[Handed]:
        """What each stage is given, from one pass through all of them; gradients pile up as in any pass."""
        received: dict[int, Mapping[str, Tensor]] = {}
        gradients: dict[int, Mapping[str, Tensor]] = {}

        def recorded(letter: Letter, stage: int, action: Any, *given: Any) -> Any:
            if letter is Letter.FORWARD:
                received[stage] = given[3]
            elif letter is Letter.BACKWARD_INPUT:
                gradients[stage] = dict(given[1])
            return action(*given)

        self.run(recorded, split=True)
        return [Handed(received[number], gradients[number]) for number in range(len(self.stages))]

    def seconds(
        self, number: int, handed: Handed, clock: Clock, *, rounds: int, under_way: int
    ) -> dict[str, list[float]]:
        """Seconds of one stage's F, and of its B, or I and W, by turns, on micro-batches that are handed to it.

        F is that of the fused ones; SPLIT_FORWARD stands for the others'. ``under_way``: micro-batches that are, when a
        backward begins, its own counted.
        """
        stage, (inputs, target) = self.stages[number], self._batch
        found: dict[str, list[float]] = {letter: [] for letter in TIMED}

        def forward(turn: int) -> None:
            stage.forward(turn, inputs, target, handed.received, self._key, split=turn % 2 == 0)

        def backward(turn: int) -> tuple[Letter, ...]:
            given = dict(handed.gradients)
            if turn % 2:
                stage.backward(turn, given, 1.0)
                clock.mark()
                return (Letter.BACKWARD,)
            stage.backward_input(turn, given, 1.0)
            clock.mark()
            stage.backward_weight(turn)
            clock.mark()
            return (Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT)

        ahead, turns = under_way - 1, 2 * rounds
        for turn in range(ahead):
            forward(turn)
        for turn in range(turns):
            clock.start()
            forward(turn + ahead)
            clock.mark()
            letters = backward(turn)
            forward_s, *seconds = clock.seconds()
            for letter, value in zip(letters, seconds, strict=True):
                found[letter].append(value)
            found[Letter.FORWARD if (turn + ahead) % 2 else SPLIT_FORWARD].append(forward_s)
        for turn in range(turns, turns + ahead):
            clock.start()
            backward(turn)
        return found

    def drop_gradients(self, *numbers: int) -> None:
        """Free the gradients that piled up in some stages, or in all."""
        for number in numbers or range(len(self.stages)):
            self.stages[number].finish_gradients()
        self._module.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Forward and backward of one micro-batch, as they come."""
        self.run(lambda letter, stage, action, *given: action(*given), split=False)

    def run(self, act: Act, *, split: bool) -> None:
        """Forward and backward of one micro-batch; every action goes through ``act``."""
        made: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            received = {boundary.name: made[boundary.name] for boundary in self.programs[number].receives}
            inputs, target = self._batch
            forward = partial(stage.forward, split=split)
            forwarded = act(Letter.FORWARD, number, forward, 0, inputs, target, received, self._key)
            made |= forwarded.sent
            if forwarded.loss is not None:
                self.loss = float(forwarded.loss)
        del made, received, forwarded
        gradients: dict[str, Tensor] = {}
        for number, stage in reversed(list(enumerate(self.stages))):
            given = self._gradients_for(number, gradients)
            if split:
                returned = act(Letter.BACKWARD_INPUT, number, stage.backward_input, 0, given, 1.0)
                del given
                act(Letter.BACKWARD_WEIGHT, number, stage.backward_weight, 0)
            else:
                returned = act(Letter.BACKWARD, number, stage.backward, 0, given, 1.0)
            gradients |= returned

    def _gradients_for(self, number: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients that a stage is given: of each tensor made or relayed here, from its next reader."""
        program = self.programs[number]
        return {name: gradients.pop(name) for name in (*program.roots, *program.relays)}
