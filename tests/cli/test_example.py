"""``pipeplan example``: lists, writes, overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.main import main
from planner.examples import example_names, example_text


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["example", *words])
    return int(ended.value.code or 0)


def test_lists_every_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(example_names())


def test_writes_it_here_and_says_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run("gpt") == 0
    assert (tmp_path / "gpt.py").read_text() == example_text("gpt")
    said = capsys.readouterr()
    assert said.out == ""
    assert "pipeplan profile gpt.py" in said.err


def test_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text("mine")
    assert _run("unet", "-o", str(path)) == 2
    assert path.read_text() == "mine"
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("words", [["nonsense"], ["-o", "x.py"], ["gpt", "-o", "no/such/folder/gpt.py"]])
def test_bad_words_give_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(*words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
