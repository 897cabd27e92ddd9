"""``pipeplan profile``: measure a model file's layers on this machine, or estimate them for another."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.cli.console import err, out, print_json, say
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.capture import ModelFile
    from planner.measure import Asked, Measured
    from planner.profile import Profile


class DeviceKind(StrEnum):
    """Where to measure."""

    CPU = "cpu"
    CUDA = "cuda"


class Granularity(StrEnum):
    """What a layer is."""

    OP = "op"
    MODULE = "module"
    BLOCK = "block"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("profile")(profile)


def profile(
    model: Path = typer.Argument(help="The model file, e.g. model.py."),
    output: Path | None = typer.Option(None, "-o", "--output", help="The profile (default: profiles/MODEL.json)."),
    microbatch: str = typer.Option("1,2,4", help="Micro-batch sizes (samples) to measure at."),
    tensor: str = typer.Option("1", help="Tensor sizes (T) to measure at too: every layer as one of T ranks has it."),
    sequence_parallel: bool = typer.Option(
        False, "--sequence-parallel", help="With --tensor: between split ops each rank holds a part of the tokens."
    ),
    device: DeviceKind | None = typer.Option(None, help="Where to measure (default: cuda where there is one)."),
    estimate: str | None = typer.Option(None, help="Estimate for a GPU that is not here, e.g. h100-sxm, a100, mi300x."),
    granularity: Granularity = typer.Option(
        Granularity.BLOCK, help="What a layer is: an op, a module, or a repeated block (in parts, where it is large)."
    ),
    layerwise: bool | None = typer.Option(
        None,
        "--layerwise/--whole",
        help="Measure layer by layer without ever holding the model, or all of it at once (default: as it fits).",
    ),
    fresh: bool = typer.Option(
        False, "--fresh", help="Measure though the profile that is there is of this very model."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document on stdout."),
) -> None:
    """Measure what every layer of a model costs on this machine: time, memory, and the link between two processes.

    A model that does not fit is measured layer by layer. --estimate computes the figures for another device. Where the
    profile that is there is of the same model and machine nothing is measured, but with --fresh.
    """
    sizes, tensor_sizes = _sizes(microbatch, "--microbatch"), _sizes(tensor, "--tensor")
    if sequence_parallel and tensor_sizes == (1,):
        raise InputError("--sequence-parallel is for tensor ranks", hint="add --tensor 1,2")
    path = output or Path("profiles") / f"{model.stem}.json"
    if estimate is not None and (device is not None or layerwise is not None):
        raise InputError("--estimate measures nothing", hint="leave --device, --layerwise and --whole away")
    earlier = _earlier(path, estimate=estimate)

    from planner.capture import load_model_file
    from planner.measure import Asked, chosen_device, default_neighbours, difference, known_device, unchanged
    from planner.profile import write_profile
    from planner.report.profiled import document, report

    kind = "cpu" if estimate else chosen_device(device.value if device else None)
    asked = Asked(
        microbatch_sizes=sizes,
        device=kind,
        granularity=granularity.value,
        neighbours=default_neighbours(kind),
        layerwise=layerwise,
        tensor=tensor_sizes,
        sequence=sequence_parallel,
        estimate=known_device(estimate) if estimate else None,
    )
    with redirect_stdout(sys.stderr):  # what the user's code prints is no answer of ours
        model_file = load_model_file(model)
        is_known = earlier is not None and not fresh and unchanged(earlier, model_file, asked)
    if earlier is not None and is_known:
        if as_json:
            print_json(document(path, earlier))
        else:
            done = "estimated" if estimate else "measured"
            line = f"{path} is of this model, {done} for this already; --fresh does it again"
            out.print(line, markup=False, soft_wrap=True)
        return
    with redirect_stdout(sys.stderr), _progress() as progress:
        measured = _measured(model_file, asked, path, progress)
    change = difference(earlier, measured.profile) if earlier else None
    write_profile(measured.profile, path)
    if as_json:
        print_json(document(path, measured.profile, measured, change))
    else:
        report(out, partial(say, indent=2), measured, change, earlier)
    err.print(f"wrote {path}; next: pipeplan solve {path} --gpus 2", markup=False, soft_wrap=True)


def _measured(model_file: ModelFile, asked: Asked, path: Path, progress: Callable[[str, float], None]) -> Measured:
    from planner.measure import estimate_profile, measure_profile
    from planner.runtime.sums import measure_links_and_sums

    if asked.estimate is not None:
        return estimate_profile(model_file, asked, folder=path.parent, progress=progress)
    measure_links = partial(measure_links_and_sums, tensor_sizes=asked.tensor)
    return measure_profile(model_file, asked, folder=path.parent, measure_links=measure_links, progress=progress)


def _sizes(text: str, option: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError(f"{option} {text!r} is no list of sizes", hint="write whole numbers, e.g. 1,2,4")
    return tuple(sorted({int(word) for word in words}))


def _earlier(path: Path, *, estimate: str | None) -> Profile | None:
    """The profile that is there. Raises InputError where what is there must not be overwritten."""
    from planner.files import check_writable, read_text
    from planner.profile import FORMAT, read_profile

    check_writable(path)
    if not path.exists():
        return None
    try:
        earlier = read_profile(path)
    except InputError:
        if _is_profile(read_text(path), FORMAT):
            return None  # of another version, or damaged: a new one takes its place
        raise InputError(f"{path}: is there and is no profile", hint="name another file with -o") from None
    if estimate is not None and earlier.provenance == "measured":
        raise InputError(f"{path}: holds a measured profile", hint="name another file for the estimate with -o")
    return earlier


def _is_profile(text: str, wanted: str) -> bool:
    try:
        data = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and str(data.get("format")).partition("/")[0] == wanted.partition("/")[0]


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal; nothing in a pipe."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description:30}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def told(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)

        yield told
