"""``pipeplan export``: a plan for other systems."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import typer

from planner.cli.console import err, remark, say_if_estimated
from planner.errors import InputError


class Target(StrEnum):
    """The systems that plans are written for."""

    TORCH_CSV = "torch-csv"
    TORCH = "torch"
    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export")(export)


def export(
    plan: Path = typer.Argument(metavar="PLAN", help="The plan file.", show_default=False),
    target: Target = typer.Option(
        ..., "--to", metavar="SYSTEM", help="torch-csv, torch, torchtitan, megatron or deepspeed.", show_default=False
    ),
    output: Path = typer.Option(
        None, "-o", "--output", help="The file to write (default: stdout).", show_default=False
    ),
) -> None:
    """Write a plan for another system.

    torch: a script that trains the model with torch.distributed.pipelining. torchtitan: Python that sets a trainer's
    parallelism. megatron: Megatron-LM's options, as a shell array. deepspeed: a PipelineModule with the plan's
    boundaries, and its config. torch-csv: the schedule's actions alone, a row a rank, as torch.distributed.pipelining
    reads them.

    Megatron-LM runs 1f1b and interleaved-1f1b, DeepSpeed 1f1b: solve for them with that --schedule.

    Each file says how it is used. What a system cannot express is refused by name: nothing of a plan is dropped.
    """
    from planner.files import write_atomically
    from planner.plan import read_plan

    writer, use = _writer(target)
    text = writer(plan, output)
    plan_file = read_plan(plan)
    say_if_estimated(plan_file.profile.provenance, plan_file.profile.device, to=err)
    if output is None:
        typer.echo(text, nl=False)
        return
    _check_replaceable(output, target)
    write_atomically(output, text)
    use = use.replace("GPUS", str(plan_file.parallel.gpus)).replace("FILE", str(output))
    err.print(f"wrote {output}; {use}", markup=False, soft_wrap=True)
    if target is Target.TORCH:
        remark("dropout, where the model has any, is drawn otherwise than by pipeplan run, and losses differ then")


def _check_replaceable(output: Path, target: Target) -> None:
    """Raises InputError where a file that no export wrote would be overwritten: the plan, its profile, the model."""
    try:
        with output.open("rb") as file:
            start = file.read(4096)
    except OSError:
        return  # there is none, or writing says what is wrong
    ours = re.match(rb"[,\s]*\d+[FIWB]\d+[,\r\n]", start) if target is Target.TORCH_CSV else b"by pipeplan" in start
    if start and not ours:
        raise InputError(f"{output}: is there and is no file that export writes", hint="name another file with -o")


Writer = Callable[[Path, Path | None], str]


def _writer(target: Target) -> tuple[Writer, str]:
    """What writes the text of a plan for a target, and what to do with it."""
    if target is Target.TORCH:
        from planner.exchange.torch_script import torch_script

        return torch_script, "next: torchrun --nproc-per-node GPUS FILE, as it says"
    if target is Target.TORCHTITAN:
        from planner.exchange.torchtitan import torchtitan_settings

        return torchtitan_settings, "next: import it where the trainer's config is made, as it says"
    if target is Target.MEGATRON:
        from planner.exchange.megatron import megatron_options

        return megatron_options, "next: source FILE before the call of pretrain_gpt.py, as it says"
    if target is Target.DEEPSPEED:
        from planner.exchange.deepspeed import deepspeed_module

        return deepspeed_module, "next: import it where the PipelineModule is made, as it says"
    from planner.exchange.torch_csv import plan_csv

    return plan_csv, "its schedule loads it with _load_csv; pipeplan import --from torch-csv reads it back"
