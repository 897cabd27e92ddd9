"""``pipeplan profile``: measure a model file's layers on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.cli.console import err, out, print_json
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.measure import Difference, Measured
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
    device: DeviceKind | None = typer.Option(None, help="Where to measure (default: cuda where there is one)."),
    granularity: Granularity = typer.Option(Granularity.BLOCK, help="What a layer is."),
    fresh: bool = typer.Option(False, "--fresh", help="Take no notice of the profile that is there."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document on stdout."),
) -> None:
    """Measure what every layer of a model costs on this machine: time, memory, and the link between two processes.

    An unchanged model is measured again, and how far the figures are from those of the profile that is there is said.
    """
    sizes = _sizes(microbatch)
    path = output or Path("profiles") / f"{model.stem}.json"
    earlier = _earlier(path, fresh=fresh)

    from planner.capture import load_model_file
    from planner.measure import chosen_device, default_neighbours, difference, measure_profile
    from planner.profile import write_profile
    from planner.runtime.links import measure_links

    kind = chosen_device(device.value if device else None)
    model_file = load_model_file(model)
    with _progress() as progress:
        measured = measure_profile(
            model_file,
            microbatch_sizes=sizes,
            device=kind,
            granularity=granularity.value,
            folder=path.parent,
            measure_links=measure_links,
            neighbours=default_neighbours(kind),
            progress=progress,
        )
    change = difference(earlier, measured.profile) if earlier else None
    write_profile(measured.profile, path)
    if as_json:
        print_json(_document(path, measured, change))
    else:
        _report(measured, change, earlier)
    err.print(f"wrote {path}; next: pipeplan solve {path} --gpus 2", markup=False, soft_wrap=True)


def _sizes(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError(f"--microbatch {text!r} is no list of sizes", hint="write whole numbers, e.g. 1,2,4")
    return tuple(sorted({int(word) for word in words}))


def _earlier(path: Path, *, fresh: bool) -> Profile | None:
    """The profile that is there. Raises InputError where something else is, which must not be overwritten."""
    from planner.files import check_writable, read_text
    from planner.profile import FORMAT, read_profile

    check_writable(path)
    if not path.exists():
        return None
    try:
        return None if fresh and _is_profile(read_text(path), FORMAT) else read_profile(path)
    except InputError:
        if _is_profile(read_text(path), FORMAT):
            return None  # of another version, or damaged: a new one takes its place
        raise InputError(f"{path}: is there and is no profile", hint="name another file with -o") from None


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


# --- what is said -----------------------------------------------------------------------------------------------------


def _document(path: Path, measured: Measured, change: Difference | None) -> dict[str, Any]:
    from planner.files import plain

    return {
        "path": str(path),
        "accuracy": [
            {
                "microbatch_size": one.microbatch_size,
                "median_error": one.median_error,
                "largest_error": one.largest_error,
                "split_cost": one.split_cost,
                "entry_s": one.entry_s,
            }
            for one in measured.accuracy
        ],
        "left_out": [{"microbatch_size": one.microbatch_size, "reason": one.reason} for one in measured.left_out],
        "busy_neighbours": measured.neighbours,
        "difference": change and change._asdict(),
        "profile": plain(measured.profile),
    }


def _report(measured: Measured, change: Difference | None, earlier: Profile | None) -> None:
    from rich.table import Table

    from planner.units import format_bytes, format_seconds

    profile = measured.profile
    layers = profile.layers
    out.print(
        f"{profile.model.name}: {len(layers)} layers, {format_bytes(_parameter_bytes(profile))} of parameters "
        f"({profile.dtype}), on {profile.device.name} ({format_bytes(profile.device.memory_bytes)})",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for heading in ("micro-batch", "F", "I", "W", "samples/s", "saved", "spread", "error", "largest"):
        table.add_column(heading, justify="right")
    for row, accuracy in enumerate(measured.accuracy):
        costs = [layer.costs[row] for layer in layers]
        parts = [sum(getattr(cost, name) for cost in costs) for name in _TIMES]
        table.add_row(
            str(accuracy.microbatch_size),
            *map(format_seconds, parts),
            f"{accuracy.microbatch_size / sum(parts):.1f}",
            format_bytes(sum(cost.saved_bytes for cost in costs)),
            f"{sorted(cost.spread or 0.0 for cost in costs)[len(costs) // 2]:.0%}",
            f"{accuracy.median_error:.1%}",
            f"{accuracy.largest_error:+.1%}",
        )
    out.print(table)
    out.print(
        "error: of runs of layers, as foretold from the layers' figures, against timed", markup=False, soft_wrap=True
    )
    for line in _remarks(measured, change, earlier):
        out.print(line, markup=False, soft_wrap=True)


_TIMES = ("forward_s", "backward_input_s", "backward_weight_s")


def _parameter_bytes(profile: Profile) -> int:
    shared = {name: one.bytes for layer in profile.layers for name, one in (layer.shared or {}).items()}
    own = sum(
        layer.parameter_bytes - sum(one.bytes for one in (layer.shared or {}).values()) for layer in profile.layers
    )
    return own + sum(shared.values())


def _remarks(measured: Measured, change: Difference | None, earlier: Profile | None) -> Iterator[str]:
    from planner.units import format_bytes, format_seconds

    profile = measured.profile
    links, optimizer = profile.links, profile.optimizer
    if links is None:
        yield "link: not measured, since there are no two devices here"
    else:
        beside = "beside compute" if links.overlap else "in place of compute"
        yield (
            f"link between two processes: {format_seconds(links.latency_s)} and "
            f"{format_bytes(links.bandwidth_bytes_per_s)}/s, {beside}"
        )
    yield (
        f"{optimizer.name}: {optimizer.state_bytes_per_trainable_byte:.2f} bytes of state and "
        f"{optimizer.step_s_per_trainable_byte * 1e9:.3f} ns a step for each byte of trainable parameters"
    )
    if profile.device.kind == "cpu":
        yield (
            f"timed on one thread beside {measured.neighbours} busy neighbour{'s' * (measured.neighbours != 1)}: "
            "more processes than that slow each other further"
        )
    for one in measured.left_out:
        yield f"micro-batch size {one.microbatch_size} is left out: {one.reason}"
    for accuracy in measured.accuracy:
        if accuracy.median_error > 0.05:
            yield (
                f"at micro-batch size {accuracy.microbatch_size} layers foretell runs of layers to "
                f"{accuracy.median_error:.1%} only: entering a stage takes {format_seconds(accuracy.entry_s)}, which "
                "counts where layers are small; else the machine was busy"
            )
    if change is not None:
        yield (
            f"from the profile that was there: {change.median:.1%} in the median over layers, at most "
            f"{change.largest:+.1%} (layer {change.layer} at micro-batch size {change.microbatch_size})"
        )
    elif earlier is not None:
        yield "the profile that was there is of another model or machine"
