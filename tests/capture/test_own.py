"""A model in parts: what is made is what the whole model has, bit by bit; the rest takes no memory."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import EVERYTHING
from torch import nn

from planner.capture import RandomStream, load_model_file
from planner.capture.own import own_weights
from planner.errors import InputError


class Odd(nn.Module):
    """Initialised in every way: at once, again at the end, in part, through views, tied, and replaced."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, 3))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.table = nn.Embedding(7, width, padding_idx=2)
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.table.weight
        self.layers[1].weight = nn.Parameter(torch.rand(width, width))
        self.lstm = nn.LSTM(width, 5)
        self.norm = nn.BatchNorm1d(width)
        self.apply(self.begin)
        nn.init.normal_(self.first[1:])
        nn.init.orthogonal_(self.layers[0].get_parameter("weight"))

    def begin(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -0.1, 0.1)


def made_by(make: type[nn.Module], *arguments: int) -> nn.Module:
    with RandomStream(5):
        return make(*arguments)


@settings(deadline=None)
@given(st.integers(1, 33), st.integers(0, 10**6))
def test_what_is_made_is_what_the_whole_has(width: int, seed: int) -> None:
    whole = made_by(Odd, width)
    names = [name for name, _ in whole.named_parameters()]
    wanted = set(random.Random(seed).sample(names, random.Random(seed).randint(0, len(names))))
    part = own_weights(lambda: made_by(Odd, width), wanted)
    assert [name for name, _ in part.named_parameters()] == names
    for name, parameter in part.named_parameters():
        assert parameter.is_meta == (name not in wanted)
        assert parameter.shape == whole.get_parameter(name).shape
        assert parameter.is_meta or torch.equal(parameter, whole.get_parameter(name)), name
    for name, buffer in part.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name))


def test_weights_that_hang_on_others_are_refused_by_name() -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.three = nn.Linear(3, 3)
            self.two.weight.data.copy_(self.one.weight.data)

    with pytest.raises(InputError, match=r"two.weight is made from the values of other parameters"):
        own_weights(Copied, {"two.weight"})
    both = own_weights(lambda: made_by(Copied), {"one.weight", "two.weight"})
    assert torch.equal(both.get_parameter("two.weight"), made_by(Copied).get_parameter("two.weight"))


def test_a_model_file_is_built_in_parts() -> None:
    model_file = load_model_file(EVERYTHING)

    def make() -> nn.Module:
        with RandomStream(3):
            return model_file.model()

    whole = dict(make().named_parameters())
    for name in whole:
        part = dict(own_weights(make, {name}).named_parameters())
        assert [other for other, parameter in part.items() if not parameter.is_meta] == [name]
        assert torch.equal(part[name], whole[name])
