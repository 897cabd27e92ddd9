#!/usr/bin/env python
"""How long the search takes, how near the bound it ends, and what its plans win over those of others.

.venv/bin/python scripts/bench/search.py [--quick] [--cases FOLDER]

``--cases``: the folder that holds pipedream/*.graph.txt (default: PIPEPLAN_CASES); without it those rows are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from planner.cluster import Cluster, ClusterLinks, Link, resolve
from planner.exchange.pipedream import import_pipedream
from planner.graph import LayerGraph
from planner.profile import Profile
from planner.search import Asked, Found, solve
from planner.search.baselines import by_hand, even_by_count, even_by_parameters
from planner.search.figures import Figures, LayerFigures
from planner.search.lattice import lattice_of
from planner.search.proof import prove
from planner.search.suffix import Shape, SuffixBound

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2] / "tests")
)  # PipeDream's objective and the chains stand there
from support.chains import chain
from support.pipedream_cut import pipedream_cut

GIBI = 1024**3
SAMPLES = 128
"""Samples of a mini-batch that PipeDream's profiles are for."""
FAST_LINK = Link(latency_s=5e-6, bandwidth_bytes_per_s=50e9)
CONSOLE = Console(width=120, highlight=False)


class Case(NamedTuple):
    """One search that is timed."""

    layers: int
    gpus: int
    memory_gibi: int | None = None


CRITERIA = [Case(98, 8), Case(98, 8, 24), Case(200, 64), Case(200, 64, 16), Case(1000, 1024), Case(1000, 1024, 16)]
"""Without a limit, and with memory that rules small P out but has room for 2P - 1 micro-batches."""
TIGHT = [Case(98, 8, 10), Case(200, 64, 4)]
"""A few micro-batches fit, no more."""
BY_LAYERS = [Case(layers, 8, 48) for layers in (50, 100, 200)] + [Case(layers, 64, 48) for layers in (500, 1000)]
BY_GPUS = [Case(200, gpus) for gpus in (8, 64, 512)] + [Case(1000, 4096)]


def timed(profile: Profile, asked: Asked) -> tuple[Found, float]:
    """A search and its seconds on the processor (it runs on one), so that what else runs there does not count."""
    began = time.process_time()
    found = solve(profile, asked)
    return found, time.process_time() - began


def row_of(what: str, found: Found, seconds: float) -> tuple[str, ...]:
    """One line of the table of searches."""
    shape = found.best.configuration
    sizes = f"P={shape.pipeline} D={shape.data} v={shape.virtual} b={shape.microbatch_size} M={shape.num_microbatches}"
    return (
        what,
        f"{seconds:.2f} s",
        f"{found.solved} of {found.configurations}",
        f"{sizes} {found.best.schedule.value}",
        f"{found.gap:.2%}",
        "yes" if found.proven else "no",
    )


def chains(cases: list[Case]) -> Iterator[tuple[str, ...]]:
    """Searches of the whole space; where all GPUs are used M is four times P at the largest micro-batch size."""
    for case in cases:
        profile = chain(case.layers)
        cluster = resolve(
            Cluster(gpus_per_node=8, links=ClusterLinks(intra_node=FAST_LINK, inter_node=FAST_LINK)),
            profile,
            case.memory_gibi * GIBI if case.memory_gibi else None,
        )
        found, seconds = timed(profile, Asked(gpus=case.gpus, global_batch=16 * case.gpus, cluster=cluster))
        memory = f", {case.memory_gibi} GiB" if case.memory_gibi else ""
        yield row_of(f"{case.layers} layers, {case.gpus} GPUs{memory}", found, seconds)


def proofs() -> Iterator[tuple[str, ...]]:
    """One cut: the bound by the recursion, its windows, the ILP's own proof."""
    for num_layers, ranks in ((98, 8), (200, 32), (200, 64)):
        graph = LayerGraph.of(chain(num_layers, sizes=(1,)))
        cluster = resolve(Cluster(), graph.profile)
        began = time.process_time()
        layers = LayerFigures(graph, microbatch_size=1, tensor=1, cluster=cluster)
        lattice = lattice_of(graph)
        assert lattice is not None
        shape = Shape(num_ranks=ranks, num_microbatches=4 * ranks, fused=True, cluster=cluster)
        suffix = SuffixBound(Figures(layers, lattice), shape)
        below = suffix.bound_s * 1.0001
        windows = suffix.windows(below)
        assert windows is not None
        solved = prove(layers, shape, windows=windows, below_s=below)
        seconds = time.process_time() - began
        yield (
            f"{num_layers} layers into {ranks}",
            f"{seconds:.2f} s",
            str(sum(last - first for first, last in windows)),
            str(solved.nodes),
            f"{solved.bound:.6g}",
            f"{suffix.bound_s:.6g}",
        )


def margins(cases: Path, names: tuple[str, ...], counts: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    """PipeDream's profiles over links of 1 GB/s: our plans, and how many times their time others' plans take."""
    links = ClusterLinks(intra_node=Link(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    for name in names:
        profile, _ = import_pipedream(cases / "pipedream" / f"{name}.graph.txt", microbatch_size=SAMPLES)
        cluster = resolve(Cluster(links=links), profile)
        for gpus in counts:
            found, seconds = timed(profile, Asked(gpus=gpus, global_batch=4 * gpus * SAMPLES, cluster=cluster))
            yield margin_row(f"{name}, {gpus} GPUs", gpus, found, seconds)


def margin_row(what: str, gpus: int, found: Found, seconds: float) -> tuple[str, ...]:
    """One line of the table of margins; the others' plans each at their best number of replicas."""
    times: dict[str, float] = {}
    for data in (data for data in range(1, gpus + 1) if gpus % data == 0):
        ranks = min(gpus // data, len(found.graph))
        cuts = {
            "layers": even_by_count(found.graph, ranks),
            "parameters": even_by_parameters(found.graph, ranks),
            "pipedream": pipedream_cut(found.graph, num_stages=ranks, data=data, microbatch_size=SAMPLES),
        }
        for whose, cut in cuts.items():
            theirs = by_hand(found.graph, found.asked, cut, SAMPLES, data=data).iteration_s
            key = "data" if ranks == 1 else whose
            times[key] = min(times.get(key, theirs), theirs)
    ratios = [f"{times[key] / found.best.iteration_s:.3f}" for key in ("layers", "parameters", "pipedream", "data")]
    shape = found.best.configuration
    plan = f"P={shape.pipeline} D={shape.data} v={shape.virtual} {found.best.schedule.value}"
    return (what, f"{seconds:.2f} s", f"{found.gap:.2%}", "yes" if found.proven else "no", plan, *ratios)


def show(title: str, headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A table, its rows as they are ready and then put together."""
    table, made = Table(*headings, title=title, title_justify="left"), []
    for row in rows:
        CONSOLE.print("  ".join(row), style="dim")
        table.add_row(*row)
        made.append(row)
    CONSOLE.print(table)
    return made


SEARCHED = ("search", "time", "solved", "plan", "gap", "proven")
MODELS = ("vgg16", "resnet50", "gnmt", "alexnet", "densenet121")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="what fits into two minutes")
    parser.add_argument("--cases", default=os.environ.get("PIPEPLAN_CASES"), help="folder of real profiles")
    chosen = parser.parse_args()
    quick: bool = chosen.quick
    show("one cut, and its proof", ("cut", "time", "binaries", "nodes", "ILP", "recursion"), proofs())
    rows = show("whole searches", SEARCHED, chains(CRITERIA[:4] if quick else CRITERIA))
    rows += show("as layers grow", SEARCHED, chains(BY_LAYERS[:3] if quick else BY_LAYERS))
    rows += show("as GPUs grow", SEARCHED, chains(BY_GPUS[:2] if quick else BY_GPUS))
    show("where memory is tight", SEARCHED, chains(TIGHT[:1] if quick else TIGHT))
    gaps = [float(row[4].rstrip("%")) for row in rows]
    CONSOLE.print(f"gaps but for tight memory: median {statistics.median(gaps):.2f} %, largest {max(gaps):.2f} %")
    if not chosen.cases:
        CONSOLE.print("no folder of cases: PipeDream's models are left out")
        return
    models = ("vgg16", "alexnet", "densenet121") if quick else MODELS
    show(
        "others' plans, times ours (1 GB/s links)",
        ("model", "time", "gap", "proven", "plan", "even layers", "even params", "PipeDream", "data par."),
        margins(Path(chosen.cases), models, (8,) if quick else (4, 8, 16)),
    )


if __name__ == "__main__":
    main()
