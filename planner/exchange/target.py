"""What the exporters share: a checked plan with its profile, and the refusal of what a target cannot express.

Layers stand in the order in which the model runs them, and every target here takes stages as runs of that order:

    layers   token  blocks.0  blocks.1  blocks.2  norm  head
    stages   0      0         1         1         1     1        each sends to the next alone
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from planner.errors import InputError
from planner.graph import LayerGraph, ties
from planner.plan import Plan, read_plan
from planner.plan.check import check_plan, profile_of
from planner.plan.job import job_of, schedule_of
from planner.profile import Edge, Layer, Profile
from planner.record import record
from planner.schedules import Placement, Schedule, ScheduleName, build, default_warmup
from planner.simulate import simulate


@record
class Planned:
    """A plan that keeps all rules, its figures fresh, with its profile and its actions.

    ``cut``: the layers of each stage, in the order in which the model runs them.
    """

    path: Path
    system: str
    plan: Plan
    profile: Profile
    schedule: Schedule
    cut: tuple[tuple[Layer, ...], ...]

    def refuse(self, what: str, mend: str) -> NoReturn:
        """Raise InputError: the target cannot express that."""
        raise InputError(f"{self.path}: {self.system} cannot express {what}", hint=mend)

    @property
    def crossing(self) -> tuple[tuple[Edge, int, int], ...]:
        """The edges between stages, each with the stages of its source and its target."""
        home = {layer.name: stage for stage, layers in enumerate(self.cut) for layer in layers}
        return tuple(
            (edge, home[edge.source], home[edge.target])
            for edge in self.profile.edges
            if home[edge.source] != home[edge.target]
        )

    @property
    def warmup_is_default(self) -> bool:
        """Whether each rank warms up as deep as its schedule does where nothing else is said."""
        schedule, sizes = self.plan.schedule, self.plan.parallel
        default = default_warmup(
            schedule.name,
            num_ranks=sizes.pipeline,
            virtual=sizes.virtual,
            num_microbatches=self.plan.batch.microbatches,
        )
        return schedule.warmup is None or schedule.warmup == default


def planned(path: Path, *, system: str) -> Planned:
    """The plan in a file, checked, for a target that takes a model whose modules have names.

    Raises InputError where the plan breaks a rule, its profile is missing, or its stages are no runs of layers.
    """
    said = read_plan(path)
    profile = profile_of(said, path)
    try:
        found = check_plan(said, profile)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", hint=error.hint) from error
    if found.errors:
        raise InputError(f"{path}: {found.errors[0]}", hint="correct its actions or its schedule")
    layers = {layer.name: (index, layer) for index, layer in enumerate(profile.layers)}
    cut = [sorted((layers[name] for name in stage.layers), key=lambda entry: entry[0]) for stage in found.fresh.stages]
    made = Planned(
        path=path,
        system=system,
        plan=found.fresh,
        profile=profile,
        schedule=schedule_of(said),
        cut=tuple(tuple(layer for _, layer in stage) for stage in cut),
    )
    if profile.provenance == "imported":
        made.refuse("layers of an imported profile, which name no modules of a model", "profile the model file itself")
    if said.parallel.zero1:
        made.refuse(
            "an optimizer whose state is spread over the replicas (parallel.zero1) as pipeplan export writes it",
            "solve without --zero1, and switch it on in that system's own settings",
        )
    _refuse_what_is_no_run(made, [[index for index, _ in stage] for stage in cut])
    return made


def _refuse_what_is_no_run(made: Planned, positions: list[list[int]]) -> None:
    expected = 0
    for stage, run in enumerate(positions):
        for index in run:
            if index != expected:
                name, other = made.profile.layers[index].name, made.profile.layers[expected].name
                made.refuse(
                    f"stage {stage}, which runs layer {name} before {other} of a later stage",
                    "train it with pipeplan run, or cut the layers in their order",
                )
            expected += 1


def refuse_skips(made: Planned) -> None:
    """Refuse stages that send to others than the next."""
    for stage in made.plan.stages:
        for entry in (*stage.sends, *stage.returns):
            if abs(entry.to_stage - stage.stage) != 1:
                low, high = sorted((stage.stage, entry.to_stage))
                edge = next(edge for edge, source, target in made.crossing if source <= low and target >= high)
                made.refuse(
                    f"a skip over stages: layer {edge.target} of stage {high} reads {edge.source} of stage {low}",
                    "train it with pipeplan run, or cut so that they lie in one stage or in neighbours",
                )


def refuse_ties(made: Planned) -> None:
    """Refuse parameters that layers of several stages share."""
    for tie in tied(made):
        made.refuse(
            f"parameter {tie} shared by several stages, which would become copies that train apart",
            "train it with pipeplan run, or keep the layers that share it in one stage",
        )


def tied(made: Planned) -> tuple[str, ...]:
    """The names of the parameters that stages share."""
    cut = [stage.layers for stage in made.plan.stages]
    return tuple(
        tie.name for tie in ties(LayerGraph.of(made.profile), cut, tensor=made.plan.parallel.tensor) if tie.trainable
    )


def refuse_tensor_parallel(made: Planned) -> None:
    """Refuse layers that are split over ranks."""
    if made.plan.parallel.tensor > 1:
        made.refuse(f"tensor parallel size {made.plan.parallel.tensor} of these layers", "solve with --tensor 1")


def refuse_other_schedules(made: Planned, name: ScheduleName) -> None:
    """Refuse every order of actions but the one that a schedule has by itself, whatever the plan calls it."""
    schedule = made.plan.schedule
    own = _order_of(made, name)
    if made.schedule == own:
        return
    what = f"schedule {schedule.name.value} in placement {schedule.placement.value}"
    solve = f"solve with --schedule {name.value}"
    if schedule.name is name:
        what = f"warm-up depths {list(schedule.warmup or ())} of schedule {name.value}, which has its own"
        solve = "pipeplan check --write says whether it fits"
    if own is None:
        made.refuse(what, solve)
    job = job_of(made.plan, made.profile)
    seconds = [simulate(job, order, memory=False).iteration_s for order in (own, made.schedule)]
    longer = seconds[0] / seconds[1] - 1 if seconds[1] else 0.0
    cost = f"{abs(longer):.1%} {'longer' if longer >= 0 else 'less'}"
    made.refuse(
        what, f"write schedule: {{name: {name.value}, placement: loop}} in {made.path}, which takes {cost}; or {solve}"
    )


def _order_of(made: Planned, name: ScheduleName) -> Schedule | None:
    """The plan's stages under a schedule in placement loop, warming up as it does; None where it is not for them."""
    sizes = made.plan.parallel
    if made.plan.schedule.placement is not Placement.LOOP:
        return None
    try:
        return build(
            name,
            num_ranks=sizes.pipeline,
            virtual=sizes.virtual,
            num_microbatches=made.plan.batch.microbatches,
            placement=Placement.LOOP,
        )
    except InputError:
        return None


def list_text(rows: Iterable[object], *, indent: int = 4) -> str:
    """A Python list, an entry a line."""
    inner = "".join(f"{' ' * indent}{row!r},\n" for row in rows)
    return f"[\n{inner}{' ' * (indent - 4)}]"
