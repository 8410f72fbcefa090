"""Checkpoints that survive a kill at any moment.

A checkpoint is one file, replaced whole or not at all. It begins with a line with the hash of the
rest: a file in which one bit has changed is refused. It is read with ``weights_only=True``: tensors
and plain containers, no code.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfnorm._context import evaluating, seeded
from selfnorm._files import atomic, open_file
from selfnorm.errors import CheckpointError

if TYPE_CHECKING:
    from selfnorm.training.task import State, Task

_NAME = b"selfnorm checkpoint 3 "
AFRESH = "name another checkpoint, or delete this one to start afresh"
_HEAD = len(_NAME) + 64 + 1  # the name, a hash in hexadecimal digits, the end of the line


def _head(content: bytes | memoryview) -> bytes:
    return _NAME + hashlib.sha256(content).hexdigest().encode() + b"\n"


def save_checkpoint(path: str | Path, state: State) -> None:
    """Write ``state`` atomically; a full disk leaves the previous checkpoint untouched."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save(state, content)
    try:
        with atomic(path) as part, open(part, "wb") as handle:
            handle.write(_head(content.getbuffer()))
            handle.write(content.getbuffer())
    except OSError as error:
        raise CheckpointError(
            f"could not write the checkpoint {path}: {error}; the previous one is untouched. "
            "Free some space or choose another place"
        ) from error


# What torch's reader raises on files that are none of its own.
_UNREADABLE = (
    *(RuntimeError, OSError, EOFError, pickle.UnpicklingError, struct.error),
    *(ValueError, LookupError, TypeError, AttributeError, MemoryError, zipfile.BadZipFile),
)


def load_checkpoint(path: str | Path) -> State:
    """Read a checkpoint; anything wrong with the file is a :class:`CheckpointError`."""
    path = Path(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path} is a folder, pipe or device: name a file")
    try:
        with open_file(path) as (handle, size):
            head = handle.read(_HEAD)
            content = handle.read(size) if head.startswith(_NAME) else b""
        if head.startswith((b"PK", _NAME[:-2])) and not head.startswith(_NAME):
            raise CheckpointError(
                f"{path} is not a checkpoint of this version of selfnorm; delete it to start afresh"
            )
        if head != _head(content):
            raise ValueError("its hash differs")
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            if sum(entry.file_size for entry in packed.infolist()) > len(content):
                raise ValueError("it is compressed, and torch writes none that is")
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path} is not a readable checkpoint ({type(error).__name__}): it is truncated or "
            "damaged. Delete it to start afresh"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state of a run; delete it to start afresh")
    return state


def entries_of_task(task: Task, data: tuple[Tensor, ...]) -> State:
    """What a task wants in its checkpoints."""
    return {"settings": task.settings(), "witness": _witness(task, data), "task": task.own_state()}


def check_same_run(path: Path, state: State, task: Task, options: State, data: str) -> None:
    """Refuse to resume a run that had other options, or other data (by their fingerprint)."""
    mine = {**task.settings(), **options}
    saved = {**state["settings"], **state["options"]}
    other = sorted(k for k in mine if mine[k] != saved.get(k))
    if other:
        named = ", ".join(f"{k}={saved.get(k)!r}" for k in other)
        raise CheckpointError(
            f"{path} belongs to a run with other options ({named}); use the same ones, or {AFRESH}"
        )
    if state["data"] != data:
        rows = len(state["order"])
        raise CheckpointError(f"{path} belongs to a run on other data, of {rows} rows; {AFRESH}")


def restore_task(path: Path, state: State, task: Task, data: tuple[Tensor, ...]) -> None:
    """Check the weights just loaded by what they mean, and give the task what it remembered.

    Networks that differ by an activation, a base or a proposal only have weights of one shape.
    """
    saved, mine = state["witness"], _witness(task, data)
    if saved is not None and mine is not None:
        alike = saved.shape == mine.shape
        # Loose enough for another device and its rounding of products (TF32).
        if not alike or not torch.allclose(saved, mine, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise CheckpointError(
                f"{path} belongs to a run with another energy, base or proposal: with its weights "
                f"this one gives other densities. Use the same ones, or {AFRESH}"
            )
    if state["task"] is not None:
        task.load_own_state(state["task"])


def _witness(task: Task, data: tuple[Tensor, ...]) -> Tensor | None:
    """Log-densities at a few rows in evaluation mode; the run's random stream stays as it is."""
    with evaluating(task.module), torch.no_grad(), seeded(0, data[0].device):
        seen = task.witness(data)
    return None if seen is None else seen.double().cpu()
