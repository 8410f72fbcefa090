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

from selfnorm._context import evaluating, seeded
from selfnorm.errors import CheckpointError

__all__ = [
    "all_finite",
    "check_same_run",
    "copied",
    "copy_into",
    "entries_of_task",
    "fingerprint",
    "floats",
    "load_checkpoint",
    "restore_task",
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


def entries_of_task(task: Any, data: tuple[Tensor, ...]) -> dict[str, Any]:
    """What a task wants in its checkpoints; see :class:`~selfnorm.training.task.Task`."""
    return {
        "settings": _ask(task, "settings") or {},
        "witness": _witness(task, data),
        "task": copied(_ask(task, "own_state")),
    }


def check_same_run(
    path: Path, state: dict[str, Any], task: Any, options: dict[str, Any], data: str
) -> None:
    """Refuse to resume a run that had other options, or other data (by :func:`fingerprint`).

    A task's setting ``rows`` is the fingerprint of data that it holds itself.
    """
    mine = {**(_ask(task, "settings") or {}), **options}
    saved = {**state.get("settings", mine), **state["options"]}
    other = sorted(k for k in mine if mine[k] != saved.get(k) and k != "rows")
    if other:
        named = ", ".join(f"{k}={saved.get(k)!r}" for k in other)
        raise CheckpointError(
            f"{path} belongs to a run with other options ({named}); use the same ones, another "
            "checkpoint path, or resume=False"
        )
    if state["data"] != data or mine.get("rows") != saved.get("rows"):
        raise CheckpointError(
            f"{path} belongs to a run on other data; use another checkpoint path, or resume=False"
        )


def restore_task(path: Path, state: dict[str, Any], task: Any, data: tuple[Tensor, ...]) -> None:
    """Check the weights just loaded by what they mean, and give the task what it remembered.

    Networks that differ by an activation, a base or a proposal only have weights of one shape.
    """
    saved, mine = state.get("witness"), _witness(task, data)
    if saved is not None and mine is not None:
        alike = saved.shape == mine.shape
        # Loose enough for another device and its rounding of products (TF32).
        if not alike or not torch.allclose(saved, mine, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise CheckpointError(
                f"{path} belongs to a run with another energy, base or proposal: with its weights "
                "this one gives other densities. Use the same ones, another checkpoint path, or "
                "resume=False"
            )
    if state.get("task") is not None:
        _ask(task, "load_own_state", state["task"])


def _ask(task: Any, method: str, *args: Any) -> Any:
    """What the task answers, if it defines the method."""
    own = getattr(task, method, None)
    return None if own is None else own(*args)


def _witness(task: Any, data: tuple[Tensor, ...]) -> Tensor | None:
    """Log-densities at a few rows in evaluation mode; the run's random stream stays as it is."""
    if not hasattr(task, "witness"):
        return None
    with evaluating(task.module), torch.no_grad(), seeded(0, data[0].device):
        seen: Tensor = task.witness(data)
    return seen.double().cpu()


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
