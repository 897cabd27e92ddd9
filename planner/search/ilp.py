"""The ILP of a cut (the only module that imports PuLP): its variables and constraints; objective rows are passed in.

    c[l, k] = 1       layer l lies in a stage <= k (c[l, K-1] = 1)
    c[l, k] <= c[l, k+1]                     a layer stays where it is
    c[w, k] <= c[u, k]                       for every edge u -> w: no edge leads back
    sum over l of c[l, k] - c[l, k-1] >= 1   no stage is empty (unless asked for)

Loads, cut bytes and memory of a stage are linear in c. The least T that the rows allow is the optimum: a lower bound is
taken from the solver's own dual bound, never from its status word, except that "infeasible below a known value" proves
that value. Give times scaled so that T is about 1 and bytes divided by their limit: the solver's tolerances are
absolute, and raw bytes have made it declare wrong optima.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pulp

TOLERANCE: Final = 1e-6
"""What a bound of the solver's may be off by, relative to T of about 1."""


class Linear:
    """A linear expression over the model's variables: terms by variable, and a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, terms: Mapping[Any, float] | None = None, constant: float = 0.0) -> None:
        self.terms: dict[Any, float] = dict(terms or {})
        self.constant = constant

    def add(self, other: Linear, factor: float = 1.0) -> Linear:
        """This expression, with ``factor`` times the other added to it in place."""
        terms = self.terms
        for variable, coefficient in other.terms.items():
            terms[variable] = terms.get(variable, 0.0) + factor * coefficient
        self.constant += factor * other.constant
        return self

    def __add__(self, other: Linear) -> Linear:
        return Linear(self.terms, self.constant).add(other)

    def __sub__(self, other: Linear) -> Linear:
        return Linear(self.terms, self.constant).add(other, -1.0)

    def __mul__(self, factor: float) -> Linear:
        return Linear({variable: factor * value for variable, value in self.terms.items()}, factor * self.constant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What the solver proved and found: no T below ``bound``; ``value`` and ``stage_of`` where it found a cut."""

    bound: float
    value: float
    stage_of: tuple[int, ...] | None
    nodes: int


class CutModel:
    """Cuts of ``num_layers`` layers into ``num_stages`` stages, with T to be minimised under rows that are added.

    ``windows[l]``: the first and the last stage that layer l may lie in. ``relaxed``: the LP instead of the ILP.
    """

    def __init__(
        self,
        num_layers: int,
        edges: Iterable[tuple[int, int]],
        num_stages: int,
        *,
        windows: Sequence[tuple[int, int]] | None = None,
        empty_stages: bool = False,
        relaxed: bool = False,
    ) -> None:
        self.num_layers: Final = num_layers
        self.num_stages: Final = num_stages
        self._relaxed = relaxed
        self._choices = 0
        self._problem: Any = pulp.LpProblem("cut", pulp.LpMinimize)
        self._count = 0
        self.total: Final = self.variable()
        self._problem.setObjective(pulp.LpAffineExpression(list(self.total.terms.items())))
        self._windows = list(windows) if windows else [(0, num_stages - 1)] * num_layers
        self._within = [self._layer_variables(layer) for layer in range(num_layers)]
        self._open: list[list[int]] = [[] for _ in range(num_stages)]
        self._settled: list[list[int]] = [[] for _ in range(num_stages)]
        for layer, (first, last) in enumerate(self._windows):
            for stage in range(first, last):
                self._open[stage].append(layer)
            self._settled[last].append(layer)
        self._order(edges)
        if not empty_stages:
            for stage in range(num_stages):
                self.at_most(Linear(constant=1.0), self.load([1.0] * num_layers, stage))

    def _layer_variables(self, layer: int) -> list[Linear]:
        first, last = self._windows[layer]
        made: list[Linear] = []
        for stage in range(self.num_stages):
            if first <= stage < last:
                made.append(self.variable(most=1.0, whole=True))
            else:
                made.append(Linear(constant=0.0 if stage < first else 1.0))
        return made

    def _order(self, edges: Iterable[tuple[int, int]]) -> None:
        for layer, (first, last) in enumerate(self._windows):
            for stage in range(first, last - 1):
                self.at_most(self._within[layer][stage], self._within[layer][stage + 1])
        for source, target in edges:
            for stage in range(self._windows[target][0], self._windows[source][1]):
                self.at_most(self._within[target][stage], self._within[source][stage])

    # --- building rows ------------------------------------------------------------------------------------------------

    def variable(self, *, least: float | None = 0.0, most: float | None = None, whole: bool = False) -> Linear:
        """A new variable; ``whole`` ones are 0, 1, 2, ..."""
        kind = pulp.LpInteger if whole and not self._relaxed else pulp.LpContinuous
        self._count += 1
        self._choices += kind == pulp.LpInteger
        return Linear({self._problem.add_variable(f"x{self._count}", least, most, kind): 1.0})

    def up_to(self, layer: int, stage: int) -> Linear:
        """c[l, k]: whether the layer lies in a stage <= k."""
        return Linear() if stage < 0 else self._within[layer][stage]

    def inside(self, layer: int, stage: int) -> Linear:
        """Whether the layer lies in exactly this stage."""
        return self.up_to(layer, stage) - self.up_to(layer, stage - 1)

    def prefix(self, weights: Sequence[float], stage: int) -> Linear:
        """The sum of weights over all layers in stages up to this one."""
        if stage < 0:
            return Linear()
        settled = sum(weights[layer] for ended in self._settled[: stage + 1] for layer in ended)
        made = Linear(constant=settled)
        for layer in self._open[stage]:
            if weights[layer]:
                made.add(self._within[layer][stage], weights[layer])
        return made

    def load(self, weights: Sequence[float], stage: int) -> Linear:
        """The sum of weights over the layers of a stage."""
        return self.prefix(weights, stage) - self.prefix(weights, stage - 1)

    def leaves(self, source: int, readers: Sequence[int], stage: int) -> Linear:
        """At least 1 where a tensor is made in the stage and read in another one."""
        return self._over([self.inside(source, stage) - self.inside(reader, stage) for reader in readers])

    def enters(self, source: int, readers: Sequence[int], stage: int) -> Linear:
        """At least 1 where a tensor is read in the stage and made in another one."""
        return self._over([self.inside(reader, stage) - self.inside(source, stage) for reader in readers])

    def crosses(self, source: int, readers: Sequence[int], stage: int) -> Linear:
        """At least 1 where a tensor is made in a stage <= k and read in a later one."""
        return self._over([self.up_to(source, stage) - self.up_to(reader, stage) for reader in readers])

    def _over(self, amounts: Sequence[Linear]) -> Linear:
        """A variable of at least each of the amounts; the amount itself where it is the only one and never negative."""
        open_amounts = [amount for amount in amounts if amount.terms or amount.constant > 0]
        if not open_amounts:
            return Linear()
        made = self.variable()
        for amount in open_amounts:
            self.at_most(amount, made)
        return made

    def stored(self, expression: Linear) -> Linear:
        """A variable equal to an expression, so that rows that share it stay short."""
        expression = Linear({x: value for x, value in expression.terms.items() if value}, expression.constant)
        if len(expression.terms) <= 2:
            return expression
        made = self.variable(least=None)
        self._add(expression - made, pulp.LpConstraintEQ)
        return made

    def at_most(self, left: Linear, right: Linear) -> None:
        """Demand left <= right."""
        self._add(left - right, pulp.LpConstraintLE)

    def row(self, time: Linear) -> None:
        """Demand T >= time."""
        self.at_most(time, self.total)

    def exclude(self, stage_of: Sequence[int]) -> None:
        """Forbid exactly one cut."""
        same = Linear()
        for layer, stage in enumerate(stage_of):
            same.add(self.inside(layer, stage))
        self.at_most(same, Linear(constant=self.num_layers - 1.0))

    def _add(self, difference: Linear, sense: int) -> None:
        """A constraint difference <= 0 or = 0; rows that always hold are left out."""
        terms = {variable: value for variable, value in difference.terms.items() if value}
        if not terms and (difference.constant <= 1e-12 and sense == pulp.LpConstraintLE):
            return
        if not terms:
            terms = {next(iter(self.total.terms)): 0.0}
        expression = pulp.LpAffineExpression(terms, constant=difference.constant)
        self._problem.addConstraint(pulp.LpConstraint(expression, sense=sense, rhs=0))

    # --- solving ------------------------------------------------------------------------------------------------------

    def solve(
        self, *, below: float = math.inf, most_nodes: int | None = None, gap: float = 0.0, presolve: bool = True
    ) -> Solved:
        """The least T: its proven bound, and the best cut found with T at most ``below``.

        ``most_nodes`` limits the branch and bound tree (a count, so that one input gives one answer). Without
        ``presolve``: HiGHS 1.13 presolves some models with rows that a binary switches off to wrong optima.
        """
        if math.isfinite(below):
            self.at_most(self.total, Linear(constant=below))
        solver = _solver(most_nodes, gap, relaxed=self._relaxed or not self._choices, presolve=presolve)
        try:
            self._problem.solve(solver)
        except pulp.PulpSolverError:
            return Solved(bound=0.0, value=math.inf, stage_of=None, nodes=0)
        except KeyError:  # PuLP knows no word for HiGHS's "node limit reached"; what HiGHS found is read below
            if solver.name != "HiGHS":
                raise
        if solver.name == "HiGHS":
            return self._from_highs(below)
        return self._from_cbc(below)

    def _from_highs(self, below: float) -> Solved:
        solver_model = self._problem.solverModel
        columns = solver_model.getSolution().col_value
        for variable in self._problem.variables():
            variable.varValue = columns[variable.index]
        information = solver_model.getInfo()
        status = solver_model.modelStatusToString(solver_model.getModelStatus())
        if status == "Infeasible":
            return Solved(bound=below, value=math.inf, stage_of=None, nodes=0)
        if self._relaxed or not self._choices:
            solved = status == "Optimal"
            value = information.objective_function_value if solved else math.inf
            bound = value * (1 - TOLERANCE) if solved else 0.0
            if not solved or self._relaxed:
                return Solved(bound=bound, value=math.inf, stage_of=None, nodes=0)
            return Solved(bound=bound, value=value, stage_of=self._stages(), nodes=0)
        bound = information.mip_dual_bound * (1 - TOLERANCE)
        found = math.isfinite(information.mip_gap) and information.primal_solution_status == 2
        nodes = int(information.mip_node_count)
        if not found:
            return Solved(bound=max(bound, 0.0), value=math.inf, stage_of=None, nodes=nodes)
        value = information.objective_function_value
        return Solved(bound=max(bound, 0.0), value=value, stage_of=self._stages(), nodes=nodes)

    def _from_cbc(self, below: float) -> Solved:
        """CBC tells PuLP no bound of its own: what it proves here is the optimum of the LP."""
        status = self._problem.sol_status
        if status == pulp.LpSolutionInfeasible:
            return Solved(bound=below, value=math.inf, stage_of=None, nodes=0)
        found = status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible) and not self._relaxed
        value = pulp.value(self._problem.objective) if found else math.inf
        stages = self._stages() if found else None
        self._problem.solve(pulp.PULP_CBC_CMD(msg=False, mip=False))
        solved = self._problem.sol_status == pulp.LpSolutionOptimal
        bound = pulp.value(self._problem.objective) * (1 - TOLERANCE) if solved else 0.0
        return Solved(bound=bound, value=value, stage_of=stages, nodes=0)

    def _stages(self) -> tuple[int, ...]:
        made = []
        for layer in range(self.num_layers):
            reached = (self._value(self._within[layer][stage]) for stage in range(self.num_stages))
            made.append(next(stage for stage, value in enumerate(reached) if value > 0.5))
        return tuple(made)

    @staticmethod
    def _value(expression: Linear) -> float:
        return float(expression.constant + sum(c * variable.varValue for variable, c in expression.terms.items()))


def _solver(most_nodes: int | None, gap: float, *, relaxed: bool, presolve: bool) -> Any:
    """HiGHS on one thread; CBC where there is none."""
    limits = {} if most_nodes is None else {"mip_max_nodes": most_nodes}
    solver = pulp.HiGHS(
        mip=not relaxed,
        msg=False,
        threads=1,
        gapRel=gap,
        gapAbs=0.0,
        primal_feasibility_tolerance=1e-9,
        mip_feasibility_tolerance=1e-9,
        presolve="on" if presolve else "off",
        **limits,
    )
    if solver.available():
        return solver
    return pulp.PULP_CBC_CMD(mip=not relaxed, msg=False, gapRel=gap, threads=1, maxNodes=most_nodes)
