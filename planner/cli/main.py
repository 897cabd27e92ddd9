"""The command ``pipeplan``: its commands, and how each error becomes one line and an exit code."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from pathlib import Path

import typer
from typer.exceptions import TyperException

import planner
from planner.cli import check, doctor, example, export, import_, profile, run, schema, show, simulate, solve
from planner.errors import PipeplanError

_LONGEST_LINE = 1_000
"""Letters of an error; a path is rarely so long."""

_HELP = ["-h", "--help"]

app = typer.Typer(
    name="pipeplan",
    help="Plans pipeline-parallel training, proves the plan, and runs it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": _HELP},
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


for _module in (example, profile, solve, run, simulate, check, show, export, import_, schema, doctor):
    _module.register(app)
for _command in app.registered_commands:
    assert _command.callback is not None
    _paragraphs = inspect.cleandoc(_command.callback.__doc__ or "").split("\n\n")
    _command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with 0, 1 (our bug), 2 (input), 3 (fits), 4 (run failed) or 130 (^C)."""
    sys.stdout, sys.stderr = (stream or Path(os.devnull).open("w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115 - closed ones
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    words = [word for word in given if word != "--debug"] or ["--help"]
    try:
        code = _typer_group().main(words, prog_name="pipeplan", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        if debug:
            traceback.print_exc()
        _say(_usage_fault(error))
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
    except OSError as error:
        if debug:
            traceback.print_exc()
        reason = error.strerror or _one_line(str(error))
        _say(f"{error.filename or 'a file or stream'}: {reason}; check it and its rights")
        raise SystemExit(2) from None
    except Exception as error:  # noqa: BLE001 - the last resort: whatever else it is, it is our bug
        if debug:
            traceback.print_exc()
        # typer's own for an EOFError, which is our bug, and for ^C with some of its versions
        cause = error.__cause__ if isinstance(error, typer.Abort) and error.__cause__ else error
        if isinstance(cause, KeyboardInterrupt):
            raise SystemExit(130) from None
        fault = f"{type(cause).__name__}: {_one_line(str(cause))}"
        _say(f"a bug in pipeplan: {fault}; run it again with --debug and report it")
        raise SystemExit(1) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _typer_group() -> typer.core.TyperGroup:
    """The commands, with arguments and values named as people write them: PLAN, and nothing for a flag."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for command in (group, *group.commands.values()):
        own = command.get_help_option(typer.Context(command, help_option_names=_HELP))
        for parameter in (*command.params, *([own] if own else [])):
            if parameter.param_type_name == "argument" and parameter.name:
                parameter.metavar = parameter.metavar or parameter.name.upper()
            elif getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return group


def _usage_fault(error: TyperException) -> str:
    """What is wrong with the words of the command line, and which help says more."""
    spell = getattr(error, "format_message", None)
    fault = _one_line(str(spell() if spell else error)).replace("Value error, ", "").rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{fault}; see {context.command_path if context else 'pipeplan'} --help"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _say(line: str) -> None:
    """One line on stderr, its middle left out where a file's own words make it endless: the mend stands at its end."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)
    if len(shown) > _LONGEST_LINE:
        shown = f"{shown[: _LONGEST_LINE - 401]}…{shown[-400:]}"
    sys.stderr.write(f"pipeplan: {shown}\n")


if __name__ == "__main__":
    main()
