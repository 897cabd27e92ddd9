"""Checkpoints: a run that goes on from one is the run that never stopped, under whatever plan; nothing half is read."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import EVERYTHING, plan_of, run
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as load_tensors

from planner.capture import load_model_file
from planner.errors import InputError
from planner.plan import Plan
from planner.runtime.optimizer import NamedOptimizer, tensors_in
from planner.runtime.result import RunResult
from planner.runtime.saved import KEPT, finish, newest, read_saved, unfinished
from planner.schedules import Placement, ScheduleName

STEPS, STOP = 5, 3

OTHER_PLANS: dict[str, dict[str, Any]] = {
    "1f1b on 2": {"num_ranks": 2},
    "interleaved on 2": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.INTERLEAVED},
    "zb-v on 2": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.ZB_V, "placement": Placement.V},
    "gpipe on 3": {"num_ranks": 3, "schedule": ScheduleName.GPIPE},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The run that never stops."""
    return run(plan_of(EVERYTHING, num_ranks=2), tmp_path_factory.mktemp("whole"), steps=STEPS).result


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """The folder and the result of the first steps, on four ranks."""
    folder = tmp_path_factory.mktemp("stopped")
    result = run(plan_of(EVERYTHING, num_ranks=4), folder, steps=STOP, checkpoints=folder / "kept").result
    return folder / "kept", result


def resumed(plan: Plan, checkpoints: Path, folder: Path, **options: Any) -> RunResult:
    copy = folder / "copy"
    shutil.copytree(checkpoints, copy, symlinks=True)
    return run(plan, folder, **({"steps": STEPS, "checkpoints": copy, "resume": True} | options)).result


@pytest.mark.parametrize(
    "name", [name if name == "interleaved on 2" else pytest.param(name, marks=pytest.mark.slow) for name in OTHER_PLANS]
)
def test_a_resumed_run_is_the_one_that_never_stopped(
    name: str, whole: RunResult, stopped: tuple[Path, RunResult], tmp_path: Path
) -> None:
    checkpoints, first = stopped
    verify = name == "interleaved on 2"
    result = resumed(plan_of(EVERYTHING, **OTHER_PLANS[name]), checkpoints, tmp_path, verify=verify)
    assert first.losses + result.losses == whole.losses
    assert result.weights_sha256 == whole.weights_sha256
    assert len(result.steps) == STEPS - STOP
    if verify:
        assert result.verify is not None
        assert result.verify.equal
        assert result.verify.eager_difference is not None
        assert result.verify.eager_difference < 1e-4


@pytest.mark.slow
def test_replicas_go_on_from_one_pipeline_and_back(
    whole: RunResult, stopped: tuple[Path, RunResult], tmp_path: Path
) -> None:
    """D 1 -> 2 to rounding; and what two replicas keep is what they go on from, to the bit."""
    two = plan_of(EVERYTHING, num_ranks=1, data=2, microbatches=2)
    result = resumed(two, stopped[0], tmp_path / "two")
    assert result.losses == pytest.approx(whole.losses[STOP:], rel=1e-4)
    (tmp_path / "through").mkdir()
    through = run(two, tmp_path / "through", steps=STEPS).result
    (tmp_path / "first").mkdir()
    run(two, tmp_path / "first", steps=STOP, checkpoints=tmp_path / "kept")
    again = resumed(two, tmp_path / "kept", tmp_path / "again")
    assert again.losses == through.losses[STOP:]
    assert again.weights_sha256 == through.weights_sha256
    back = resumed(plan_of(EVERYTHING, num_ranks=2), tmp_path / "kept", tmp_path / "back")
    assert back.losses == pytest.approx(through.losses[STOP:], rel=1e-4)


@pytest.mark.slow
def test_a_run_that_has_all_its_steps_has_nothing_left_to_do(stopped: tuple[Path, RunResult], tmp_path: Path) -> None:
    checkpoints, first = stopped
    result = resumed(plan_of(EVERYTHING, num_ranks=2), checkpoints, tmp_path, steps=STOP)
    assert (result.losses, result.steps) == ((), ())
    assert result.weights_sha256 == first.weights_sha256


def test_plain_torch_reads_the_weights(stopped: tuple[Path, RunResult]) -> None:
    """As the README tells it; the loss of the next step's data is that of the run."""
    model = load_model_file(EVERYTHING).model()
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    before = {name: value.clone() for name, value in weights.items()}
    tensors = {name: value.data for name, value in weights.items()}
    load_tensors(tensors, storage_reader=HuggingFaceStorageReader(str(stopped[0] / "latest")))
    assert all(not torch.equal(before[name], value) for name, value in weights.items() if name.endswith("norm.weight"))
    assert weights["blocks.0.norm.num_batches_tracked"].item() == STOP * 4


DATA = """
def data(size):
    '''Three items an epoch, drawn anew in each.'''
    for _ in range(3):
        yield batch(size)

def optimizer(params):
    made = torch.optim.SGD([{"params": list(params)[:1], "lr": 0.05}, {"params": list(params)[1:]}], lr=0.02,
                           momentum=0.9)
    return Cooling(made)

class Cooling(torch.optim.Optimizer):
    '''Lowers the learning rate itself, and keeps a list with a tensor and what is no number in its state.'''
    def __init__(self, inner):
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.param_groups, self.inner = inner.param_groups, inner
        self.state = inner.state
    def step(self):
        self.inner.step()
        for group in self.param_groups:
            group["lr"] *= 0.9
            group["best"] = float("inf")
            for p in group["params"]:
                if p in self.state:
                    count = self.state[p].get("count", [0, torch.zeros(2)])
                    self.state[p]["count"] = [count[0] + 1, count[1] + 1]
                    p.data.mul_(1 + 1e-3 * count[0])
"""


@pytest.mark.slow
def test_data_and_what_an_optimizer_changes_itself_go_on(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(EVERYTHING.read_text().split("def optimizer")[0] + DATA)
    plan = plan_of(model, num_ranks=2)
    through = run(plan, tmp_path, steps=STEPS).result
    first = run(plan, tmp_path, steps=4, checkpoints=tmp_path / "kept", checkpoint_every=3).result
    shutil.rmtree(tmp_path / "kept" / "step-00000004")
    result = resumed(plan_of(model, num_ranks=3), tmp_path / "kept", tmp_path / "again")
    assert first.losses[:3] + result.losses == through.losses
    assert result.weights_sha256 == through.weights_sha256
    assert len(set(through.losses)) == STEPS


# --- which checkpoints there are --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_newest_stay(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    run(plan_of(EVERYTHING, num_ranks=2), tmp_path, steps=STEPS, checkpoints=kept, checkpoint_every=1)
    names = sorted(path.name for path in kept.iterdir())
    assert names == ["latest", *(f"step-{step:08d}" for step in range(STEPS - KEPT + 1, STEPS + 1))]
    assert (kept / "latest").resolve() == newest(kept)


@pytest.mark.slow
def test_half_a_checkpoint_is_none(stopped: tuple[Path, RunResult], tmp_path: Path) -> None:
    """A folder that was being written when the run was killed is not read, and goes away with the next one."""
    kept = tmp_path / "kept"
    shutil.copytree(stopped[0], kept, symlinks=True)
    half = unfinished(kept, STOP + 1, "abc")
    shutil.copytree(kept / "latest", half)
    assert newest(kept) == kept / f"step-{STOP:08d}"
    run(plan_of(EVERYTHING, num_ranks=2), tmp_path, steps=STOP + 1, checkpoints=kept, resume=True)
    assert not half.exists()


def test_one_that_was_renamed_but_never_known_of_is_made_again(stopped: tuple[Path, RunResult], tmp_path: Path) -> None:
    path = tmp_path / f"step-{STOP:08d}"
    shutil.copytree(stopped[0] / path.name, path)
    again = unfinished(tmp_path, STOP, "abc")
    shutil.copytree(path, again)
    saved = read_saved(path)
    assert finish(again, saved, num_parts=0) == path
    assert read_saved(path) == saved


def damage_nothing(path: Path) -> None:
    shutil.rmtree(path)


def cut(path: Path) -> None:
    file = next(path.glob("shard-00002*"))
    file.write_bytes(file.read_bytes()[:-1])


def flip(path: Path) -> None:
    file = next(path.glob("shard-00003*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def lose(path: Path) -> None:
    next(path.glob("shard-00001*")).unlink()


def unwrite(path: Path) -> None:
    (path / "checkpoint.json").write_text("{")


def forget(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name("step-00000007"))


def other_model(path: Path) -> None:
    rewrite(path, lambda data: data["model"].update(fingerprint="0" * 64))


def missing_state(path: Path) -> None:
    entry = {"state": {"step": {"tensor": "optimizer/nowhere"}}, "settings": {}}
    rewrite(path, lambda data: data["optimizer"].update({"join.weight": entry}))


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads((path / "checkpoint.json").read_text())
    change(data)
    (path / "checkpoint.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "the checkpoint is damaged: shard-00002"),
        (flip, "the checkpoint is damaged: shard-00003.* is not what was written"),
        (lose, "the checkpoint is damaged: shard-00001.*No such file"),
        (unwrite, "the checkpoint is damaged: .*checkpoint.json: line 1"),
        (forget, "the checkpoint is damaged: .*there is no such file"),
        (rename, "the checkpoint is damaged: checkpoint.json speaks of step 3"),
        (damage_nothing, "holds no checkpoint to resume from"),
        pytest.param(other_model, "is a checkpoint of another model", marks=pytest.mark.slow),
        pytest.param(missing_state, "the checkpoint is damaged: KeyError", marks=pytest.mark.slow),
    ],
)
def test_what_is_damaged_is_refused(
    damage: Callable[[Path], None], said: str, stopped: tuple[Path, RunResult], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(stopped[0], kept, symlinks=True)
    damage(kept / f"step-{STOP:08d}")
    with pytest.raises(InputError, match=said):
        run(plan_of(EVERYTHING, num_ranks=2), tmp_path, steps=9, checkpoints=kept, resume=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 1}, "was trained with --seed 0, not 1"),
        ({"steps": STOP - 1}, "has 3 steps already, more than --steps 2"),
        ({"resume": False}, "holds the checkpoints of an earlier run"),
        ({"checkpoints": None}, "--resume needs --checkpoint"),
        ({"checkpoints": None, "resume": False, "checkpoint_every": 2}, "--checkpoint-every needs --checkpoint"),
        ({"checkpoints": Path("/dev/null/folder")}, "cannot be written"),
    ],
)
def test_what_does_not_go_on_is_refused(
    options: dict[str, Any], said: str, stopped: tuple[Path, RunResult], tmp_path: Path
) -> None:
    given = {"steps": STEPS, "checkpoints": stopped[0], "resume": True} | options
    with pytest.raises(InputError, match=said):
        run(plan_of(EVERYTHING, num_ranks=2), tmp_path, **given)


def test_another_batch_is_refused(stopped: tuple[Path, RunResult], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was trained with 8 samples a step; the plan has 4"):
        resumed(plan_of(EVERYTHING, num_ranks=2, microbatches=2), stopped[0], tmp_path)


@pytest.mark.slow
def test_the_same_model_in_other_layers_is_the_same_model(stopped: tuple[Path, RunResult], tmp_path: Path) -> None:
    """A plan of a profile at another granularity has another fingerprint."""
    from planner.capture import capture

    model_file = load_model_file(EVERYTHING)
    fine = capture(model_file, microbatch_size=2, granularity="op")
    plan = plan_of(EVERYTHING, num_ranks=1, cut=[[layer.name for layer in fine.layers]])
    assert fine.fingerprint != plan.model.fingerprint
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, fingerprint=fine.fingerprint))
    assert len(resumed(plan, stopped[0], tmp_path, steps=STOP + 1).losses) == 1


# --- the optimizer by names -------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "NAdam": torch.optim.NAdam,
    "a tensor as learning rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_with_what_was_kept(name: str) -> None:
    """Kept over one division of the parameters, and restored over another."""
    generator = random.Random(0)
    torch.manual_seed(0)
    first = {f"p{n}": nn.Parameter(torch.randn(4, 3)) for n in range(6)}
    second = {key: nn.Parameter(value.detach().clone()) for key, value in first.items()}
    gradients = [{key: torch.randn(4, 3) for key in first} for _ in range(5)]

    def train(parameters: dict[str, nn.Parameter], optimizers: list[NamedOptimizer], steps: range) -> None:
        for step in steps:
            for key, parameter in parameters.items():
                parameter.grad = gradients[step][key].clone()
            for optimizer in optimizers:
                optimizer.step()

    def divided(parameters: dict[str, nn.Parameter]) -> list[NamedOptimizer]:
        keys = generator.sample(sorted(parameters), len(parameters))
        parts = [{key: parameters[key] for key in part} for part in (keys[:2], keys[2:])]
        return [NamedOptimizer(OPTIMIZERS[name](part.values()), part) for part in parts]

    before = divided(first)
    train(first, before, range(3))
    entries: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for optimizer in before:
        some, theirs = optimizer.kept()
        entries, tensors = entries | json.loads(json.dumps(some)), tensors | theirs
    assert set(tensors_in(list(entries.values()))) == set(tensors)
    copies = {key: value.clone() for key, value in tensors.items()}
    with torch.no_grad():
        for key, parameter in second.items():
            parameter.copy_(first[key])
    after = divided(second)
    for optimizer in after:
        optimizer.restore(entries, copies)
    train(first, before, range(3, 5))
    train(second, after, range(3, 5))
    assert all(torch.equal(first[key], second[key]) for key in first)
