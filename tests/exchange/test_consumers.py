"""What is exported, taken by the systems themselves, each in a process of its own: torch trains, the others parse.

PIPEPLAN_CONSUMERS names a Python that has megatron-core, deepspeed or torchtitan (default: this one); what it has not
is skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import pipeplan
from support.plans import fresh_plan, save
from support.rows import MODEL_FILE, row_profile, with_tensor_rows

from planner.schedules import Placement, ScheduleName, build

PYTHON = os.environ.get("PIPEPLAN_CONSUMERS", sys.executable)


def _saved(folder: Path, *starts: int, profile: Any = None, **shape: Any) -> Path:
    profile = profile or row_profile(6)
    names = [layer.name for layer in profile.layers]
    cut = [names[a:b] for a, b in zip((0, *starts), (*starts, len(names)), strict=True)]
    return save(fresh_plan(profile, cut, **({"ranks": len(cut)} | shape)), profile, folder)


def _child(code: str, *words: object, python: str = PYTHON, **environment: str) -> str:
    made = subprocess.run(
        [python, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **environment},
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout


def _needs(module: str) -> None:
    """Skip where the Python of the consumers lacks a package."""
    found = subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, check=False, text=True)
    if found.returncode:
        pytest.skip(f"{PYTHON} has no {module}; PIPEPLAN_CONSUMERS names a Python that has")


# --- torch ------------------------------------------------------------------------------------------------------------

ONE_PROCESS = """
import sys, torch, importlib.util
spec = importlib.util.spec_from_file_location("model_file", sys.argv[1])
user = importlib.util.module_from_spec(spec)
spec.loader.exec_module(user)
torch.manual_seed(0)
model = user.model()
optimizer = user.optimizer(model.parameters())
for step in range(int(sys.argv[3])):
    torch.manual_seed(step)
    inputs, target = user.batch(int(sys.argv[2]))
    optimizer.zero_grad()
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    loss = user.loss(output, target) if hasattr(user, "loss") else output
    loss.backward()
    if getattr(user, "clip_norm", None):
        torch.nn.utils.clip_grad_norm_(model.parameters(), user.clip_norm)
    optimizer.step()
    print(loss.item())
"""


def _trains_like_one_process(
    folder: Path, path: Path, samples: int, processes: int, *, inputs: str = "tokens", more: str = ""
) -> None:
    """The exported script, in as many processes as it says, has the losses of plain PyTorch in one."""
    (folder / "model.py").write_text(MODEL_FILE.replace("INPUTS", inputs) + more)
    assert pipeplan("export", path, "--to", "torch", "-o", folder / "train.py").code == 0
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        "train.py",
        "--steps",
        "4",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert made.returncode == 0, made.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", made.stdout, re.MULTILINE)]
    alone = _child(ONE_PROCESS, folder / "model.py", samples, 4, python=sys.executable).split()
    assert losses == pytest.approx([float(loss) for loss in alone], rel=1e-5)
    assert len(set(losses)) == len(losses), "it trains"


@pytest.mark.slow
def test_torch_trains_two_stages_a_rank_in_a_v(tmp_path: Path) -> None:
    path = _saved(tmp_path, 2, 5, 7, name=ScheduleName.ZB_V, ranks=2, microbatches=4, size=2)
    _trains_like_one_process(tmp_path, path, 8, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "starts"),
    [
        (ScheduleName.GPIPE, (3,)),
        (ScheduleName.ONE_F_ONE_B, (8,)),
        (ScheduleName.ZB_H1, (3,)),
        (ScheduleName.ZB_H2, (1,)),
        (ScheduleName.INTERLEAVED, (2, 4, 6)),
        (ScheduleName.LOOPED_BFS, (2, 4, 6)),
    ],
)
def test_torch_trains_every_schedule(tmp_path: Path, name: ScheduleName, starts: tuple[int, ...]) -> None:
    path = _saved(tmp_path, *starts, name=name, ranks=2, microbatches=4)
    _trains_like_one_process(tmp_path, path, 4, 2)


@pytest.mark.slow
def test_torch_trains_replicas_with_recompute_and_named_inputs(tmp_path: Path) -> None:
    path = _saved(tmp_path, 4, microbatches=2, size=2, data=2, recompute=[True, False])
    _trains_like_one_process(tmp_path, path, 8, 4, inputs="{'tokens': tokens}", more="clip_norm = 0.1")


LABELLED = """
class Labelled(Row):
    def forward(self, tokens, labels):
        x = self.token(tokens).transpose(0, 1)
        slopes = torch.linspace(0.5, 1, 8).cos()
        for block in self.blocks:
            x = block(x) * slopes
        output = self.head(self.norm(x)).transpose(0, 1)
        return functional.cross_entropy(output.flatten(0, 1), labels.flatten())

def model():
    return Labelled()

del loss
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1])
@pytest.mark.parametrize("starts", [(4,), (2, 4, 6)])
def test_torch_trains_a_model_that_makes_its_loss(tmp_path: Path, starts: tuple[int, ...], name: ScheduleName) -> None:
    """Labels are an input that the last stage reads, a table that the first makes all read; what is sent is a view."""
    path = _saved(tmp_path, *starts, microbatches=4, size=2, name=name)
    text = "{'tokens': tokens, 'labels': tokens.roll(1, 1)}"
    more = LABELLED + f"def batch(size):\n    tokens = torch.randint(16, (size, 4))\n    return {text}, None\n"
    _trains_like_one_process(tmp_path, path, 8, len(starts) + 1, more=more)


NAMED_OUTPUT = """
class Named(Row):
    def forward(self, tokens):
        return {"scores": super().forward(tokens), "zeros": torch.zeros(len(tokens))}

def model():
    return Named()

def batch(size):
    tokens = torch.randint(16, (size, 4))
    return tokens, {"next": (tokens.roll(1, 1), None), "weight": torch.ones(size)}

def loss(output, target):
    losses = functional.cross_entropy(output["scores"].transpose(1, 2), target["next"][0], reduction="none")
    return (losses.mean(1) * target["weight"]).mean() + output["zeros"].sum()
"""


@pytest.mark.slow
def test_torch_trains_a_model_of_several_outputs_and_targets(tmp_path: Path) -> None:
    path = _saved(tmp_path, 4, microbatches=4, size=2)
    _trains_like_one_process(tmp_path, path, 8, 2, more=NAMED_OUTPUT)


@pytest.mark.slow
def test_torch_trains_one_stage(tmp_path: Path) -> None:
    _trains_like_one_process(tmp_path, _saved(tmp_path, microbatches=2), 2, 1)


TORCH_ORDERS = """
import json, sys
from torch.distributed.pipelining import schedules
asked = json.loads(sys.argv[1])
made = []
for name, ranks, virtual, microbatches in asked:
    if virtual == 1 and name != "1F1B":
        made.append(None)
        continue
    kind = schedules.get_schedule_class(name)
    self = object.__new__(kind)
    self.__dict__.update(pp_group_size=ranks, _num_stages=ranks * virtual, n_local_stages=virtual,
                         _n_microbatches=microbatches, rank=0, _stages=[None] * virtual)
    orders = []
    if name == "Interleaved1F1B":
        self.number_of_rounds = max(1, microbatches // ranks)
        self.microbatches_per_round = microbatches // self.number_of_rounds
    for rank in range(ranks):
        orders.append([str(a) for a in self._calculate_single_rank_operations(rank) if a is not None])
    made.append(orders)
print(json.dumps(made))
"""


def test_torch_makes_the_orders_that_are_exported_by_name() -> None:
    """What torchtitan is told by name alone is what torch makes of that name."""
    shapes = [(ranks, virtual, rounds * ranks) for ranks in (2, 3, 4) for virtual in (2, 3) for rounds in (1, 2, 3)]
    asked = [("Interleaved1F1B", *shape) for shape in shapes]
    for (name, ranks, virtual, microbatches), theirs in zip(
        asked, json.loads(_child(TORCH_ORDERS, json.dumps(asked), python=sys.executable)), strict=True
    ):
        made = build(
            ScheduleName.INTERLEAVED,
            num_ranks=ranks,
            virtual=virtual,
            num_microbatches=microbatches,
            placement=Placement.LOOP,
        )
        assert [[str(action) for action in order] for order in made] == theirs, (name, ranks, virtual, microbatches)


# --- Megatron-LM ------------------------------------------------------------------------------------------------------

MEGATRON = """
import json, sys
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout as Layout
layout = Layout(sys.argv[1], int(sys.argv[2]))
layout.validate_layer_layout(int(sys.argv[3]), None)
print(json.dumps([[[kind.name for kind in chunk] for chunk in rank] for rank in layout.layout]))
"""
MEGATRON_TABLES = """
import json, sys
from megatron.core.pipeline_parallel import schedules
print(json.dumps([schedules.get_schedule_table(m, v, p) for p, v, m in json.loads(sys.argv[1])]))
"""


def _megatron(path: Path) -> dict[str, str]:
    answer = pipeplan("export", path, "--to", "megatron")
    assert answer.code == 0, answer
    script = f"{answer.out}\nprintf '%s\\n' \"${{PIPEPLAN_OPTIONS[@]}}\"\n"
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\n")
    found: dict[str, str] = {}
    for word in filter(None, words):
        if word.startswith("--"):
            found[name := word] = ""
        else:
            found[name] = word
    return found


@pytest.mark.parametrize("starts", [(3,), (1, 4, 6)])
def test_megatron_core_parses_the_layout(tmp_path: Path, starts: tuple[int, ...]) -> None:
    _needs("megatron.core")
    name = ScheduleName.INTERLEAVED if len(starts) > 1 else ScheduleName.ONE_F_ONE_B
    path = _saved(tmp_path, *starts, ranks=2, name=name)
    options = _megatron(path)
    layout = json.loads(
        _child(MEGATRON, options["--pipeline-model-parallel-layout"], options["--pipeline-model-parallel-size"],
               options["--num-layers"])
    )  # fmt: skip
    kinds = ["embedding", *["decoder"] * 6, "loss", "loss"]
    stages = [kinds[a:b] for a, b in zip((0, *starts), (*starts, 9), strict=True)]
    wanted = [stage[:-1] if stage.count("loss") == 2 else stage for stage in stages]  # norm and head are one L
    assert layout == [wanted[rank::2] for rank in range(2)]


MEGATRON_CONFIG = """
import sys
from megatron.core.model_parallel_config import ModelParallelConfig
made = ModelParallelConfig(tensor_model_parallel_size=int(sys.argv[1]), sequence_parallel=len(sys.argv) > 2)
print(made.tensor_model_parallel_size, made.sequence_parallel)
"""


@pytest.mark.parametrize("sequence", [False, True])
def test_megatron_core_takes_tensor_ranks_and_their_tokens(tmp_path: Path, sequence: bool) -> None:
    _needs("megatron.core")
    profile = with_tensor_rows(row_profile(6), sequence=sequence)
    options = _megatron(_saved(tmp_path, 3, profile=profile, tensor=2))
    words = [options["--tensor-model-parallel-size"], *(["on"] if "--sequence-parallel" in options else [])]
    assert _child(MEGATRON_CONFIG, *words).split() == ["2", str(sequence)]


def test_megatron_core_has_the_interleaved_order() -> None:
    """Its table says which micro-batch and chunk each forward is; backwards go through it with the chunks turned round.

    A rank runs (P-1-r) * 2 + (v-1) * P of the forwards, then one forward and one backward by turns.
    """
    _needs("megatron.core")
    shapes = [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 9)]
    tables = json.loads(_child(MEGATRON_TABLES, json.dumps(shapes)).splitlines()[-1])
    for (ranks, virtual, microbatches), table in zip(shapes, tables, strict=True):
        made = build(ScheduleName.INTERLEAVED, num_ranks=ranks, virtual=virtual, num_microbatches=microbatches,
                     placement=Placement.LOOP)  # fmt: skip
        for rank, order in enumerate(made):
            forwards = [f"{chunk * ranks + rank}F{m}" for m, chunk in table]
            backwards = [f"{(virtual - 1 - chunk) * ranks + rank}B{m}" for m, chunk in table]
            warm = min((ranks - rank - 1) * 2 + (virtual - 1) * ranks, len(table))
            turns = [word for pair in zip(forwards[warm:], backwards, strict=False) for word in pair]
            theirs = [*forwards[:warm], *turns, *backwards[len(table) - warm :]]
            assert [str(action) for action in order] == theirs, (ranks, virtual, microbatches, rank)


# --- DeepSpeed --------------------------------------------------------------------------------------------------------

DEEPSPEED = """
import json, os, sys
import torch, torch.distributed
import deepspeed
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=2)
deepspeed.init_distributed(auto_mpi_discovery=False)
sys.path.insert(0, sys.argv[1])
from planned import BOUNDARIES, CONFIG, LAYERS, PlannedPipeline
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule
net = PlannedPipeline([torch.nn.Linear(4, 4) for _ in LAYERS], loss_fn=torch.nn.functional.mse_loss)
steps = TrainSchedule(CONFIG["gradient_accumulation_steps"], net.num_stages, net.stage_id)
letters = {ForwardPass: "F", BackwardPass: "B"}
order = [letters[type(cmd)] for step in steps for cmd in step if type(cmd) in letters]
try:
    PlannedPipeline([torch.nn.Linear(4, 4)])
    refused = False
except ValueError:
    refused = True
deepspeed.runtime.config.DeepSpeedConfig(CONFIG, mpu=net.mpu())
print(json.dumps({"stage": net.stage_id, "here": sorted(int(n) for n, _ in net.named_children() if n.isdigit()),
                  "interval": net.activation_checkpoint_interval, "order": order, "refused": refused}))
"""


def test_deepspeed_constructs_the_stages_and_runs_their_order(tmp_path: Path) -> None:
    _needs("deepspeed")
    path = _saved(tmp_path, 4, microbatches=5, recompute=[True, False])
    assert pipeplan("export", path, "--to", "deepspeed", "-o", tmp_path / "planned.py").code == 0
    children = [
        subprocess.Popen(
            [PYTHON, "-c", DEEPSPEED, str(tmp_path), str(tmp_path / "meeting")],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu",
                 "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    made = build(ScheduleName.ONE_F_ONE_B, num_ranks=2, virtual=1, num_microbatches=5, placement=Placement.LOOP)
    for rank, child in enumerate(children):
        said, fault = child.communicate(timeout=200)
        assert child.returncode == 0, fault[-3000:]
        found = json.loads(said.splitlines()[-1])
        assert found["stage"] == rank
        assert found["here"] == (list(range(4)) if rank == 0 else list(range(4, 9)))
        assert found["interval"] == (4 if rank == 0 else 0)
        assert found["order"] == [action.letter.value for action in made[rank]]
        assert found["refused"]


# --- torchtitan -------------------------------------------------------------------------------------------------------

TITAN = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from planned import planned

@dataclasses.dataclass
class Config:
    parallelism: ParallelismConfig
    training: TrainingConfig
    activation_checkpoint: object = None

config = planned(Config(ParallelismConfig(), TrainingConfig()))
titan = config.parallelism
"""
TORCHTITAN = (
    TITAN
    + """
import torch
from torch import nn
from torchtitan.distributed import pipeline_parallel as pp
model = nn.Module()
model.token, model.norm, model.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16)
model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
parts = titan.module_fqns_per_model_part
kept = [[n for n, m in pp._split_module(model, part).named_modules() if not list(m.children())] for part in parts]
ranks = [pp._get_pp_rank_to_stage_indices_mapping(r, titan.pipeline_parallel_degree, titan.pipeline_parallel_schedule,
                                                  len(parts)) for r in range(titan.pipeline_parallel_degree)]
print(json.dumps({"kept": kept, "ranks": ranks, "local": config.training.local_batch_size,
                  "micro": titan.pipeline_parallel_microbatch_size, "csv": titan.pipeline_parallel_schedule_csv,
                  "checkpoint": type(config.activation_checkpoint).__qualname__}))
"""
)


@pytest.mark.parametrize("name", [ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_V])
def test_torchtitan_splits_and_places_as_planned(tmp_path: Path, name: ScheduleName) -> None:
    _needs("torchtitan.distributed.pipeline_parallel")
    starts = (2, 5, 7) if name is ScheduleName.ZB_V else (4,)
    again = name is ScheduleName.ONE_F_ONE_B
    path = _saved(tmp_path, *starts, ranks=2, name=name, size=2, microbatches=4, recompute=[again] * (len(starts) + 1))
    assert pipeplan("export", path, "--to", "torchtitan", "-o", tmp_path / "planned.py").code == 0
    found = json.loads(_child(TORCHTITAN, tmp_path).splitlines()[-1])
    numbers = [[part.count("blocks.") for part in kept] for kept in found["kept"]]
    assert [sum(row) for row in numbers] == ([1, 3, 2, 0] if name is ScheduleName.ZB_V else [3, 3])
    assert [("token" in kept, "head" in kept) for kept in found["kept"]] == [
        (index == 0, index == len(starts)) for index in range(len(starts) + 1)
    ]
    assert found["ranks"] == ([[0, 3], [1, 2]] if name is ScheduleName.ZB_V else [[0], [1]])
    assert (found["local"], found["micro"]) == (8, 2)
    assert found["checkpoint"] == ("FullAC.Config" if again else "NoneType")
    if name is ScheduleName.ZB_V:
        assert Path(found["csv"]).read_text() == pipeplan("export", path, "--to", "torch-csv").out


TORCHTITAN_TENSOR = (
    TITAN
    + """
print(titan.pipeline_parallel_degree, titan.tensor_parallel_degree, titan.enable_sequence_parallel)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_torchtitan_takes_tensor_ranks_and_their_tokens(tmp_path: Path, sequence: bool) -> None:
    _needs("torchtitan.distributed.pipeline_parallel")
    path = _saved(tmp_path, 3, profile=with_tensor_rows(row_profile(6), sequence=sequence), tensor=2, microbatches=4)
    assert pipeplan("export", path, "--to", "torchtitan", "-o", tmp_path / "planned.py").code == 0
    assert _child(TORCHTITAN_TENSOR, tmp_path).split()[-3:] == ["2", "2", str(sequence)]
