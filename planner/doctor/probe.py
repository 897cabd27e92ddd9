"""What is asked in a child process: ``python -m planner.doctor.probe solver`` prints one JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def solver() -> dict[str, Any]:
    """A knapsack by HiGHS and by CBC through PuLP: which of them found its optimum, 25."""
    import pulp

    def optimum(found: Any) -> float | str:
        values, weights = (10, 13, 7, 8, 12), (3, 4, 2, 3, 4)
        problem = pulp.LpProblem("knapsack", pulp.LpMaximize)
        taken = [pulp.LpVariable(f"x{index}", cat="Binary") for index in range(5)]
        problem += pulp.lpSum(value * x for value, x in zip(values, taken, strict=True))
        problem += pulp.lpSum(weight * x for weight, x in zip(weights, taken, strict=True)) <= 8
        try:
            problem.solve(found())
            return float(pulp.value(problem.objective))
        except Exception as error:  # noqa: BLE001 - a solver that is not there says so in its own way
            return f"{type(error).__name__}: {error}"

    made = {"pulp": pulp.__version__, "optimum": 25.0}
    made["highs"] = optimum(lambda: pulp.HiGHS(msg=False))
    made["cbc"] = optimum(lambda: pulp.PULP_CBC_CMD(msg=False))
    return made


def torch() -> dict[str, Any]:
    """torch's version, its backends, and the GPUs it sees."""
    import torch as module
    import torch.distributed as dist

    there = dist.is_available()
    gpus = []
    for index in range(module.cuda.device_count()):
        with module.cuda.device(index):
            free, total = module.cuda.mem_get_info()
        gpus.append({"name": module.cuda.get_device_name(index), "memory_bytes": total, "free_bytes": free})
    return {
        "version": module.__version__,
        "cuda": module.version.cuda,
        "distributed": there,
        "gloo": there and dist.is_gloo_available(),
        "nccl": there and dist.is_nccl_available(),
        "gpus": gpus,
    }


def link(device: str) -> dict[str, Any]:
    """Two processes started, and the link between them as profiles measure it."""
    from planner.runtime.links import measure_links

    found = measure_links(device)
    if found is None:
        return {"found": False}
    return {
        "found": True,
        "latency_s": found.latency_s,
        "bandwidth_bytes_per_s": found.bandwidth_bytes_per_s,
        "overlap": found.overlap,
    }


PROBES: dict[str, Callable[..., dict[str, Any]]] = {"solver": solver, "torch": torch, "link": link}


if __name__ == "__main__":
    answer = PROBES[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
