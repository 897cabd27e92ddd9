"""A language model as a profile has it, without measuring: token, blocks.0, blocks.1, ..., norm, head; and its file."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from planner.profile import Collective, Collectives, Edge, EdgeTensor, Layer, Profile, SharedParameter
from support.plans import chain_profile

MODEL_FILE = """
import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

def model():
    return Row()

def batch(size):
    tokens = torch.randint(16, (size, 4))
    return INPUTS, tokens.roll(1, 1)

def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(params):
    return torch.optim.SGD(params, lr=0.5)
"""
"""The model of ``row_profile(6)``; INPUTS stands for what ``batch`` gives the model."""


def row_profile(blocks: int = 6, *, tied: bool = False, skip: bool = False) -> Profile:
    """The profile. ``tied``: token and head share their weights; ``skip``: head reads token too."""
    chain = chain_profile(blocks + 3)
    names = ["token", *(f"blocks.{index}" for index in range(blocks)), "norm", "head"]
    shared = {"token.weight": SharedParameter(bytes=64)}
    layers = tuple(
        dataclasses.replace(
            layer,
            name=name,
            kind="Block" if "." in name else name,
            modules=(name,),
            shared=shared if tied and name in ("token", "head") else None,
        )
        for layer, name in zip(chain.layers, names, strict=True)
    )
    ends = list(pairwise(names)) + ([("token", "head")] if skip else [])
    return dataclasses.replace(chain, layers=layers, edges=tuple(edge(source, target) for source, target in ends))


def edge(source: str, target: str, *, grad: bool = True, saved: bool = False) -> Edge:
    """An edge with one tensor, named as its source."""
    tensor = EdgeTensor(name=source, bytes_per_sample=100.0, fixed_bytes=0, grad=grad, saved=saved)
    return Edge(source=source, target=target, tensors=(tensor,))


def renamed(profile: Profile, names: dict[str, str]) -> Profile:
    """The profile with some layers (and their modules) under other names."""

    def new(layer: Layer) -> Layer:
        name = names.get(layer.name, layer.name)
        return dataclasses.replace(layer, name=name, modules=(name,))

    edges = tuple(edge(names.get(e.source, e.source), names.get(e.target, e.target)) for e in profile.edges)
    return dataclasses.replace(profile, layers=tuple(map(new, profile.layers)), edges=edges)


def with_tensor_rows(profile: Profile, *, sequence: bool) -> Profile:
    """Every layer halved over two tensor ranks."""
    none = Collective(count=0, bytes=0)
    layers = tuple(
        dataclasses.replace(
            layer,
            costs=layer.costs
            + tuple(
                dataclasses.replace(
                    cost,
                    tensor=2,
                    parameter_bytes=layer.parameter_bytes // 2,
                    trainable_bytes=layer.trainable_bytes // 2,
                    buffer_bytes=layer.buffer_bytes,
                    collectives=Collectives(forward=none, backward_input=none),
                )
                for cost in layer.costs
            ),
        )
        for layer in profile.layers
    )
    return dataclasses.replace(profile, layers=layers, sequence_parallel=sequence or None)
