"""All stages of a cut in one process, as a pipeline would run them: what every equality test here uses."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor, nn

from planner.capture import Batch, Capture, EagerReference, RandomKey, Stage, microbatch


@dataclass
class Trained:
    """What a step leaves behind: losses by micro-batch, gradients and buffers by name."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def eager_step(captured: Capture, batch: Batch) -> tuple[Trained, bool]:
    """A step of the user's own model, and whether its random numbers were those of the layers."""
    eager = EagerReference(captured)
    losses = eager.step(batch, seed=7, step=0)
    gradients = {name: parameter.grad for name, parameter in eager.module.named_parameters()}
    return Trained(losses, gradients, dict(eager.module.named_buffers())), eager.aligned


@dataclass
class Pipeline:
    """Stages of one cut on one copy of the module; gradients travel hop by hop."""

    capture: Capture
    cut: Sequence[Sequence[str]]
    recompute: bool = False
    module: nn.Module = field(init=False)
    stages: list[Stage] = field(init=False)

    def __post_init__(self) -> None:
        self.module = copy.deepcopy(self.capture.module)
        programs = self.capture.stages(self.cut)
        self.stages = [Stage(program, self.module, recompute=self.recompute) for program in programs]
        self._activations: dict[tuple[int, str], Tensor] = {}
        self._gradients: dict[tuple[int, int, str], Tensor] = {}
        self.losses: dict[int, Tensor] = {}

    def step(self, batch: Batch, count: int, *, actions: Iterable[tuple[str, int, int]], seed: int = 7) -> Trained:
        """One optimizer step of ``count`` micro-batches; ``actions`` are (letter, stage, micro-batch) in order."""
        size = self.capture.microbatch_size
        parts = [microbatch(batch, index, size=size) for index in range(count)]
        actions = list(actions)
        split = {(stage, index) for letter, stage, index in actions if letter == "I"}
        for letter, number, index in actions:
            if letter == "F":
                self._forward(number, index, parts[index], RandomKey(seed, 0, index), (number, index) in split)
            elif letter == "W":
                self.stages[number].backward_weight(index)
            else:
                self._backward(number, index, letter, 1 / count)
        self._finish()
        return Trained(
            losses=[self.losses[index] for index in range(count)],
            gradients={name: parameter.grad for name, parameter in self.module.named_parameters()},
            buffers=dict(self.module.named_buffers()),
        )

    def _forward(self, number: int, index: int, part: Batch, key: RandomKey, split: bool) -> None:
        stage = self.stages[number]
        received = {b.name: self._activations[index, b.name] for b in stage.program.receives}
        done = stage.forward(index, part.inputs, part.target, received, key, split=split)
        for boundary in stage.program.sends:
            sent = done.sent[boundary.name]
            assert tuple(sent.shape) == boundary.shape
            assert sent.stride() == boundary.stride
            assert sent.dtype == boundary.dtype
            self._activations[index, boundary.name] = over_the_wire(sent)
        if done.loss is not None:
            self.losses[index] = done.loss

    def _backward(self, number: int, index: int, letter: str, scale: float) -> None:
        stage = self.stages[number]
        program = stage.program
        wanted = (*program.roots, *program.relays)
        gradients = {name: self._gradients.pop((number, index, name)) for name in wanted}
        act = stage.backward if letter == "B" else stage.backward_input
        for name, gradient in act(index, gradients, scale).items():
            boundary = next(b for b in program.receives if b.name == name)
            assert tuple(gradient.shape) == boundary.shape
            before = [reader for reader in boundary.grad_readers if reader < number]
            to = before[-1] if before else boundary.producer
            self._gradients[to, index, name] = over_the_wire(gradient)

    def _finish(self) -> None:
        names = {name for stage in self.stages for name in stage.program.parameters}
        totals: dict[str, Tensor | None] = {}
        for name in names:
            users = [stage for stage in self.stages if name in stage.program.parameters]
            if len(users) > 1:
                partial = None
                for stage in reversed(users):
                    partial = stage.tied_gradient(name, partial)
                totals[name] = partial
        for stage in self.stages:
            used = {name: total for name, total in totals.items() if name in stage.program.parameters}
            stage.finish_gradients(used)


def over_the_wire(tensor: Tensor) -> Tensor:
    """A copy with the same strides (of 0 too) in new memory: the stretch of storage that the tensor spans."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    stretch = tensor.as_strided((span if tensor.numel() else 0,), (1,)).clone()
    return stretch.as_strided(tensor.shape, tensor.stride())


def gpipe(stages: int, count: int, *, split: bool = False) -> list[tuple[str, int, int]]:
    """All forwards, then all backwards; W after all I's of a micro-batch."""
    made = [("F", stage, index) for index in range(count) for stage in range(stages)]
    for index in range(count):
        made += [("I" if split else "B", stage, index) for stage in reversed(range(stages))]
        made += [("W", stage, index) for stage in range(stages)] if split else []
    return made


def one_f_one_b(stages: int, count: int, *, split: bool = False) -> list[tuple[str, int, int]]:
    """1F1B with its rounds in an order that one process can follow; W one micro-batch late."""
    made: list[tuple[str, int, int]] = []
    forward = dict.fromkeys(range(stages), 0)
    backward = dict.fromkeys(range(stages), 0)
    weight = dict.fromkeys(range(stages), 0)
    while any(done < count for done in backward.values()):
        for stage in range(stages):
            ready = forward[stage] < (forward[stage - 1] if stage else count)
            if ready and forward[stage] - backward[stage] < stages - stage:
                made.append(("F", stage, forward[stage]))
                forward[stage] += 1
        for stage in reversed(range(stages)):
            above = backward[stage + 1] if stage + 1 < stages else forward[stage]
            if backward[stage] < min(above, forward[stage]):
                made.append(("I" if split else "B", stage, backward[stage]))
                backward[stage] += 1
                if split and backward[stage] - weight[stage] > 1:
                    made.append(("W", stage, weight[stage]))
                    weight[stage] += 1
    if split:
        made += [("W", stage, index) for stage in range(stages) for index in range(weight[stage], count)]
    return made


def even_cut(capture: Capture, stages: int) -> list[list[str]]:
    """Consecutive layers, as even in number as can be."""
    names = [layer.name for layer in capture.layers]
    bounds = [round(index * len(names) / stages) for index in range(stages + 1)]
    return [names[first:last] for first, last in itertools.pairwise(bounds)]


def differences(one: Trained, other: Trained) -> list[str]:
    """Names of what is not equal to the bit."""
    found = [
        f"loss {index}"
        for index, pair in enumerate(zip(one.losses, other.losses, strict=True))
        if not torch.equal(*pair)
    ]
    for name, gradient in one.gradients.items():
        twin = other.gradients[name]
        if (gradient is None) != (twin is None) or (gradient is not None and not torch.equal(gradient, twin)):  # type: ignore[arg-type]
            found.append(name)
    return found + [name for name, buffer in one.buffers.items() if not torch.equal(buffer, other.buffers[name])]


def random_order(stages: int, count: int, random: Random, *, split: bool = False) -> list[tuple[str, int, int]]:
    """Any order that a pipeline allows; each stage's actions of one letter by micro-batch (buffers hang on it)."""
    forwards = {(stage, index) for stage in range(stages) for index in range(count)}
    backwards = dict.fromkeys(range(stages), 0)
    weights = dict.fromkeys(range(stages), 0)
    made: list[tuple[str, int, int]] = []
    while len(made) < stages * count * (3 if split else 2):
        ready = [
            ("F", stage, index)
            for stage, index in sorted(forwards)
            if not forwards & {(stage - 1, index), (stage, index - 1)}
        ]
        for stage, index in backwards.items():
            above = stage + 1 == stages or backwards[stage + 1] > index
            if index < count and above and (stage, index) not in forwards:
                ready.append(("I" if split else "B", stage, index))
            if split and weights[stage] < index:
                ready.append(("W", stage, weights[stage]))
        letter, stage, index = random.choice(ready)
        made.append((letter, stage, index))
        if letter == "F":
            forwards.remove((stage, index))
        else:
            (weights if letter == "W" else backwards)[stage] += 1
    return made


def random_cut(capture: Capture, stages: int, random: Random) -> list[list[str]]:
    """Any cut that the edges allow, not only of consecutive layers; some stages may stay empty and are left out."""
    least = dict.fromkeys((layer.name for layer in capture.layers), 0)
    sources: dict[str, list[str]] = {name: [] for name in least}
    for edge in capture.edges:
        sources[edge.target].append(edge.source)
    for name, before in sources.items():
        bound = max((least[source] for source in before), default=0)
        least[name] = bound if random.random() < 0.6 else random.randint(bound, stages - 1)
    cut = [[name for name, stage in least.items() if stage == number] for number in range(stages)]
    return [names for names in cut if names]
