"""Long chains that look like transformers."""

from __future__ import annotations

import random

from planner.profile import Cost, Device, Edge, EdgeTensor, Layer, OptimizerCost, Profile, ProfiledModel


def chain(num_layers: int, *, spread: float = 0.3, sizes: tuple[int, ...] = (1, 2, 4), seed: int = 0) -> Profile:
    """A transformer-like chain: an embedding, blocks that differ by ``spread``, a head of three blocks' work."""
    rng = random.Random(seed)
    layers = []
    for index in range(num_layers):
        work = 3.0 if index == num_layers - 1 else 0.1 if index == 0 else rng.uniform(1 - spread, 1 + spread)
        parameters = 400 * 2**20 if index in (0, num_layers - 1) else 100 * 2**20
        costs = tuple(
            Cost(
                microbatch_size=size,
                forward_s=1e-3 * work * (0.2 + 0.8 * size),
                backward_input_s=1.1e-3 * work * (0.2 + 0.8 * size),
                backward_weight_s=0.9e-3 * work * (0.2 + 0.8 * size),
                saved_bytes=16 * 2**20 * size,
                saved_for_weight_bytes=10 * 2**20 * size,
                workspace_bytes=16 * 2**20 * size,
            )
            for size in sizes
        )
        layers.append(
            Layer(
                name=f"layer{index}",
                kind="block",
                modules=(),
                parameter_bytes=parameters,
                trainable_bytes=parameters,
                buffer_bytes=0,
                costs=costs,
            )
        )
    hidden = EdgeTensor(name="hidden", bytes_per_sample=4 * 2**20, fixed_bytes=0, grad=True, saved=True)
    return Profile(
        model=ProfiledModel(name=f"chain{num_layers}", source="chain.py", fingerprint="0"),
        device=Device(kind="estimate", name="none", memory_bytes=0, software={}),
        provenance="estimated",
        dtype="bfloat16",
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=OptimizerCost(name="adamw", state_bytes_per_trainable_byte=4.0, step_s_per_trainable_byte=1e-12),
        layers=tuple(layers),
        edges=tuple(
            Edge(source=f"layer{index}", target=f"layer{index + 1}", tensors=(hidden,))
            for index in range(num_layers - 1)
        ),
    )
