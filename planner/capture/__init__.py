"""Model file -> captured graph -> layers -> stages that run: seeds, relayed gradients, split backward (torch)."""

from planner.capture.batch import Batch, microbatch
from planner.capture.capture import Capture, CapturedEdge, CapturedLayer, CapturedTensor, capture, capture_as
from planner.capture.eager import EagerReference
from planner.capture.model_file import ModelFile, load_model_file
from planner.capture.program import Boundary, Leaf, StageProgram
from planner.capture.seeds import RandomKey, RandomStream
from planner.capture.stage import Forwarded, Stage

__all__ = [
    "Batch",
    "Boundary",
    "Capture",
    "CapturedEdge",
    "CapturedLayer",
    "CapturedTensor",
    "EagerReference",
    "Forwarded",
    "Leaf",
    "ModelFile",
    "RandomKey",
    "RandomStream",
    "Stage",
    "StageProgram",
    "capture",
    "capture_as",
    "load_model_file",
    "microbatch",
]
