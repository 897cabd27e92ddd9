"""The profile and its file: per-layer costs and the layer graph, as measured, estimated or imported (no torch)."""

from planner.profile.file import read_profile, write_profile
from planner.profile.profile import (
    FORMAT,
    Accuracy,
    Collective,
    Collectives,
    Cost,
    Device,
    Edge,
    EdgeTensor,
    Layer,
    LayerSplit,
    OptimizerCost,
    Profile,
    ProfiledLinks,
    ProfiledModel,
    Provenance,
    SharedParameter,
    TensorPart,
)

__all__ = [
    "FORMAT",
    "Accuracy",
    "Collective",
    "Collectives",
    "Cost",
    "Device",
    "Edge",
    "EdgeTensor",
    "Layer",
    "LayerSplit",
    "OptimizerCost",
    "Profile",
    "ProfiledLinks",
    "ProfiledModel",
    "Provenance",
    "SharedParameter",
    "TensorPart",
    "read_profile",
    "write_profile",
]
