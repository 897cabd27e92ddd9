"""One rank of PyTorch's own pipelining on a model file whose model() is an nn.Sequential; started by runtime.py.

    torch_pipelining.py RANK RANKS MICROBATCHES SCHEDULE MODEL CUT STEPS FOLDER

CUT: layers per stage, joined by commas. Writes the moments at which its steps ended to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from planner.allocator import keep_freed_memory
from planner.capture import load_model_file

ACTION = re.compile(r"\d+[FBIW]\d+")
SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL: dict[str, Any] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


def main() -> None:
    """Train; tell when each step ended."""
    rank, num_ranks, num_microbatches = map(int, sys.argv[1:4])
    name, model_path, cut, num_steps, folder = (
        sys.argv[4],
        Path(sys.argv[5]),
        sys.argv[6],
        int(sys.argv[7]),
        sys.argv[8],
    )
    torch.set_num_threads(1)
    keep_freed_memory()  # as our processes do: both sides alike
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    model_file = load_model_file(model_path)
    torch.manual_seed(0)
    layers = list(model_file.model())
    bounds = [0]
    for count in map(int, cut.split(",")):
        bounds.append(bounds[-1] + count)
    num_stages = len(bounds) - 1
    mine = [stage for stage in range(num_stages) if _rank_of(stage, num_ranks, v_shaped=name == "zb-v") == rank]
    parts = [nn.Sequential(*layers[bounds[stage] : bounds[stage + 1]]) for stage in mine]
    stages = [
        PipelineStage(part, stage, num_stages, torch.device("cpu")) for part, stage in zip(parts, mine, strict=True)
    ]
    if name in SINGLE:
        schedule = SINGLE[name](stages[0], num_microbatches, loss_fn=model_file.loss)
    else:
        schedule = SEVERAL[name](stages, num_microbatches, loss_fn=model_file.loss)
    optimizer = model_file.optimizer([parameter for part in parts for parameter in part.parameters()])
    inputs, target = model_file.batch(num_microbatches)
    dist.barrier()
    ends = []
    for _ in range(num_steps):
        given = (inputs,) if 0 in mine else ()
        wanted = {"target": target, "losses": []} if num_stages - 1 in mine else {}
        schedule.step(*given, **wanted)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    order = {} if name in SINGLE else schedule.pipeline_order  # what 1F1B tells of its own order is wrong
    row = [str(action) for action in order.get(rank, ()) if ACTION.fullmatch(str(action))]
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"ends": ends, "order": row}))
    dist.barrier()
    dist.destroy_process_group()


def _rank_of(stage: int, num_ranks: int, *, v_shaped: bool) -> int:
    turn, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if v_shaped and turn else place


if __name__ == "__main__":
    main()
