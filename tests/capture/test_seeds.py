"""Random numbers hang on (seed, step, micro-batch, layer) and on nothing else."""

from __future__ import annotations

import random
from itertools import product

import torch

from planner.capture import RandomKey, RandomStream
from planner.capture.seeds import folded, salt_of, seed_layer


def test_every_key_and_layer_has_a_seed_of_its_own() -> None:
    salts = [salt_of(f"blocks.{index}") for index in range(8)]
    seeds = [
        RandomKey(seed, step, microbatch).seed_for(salt)
        for seed, step, microbatch, salt in product(range(3), range(8), range(8), salts)
    ]
    assert len(set(seeds)) == len(seeds)  # 1536 out of 2^32: one pair in 3600 trials would meet by chance
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seeds[:2] == [RandomKey(0, 0, 0).seed_for(salt) for salt in salts[:2]]


def test_a_layer_draws_the_same_whatever_was_drawn_before() -> None:
    key, salt = RandomKey(1, 2, 3), salt_of("head")
    seed_layer(key, salt)
    first = torch.rand(5)
    torch.rand(7)
    seed_layer(key, salt)
    assert torch.equal(first, torch.rand(5))
    seed_layer(RandomKey(1, 2, 4), salt)
    assert not torch.equal(first, torch.rand(5))


def test_folding_reaches_every_bit() -> None:
    flipped = 0
    for bit in range(32):
        flipped |= folded(7, 9) ^ folded(7 ^ (1 << bit), 9)
    assert flipped == 0xFFFFFFFF


def test_a_stream_leaves_the_world_alone_and_goes_on_where_it_ended() -> None:
    with RandomStream(5):
        whole = [torch.rand(2), torch.rand(2)]
    stream = RandomStream(5)
    torch.manual_seed(1)
    before, python = torch.get_rng_state(), random.getstate()
    with stream:
        first = torch.rand(2)
        random.random()
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python
    torch.manual_seed(2)
    with stream:
        second = torch.rand(2)
    assert torch.equal(first, whole[0])
    assert torch.equal(second, whole[1])
