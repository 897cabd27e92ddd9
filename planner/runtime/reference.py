"""Training in one process, K = 1, through the same stage code: what a run is compared with, to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.capture import Batch, Capture, EagerReference, ModelFile
from planner.capture.batch import to_device
from planner.runtime.board import State, Writer
from planner.runtime.checkpoint import Part, WholeModel
from planner.runtime.initial import fill, initial_weights
from planner.runtime.messages import rank_programs
from planner.runtime.optimizer import NamedOptimizer
from planner.runtime.scaling import LossScaling
from planner.runtime.trainer import Shape, Trainer, routes_of
from planner.schedules import Action, Letter

ROUNDING = 1e-4
"""How far losses may be apart, of the largest, where sums run in an order of their own.

So they do over more than two replicas, over tensor ranks, and where a stage's backwards are not in the order of the
micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Losses, one mean a step, and the weights after the last step.

    ``eager_difference``: how far the losses are from those of the user's own model in plain PyTorch.
    """

    losses: tuple[float, ...]
    weights: Mapping[str, Tensor]
    eager_difference: float | None


def train_whole(
    model_file: ModelFile,
    captured: Capture,
    *,
    start: int,
    restore: Callable[[Part], None],
    batches: Callable[[], Iterator[Batch]],
    num_steps: int,
    shape: Shape,
    seed: int,
    initial: Path | None,
    device: torch.device,
    board: Writer,
) -> Reference:
    """Train with all layers in one stage, micro-batches one after another; replicas too, then adding their sums.

    ``start``: the first step, before which ``restore`` puts a checkpoint in, where there is one. ``initial``: the files
    of the weights that it starts with, if they are not those of model().
    """
    programs = captured.stages([[layer.name for layer in captured.layers]])
    found = routes_of(captured, programs, ranks=[0])
    order = tuple(
        Action(0, letter, m) for m in range(shape.num_microbatches) for letter in (Letter.FORWARD, Letter.BACKWARD)
    )
    (program,) = rank_programs((order,), found)
    module = initial_weights(model_file, seed, files=initial)
    trainer = Trainer(
        model_file=model_file,
        module=module,
        programs=programs,
        recompute=[False],
        found=found,
        program=program,
        shape=shape,
        seed=seed,
        device=device,
        transport=None,
        group=None,
        pipeline=None,
        board=board,
    )
    restore(trainer)
    steps = list(enumerate(islice(batches(), num_steps), start))
    losses = tuple(trainer.step(step, batch).loss for step, batch in steps)
    weights = {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}
    eager = _eager_losses(model_file, captured, initial=initial, restore=restore, steps=steps, seed=seed, board=board)
    return Reference(
        losses=losses,
        weights=weights,
        eager_difference=None if eager is None else _largest_difference(losses, eager),
    )


def _eager_losses(
    model_file: ModelFile,
    captured: Capture,
    *,
    initial: Path | None,
    restore: Callable[[Part], None],
    steps: Sequence[tuple[int, Batch]],
    seed: int,
    board: Writer,
) -> tuple[float, ...] | None:
    """What the user's own model loses in plain PyTorch, one mean a step, with dropout drawn alike.

    None where the two do not draw random numbers equally often, so that nothing can be compared.
    """
    eager = EagerReference(captured)
    if initial is not None:
        fill(eager.module, initial)
    parameters = dict(eager.module.named_parameters())
    optimizer = NamedOptimizer(model_file.optimizer(parameters.values()), parameters)
    scaling = LossScaling(device=captured.device) if model_file.autocast is torch.float16 else None
    buffers = dict(eager.module.named_buffers())
    restore(WholeModel(parameters=parameters, buffers=buffers, optimizer=optimizer, scaling=scaling))
    means = []
    for step, batch in steps:
        board.at(State.VERIFYING)
        scale = scaling.scale if scaling is not None else 1.0
        losses = eager.step(to_device(batch, captured.device), seed=seed, step=step, scale=scale)
        if scaling is None or scaling.unscale(parameters.values()):
            if model_file.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters.values(), model_file.clip_norm)
            optimizer.step()
        means.append(sum(loss.item() for loss in losses) / len(losses))
    return tuple(means) if eager.aligned else None


def _largest_difference(these: Iterable[float], those: Iterable[float]) -> float:
    """The largest absolute difference of pairs; NaN where but one of a pair is NaN."""
    found = [0.0 if _alike(a, b) else abs(a - b) for a, b in zip(these, those, strict=True)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def _alike(a: float, b: float) -> bool:
    """Equal, infinities and NaN too."""
    return a == b or (math.isnan(a) and math.isnan(b))


def compare(
    reference: Reference, weights: Iterable[tuple[str, Tensor]], losses: Sequence[float], *, exact: bool
) -> dict[str, Any]:
    """A run's losses and weights beside the reference's: equal to the bit, NaN to NaN.

    Losses to rounding where not ``exact``.
    """
    same, largest = True, 0.0
    for name, weight in weights:
        whole = reference.weights[name].contiguous()
        bits = whole.view(-1).view(torch.uint8), weight.reshape(-1).view(torch.uint8)
        if torch.equal(*bits):
            continue
        these, those = whole.reshape(-1).double(), weight.reshape(-1).double()
        unlike = (bits[0] != bits[1]).view(len(these), -1).any(1) & ~(these.isnan() & those.isnan())
        if unlike.any():
            same = False
            largest = max(largest, (these - those).abs()[unlike].max().item())
    loss_difference = _largest_difference(reference.losses, losses)
    if exact:
        equal = same and all(map(_alike, losses, reference.losses))
    else:
        finite = [abs(loss) for loss in reference.losses if math.isfinite(loss)]
        equal = loss_difference <= ROUNDING * max(finite, default=0.0)
    return {
        "equal": equal,
        "loss_difference": loss_difference,
        "largest_weight_difference": largest,
        "eager_difference": reference.eager_difference,
    }
