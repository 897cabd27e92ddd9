"""Trains with one rank's part of a plan: actions, sums over replicas and tied weights, optimizer step.

The same code trains a plan on many processes, and K = 1, one stage that holds every layer, in one.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.capture import (
    Batch,
    Capture,
    ModelFile,
    RandomKey,
    Stage,
    StageProgram,
    microbatch,
)
from planner.capture.batch import to_device
from planner.runtime.board import State, Writer
from planner.runtime.clipping import Clipping
from planner.runtime.executor import CudaStopwatch, Executor, HostStopwatch, Mark, Span, Stopwatch
from planner.runtime.groups import Group
from planner.runtime.memory import LivePeak, state_bytes, total_bytes
from planner.runtime.messages import RankProgram, Routes, routes
from planner.runtime.optimizer import NamedOptimizer
from planner.runtime.parts import TensorParts
from planner.runtime.replicas import Replicas
from planner.runtime.scaling import LossScaling
from planner.runtime.sharded import Shards
from planner.runtime.transport import Transport
from planner.schedules import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a step's samples are laid out: G = b · M · D; this process trains ``replicas`` of 0..D-1 in turn."""

    microbatch_size: int
    num_microbatches: int
    data: int = 1
    replicas: tuple[int, ...] = (0,)


def routes_of(capture: Capture, programs: Sequence[StageProgram], ranks: Sequence[int]) -> Routes:
    """The routes between the stages of a cut of a captured model."""
    parameters = dict(capture.module.named_parameters())
    return routes(
        [program.sends for program in programs],
        ranks,
        parameters=[program.parameters for program in programs],
        trainable=lambda name: parameters[name].requires_grad,
    )


class Trainer:
    """One rank of one replica: its stages, their weights, their optimizer."""

    def __init__(
        self,
        *,
        model_file: ModelFile,
        module: nn.Module,
        programs: Sequence[StageProgram],
        recompute: Sequence[bool],
        found: Routes,
        program: RankProgram,
        shape: Shape,
        seed: int,
        device: torch.device,
        transport: Transport | None,
        group: Group | None,
        pipeline: Group | None,
        board: Writer,
        parts: TensorParts | None = None,
        zero1: bool = False,
    ) -> None:
        """``group``: of this rank's replicas, ``pipeline``: of this replica's ranks; None where there is but one.
        ``zero1``: the optimizer is sharded over the replicas.

        ``parts``: what the ranks hold that share this rank's layers, where there are several.
        """
        self.rank = program.rank
        self._shape = shape
        self._seed = seed
        self._device = device
        self._transport = transport
        self._group = group
        self._replicas: Replicas | Shards | None = None
        self._board = board
        self._tied = {name for name, _ in found.ties}
        self._order = tuple(step.action for step in program.steps)
        numbers = [stage for stage, rank in enumerate(found.ranks) if rank == program.rank]
        self.parameters = _on_device(module.named_parameters(), [programs[k].parameters for k in numbers], device)
        self.buffers = _on_device(module.named_buffers(), [programs[k].buffers for k in numbers], device)
        self._stages = {k: Stage(programs[k], module, recompute=recompute[k]) for k in numbers}
        trained = any(parameter.requires_grad for parameter in self.parameters.values())
        self.changed_buffers = frozenset(name for k in numbers for name in programs[k].changed_buffers)
        self.optimizer: NamedOptimizer | None = None
        self.shards: Shards | None = None
        if trained:
            optimizer = model_file.optimizer(self.parameters.values())
            if zero1 and group is not None:
                self.shards = self._sharded(optimizer, group)
                self.optimizer = NamedOptimizer(optimizer, self.shards.pieces, cut=self.shards.cut)
            else:
                self.optimizer = NamedOptimizer(optimizer, self.parameters)
        if group is not None:
            self._replicas = self.shards or Replicas(self._rows(), group)
        self._gradient_bytes = self._keep_gradients() if len(shape.replicas) == 1 else 0
        self._stopwatch: Stopwatch = CudaStopwatch() if device.type == "cuda" else HostStopwatch()
        self._executor = Executor(
            program,
            stages=self._stages,
            transport=transport,
            stopwatch=self._stopwatch,
            board=board,
            loss_scale=1.0 / (shape.num_microbatches * shape.data),
        )
        self._loss_scale = self._executor.loss_scale
        self.scaling: LossScaling | None = None
        if model_file.autocast is torch.float16:
            tensor_group = None if parts is None else parts.group
            shared = group if self.shards is not None else None
            self.scaling = LossScaling(groups=(pipeline, tensor_group, shared), device=device)
        self._clipping: Clipping | None = None
        if model_file.clip_norm is not None:
            self._clipping = Clipping(
                model_file.clip_norm,
                names=[name for name, parameter in module.named_parameters() if parameter.requires_grad],
                counted=_first_here(found.ranks, programs, program.rank),
                group=pipeline,
                device=device,
                parts=parts,
                shared=None if self.shards is None or group is None else (group, self.shards.divided),
            )
        self._reads_data = any(programs[k].inputs for k in numbers)
        self._has_loss = any(programs[k].has_loss for k in numbers)
        self._live_bytes = self._steps_done = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        gc.collect()
        gc.freeze()  # what stands now lasts; a collection in a step then looks at little

    def step(self, step: int, batch: Batch) -> StepRecord:
        """Train one step on a global batch."""
        if self._reads_data:
            batch = to_device(batch, self._device)
        if self._steps_done == 0 and self._device.type == "cpu":
            with LivePeak() as live:
                losses, spans = self._gradients(step, batch)
            self._live_bytes = live.peak_bytes
        else:
            losses, spans = self._gradients(step, batch)
        self._steps_done += 1
        updating, updated = self._update()
        end = self._stopwatch.mark()
        return StepRecord(spans=spans, updating=updating, updated=updated, end=end, losses=self._loss_values(losses))

    def _gradients(self, step: int, batch: Batch) -> tuple[list[Tensor], tuple[Span, ...]]:
        """All actions, and every parameter's gradient of the whole batch in its ``.grad``."""
        losses: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        if self.scaling is not None:
            self._executor.loss_scale = self._loss_scale * self.scaling.scale
        spans: tuple[Span, ...] = ()
        for replica in self._shape.replicas:
            done = self._sum_stage if self._replicas is not None else None
            made, spans = self._executor.run(*self._share(step, batch, replica), done=done)
            losses += [made[m] for m in sorted(made)]
            self._board.at(State.GRADIENTS)
            totals = self._executor.sum_tied()
            for stage in self._stages.values():
                stage.finish_gradients(totals, names=self._tied if self._replicas is not None else None)
            if len(self._shape.replicas) > 1:
                self._add_to(sums)
        if self._replicas is not None:
            for name in sorted(self._tied & self.parameters.keys()):
                self._start_sum([name])
            self._replicas.finish()
        self._executor.next_step()
        return losses, spans

    def _update(self) -> tuple[Mark, Mark]:
        """Step the optimizer, unless a gradient in float16 overflowed somewhere; then no parameter has a gradient.

        Returns when the optimizer's step began and ended.
        """
        stepped = self.parameters if self.shards is None else self.shards.pieces
        finite = self.scaling is None or self.scaling.unscale(stepped.values())
        if finite and self._clipping is not None:
            self._clipping.clip(stepped)
        self._board.at(State.OPTIMIZER)
        began = self._stopwatch.mark()
        if finite and self.optimizer is not None:
            self.optimizer.step()
        ended = self._stopwatch.mark()
        if finite and self.shards is not None:
            self.shards.gather()
        for parameter in (*self.parameters.values(), *stepped.values()):
            parameter.grad = None
        return began, ended

    def _sharded(self, optimizer: torch.optim.Optimizer, group: Group) -> Shards:
        """This replica's share of the optimizer: of each stage's parameters, and of each tied one, a part."""
        (replica,) = self._shape.replicas
        return Shards(self._rows(), optimizer, replica=replica, replicas=self._shape.data, group=group)

    def _rows(self) -> list[dict[str, nn.Parameter]]:
        """The parameters trained here, those in a row summed together over the replicas: a stage's, each tied one."""
        rows: list[Sequence[str]] = [self._own(stage) for stage in self._stages.values()]
        rows += [[name] for name in sorted(self._tied & self.parameters.keys())]
        trained = {name: value for name, value in self.parameters.items() if value.requires_grad}
        return [{name: trained[name] for name in row if name in trained} for row in rows]

    def _own(self, stage: Stage) -> list[str]:
        """The parameters that no other stage uses."""
        return [name for name in stage.program.parameters if name not in self._tied]

    def _keep_gradients(self) -> int:
        """Let the stages' gradients gather where they are summed over the replicas; the bytes that gradients take."""
        places = {} if self._replicas is None else self._replicas.places
        kept = list(places.values())
        for stage in self._stages.values():
            own = {name: places[name] for name in self._own(stage) if name in places}
            kept += stage.keep_gradients(own).places.values()
        storages = {place.untyped_storage().data_ptr(): place.untyped_storage().nbytes() for place in kept}
        return sum(storages.values())

    def _sum_stage(self, stage: Stage) -> None:
        """Begin to add up a stage's gradients over the replicas: all backwards of the stage have run."""
        own = self._own(stage)
        stage.finish_gradients(names=own)
        self._start_sum(own)

    def _start_sum(self, names: Sequence[str]) -> None:
        assert self._replicas is not None
        self._replicas.start(names)

    def _share(self, step: int, batch: Batch, replica: int) -> tuple[list[Batch], list[RandomKey]]:
        """A replica's micro-batches, and what their random numbers hang on; the whole batch where no stage reads it."""
        shape = self._shape
        numbers = range(replica * shape.num_microbatches, (replica + 1) * shape.num_microbatches)
        keys = [RandomKey(self._seed, step, number) for number in numbers]
        if not self._reads_data:
            return [batch] * len(keys), keys
        return [microbatch(batch, number, size=shape.microbatch_size) for number in numbers], keys

    def _add_to(self, sums: dict[str, Tensor]) -> None:
        """Add up the gradients of replicas trained one after another, dense; ``.grad`` is the sum so far."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense()
                sums[name] = sums[name] + gradient if name in sums else gradient
            parameter.grad = sums.get(name)

    def _loss_values(self, losses: Sequence[Tensor]) -> tuple[float, ...]:
        """The losses of all micro-batches of all replicas, in their order; none where no loss is made on this rank."""
        if not self._has_loss:
            return ()
        row = torch.stack([loss.double() for loss in losses])
        if self._group is None:
            return tuple(row.tolist())
        return tuple(torch.cat(self._group.gather(row, self._shape.data)).tolist())

    @property
    def reads_data(self) -> bool:
        """Whether a stage of this rank reads inputs or targets."""
        return self._reads_data

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of a step."""
        return self._order

    @property
    def stopwatch(self) -> Stopwatch:
        """What the marks of records are made with."""
        return self._stopwatch

    @property
    def trainable_bytes(self) -> int:
        """Bytes of what is trained here: of a sharded optimizer this replica's share."""
        stepped = self.parameters if self.shards is None else self.shards.pieces
        return total_bytes(value for value in stepped.values() if value.requires_grad)

    def peak_memory_bytes(self) -> int:
        """The most memory this rank held: as the allocator saw it on CUDA, by counting tensors on the CPU.

        Counted: parameters, gradients, buffers and optimizer state, and the fullest moment of the first step's other
        tensors: what F saved, messages, and what the ops themselves made.
        """
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        owned = total_bytes([*self.parameters.values(), *self.buffers.values()]) + self._gradient_bytes
        return owned + state_bytes(self.optimizer.optimizer if self.optimizer else None) + self._live_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step left behind; ``updating``, ``updated``: when the optimizer's step began and ended.

    Its ``losses`` are those of all micro-batches of all replicas."""

    spans: tuple[Span, ...]
    updating: Mark
    updated: Mark
    end: Mark
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The mean over the micro-batches, added up in their order; NaN on a rank that makes no loss."""
        total = 0.0
        for value in self.losses:
            total += value
        return total / len(self.losses) if self.losses else float("nan")


def _first_here(ranks: Sequence[int], programs: Sequence[StageProgram], rank: int) -> set[str]:
    """The parameters whose first rank is this one: where a tied one is counted."""
    first: dict[str, int] = {}
    for program in programs:
        for name in program.parameters:
            first[name] = min(ranks[program.index], first.get(name, len(ranks)))
    return {name for name, where in first.items() if where == rank}


def _on_device(named: Any, wanted: Sequence[Sequence[str]], device: torch.device) -> dict[str, Any]:
    """Those of a module's parameters or buffers that are wanted, by name in the module's order, on the device."""
    names = {name for row in wanted for name in row}
    made = {}
    for name, value in named:
        if name in names:
            if value.device != device:
                value.data = value.data.to(device)
            made[name] = value
    return made
