"""``pipeplan doctor``: what it finds, and that a real fault is found, with its mend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.command import pipeplan, refused

from planner.doctor import Finding, State, checks


def _only(found: list[Finding], name: str) -> Finding:
    (one,) = [finding for finding in found if finding.name == name]
    assert bool(one.mend) == (one.state is not State.OK)
    return one


def _hide(folder: Path, monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make child processes fail to import packages, as where they are not installed."""
    for package in packages:
        (folder / f"{package}.py").write_text(f'raise ModuleNotFoundError("No module named {package!r}")')
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_the_solver_solves(tmp_path: Path) -> None:
    found = _only(list(checks._solver({})), "solver")
    assert found.state is State.OK
    assert found.figures is not None
    assert found.figures["highs"] == 25.0


def test_a_python_without_the_solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(tmp_path, monkeypatch, "pulp")
    found = _only(list(checks._solver({})), "solver")
    assert found.state is State.BROKEN
    assert "No module named 'pulp'" in found.fact
    assert "pip install 'pulp[highs]" in found.mend


def test_a_python_without_highs_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(tmp_path, monkeypatch, "highspy")
    found = _only(list(checks._solver({})), "solver")
    assert found.state is State.WARNING
    assert "CBC, far slower, does" in found.fact


def test_a_python_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(tmp_path, monkeypatch, "torch")
    machine: dict[str, object] = {}
    found = _only(list(checks._torch(machine)), "torch")
    assert found.state is State.BROKEN
    assert "pip install 'torch" in found.mend
    assert list(checks._processes(machine)) == [], "what needs torch is not asked for"


@pytest.mark.parametrize(("found", "unfit"), [("0.9.1", True), ("0.29", False), ("0.29.0", False), ("1.2.3rc1", False)])
def test_packages_of_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str, unfit: bool) -> None:
    """A package's metadata, found before that of the real one."""
    (tmp_path / f"typer-{found}.dist-info").mkdir()
    (tmp_path / f"typer-{found}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: typer\nVersion: {found}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    one = _only(list(checks._packages({})), "packages")
    assert one.state is (State.WARNING if unfit else State.OK)
    if unfit:
        assert one.fact == "typer 0.9.1 is none that pipeplan is made for"
        assert one.mend.startswith("pip install 'typer>=0.")


@pytest.mark.parametrize(
    ("found", "bounds", "suits"),
    [
        ("3.3.2", "<4,>=3.3", True),
        ("4.0.0a1", "<4,>=3.3", False),
        ("3.2.9", "<4,>=3.3", False),
        ("3.3", ">=3.3.0", True),
    ],
)
def test_versions_within_bounds(found: str, bounds: str, suits: bool) -> None:
    assert checks._within(found, bounds) == suits


def test_a_torch_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This torch, which says another version of itself."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.6.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = _only(list(checks._torch({})), "torch")
    assert found.state is State.WARNING
    assert found.fact.startswith("2.6.0 (")
    assert "pip install 'torch>=2.11,<2.14'" in found.mend


def test_a_solver_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pulp.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = _only(list(checks._solver({})), "solver")
    assert (found.state, found.fact) == (State.BROKEN, "ended with code -9")


def test_a_temporary_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", None)
    found = _only(list(checks._disk({})), "temporary folder")
    assert found.state is State.WARNING
    assert found.fact.startswith("TMPDIR names /proc/none, which cannot be written")


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")
    found = _only(list(checks._disk({})), "this folder")
    assert found.state is State.BROKEN
    assert found.fact.startswith("/proc: ")


def test_a_machine_that_cannot_connect_to_itself() -> None:
    """In a network namespace whose loopback interface is down."""
    code = (
        "from planner.doctor import checks\n"
        "(found,) = checks._processes({'torch': {'gpus': []}})\nprint(found.state, found.fact, found.mend, sep='|')"
    )
    words = ["unshare", "--map-root-user", "--net", sys.executable, "-c", code]
    try:
        made = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    except FileNotFoundError:
        pytest.skip("needs unshare, of util-linux")
    if made.returncode and "unshare" in made.stderr:
        pytest.skip(f"needs network namespaces: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr
    state, fact, mend = made.stdout.strip().split("|")
    assert state == "broken"
    assert fact.startswith("this machine cannot connect to itself: 127.0.0.1: ")
    assert "ip link set lo up" in mend


@pytest.mark.parametrize(
    ("torch", "state", "said"),
    [
        ({"gloo": True, "nccl": False, "gpus": []}, State.OK, "gloo"),
        ({"gloo": False, "nccl": False, "gpus": []}, State.BROKEN, "none"),
        ({"gloo": True, "nccl": False, "gpus": [{}]}, State.BROKEN, "gloo"),
        ({"gloo": True, "nccl": True, "gpus": [{}]}, State.OK, "gloo, nccl"),
    ],
)
def test_backends_that_a_run_needs(torch: dict[str, object], state: State, said: str) -> None:
    found = checks._backends(torch)
    assert (found.state, found.fact) == (state, said)


def test_gpus_that_others_use() -> None:
    gpus = [{"name": "H100", "memory_bytes": 80 << 30, "free_bytes": free << 30} for free in (79, 10)]
    found = checks._gpus({"gpus": gpus, "cuda": "12"})
    assert found.state is State.WARNING
    assert found.fact == "2: H100 (80 GiB); others hold over a tenth of GPU 1"


def test_what_is_broken_is_said_at_the_end_with_code_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.doctor.checks.CHECKS", (checks._python, checks._disk))
    monkeypatch.chdir("/proc")
    answer = pipeplan("doctor")
    assert answer.code == 4
    assert answer.out.splitlines()[0].startswith("ok      python: 3.")
    assert "broken  this folder: /proc" in answer.out
    assert answer.err == ("pipeplan: 1 of 3 checks found something broken: this folder; mend it as their lines say\n")
    answer = pipeplan("doctor", "--json")
    assert "this folder" in refused(answer._replace(out=""), code=4)
    document = json.loads(answer.out)
    assert document["ok"] is False
    assert [check["state"] for check in document["checks"]][:2] == ["ok", "broken"]


@pytest.mark.slow
def test_this_machine_is_well(tmp_path: Path) -> None:
    """The whole command in a process of its own, whose own modules hold no torch."""
    code = (
        "import sys\nfrom planner.cli.main import main\ntry:\n    main(['doctor', '--json'])\n"
        "except SystemExit as end:\n    print('torch' in sys.modules, end.code, file=sys.stderr)\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert made.stderr.split() == ["False", "0"]
    checks_ = {check["name"]: check for check in json.loads(made.stdout)["checks"]}
    assert checks_["link"]["figures"]["bandwidth_bytes_per_s"] > 0
    assert checks_["processes"]["state"] == "ok"


def test_the_versions_of_torch_it_names_are_those_that_are_asked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"torch{checks._TORCH}" in project["project"]["dependencies"]
