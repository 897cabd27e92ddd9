"""Two launchers, each in a network namespace of its own: as on two machines, one address is all they have."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.runs import EVERYTHING, plan_of, run
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from planner.errors import InputError, RunError
from planner.plan import write_plan
from planner.runtime import launch
from planner.runtime.launch import Nodes, meet

ADDRESSES = ("10.231.77.1", "10.231.77.2")
PATIENCE_S = 240
MEETINGS = 150
"""A port that torch picked comes round again after 20 to 60 of them."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces with one cable between them."""
    if shutil.which("ip") is None or not hasattr(os, "geteuid") or os.geteuid():
        pytest.skip("needs root and the command ip")
    names = [f"pipeplan{number}-{os.getpid()}" for number in (0, 1)]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            ends = [f"pp{number}x{os.getpid() % 100_000}" for number in (0, 1)]
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end, address in zip(names, ends, ADDRESSES, strict=True):
                _ip("link", "set", end, "netns", name)
                for words in (["addr", "add", f"{address}/24", "dev", end], ["link", "set", end, "up"]):
                    _ip("-n", name, *words)
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_two_launchers_that_share_nothing_but_a_cable(namespaces: list[str], tmp_path: Path) -> None:
    plan = plan_of(EVERYTHING, num_ranks=2)
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    started = [
        subprocess.Popen(
            [
                "ip", "netns", "exec", name, sys.executable, "-m", "planner", "run", str(path), "--steps", "3",
                "--json", "--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", f"{ADDRESSES[0]}:29500",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(namespaces)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], told
    (first, _), (second, words) = told
    assert second == ""
    assert "node 0 tells the result" in words
    assert json.loads(first)["weights_sha256"] == run(plan, tmp_path, steps=3).result.weights_sha256


@pytest.mark.slow
def test_the_launcher_finds_the_store_of_every_run_of_one_process() -> None:
    for _ in range(MEETINGS):
        store = meet(Nodes())
        launchers = TCPStore("127.0.0.1", store.port, is_master=True, wait_for_workers=False, multi_tenant=True)
        launchers.set("key", "value")
        assert store.get("key") == b"value"
        del launchers, store


@pytest.mark.slow
def test_an_address_that_no_machine_has(tmp_path: Path) -> None:
    plan = plan_of(EVERYTHING, num_ranks=2)
    with pytest.raises(InputError, match=r"--rdzv-endpoint no\.such\.host\.invalid:29500: .* is not known here"):
        run(plan, tmp_path, nnodes=2, node_rank=1, endpoint="no.such.host.invalid:29500")


@pytest.mark.slow
def test_an_address_that_node_0_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 waits for its own store no longer than it takes to see that it is not there (addresses of RFC 5737)."""
    monkeypatch.setattr(launch, "OWN_S", timedelta(seconds=2))
    started = time.monotonic()
    with pytest.raises(RunError, match=r"node 0 cannot meet the others at 192\.0\.2\.7:\d+ .*an address of node 0"):
        meet(Nodes(count=2, rank=0, host="192.0.2.7", port=free_port()))
    assert time.monotonic() - started < 60


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
