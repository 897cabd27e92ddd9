"""``pipeplan example``: list the model files that ship, or write one."""

from __future__ import annotations

from pathlib import Path

import typer

from planner.cli.console import err, out
from planner.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("example")(example)


def example(
    name: str | None = typer.Argument(None, help="Which example; without it, list them."),
    output: Path | None = typer.Option(None, "-o", "--output", help="Where to write it (default: ./NAME.py)."),
) -> None:
    """Write an example model file, and overwrite nothing."""
    from planner.examples import example_names, example_summary, example_text

    names = example_names()
    if name is None:
        if output is not None:
            raise InputError("-o names a file, but no example is named", hint=f"name one of {', '.join(names)}")
        for known in names:
            out.print(f"{known:8}{example_summary(known)}", markup=False, soft_wrap=True)
        return
    if name not in names:
        raise InputError(f"there is no example {name!r}", hint=f"name one of {', '.join(names)}")
    path = output or Path(f"{name}.py")
    _write_new(path, example_text(name))
    err.print(f"wrote {path}; next: pipeplan profile {path}", markup=False, soft_wrap=True)


def _write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet. Raises InputError where it is, or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"{path}: is there already", hint="name another file with -o, or move it away") from None
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror})", hint="check the path and its rights"
        ) from None
