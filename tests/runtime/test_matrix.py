"""The whole matrix: real models, every schedule, one, two and four ranks, one and two stages on each: one hash."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
from support.runs import plan_of, run

from planner.runtime.result import RunResult
from planner.schedules import Placement, ScheduleName
from tests.capture.real_models import REAL_MODELS

EXAMPLES = Path(__file__).parents[2] / "planner" / "examples"
STEPS = 3
LOOP, V = Placement.LOOP, Placement.V
SCHEDULES = {
    (1, LOOP): ("gpipe", "1f1b", "zb-h1", "zb-h2"),
    (2, LOOP): ("interleaved-1f1b", "looped-bfs", "zb-h1"),
    (2, V): ("zb-v", "dualpipe-v", "v-half", "v-min"),
}
TEXTS = {
    "gpt": (EXAMPLES / "gpt.py").read_text().replace("TIED = False", "TIED = True"),
    "unet": (EXAMPLES / "unet.py").read_text(),
    "t5": REAL_MODELS["t5"],
    "llama": REAL_MODELS["llama"],
}
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs the packages of the extra 'models': pip install pipeplan[models]",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def model_of(name: str, folder: Path) -> Path:
    path = folder / f"{name}.py"
    path.write_text(TEXTS[name])
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    """Each model's run on one rank, beside one process; made as it is asked for."""

    class Made(dict[str, RunResult]):
        def __missing__(self, name: str) -> RunResult:
            folder = tmp_path_factory.mktemp(name)
            plan = plan_of(model_of(name, folder), num_ranks=1)
            self[name] = run(plan, folder, steps=STEPS, verify=True).result
            return self[name]

    return Made()


NAMES = [pytest.param(name, marks=[needs_transformers] if name in REAL_MODELS else []) for name in TEXTS]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", list(SCHEDULES), ids=lambda shape: f"v={shape[0]} {shape[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_gives_the_same_weights(
    name: str, shape: tuple[int, Placement], num_ranks: int, whole: dict[str, RunResult], tmp_path: Path
) -> None:
    virtual, placement = shape
    if num_ranks == 1 and placement is V:
        pytest.skip("one rank has no V")
    verified = whole[name].verify
    assert verified is not None
    assert verified.equal
    model = model_of(name, tmp_path)
    for schedule in map(ScheduleName, SCHEDULES[shape]):
        asked: dict[str, Any] = {"schedule": schedule, "virtual": virtual, "placement": placement}
        result = run(plan_of(model, num_ranks=num_ranks, **asked), tmp_path, steps=STEPS).result
        assert (schedule, result.weights_sha256) == (schedule, whole[name].weights_sha256)
        assert result.losses == whole[name].losses


@pytest.mark.parametrize("name", NAMES)
def test_two_replicas_train_alike_to_rounding(name: str, whole: dict[str, RunResult], tmp_path: Path) -> None:
    """The first losses are the same; then the gradients' sum has another order. Beside one process they are equal."""
    model = model_of(name, tmp_path)
    for num_ranks, schedule in itertools.product((1, 2), (ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1)):
        plan = plan_of(model, num_ranks=num_ranks, schedule=schedule, data=2, microbatches=2)
        result = run(plan, tmp_path, steps=STEPS, verify=True).result
        assert result.verify is not None
        assert (result.verify.equal, result.verify.largest_weight_difference) == (True, 0.0)
        assert result.losses[0] == whole[name].losses[0]
        assert result.losses == pytest.approx(whole[name].losses, rel=1e-4)
