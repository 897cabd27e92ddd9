"""Layers measured one by one, for a model that does not fit: made up, fed, timed, freed.

    layer 0      layer 1      layer 2      layer 3
    measured ──▶ measured ──▶ like 1  ──▶  measured        what a layer sends is real, and is what the next is fed
                              its outputs stand in

Layers that do the same to tensors of the same kind are measured once. At any time there are the weights and gradients
of one layer, what it saves, and the tensors that cross the cut before it. Runs of several layers are timed too where
they need no more memory than the largest layer, and the layers' figures are fitted to them (calibrate.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from planner.allocator import give_back_freed_memory
from planner.capture import Batch, Capture, RandomKey, Stage, StageProgram
from planner.capture.made_up import made_up, made_up_parameter
from planner.capture.program import Boundary
from planner.capture.signature import signature
from planner.capture.weightless import Fakes
from planner.measure.calibrate import Run, calibrate, entry_seconds, errors
from planner.measure.clock import Clock, clock_for
from planner.measure.held import HeldBytes, fill_gradients, held_by, saved_inputs
from planner.measure.passes import SPLIT_FORWARD, TIMED
from planner.measure.timing import SMALLEST_RUN, Progress, Timed, layer_seconds, no_collector
from planner.schedules import Letter

BUDGET_S = 20.0
"""Timed passes of one stage go on for about this long, within these numbers of passes."""
FEWEST_PASSES, MOST_PASSES = 2, 9
SMALL_BYTES = 64 * 2**20
"""Runs of layers may always take this much memory."""
OPTIMIZER_BYTES = 256 * 2**20
"""The optimizer is timed on no more parameters than this (one at least)."""

_Rows = dict[str, list[float]]


class TooLargeError(Exception):
    """One layer alone needs more memory than there is."""


class Weights(nn.Module):
    """Some of a model's parameters and buffers under their names there; the parameters are made up, or all is fake."""

    def __init__(
        self, captured: Capture, parameters: Sequence[str], buffers: Sequence[str], fakes: Fakes | None = None
    ) -> None:
        super().__init__()
        module, device = captured.module, captured.device
        known, kept = dict(module.named_parameters()), dict(module.named_buffers())
        self._made: dict[str, Any] = {
            name: made_up_parameter(name, known[name], device) if fakes is None else fakes.of(known[name])
            for name in parameters
        }
        self._kept = {name: kept[name].clone() if fakes is None else fakes.of(kept[name]) for name in buffers}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters."""
        yield from self._made.items()

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers."""
        yield from self._kept.items()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probed:
    """What one stage took, pass by pass, what it held, and what it sent."""

    rows: _Rows
    held: HeldBytes
    sent: tuple[Tensor, ...]

    def medians(self, *letters: str) -> float:
        return sum(median(self.rows[letter]) for letter in letters)


def measure_layerwise(captured: Capture, *, free_bytes: int, progress: Progress) -> tuple[Timed, tuple[HeldBytes, ...]]:
    """Seconds and bytes of all layers of a model captured without its weights.

    Raises TooLargeError where one layer alone needs more than ``free_bytes``.
    """
    with no_collector():
        walk = _Walk(captured, free_bytes, progress)
        walk.run()
    return walk.timed(), tuple(found.held for found in walk.layers)


class _Walk:
    """Through all layers, in execution order."""

    def __init__(self, captured: Capture, free_bytes: int, progress: Progress) -> None:
        self._captured = captured
        self._progress = progress
        self._programs = [captured.program([layer.name]) for layer in captured.layers]
        self._keys = [signature(program) for program in self._programs]
        self._saved_inputs = saved_inputs(captured)
        self._check(free_bytes)
        self._last_reader = {
            name: index for index, program in enumerate(self._programs) for name in map(_name, program.receives)
        }
        self._alive: dict[str, Tensor] = {}
        self._known: dict[str, _Probed] = {}
        self._clock = clock_for(captured.device)
        self.layers: list[_Probed] = []
        self.runs: dict[bool, list[tuple[int, int, _Probed]]] = {True: [], False: []}  # fitted or foretold

    def _check(self, free_bytes: int) -> None:
        for index, layer in enumerate(self._captured.layers):
            needed = self._needed(index, index + 1)
            if needed > free_bytes:
                raise TooLargeError(f"layer {layer.name} alone needs {needed} bytes, of which {free_bytes} are free")

    def _needed(self, first: int, last: int) -> int:
        """About the bytes that measuring a run takes: weights, gradients, the largest one twice, saved tensors."""
        layers = self._captured.layers[first:last]
        largest = max(layer.trainable_bytes for layer in layers)
        fixed = sum(layer.parameter_bytes + layer.trainable_bytes + layer.buffer_bytes for layer in layers)
        return fixed + largest + 2 * sum(layer.saved_bytes for layer in layers)

    def run(self) -> None:
        limit = max(SMALL_BYTES, *(self._needed(index, index + 1) for index in range(len(self._programs))))
        spans = {fitted: self._spans(limit, shifted=not fitted) for fitted in (True, False)}
        left = Counter(self._keys)
        for index, (program, key) in enumerate(zip(self._programs, self._keys, strict=True)):
            self._progress(f"timing {program.layers[0]}", index / len(self._programs))
            for fitted, found in spans.items():
                if (last := found.get(index)) is not None:
                    whole = self._captured.program([layer.name for layer in self._captured.layers[index:last]])
                    self.runs[fitted].append((index, last, self._probe(whole, signature(whole), index, last)))
            probed = self._probe(program, key, index, index + 1)
            self.layers.append(probed)
            for boundary, tensor in zip(program.sends, probed.sent, strict=True):
                self._alive[boundary.name] = tensor
            self._alive = {name: tensor for name, tensor in self._alive.items() if self._last_reader[name] > index}
            left[key] -= 1
            if not left[key]:
                self._known[key] = _Probed(rows=probed.rows, held=probed.held, sent=())

    def _spans(self, limit: int, *, shifted: bool) -> dict[int, int]:
        """Runs of two layers and more, one after another, none of which needs more than ``limit``: first -> end."""
        found: dict[int, int] = {}
        first, number = 0, len(self._programs)
        while first < number:
            last = first + 1
            while last < number and self._needed(first, last + 1) <= limit and last - first < 8:
                last += 1
            if shifted and not found and last - first > 2:
                last = first + (last - first) // 2
            if last - first > 1:
                found[first] = last
            first = last
        return found

    def _probe(self, program: StageProgram, key: str, first: int, last: int) -> _Probed:
        if key in self._known:
            return self._known[key]
        give_back_freed_memory()  # holes that another layer left would add to this one's memory
        captured = self._captured
        weights = Weights(captured, program.parameters, program.buffers)
        stage = Stage(program, weights, defer=False)
        received = {name: self._alive[name] for name in map(_name, program.receives)}
        gradients = made_up_gradients(program, captured.device)
        saved = sum(layer.saved_bytes for layer in captured.layers[first:last]) + self._saved_inputs[first]
        fill_gradients(stage, captured.batch, received, gradients)
        held = held_by(captured, stage, captured.batch, received, gradients, saved)
        bench = _Bench(stage, captured.batch, received, gradients, self._clock)
        rows, sent = bench.passes()
        stage.finish_gradients()
        self._known[key] = found = _Probed(rows=rows, held=held, sent=sent if last - first == 1 else ())
        return found

    def timed(self) -> Timed:
        """As where the model fits; ``errors`` holds nothing where no run of layers could be timed."""
        whole = (Letter.FORWARD, Letter.BACKWARD)
        layers = layer_seconds(self._figures, [_spread(one) for one in self.layers])
        both = [one.forward + one.backward_input + one.backward_weight for one in layers]
        foretold = [run for run in self._runs(False, *whole) if run.seconds >= SMALLEST_RUN * sum(both)]
        return Timed(
            layers=layers,
            entry_s=entry_seconds([one.medians(*whole) for one in self.layers], self._runs(True, *whole)),
            errors=errors(both, foretold),
        )

    def _figures(self, *letters: str) -> tuple[float, ...]:
        return calibrate([one.medians(*letters) for one in self.layers], self._runs(True, *letters))

    def _runs(self, fitted: bool, *letters: str) -> list[Run]:
        return [Run(first, last, one.medians(*letters)) for first, last, one in self.runs[fitted]]


class _Bench:
    """One stage, timed pass after pass, split and fused by turns; the gradients that it needs are made up."""

    def __init__(
        self, stage: Stage, batch: Batch, received: Mapping[str, Tensor], gradients: Mapping[str, Tensor], clock: Clock
    ) -> None:
        self._stage, self._batch, self._clock = stage, batch, clock
        self._received, self._gradients = received, gradients
        self._sent: dict[str, Tensor] = {}

    def passes(self) -> tuple[_Rows, tuple[Tensor, ...]]:
        """Seconds of what is told apart, and what the stage sends."""
        rows: _Rows = {letter: [] for letter in TIMED}
        passes, number = MOST_PASSES, 0
        while number < passes:
            split, fused = self._pass(split=True), self._pass(split=False)
            for letter, seconds in (*split.items(), *fused.items()):
                rows[letter].append(seconds)
            number += 1
            if number == 1:
                one_s = sum(split.values()) + sum(fused.values())
                passes = max(FEWEST_PASSES, min(MOST_PASSES, int(BUDGET_S / (one_s or 1))))
        return rows, tuple(self._sent[boundary.name] for boundary in self._stage.program.sends)

    def _pass(self, *, split: bool) -> dict[str, float]:
        inputs, target = self._batch
        given = dict(self._gradients)
        self._clock.start()
        forwarded = self._stage.forward(0, inputs, target, self._received, RandomKey(0, 0, 0), split=split)
        self._clock.mark()
        if split:
            self._stage.backward_input(0, given, 1.0)
            self._clock.mark()
            self._stage.backward_weight(0)
        else:
            self._stage.backward(0, given, 1.0)
        self._clock.mark()
        self._sent = forwarded.sent
        letters = (
            (SPLIT_FORWARD, Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT)
            if split
            else (Letter.FORWARD, Letter.BACKWARD)
        )
        return dict(zip(letters, self._clock.seconds(), strict=True))


def made_up_gradients(program: StageProgram, device: torch.device | str) -> dict[str, Tensor]:
    """Gradients such as later stages would send: small numbers."""
    wanted = {*program.roots, *program.relays}
    boundaries = {boundary.name: boundary for boundary in (*program.sends, *program.receives)}
    return {name: made_up(boundaries[name].example(), device).mul_(1e-3) for name in boundaries if name in wanted}


def _name(boundary: Boundary) -> str:
    return boundary.name


def _spread(one: _Probed) -> float:
    row = [f + b for f, b in zip(one.rows[Letter.FORWARD], one.rows[Letter.BACKWARD], strict=True)]
    low, middle, high = quantiles(row, n=4, method="inclusive") if len(row) > 1 else (row[0],) * 3
    return (high - low) / (middle or 1)


def optimizer_weights(captured: Capture) -> Weights:
    """Parameters of the layer that trains most, not too many of them, to step the optimizer over."""
    known = dict(captured.module.named_parameters())
    largest = max(captured.layers, key=lambda layer: layer.trainable_bytes)
    names: list[str] = []
    total = 0
    for name in largest.parameters:
        size = known[name].numel() * known[name].element_size()
        if known[name].requires_grad and (not names or total + size <= OPTIMIZER_BYTES):
            names.append(name)
            total += size
    return Weights(captured, names, ())
