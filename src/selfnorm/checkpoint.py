"""States of a training run: copies in memory, and checkpoints that survive a kill at any moment.

A checkpoint is one file, written beside its final name, flushed to disk and renamed: a reader sees
the old state or the new one, never half of one. It is read with ``weights_only=True``: tensors and
plain containers, no code.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm.errors import CheckpointError

__all__ = [
    "all_finite",
    "copied",
    "copy_into",
    "fingerprint",
    "floats",
    "load_checkpoint",
    "save_checkpoint",
]

_FORMAT = 1


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write ``state`` atomically; a full disk leaves the previous checkpoint untouched."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as handle:
            torch.save({"format": _FORMAT, **state}, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"could not write the checkpoint {path}: {error}; the previous one is untouched. "
            "Free some space or choose another place"
        ) from error


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint; anything wrong with the file is a :class:`CheckpointError`."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: a checkpoint is one file, name it")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a readable checkpoint ({type(error).__name__}): it is truncated or "
            "damaged. Delete it to start afresh"
        ) from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of this version of selfnorm; delete it to start afresh"
        )
    return state


def fingerprint(tensors: tuple[Tensor, ...]) -> str:
    """Hash of the training data: a run is resumed only on the data it began with."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def floats(module: nn.Module) -> dict[str, Tensor]:
    """Floating-point parameters and buffers of a module by name."""
    return {k: v for k, v in module.state_dict().items() if torch.is_floating_point(v)}


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether every number of every tensor is finite; waits for the device once.

    >>> all_finite([torch.ones(2), torch.tensor([0.0, torch.nan])])
    False
    """
    if not tensors:
        return True
    return bool(torch.stack([torch.isfinite(t).all() for t in tensors]).all())


def copied(value: Any) -> Any:
    """Deep copy of nested containers of tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((k, copied(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value)(copied(v) for v in value)
    return value


def copy_into(target: Any, source: Any) -> None:
    """Copy tensors of nested dicts into those of a twin, in place; what the source lacks is zero.

    An optimiser that has not stepped yet has no state, which is the same as zeros.

    >>> state = {"step": torch.ones(1), "other": torch.ones(1)}
    >>> copy_into(state, {"step": torch.full((1,), 3.0)})
    >>> state
    {'step': tensor([3.]), 'other': tensor([0.])}
    """
    for key, value in target.items():
        if isinstance(value, Tensor):
            if key in source:
                value.copy_(source[key])
            else:
                value.zero_()
        elif isinstance(value, dict):
            copy_into(value, source.get(key, {}))
