"""Training checkpoints that survive a kill at any moment.

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
from torch import Tensor

from selfnorm.errors import CheckpointError

__all__ = ["fingerprint", "load_checkpoint", "save_checkpoint"]

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
