"""One micro-batch through all stages of a cut in one process: the very stages that a run executes, action by action.

F0 F1 ... FK-1   then   IK-1 WK-1 ... I0 W0   (split)   or   BK-1 ... B0   (fused)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from planner.capture import Batch, Capture, RandomKey, Stage, StageProgram
from planner.measure.clock import Clock
from planner.schedules import Letter


class Act(Protocol):
    """Runs one action of a stage, in the way it is measured."""

    def __call__(self, letter: Letter, stage: int, action: Any, *given: Any) -> Any:
        """What ``action(*given)`` returns."""


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

    def seconds(self, clock: Clock, *, split: bool) -> dict[Letter, list[float]]:
        """Seconds of each stage's F and B, or F, I and W, by letter."""
        row: list[tuple[Letter, int]] = []

        def timed(letter: Letter, stage: int, action: Any, *given: Any) -> Any:
            clock.mark()  # what lies between actions is bookkeeping of this process
            made = action(*given)
            clock.mark()
            row.append((letter, stage))
            return made

        clock.start()
        self.run(timed, split=split)
        found: dict[Letter, list[float]] = {letter: [0.0] * len(self.stages) for letter, _ in row}
        for (letter, stage), value in zip(row, clock.seconds()[1::2], strict=True):
            found[letter][stage] = value
        return found

    def drop_gradients(self) -> None:
        """Free the gradients that piled up."""
        for stage in self.stages:
            stage.finish_gradients()
        self._module.zero_grad(set_to_none=True)

    def run(self, act: Act, *, split: bool) -> None:
        """Forward and backward of one micro-batch; every action goes through ``act``."""
        made: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            received = {boundary.name: made[boundary.name] for boundary in self.programs[number].receives}
            inputs, target = self._batch
            forward = partial(stage.forward, split=split)
            made |= act(Letter.FORWARD, number, forward, 0, inputs, target, received, self._key).sent
        del made, received
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
        return {
            boundary.name: gradients.pop(boundary.name)
            for boundary in (*program.sends, *program.receives)
            if any(reader > number for reader in boundary.grad_readers)
        }
