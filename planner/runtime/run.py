"""Runs a plan: checks what can be checked without torch, starts the processes, puts the result together."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planner.errors import InputError
from planner.files import check_replaceable, check_writable, json_text, plain
from planner.plan import Plan, read_plan, schedule_of
from planner.plan.check import profile_of
from planner.profile import Profile, write_profile
from planner.record import record
from planner.runtime.saved import newest, read_saved
from planner.runtime.server import start_server
from planner.runtime.weight_files import weight_files
from planner.schedules import Schedule, Wiring, check_schedule, out_of_order

if TYPE_CHECKING:
    from planner.runtime.launch import Listener, Nodes
    from planner.runtime.result import Outcome

VERIFY_STEPS = 3
LEAST_TIMEOUT_S = 60.0
TIMEOUT_ITERATIONS = 10


WHOLE_SHARE = 0.5
"""All processes of a machine make the whole model where that takes at most so much of the memory that is free there."""


@record
class RunOptions:
    """How a plan is run; the machines meet at ``endpoint`` (HOST:PORT of the first) where there are several.

    ``weights``: whether each process makes the whole model, or its own stages alone; auto: those, where the whole takes
    too much memory. The weights are the same. ``initial``: the file or folder of the weights that it starts with, where
    they are not those of model(); a checkpoint that is resumed has its own.
    """

    steps: int = 20
    seed: int = 0
    verify: bool = False
    timeout_s: float | None = None
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    checkpoints: Path | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    weights: Literal["auto", "whole", "own"] = "auto"
    initial: Path | None = None
    record: bool = False
    save_profile: Path | None = None


def run_plan(path: Path, options: RunOptions, listener: Listener) -> Outcome | None:
    """Train as a plan says. None on machines other than the first: the first one tells the result.

    Raises InputError where plan, model file or options are wrong, RunError where a process fails.
    """
    plan = read_plan(path)
    schedule = schedule_of(plan)
    _check_order(plan, path, schedule)
    _check(plan, path, options)
    if plan.profile.provenance == "imported":
        raise InputError(
            f"{path}: was made from an imported profile ({plan.model.name}), which has no model to train",
            hint="simulate, check, show and export --to torch-csv work on it; to train, profile a model file",
        )
    model_path = Path(os.path.realpath(path.parent / plan.model.source))
    if not model_path.is_file():
        raise InputError(f"{path}: model.source: there is no file {model_path}", hint="correct it in the plan")
    resumed, start = _resumed(plan, options)
    initial = _initial(options)
    profile = _profile(plan, path, options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_server()
    from planner.runtime.job import RunJob
    from planner.runtime.launch import Nodes, launch
    from planner.runtime.result import outcome_of

    num_local = plan.parallel.gpus // options.nnodes
    device = _device(num_local)
    crowded = device == "cpu" and num_local > _num_cores()
    if crowded:
        listener.remark(f"{num_local} processes share {_num_cores()} cores: times mean little")
    for words in out_of_order(schedule):
        listener.remark(f"remark: {words}")
    host, port = _meeting(options)
    if options.nnodes > 1:
        listener.remark(f"node {options.node_rank} of {options.nnodes} meets the others at {host}:{port}")
    asked = {
        "plan": plain(plan), "steps": options.steps, "seed": options.seed, "verify": options.verify,
        "checkpoints": options.checkpoints is not None, "every": options.checkpoint_every, "start": start,
        "record": options.record, "initial": options.initial is not None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="pipeplan-run-") as folder:
        job = RunJob(
            plan=plan,
            schedule=schedule,
            plan_path=path,
            model_path=model_path,
            steps=options.steps,
            seed=options.seed,
            start=start,
            verify_steps=min(VERIFY_STEPS, options.steps - start) if options.verify else 0,
            checkpoints=options.checkpoints.resolve() if options.checkpoints else None,
            checkpoint_every=options.checkpoint_every,
            resume=resumed,
            record=options.record,
            initial=initial if resumed is None else None,
            in_parts=_in_parts(plan, options, num_local),
            device=device,
            folder=Path(folder),
            one_node=options.nnodes == 1,
            digest=hashlib.sha256(json_text(asked).encode()).hexdigest(),
        )
        foretold = plan.predicted.iteration_s if plan.predicted else 0.0

        def timeout_s(longest_s: float | None) -> float:
            iteration_s = foretold if longest_s is None else longest_s
            return options.timeout_s or max(LEAST_TIMEOUT_S, TIMEOUT_ITERATIONS * iteration_s)

        nodes = Nodes(count=options.nnodes, rank=options.node_rank, host=host, port=port)
        told = launch(job, nodes, timeout_s=timeout_s, listener=listener)
    if not told:
        return None
    if options.save_profile is not None and profile is not None and options.steps > start:
        _save_profile(plan, profile, told, options.save_profile, model_path=model_path, device=device, nodes=nodes)
    return outcome_of(plan, told, crowded=crowded, profile=profile)


def _profile(plan: Plan, path: Path, options: RunOptions) -> Profile | None:
    """The plan's profile, where it is there. Raises InputError where it must be, for another to be made of it."""
    if options.save_profile is None:
        with suppress(InputError):
            return profile_of(plan, path)
        return None
    check_writable(options.save_profile)
    check_replaceable(options.save_profile, "pipeplan-profile")
    return profile_of(plan, path)


def _save_profile(
    plan: Plan,
    profile: Profile,
    told: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    model_path: Path,
    device: str,
    nodes: Nodes,
) -> None:
    """Write the profile that follows from what a run measured, with the link between two processes of this machine."""
    from planner.measure.machine import this_device
    from planner.runtime.measured import measured_profile
    from planner.runtime.sums import measure_links_and_sums

    sizes = plan.parallel
    links = measure_links_and_sums(device, tensor_sizes=(sizes.tensor,)) if sizes.gpus > 1 else None
    notes = {"measured_by": f"run of {plan.parallel.gpus} processes on {nodes.count} machines"}
    made = measured_profile(
        plan,
        profile,
        told,
        path=path,
        model_path=model_path,
        device=this_device(device, notes=notes),
        links=links,
    )
    write_profile(made, path)


def _check_order(plan: Plan, path: Path, schedule: Schedule) -> None:
    """That every rank has its actions, once each, before any process is started.

    What waits for what is told by the model's own tensors: the processes see whether the orders go together.
    """
    none: tuple[tuple[int, ...], ...] = ((),) * len(plan.stages)
    wiring = Wiring(ranks=tuple(stage.rank for stage in plan.stages), sends=none, returns=none)
    faults = check_schedule(schedule, num_microbatches=plan.batch.microbatches, wiring=wiring).errors
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise InputError(f"{path}: schedule: {faults[0]}{more}", hint="correct the plan's schedule or actions")


def _check(plan: Plan, path: Path, options: RunOptions) -> None:
    if plan.parallel.gpus % options.nnodes:
        raise InputError(
            f"--nnodes {options.nnodes}: the plan's {plan.parallel.gpus} processes do not spread evenly over them",
            hint="name a number that divides them",
        )
    if (plan.parallel.gpus // options.nnodes) % plan.parallel.tensor:
        raise InputError(
            f"--nnodes {options.nnodes}: {plan.parallel.gpus // options.nnodes} processes a node do not hold whole "
            f"groups of {plan.parallel.tensor} tensor ranks",
            hint="name fewer nodes, or solve with --tensor 1",
        )
    if options.node_rank >= options.nnodes:
        raise InputError(f"--node-rank {options.node_rank}: there are nodes 0..{options.nnodes - 1}", hint="correct it")
    if options.nnodes > 1 and options.endpoint is None:
        raise InputError("--nnodes needs --rdzv-endpoint", hint="name HOST:PORT of node 0, the same on every node")
    if options.checkpoints is None and (options.resume or options.checkpoint_every is not None):
        word = "--resume" if options.resume else "--checkpoint-every"
        raise InputError(f"{word} needs --checkpoint", hint="name the folder of the checkpoints")


def _resumed(plan: Plan, options: RunOptions) -> tuple[Path | None, int]:
    """The checkpoint to go on from, and its step. Raises InputError where it is not one of this very training."""
    folder = options.checkpoints
    if folder is None:
        return None, 0
    if not folder.is_dir():
        check_writable(folder / "step")
    found = newest(folder)
    if not options.resume:
        if found is not None:
            raise InputError(
                f"{folder}: holds the checkpoints of an earlier run, up to {found.name}",
                hint="go on from there with --resume, or name another folder",
            )
        return None, 0
    if found is None:
        raise InputError(f"{folder}: holds no checkpoint to resume from", hint="start without --resume")
    saved = read_saved(found)
    if saved.seed != options.seed:
        raise InputError(f"{found}: was trained with --seed {saved.seed}, not {options.seed}", hint="give that seed")
    if saved.batch.global_batch != plan.batch.global_batch:
        raise InputError(
            f"{found}: was trained with {saved.batch.global_batch} samples a step; the plan has "
            f"{plan.batch.global_batch}",
            hint=f"solve with --batch {saved.batch.global_batch}",
        )
    if saved.step > options.steps:
        raise InputError(
            f"{found}: has {saved.step} steps already, more than --steps {options.steps}",
            hint="--steps is the total: name more",
        )
    return found.resolve(), saved.step


def _initial(options: RunOptions) -> Path | None:
    """Where the first weights are. Raises InputError where there are none."""
    if options.initial is None:
        return None
    weight_files(options.initial)
    return options.initial.resolve()


def _in_parts(plan: Plan, options: RunOptions, num_local: int) -> bool:
    """Whether each process makes its own stages' weights alone. Raises InputError where that cannot be."""
    if options.weights == "own" and options.verify:
        raise InputError("--weights own: --verify trains the whole model in one process", hint="leave one of them out")
    if options.weights != "auto" or options.verify:
        return options.weights == "own"
    from planner.measure.machine import free_bytes

    whole = sum(stage.parameter_bytes for stage in plan.stages) * plan.parallel.tensor
    return whole * num_local > WHOLE_SHARE * free_bytes("cpu")


def _meeting(options: RunOptions) -> tuple[str, int]:
    if options.endpoint is None:
        return "127.0.0.1", 0
    host, _, port = options.endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--rdzv-endpoint {options.endpoint}: is no HOST:PORT", hint="write e.g. node0:29500")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        words = error.strerror or str(error)
        raise InputError(
            f"--rdzv-endpoint {options.endpoint}: {host} is not known here ({words})", hint="name an address of node 0"
        ) from None
    return host, int(port)


def _device(num_local: int) -> str:
    """``cuda`` where this machine has GPUs, else ``cpu``. Raises InputError where it has some, but too few."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    if torch.cuda.device_count() < num_local:
        raise InputError(
            f"the plan has {num_local} processes on this machine, which has {torch.cuda.device_count()} GPUs",
            hint="solve for as many, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU",
        )
    return "cuda"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
