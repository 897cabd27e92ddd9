"""The layer graph over networkx.DiGraph: cuts, tensors that cross them, stages that follow."""

from planner.graph.derive import Cut, derive_stages, stage_of_layers, ties
from planner.graph.layers import LayerCost, LayerGraph, Reader, Tensor
from planner.graph.stage import Stage, Tie, Transfer

__all__ = [
    "Cut",
    "LayerCost",
    "LayerGraph",
    "Reader",
    "Stage",
    "Tensor",
    "Tie",
    "Transfer",
    "derive_stages",
    "stage_of_layers",
    "ties",
]
