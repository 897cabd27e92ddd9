"""``pipeplan profile``: what is written, said, refused and left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.command import pipeplan

from planner.capture import load_model_file
from planner.cli.main import main
from planner.errors import InputError
from planner.measure.optimizer import measure_optimizer
from planner.profile import read_profile

MODEL = """
import torch
from torch import nn

global_batch = 8

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4))
        self.last = nn.Linear(64, 16)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

def model():
    return Net()

def batch(size):
    return torch.randn(size, 16), torch.randn(size, 16)

def loss(output, target):
    return (output - target).pow(2).mean()
"""


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *words])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder where a model was profiled."""
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "net.py").write_text(MODEL)
    words = [sys.executable, "-m", "planner", "profile", "net.py", "--device", "cpu", "--microbatch", "2,1"]
    return folder, subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_the_profile_is_where_it_belongs(profiled: tuple[Path, Any]) -> None:
    folder, run = profiled
    assert run.returncode == 0, run.stderr
    profile = read_profile(folder / "profiles" / "net.json")
    assert (folder / "profiles" / profile.model.source).resolve() == (folder / "net.py").resolve()
    assert [cost.microbatch_size for cost in profile.layers[0].costs] == [1, 2]
    assert [one.microbatch_size for one in profile.accuracy or ()] == [1, 2]
    assert profile.global_batch == 8
    assert profile.provenance == "measured"
    assert profile.dtype == "float32"
    assert profile.links is not None
    assert profile.device.memory_bytes > 2**30


def test_people_are_told_what_was_measured_and_what_is_next(profiled: tuple[Path, Any]) -> None:
    _, run = profiled
    assert "net: 6 layers" in run.stdout
    assert "AdamW: 2.00 bytes of state" in run.stdout
    assert "link between two processes" in run.stdout
    assert "busy neighbour" in run.stdout
    assert "from the profile that was there" not in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert "next: pipeplan solve" in run.stderr
    assert "\x1b" not in run.stdout + run.stderr  # no progress bar in a pipe


def test_a_second_profile_says_how_far_it_is_from_the_first(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here as on a machine without a core for a neighbour, or a second device to send to."""
    monkeypatch.setattr("planner.measure.default_neighbours", lambda device: 0)
    monkeypatch.setattr("planner.runtime.sums.measure_links", lambda device: None)
    _edit(known / "net.py", "return Net()", "print('no part of the answer')\n    return Net()")
    words = ("--device", "cpu", "--microbatch", "2", "--fresh", "--json", "-o", known / "profiles" / "net.json")
    said = pipeplan("profile", known / "net.py", *words)
    assert said.code == 0, said.err
    document = json.loads(said.out)
    assert document["unchanged"] is False
    assert document["difference"]["median"] >= 0
    assert document["difference"]["microbatch_size"] == 2
    assert document["busy_neighbours"] == 0
    assert 0 < document["loss"] < 10
    assert document["profile"]["format"] == "pipeplan-profile/1"
    assert "links" not in document["profile"]
    assert [one["microbatch_size"] for one in document["accuracy"]] == [2]


# --- nothing is measured twice ---------------------------------------------------------------------------------------


def _again(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> bool:
    """Whether the profile in the folder was left as it was."""
    path = folder / "profiles" / "net.json"
    before = path.stat().st_mtime_ns
    capsys.readouterr()
    assert _run(str(folder / "net.py"), "--device", "cpu", "--microbatch", "1,2", "-o", str(path), *words) == 0
    return path.stat().st_mtime_ns == before


@pytest.fixture
def known(profiled: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of that folder."""
    folder, _ = profiled
    (tmp_path / "profiles").mkdir()
    for name in ("net.py", "profiles/net.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was asked to be measured, in place of measuring it."""
    asked: list[object] = []

    def refuse(model_file: object, wanted: object, path: object, progress: object) -> object:
        asked.append(wanted)
        raise InputError("would be measured")

    monkeypatch.setattr("planner.cli.profile._measured", refuse)
    return asked


def test_an_unchanged_model_is_not_measured_again(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _again(known, capsys)
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1
    assert "--fresh" in said.out
    assert said.err == ""
    assert _again(known, capsys, "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["unchanged"] is True
    assert document["profile"] == json.loads((known / "profiles" / "net.json").read_text())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", "# other words, the same graph\n"),
        ("return Net()", "net = Net()\n    torch.nn.init.zeros_(net.first.weight)\n    return net"),
    ],
)
def test_what_does_not_change_the_graph_does_not_count(
    old: str, new: str, known: Path, measured: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    _edit(known / "net.py", old, new)
    assert _again(known, capsys)
    assert not measured


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nn.ReLU()", "nn.GELU()"),
        ("Dropout(0.1)", "Dropout(0.2)"),
        ("nn.Linear(64, 64)", "nn.Linear(64, 64, bias=False)"),
        ("range(4)", "range(5)"),
        ("return Net()", "return Net().double()"),
        ("return Net()", "net = Net()\n    net.first.requires_grad_(False)\n    return net"),
        ("randn(size, 16), torch", "randn(size, 3, 16), torch"),
        ("global_batch = 8", "global_batch = 16"),
        ("def loss(", "def optimizer(params):\n    return torch.optim.SGD(params, lr=0.1)\n\ndef loss("),
    ],
)
def test_whatever_changes_the_cost_is_measured(
    old: str, new: str, known: Path, measured: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    text = _edit(known / "net.py", old, new)
    if ".double()" in text:
        _edit(known / "net.py", "torch.randn(size, 16)", "torch.randn(size, 16).double()")
    path = known / "profiles" / "net.json"
    assert _run(str(known / "net.py"), "--device", "cpu", "--microbatch", "1", "-o", str(path)) == 2
    assert len(measured) == 1, capsys.readouterr()


@pytest.mark.parametrize(
    "words", [["--fresh"], ["--microbatch", "8"], ["--granularity", "op"], ["--layerwise"]], ids=lambda words: words[0]
)
def test_whatever_is_asked_for_anew_is_measured(words: list[str], known: Path, measured: list[object]) -> None:
    path = known / "profiles" / "net.json"
    assert _run(str(known / "net.py"), "--device", "cpu", "--microbatch", "1", "-o", str(path), *words) == 2
    assert len(measured) == 1


def _edit(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 2) if old else new + text)
    return new


# --- estimates -------------------------------------------------------------------------------------------------------


def test_an_estimate_says_so_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    assert _run("net.py", "--estimate", "A100", "--microbatch", "1,2") == 0
    assert "ESTIMATED for a100-80gb" in capsys.readouterr().out
    profile = read_profile(Path("profiles/net.json"))
    assert (profile.provenance, profile.device.kind, profile.device.name) == ("estimated", "estimate", "a100-80gb")
    assert profile.links is not None
    assert _run("net.py", "--estimate", "a100", "--microbatch", "1,2") == 0
    assert "estimated for this already" in capsys.readouterr().out
    assert _run("net.py", "--estimate", "h100", "--microbatch", "1,2") == 0
    assert "ESTIMATED for h100-sxm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--estimate", "a1000"], "a100-80gb"),
        (["--estimate", "a100", "--device", "cpu"], "--device"),
        (["--estimate", "a100", "--layerwise"], "--layerwise"),
    ],
)
def test_an_estimate_for_what_is_not_known_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    assert _run(str(tmp_path / "net.py"), "-o", str(tmp_path / "p.json"), *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_an_estimate_does_not_overwrite_what_was_measured(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = known / "profiles" / "net.json"
    before = path.read_bytes()
    assert _run(str(known / "net.py"), "-o", str(path), "--estimate", "h100-sxm") == 2
    assert "holds a measured profile" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_file_that_is_no_profile_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    assert _run(str(path), "-o", str(path)) == 2
    assert path.read_text() == MODEL
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--microbatch", "1,x"], "--microbatch"),
        (["--microbatch", "0"], "--microbatch"),
        (["--microbatch", ""], "--microbatch"),
        (["--device", "tpu"], "tpu"),
        (["--granularity", "atom"], "atom"),
        (["-o", "no.py/x.json"], "no.py"),
    ],
)
def test_bad_words_give_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    Path("no.py").write_text("")
    assert _run("net.py", *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_a_backward_that_raises_is_the_models_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor changed in place that its backward still needs: plain PyTorch raises too, and only in the backward."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n        y = torch.tanh(self.a(x))\n        y.mul_(2)\n        return y\n"
        "def model():\n    return Net()\n"
        "def batch(size):\n    return torch.randn(size, 4), torch.zeros(size, 4)\n"
        "def loss(output, target):\n    return (output - target).square().mean()\n"
    )
    assert _run("net.py", "--microbatch", "1", "-o", "net.json") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "net.py: training one micro-batch raised RuntimeError: one of the variables" in lines[0]


def test_what_only_values_show_is_told_with_its_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dtypes that do not go together pass the capture, which computes nothing."""
    (tmp_path / "net.py").write_text(
        MODEL.replace("return torch.randn(size, 16),", "return torch.randint(9, (size, 16)),")
    )
    assert _run(str(tmp_path / "net.py"), "--microbatch", "1", "-o", str(tmp_path / "net.json")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "net.py:15: model()'s forward() raised RuntimeError" in lines[0]


def test_an_optimizer_that_wants_more_than_gradients_is_told(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL + "\ndef optimizer(params):\n    return torch.optim.LBFGS(params)\n")
    model_file = load_model_file(path)
    with pytest.raises(InputError, match=r"optimizer\(\) returned LBFGS, whose step\(\) raised TypeError"):
        measure_optimizer(model_file, model_file.model(), device="cpu")


def test_a_missing_model_file_gives_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(str(tmp_path / "none.py"), "-o", str(tmp_path / "p.json")) == 2
    assert "none.py" in capsys.readouterr().err


def test_interrupted_the_old_profile_stays(profiled: tuple[Path, Any]) -> None:
    folder, _ = profiled
    path = folder / "profiles" / "net.json"
    before = path.read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", "profile", "net.py", "--device", "cpu", "--microbatch", "1,2,4,8", "--fresh"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while len(_in_session(process.pid)) < 2:  # the first neighbour is there once it measures
        assert process.poll() is None, "it was over before it could be interrupted"
        assert time.monotonic() < until, "it never measures"
        time.sleep(0.1)
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    # a shell calls both 130: Python itself ends by the signal where ^C fell into an exec, such as an import makes
    assert process.returncode in (130, -signal.SIGINT), said
    assert not said
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["net.json"]
    time.sleep(0.5)
    assert not _in_session(process.pid), "neighbours outlived it"


def _in_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found
