"""Reading and writing plan files: what the types cannot say is checked here.

What follows from the profile (a stage's figures, sends and returns, ``predicted``) is judged by the check of a plan
and by ``job_of``, not here: a person may edit a plan, and what follows is then stale rather than wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planner.cluster import check_tensor, device_memory
from planner.errors import InputError
from planner.files import as_record, plain, read_yaml, write_atomically, yaml_text
from planner.plan.plan import Plan
from planner.schedules import MOST_FORWARDS, Placement, ScheduleName, check_shape, parse_action, rank_of

Fault = tuple[str, str, str]
"""Place, fault and mend."""


def read_plan(path: Path) -> Plan:
    """The plan in a YAML file. Raises InputError with file, place and mend where anything in it is wrong."""
    plan = as_record(Plan, read_yaml(path), path=path)
    for place, fault, mend in _faults(plan):
        raise InputError(f"{path}: {place}: {fault}", hint=mend)
    return plan


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan whole or not at all. Raises InputError where the folder cannot be written."""
    write_atomically(path, yaml_text(plain(plan)))


def _faults(plan: Plan) -> Iterator[Fault]:
    yield from _size_faults(plan)
    yield from _stage_faults(plan)
    yield from _schedule_faults(plan)
    try:
        if isinstance(plan.cluster.memory_bytes, str):
            device_memory(plan.cluster.memory_bytes)
        check_tensor(plan.cluster, plan.parallel.tensor)
    except InputError as error:
        yield "cluster", error.message, error.hint


def _size_faults(plan: Plan) -> Iterator[Fault]:
    sizes, batch = plan.parallel, plan.batch
    gpus = sizes.pipeline * sizes.data * sizes.tensor
    if gpus != sizes.gpus:
        yield (
            "parallel.gpus",
            f"is {sizes.gpus}, but pipeline {sizes.pipeline} · data {sizes.data} · tensor {sizes.tensor} is {gpus}",
            "gpus must be their product",
        )
    if sizes.sequence and sizes.tensor == 1:
        yield "parallel.sequence", "is true, but tensor is 1", "remove it: there are no ranks to share tokens"
    stages = sizes.pipeline * sizes.virtual
    forwards = stages * batch.microbatches
    if forwards > MOST_FORWARDS:
        yield (
            "batch.microbatches",
            f"is {batch.microbatches}, which with {stages} stages makes {forwards} forwards a step",
            f"at most {MOST_FORWARDS} are planned for: larger micro-batches, or a smaller global batch",
        )
    samples = batch.microbatch * batch.microbatches * sizes.data
    if samples != batch.global_batch:
        yield (
            "batch.global",
            f"is {batch.global_batch}, but microbatch {batch.microbatch} · microbatches {batch.microbatches} · data "
            f"{sizes.data} is {samples}",
            "global must be their product",
        )
    wanted = sizes.pipeline * sizes.virtual
    if len(plan.stages) != wanted:
        yield (
            "stages",
            f"are {len(plan.stages)}, but pipeline {sizes.pipeline} · virtual {sizes.virtual} is {wanted}",
            "list each stage once",
        )


def _stage_faults(plan: Plan) -> Iterator[Fault]:
    sizes, placement = plan.parallel, plan.schedule.placement
    if placement is Placement.V and sizes.virtual != 2:
        yield "schedule.placement", f"v needs virtual 2, not {sizes.virtual}", "use loop, or two stages a rank"
        return
    home: dict[str, int] = {}
    held = [0] * sizes.pipeline
    for index, stage in enumerate(plan.stages):
        place = f"stages[{index}]"
        if stage.stage != index:
            yield f"{place}.stage", f"is {stage.stage}", f"stages stand in order, this one is {index}"
        if stage.rank >= sizes.pipeline:
            yield f"{place}.rank", f"there is no rank {stage.rank}", f"ranks are 0 to {sizes.pipeline - 1}"
            continue
        held[stage.rank] += 1
        if placement is not Placement.FREE:
            rank = rank_of(index, sizes.pipeline, sizes.virtual, placement)
            if stage.rank != rank:
                yield (
                    f"{place}.rank",
                    f"is {stage.rank}, but placement {placement.value} puts stage {index} on rank {rank}",
                    "use that rank, or placement free with schedule synthesised",
                )
        if not stage.layers:
            yield f"{place}.layers", "are none", "no stage is empty: give it a layer, or remove the stage"
        for name in stage.layers:
            if name in home:
                yield f"{place}.layers", f"{name!r} stands in stage {home[name]} already", "a layer has one stage"
            home[name] = index
    for rank, count in enumerate(held):
        if count != sizes.virtual:
            yield "stages", f"rank {rank} has {count}, not {sizes.virtual}", "each rank has `virtual` stages"


def _schedule_faults(plan: Plan) -> Iterator[Fault]:
    schedule, ranks = plan.schedule, plan.parallel.pipeline
    synthesised = schedule.name is ScheduleName.SYNTHESISED
    if synthesised and schedule.warmup is not None:
        yield "schedule.warmup", "a synthesised order has none", "remove it"
    if not synthesised:
        try:
            check_shape(
                schedule.name,
                num_ranks=ranks,
                virtual=plan.parallel.virtual,
                num_microbatches=plan.batch.microbatches,
                placement=schedule.placement,
                warmup=schedule.warmup,
            )
        except InputError as error:
            yield "schedule", error.message, error.hint
    if synthesised and plan.actions is None:
        yield "actions", "is missing", "schedule synthesised brings its own actions, one string for each rank"
    if plan.actions is not None:
        if not synthesised:
            yield "actions", f"schedule {schedule.name.value} makes its own", "remove them, or name it synthesised"
        if len(plan.actions) != ranks:
            yield "actions", f"are {len(plan.actions)} strings for {ranks} ranks", "give one string for each rank"
        yield from _action_faults(plan, plan.actions)


def _action_faults(plan: Plan, orders: tuple[str, ...]) -> Iterator[Fault]:
    for rank, text in enumerate(orders):
        for position, word in enumerate(text.split()):
            place = f"actions[{rank}], action {position}"
            try:
                action = parse_action(word)
            except ValueError as error:
                fault, _, mend = str(error).partition("; ")
                yield place, fault, mend
                continue
            if action.stage >= len(plan.stages):
                yield place, f"{word}: there is no stage {action.stage}", f"stages are 0 to {len(plan.stages) - 1}"
            elif plan.stages[action.stage].rank != rank:
                yield (
                    place,
                    f"{word}: stage {action.stage} is on rank {plan.stages[action.stage].rank}",
                    "move it there",
                )
            if action.microbatch >= plan.batch.microbatches:
                last = plan.batch.microbatches - 1
                yield place, f"{word}: there is no micro-batch {action.microbatch}", f"they are 0 to {last}"
