"""What ranks train on: samples of the shapes that the model was captured with, the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from planner.capture import Batch, ModelFile
from planner.capture.batch import named_leaves
from planner.errors import InputError

_CHECKED_EVERY = 64
"""Steps: a comparison takes a fraction of a millisecond, and as long as it takes to hash the batch."""


def like(example: Batch, batches: Iterable[Batch], model_file: ModelFile, *, first: int) -> Iterator[Batch]:
    """The batches, from step ``first`` on; raises InputError at one whose samples have other shapes than the example's.

    Tensors are [samples, ...].
    """
    shapes = {name: leaf.shape[1:] for name, leaf in named_leaves(example) if isinstance(leaf, Tensor)}
    for step, batch in enumerate(batches, first):
        for name, leaf in named_leaves(batch):
            known = shapes.get(name)
            if known is not None and isinstance(leaf, Tensor) and leaf.shape[1:] != known:
                raise _fault(
                    model_file,
                    f"gives samples of another shape in step {step + 1} than the model was captured with: "
                    f"{list(leaf.shape[1:])} for {list(known)} ({name})",
                    "pad or cut every sample to the shape that batch() gives, always the same one",
                )
        yield batch


def is_checked(step: int) -> bool:
    """Whether ranks compare what they are given in the step with this number, counted from the first of the run.

    In the first three, which a comparison with one process may take, and then ever more rarely: random numbers that
    have parted do not meet again.
    """
    return step & (step - 1) == 0 or step % _CHECKED_EVERY == 0


def check_same(batch: Batch, model_file: ModelFile, store: Store, *, process: int, step: int) -> None:
    """Compare a batch with that of the first process that came here; raises InputError with what differs.

    Else targets would belong to other inputs.
    """
    mine = {"rank": process} | {name: _digest(leaf) for name, leaf in named_leaves(batch)}
    first = json.loads(store.compare_set(f"data/{step}", "", json.dumps(mine)))
    differing = [name for name in mine if name != "rank" and mine[name] != first.get(name)]
    if differing:
        raise _fault(
            model_file,
            f"gives rank {process} other data than rank {first['rank']} ({', '.join(differing)} of step {step + 1})",
            "draw with torch's own random numbers or a fixed seed: every rank must be given the same",
        )


def _fault(model_file: ModelFile, what: str, mend: str) -> InputError:
    return model_file.fault("data" if "data" in model_file.functions else "batch", what, mend)


def _digest(leaf: object) -> str:
    """Of a tensor's type, shape and values, or of a plain value; of what else there is in a batch its type."""
    if not isinstance(leaf, Tensor):
        plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)
        return hashlib.sha256(f"{type(leaf)} {leaf if plain else ''}".encode()).hexdigest()
    found = hashlib.sha256(f"{leaf.dtype} {list(leaf.shape)}".encode())
    values = (leaf.detach() if leaf.layout is torch.strided else leaf.detach().to_dense()).cpu()
    values = values.resolve_conj().resolve_neg().contiguous().reshape(-1)
    found.update(values.view(torch.uint8).numpy().data)
    return found.hexdigest()
