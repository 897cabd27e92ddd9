"""Starting: no torch where none is needed, help that fits a terminal, streams that close."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from support.command import pipeplan
from support.plans import chain_profile, fresh_plan, save

from planner.cli.main import app
from planner.files import schema_of
from planner.profile import Profile

HEAVY = ("torch", "networkx", "pulp", "highspy", "numpy", "pydantic", "yaml")
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def _child(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def _imported(*words: str) -> set[str]:
    """The packages that a command has imported at its end."""
    code = (
        "import sys\nfrom planner.cli.main import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    made = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120, check=True)
    return set(made.stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command: str) -> None:
    loaded = _imported(command, "--help")
    assert not loaded & {"torch", "networkx", "pulp", "highspy", "numpy"}, command


def test_the_first_help_imports_nothing_heavy() -> None:
    assert not _imported("--help") & {"torch", "networkx", "pulp", "highspy", "numpy", "yaml"}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_eighty_columns_without_colour(command: str) -> None:
    answer = _child(*filter(None, [command]), "--help", COLUMNS="80", NO_COLOR="1", TERM="xterm-256color")
    assert answer.returncode == 0
    assert answer.stderr == ""
    assert "\x1b" not in answer.stdout
    lines = answer.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in answer.stdout, "nothing is cut off"
    assert "<bool>" not in answer.stdout, "a flag takes no value"
    listed = [line.strip("│ ") for line in lines if line.startswith("│")]
    assert all(listed), "every option has its words"


def test_every_command_says_what_it_does() -> None:
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        assert command.help, command.name
        for parameter in command.params:
            assert getattr(parameter, "help", None) or parameter.name == "help", (command.name, parameter.name)


def test_the_readme_names_every_command_and_option_that_there_is_and_no_other() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)(.*)$", text, re.MULTILINE)
    assert sorted(name for name, _ in rows) == COMMANDS
    for name, said in rows:
        parameters = typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]
        assert set(re.findall(r"--[a-z0-9-]+", said)) <= {word for one in parameters for word in one.opts}, name


def test_every_command_that_the_readme_shows_is_one() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    shown = re.findall(r"^    pipeplan (\w+)([^#\n]*)", text, re.MULTILINE) + re.findall(
        r"`pipeplan (\w+)([^`]*)`", text
    )
    assert len(shown) > 10
    for name, words in shown:
        if name != "COMMAND":
            parameters = typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]
            assert set(re.findall(r"--[a-z-]+", words)) <= {word for one in parameters for word in one.opts}, name


def test_a_schema_is_one_json_document() -> None:
    answer = pipeplan("schema", "profile")
    assert json.loads(answer.out) == schema_of(Profile)
    assert answer.err == ""
    for name in ("plan", "cluster"):
        assert json.loads(pipeplan("schema", name).out)["type"] == "object"


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "planner", "schema", "plan"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert answer.returncode == 2
    assert answer.stderr.startswith("pipeplan: ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["schema plan", "show plan.yaml --all"])
def test_a_closed_pipe_is_quiet(tmp_path: Path, words: str) -> None:
    profile = chain_profile(60)
    cut = [[layer.name] for layer in profile.layers]
    save(fresh_plan(profile, cut, ranks=60), profile, tmp_path)
    made = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m planner {words} | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (made.stderr, made.returncode) == ("", 0)


@pytest.mark.parametrize("closing", [">&-", ">&- 2>&-"])
def test_closed_streams_are_no_fault(tmp_path: Path, closing: str) -> None:
    profile = chain_profile(2)
    save(fresh_plan(profile, [["block.0"], ["block.1"]], ranks=2), profile, tmp_path)
    for words, code in (("check plan.yaml", 0), ("check none", 2)):
        made = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m planner {words} {closing}"],
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert made.returncode == code, (words, made)
        assert "bug" not in made.stderr


def test_a_file_of_bytecode_that_was_cut_is_no_interruption(tmp_path: Path) -> None:
    """Importing it raises EOFError, which typer takes for a person who has had enough."""
    (tmp_path / "yaml.pyc").write_bytes(importlib.util.MAGIC_NUMBER + bytes(12))
    answer = _child("check", "plan.yaml", PYTHONPATH=str(tmp_path))
    assert answer.returncode == 1
    assert "a bug in pipeplan: EOFError: " in answer.stderr.splitlines()[-1]


def test_debug_shows_the_traceback() -> None:
    answer = pipeplan("--debug", "check", "/none.yaml")
    assert answer.code == 2
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-1].startswith("pipeplan: /none.yaml: there is no such file")
