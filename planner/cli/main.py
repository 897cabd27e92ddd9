"""The command ``pipeplan``: its commands, and how each error becomes one line and an exit code."""

from __future__ import annotations

import sys
import traceback

import typer
from typer.exceptions import TyperException

import planner
from planner.cli import schema
from planner.errors import PipeplanError

app = typer.Typer(
    name="pipeplan",
    help="Plans pipeline-parallel training, proves the plan, and runs it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipeplan {planner.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Say the version."),
    debug: bool = typer.Option(False, "--debug", help="Show a traceback with an error (anywhere on the line)."),
) -> None:
    """Plans pipeline-parallel training, proves the plan, and runs it."""


for _module in (schema,):
    _module.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with 0, 1 (our bug), 2 (input), 3 (fits), 4 (run failed) or 130 (^C)."""
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    try:
        code = typer.main.get_command(app).main(
            [word for word in words if word != "--debug"], prog_name="pipeplan", standalone_mode=False
        )
    except typer.Abort:
        raise SystemExit(130) from None
    except TyperException as error:
        if debug:
            traceback.print_exc()
        _say(f"{_one_line(str(getattr(error, 'message', error)))}; see pipeplan --help")
        raise SystemExit(2) from None
    except PipeplanError as error:
        if debug:
            traceback.print_exc()
        _say(str(error))
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except Exception as error:  # noqa: BLE001 - the last resort: whatever else it is, it is our bug
        if debug:
            traceback.print_exc()
        fault = f"{type(error).__name__}: {_one_line(str(error))}"
        _say(f"a bug in pipeplan: {fault}; run it again with --debug and report it")
        raise SystemExit(1) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _say(line: str) -> None:
    sys.stderr.write(f"pipeplan: {line}\n")


if __name__ == "__main__":
    main()
