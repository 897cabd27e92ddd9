"""Files of weights that training can start from: safetensors, found and looked into by name (no torch here)."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from planner.errors import InputError

_SUFFIX = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def weight_files(path: Path) -> dict[str, Path]:
    """The file of each tensor by the tensor's name.

    ``path``: a file, or a folder of several: as save_pretrained() writes them, or one of a run's checkpoints.
    Raises InputError where there are none, one is damaged, or two hold one name.
    """
    found: dict[str, Path] = {}
    for file in _files(path):
        for name in _names(file):
            if name in found:
                raise InputError(
                    f"{path}: {name} stands in {found[name].name} and in {file.name}", hint="name one of them"
                )
            found[name] = file
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix == _SUFFIX)
    if files:
        return files
    pickled = next((file.name for file in path.iterdir() if file.suffix in _PICKLED), None)
    if pickled:
        raise InputError(
            f"{path}: holds no safetensors file, only {pickled}, which may be pickled and is not read",
            hint="load it where you trust it, and write it with safetensors.torch.save_file",
        )
    raise InputError(f"{path}: holds no safetensors file", hint="name a file or a folder of weights")


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="np") as opened:
            return list(opened.keys())
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}", hint="name a file or a folder of weights") from None
    except SafetensorError as error:
        raise InputError(f"{file}: is no whole safetensors file: {error}", hint="write or fetch it again") from None
