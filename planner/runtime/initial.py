"""The weights that training starts with: those that model() draws, or those of safetensors files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from planner.capture import ModelFile, RandomStream
from planner.capture.own import own_weights
from planner.errors import InputError
from planner.runtime.weight_files import weight_files

_SHOWN = 3


def initial_weights(
    model_file: ModelFile, seed: int, *, files: Path | None = None, wanted: Collection[str] | None = None
) -> nn.Module:
    """The model with the weights that model() gives on the CPU after manual_seed(seed): the same for every plan.

    ``files``: where its weights are, if they are not those. ``wanted``: the parameters that need to be there; they have
    the same values, the others are on meta.
    """

    def make() -> nn.Module:
        with RandomStream(seed):
            return model_file.model()

    module = make() if wanted is None else own_weights(make, wanted)
    if files is not None:
        fill(module, files)
    return module


def fill(module: nn.Module, path: Path) -> None:
    """Put the weights of files into a model; only what it holds is read, and what is on meta stays there.

    The files must hold every parameter, under any of its names; a buffer that they do not hold stays as it is, and what
    the model does not have is passed over. Numbers are brought to the parameter's dtype. Raises InputError where a
    parameter is missing or is another kind of tensor.
    """
    found = weight_files(path)
    parameters = _named(module.named_parameters(remove_duplicate=False))
    _check_complete(path, found, [names for names, _ in parameters])
    for names, tensor in (*parameters, *_named(module.named_buffers(remove_duplicate=False))):
        name = next((name for name in names if name in found), None)
        if name is not None and not tensor.is_meta:
            _put(tensor, found[name], name)


def _named(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[list[str], Tensor]]:
    """Each tensor once, with all its names."""
    made: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in tensors:
        made.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(made.values())


def _check_complete(path: Path, found: Mapping[str, Path], parameters: list[list[str]]) -> None:
    missing = [names[0] for names in parameters if not any(name in found for name in names)]
    if not missing:
        return
    known = {name for names in parameters for name in names}
    strange = ", ".join([name for name in found if name not in known][:_SHOWN]) or "none"
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise InputError(
        f"{path}: lacks {', '.join(missing[:_SHOWN])}{more} of the model's {len(parameters)} parameters; holds others: "
        f"{strange}",
        hint="write safetensors of the state_dict() of what model() returns",
    )


def _put(tensor: Tensor, file: Path, name: str) -> None:
    try:
        with safe_open(file, framework="pt") as opened:
            value: Tensor = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: {name}: {error}", hint="write or fetch it again") from None
    if value.shape != tensor.shape or value.dtype.is_floating_point != tensor.dtype.is_floating_point:
        raise InputError(
            f"{file}: {name} is {_kind(value)}, the model's {_kind(tensor)}", hint="name the weights of this model"
        )
    with torch.no_grad():
        tensor.copy_(value)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
