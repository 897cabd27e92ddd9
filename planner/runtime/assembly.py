"""What one process trains with, made before the first step: its stages, its links to other ranks, groups, weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from planner.capture import Capture, ModelFile, StageProgram
from planner.capture.shard import shard
from planner.capture.sharding import Sharding
from planner.cluster import Cluster, link_between
from planner.errors import InputError
from planner.plan import Plan
from planner.runtime.board import State, Writer
from planner.runtime.channels import KERNEL_BYTES
from planner.runtime.groups import Communicators, Group
from planner.runtime.initial import initial_weights
from planner.runtime.job import Place, RunJob
from planner.runtime.messages import RankProgram, check_routes, rank_programs
from planner.runtime.owners import loss_process, tellers, writing_ranks
from planner.runtime.parts import TensorParts
from planner.runtime.posting import Forecast, posts
from planner.runtime.trainer import Shape, Trainer, routes_of
from planner.runtime.transport import Transport
from planner.schedules import Action, Letter
from planner.simulate.costs import durations


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A process's part of a run.

    ``control``: of all processes, on the CPU. ``parts``: what it holds of the parameters that tensor ranks share.
    ``unused``: at process 0, the parameters and buffers that no stage uses, as they belong to the model's weights.
    ``loss_process``, ``tellers``, ``writing_ranks``: see planner.runtime.owners.
    """

    trainer: Trainer
    transport: Transport
    control: Group
    parts: TensorParts | None
    unused: Mapping[str, Tensor]
    loss_process: int
    tellers: Mapping[str, int]
    writing_ranks: Mapping[str, int]


def assemble(
    job: RunJob,
    place: Place,
    captured: Capture,
    *,
    model_file: ModelFile,
    store: Store,
    device: torch.device,
    board: Writer,
) -> Assembly:
    """Make it; all processes do so together, as they connect to each other."""
    plan, sizes = job.plan, job.plan.parallel
    if sizes.tensor > 1:
        captured = shard(captured, tensor=sizes.tensor, rank=place.tensor_rank, sequence=bool(sizes.sequence))
    with _told_of(job):
        programs = captured.stages([stage.layers for stage in plan.stages])
        found = routes_of(captured, programs, job.ranks)
        check_routes(job.schedule, found, num_microbatches=plan.batch.microbatches)
    if not job.in_parts:  # all the model's, on this device: the run makes its own
        for parameter in captured.module.parameters():
            parameter.data = parameter.data.new_empty(0)
    rank_program = rank_programs(job.schedule, found)
    posted = posts([program.steps for program in rank_program], _forecast(plan, programs, device))
    communicators = Communicators(store, device=device, one_node=job.one_node)
    control = Group(communicators.make("control", place.process, job.num_processes, on_cpu=True))
    board.at(State.STARTING)
    transport = _transport(communicators, place, rank_program)
    group = None
    if sizes.data > 1:
        group = Group(communicators.make(f"replicas{place.rank}.{place.tensor_rank}", place.replica, sizes.data))
    pipeline = None
    if sizes.pipeline > 1 and (model_file.clip_norm is not None or model_file.autocast is torch.float16):
        name = f"pipeline{place.replica}.{place.tensor_rank}"
        pipeline = Group(communicators.make(name, place.rank, sizes.pipeline))
    wanted = _own_parameters(job, place, programs, captured) if job.in_parts else None
    module = initial_weights(model_file, job.seed, files=job.initial, wanted=wanted)
    unused_parameters, unused = _unused(module, programs)
    parts = _tensor_parts(captured.sharding, module, place, communicators)
    trainer = Trainer(
        model_file=model_file,
        module=module,
        programs=programs,
        recompute=[stage.recompute for stage in plan.stages],
        found=found,
        program=replace(rank_program[place.rank], posts=posted[place.rank]),
        shape=Shape(
            microbatch_size=plan.batch.microbatch,
            num_microbatches=plan.batch.microbatches,
            data=sizes.data,
            replicas=(place.replica,),
        ),
        seed=job.seed,
        device=device,
        transport=transport,
        group=group,
        pipeline=pipeline,
        board=board,
        parts=parts,
        zero1=bool(sizes.zero1),
    )
    return Assembly(
        trainer=trainer,
        transport=transport,
        control=control,
        parts=parts,
        unused={} if place.process else unused,
        loss_process=loss_process(job, programs),
        tellers=tellers(job, programs, unused_parameters),
        writing_ranks=writing_ranks(job, programs),
    )


@contextmanager
def _told_of(job: RunJob) -> Iterator[None]:
    """What is wrong with the stages or the schedule is a fault of the plan's file, which is named."""
    try:
        yield
    except InputError as fault:
        raise InputError(f"{job.plan_path}: {fault.message}", hint=fault.hint) from None


def _foretold_s(plan: Plan, action: Action) -> float:
    """An action's planned seconds."""
    cost = durations(plan.stages[action.stage])
    match action.letter:
        case Letter.FORWARD:
            return cost.forward_s
        case Letter.BACKWARD:
            return cost.backward_s
        case Letter.BACKWARD_INPUT:
            return cost.backward_input_s
        case _:
            return cost.backward_weight_s


def _forecast(plan: Plan, programs: Sequence[StageProgram], device: torch.device) -> Forecast:
    """What the plan says of a step, of messages as large as they are."""
    sizes = {boundary.name: boundary.num_bytes for program in programs for boundary in program.sends}
    cluster, parallel = plan.cluster or Cluster(), plan.parallel
    held = [0] * parallel.pipeline
    for stage in plan.stages:
        held[stage.rank] += stage.parameter_bytes + stage.trainable_bytes + stage.saved_bytes
    return Forecast(
        action_s=lambda action: _foretold_s(plan, action),
        message_bytes=sizes.__getitem__,
        link=lambda a, b: link_between(a, b, data=parallel.data, tensor=parallel.tensor, cluster=cluster),
        overlap=cluster.overlap is not False,
        buffered_bytes=KERNEL_BYTES if device.type == "cpu" else 0,
        held_bytes=held,
    )


def _transport(communicators: Communicators, place: Place, programs: Sequence[RankProgram]) -> Transport:
    """The links between the ranks of one pipeline."""
    pairs = sorted({(sender, program.rank) for program in programs for sender in program.inbox})
    mine = programs[place.rank]
    return Transport(
        communicators,
        prefix=f"replica{place.replica}.{place.tensor_rank}",
        rank=place.rank,
        pairs=pairs,
        inbox=mine.inbox,
        device=communicators.device,
    )


def _own_parameters(job: RunJob, place: Place, programs: Sequence[StageProgram], captured: Capture) -> set[str]:
    """Those that a process trains, or tells of."""
    used = {name for program in programs for name in program.parameters}
    own = {name for program in programs if job.ranks[program.index] == place.rank for name in program.parameters}
    if place.process == 0:
        own |= {name for name, _ in captured.module.named_parameters()} - used
    return own


def _unused(module: nn.Module, programs: Sequence[StageProgram]) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The parameters that no stage uses, by name, and these with the buffers that none uses."""
    used = {name for program in programs for name in (*program.parameters, *program.buffers)}
    parameters = {name: value.detach() for name, value in module.named_parameters() if name not in used}
    buffers = {name: value.detach() for name, value in module.named_buffers() if name not in used}
    return tuple(parameters), parameters | buffers


def _tensor_parts(
    sharding: Sharding | None, module: nn.Module, place: Place, communicators: Communicators
) -> TensorParts | None:
    """What a process holds of each layer that it shares with others, put in the place of the whole."""
    if sharding is None:
        return None
    name = f"tensor{place.rank}.{place.replica}"
    group = Group(communicators.make(name, place.tensor_rank, sharding.size), whom="other tensor ranks")
    sharding.connect(group)
    sharding.take_parts(module)
    return TensorParts(splits=sharding.parameters, size=sharding.size, rank=sharding.rank, group=group)
