"""Model folders: ``model.safetensors`` and ``config.json``, never a pickle.

``config.json`` holds the schema version, the library version, the kind of object, what is needed
to rebuild it, and two hashes: of the weights file and of the config itself. A folder loads with
exactly the numbers it was saved with, or not at all; every failure is a :class:`ModelFileError`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from selfnorm.errors import ModelFileError

__all__ = [
    "Folder",
    "annotate",
    "known_kinds",
    "load",
    "plain_number",
    "read_folder",
    "register",
    "save_folder",
]

__version__ = "0.1.0"  # of the library, written into every folder
SCHEMA_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 64 * 2**20

Builder = Callable[[dict[str, Any], dict[str, Tensor]], Any]
_BUILDERS: dict[str, Builder] = {}

# What a builder may raise on a config or on tensors that do not fit together.
_BUILD_ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Folder:
    """A checked model folder: what it holds, and how to rebuild it."""

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    library_version: str
    notes: dict[str, Any]


def register(kind: str, builder: Builder) -> None:
    """Let :func:`load` rebuild ``kind`` by ``builder(config, tensors)``.

    Only registered kinds are ever built: a config cannot name a class or function to call.
    """
    _BUILDERS[kind] = builder


def known_kinds() -> list[str]:
    """Kinds of model folders that this installation can load."""
    return sorted(_BUILDERS)


def save_folder(
    path: str | os.PathLike[str],
    kind: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a model folder; an older model in it is replaced.

    ``config`` and ``notes`` (what a program wants to remember beside the model, such as the name of
    the target column) must be JSON-safe. Tensors are stored on the CPU in their own dtype.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> save_folder(folder, "example", {"width": 3}, {"w": torch.ones(3)})
    >>> read_folder(folder).config
    {'width': 3}
    """
    path = Path(path)
    stored = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    weights = save_safetensors(stored)
    document = {
        "schema_version": SCHEMA_VERSION,
        "library_version": __version__,
        "kind": kind,
        "config": config,
        "notes": notes or {},
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    document["config_sha256"] = _config_hash(document)
    text = json.dumps(document, indent=1, allow_nan=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # The config goes last: until it is there, the old config refuses the new weights.
        for name, content in ((WEIGHTS_FILE, weights), (CONFIG_FILE, text.encode())):
            temporary = path / f".{name}.{os.getpid()}.tmp"
            temporary.write_bytes(content)
            temporary.replace(path / name)
    except OSError as error:
        raise ModelFileError(f"cannot write the model to {path}: {error.strerror}") from error


def read_folder(path: str | os.PathLike[str]) -> Folder:
    """Read and check a model folder without building anything."""
    path = Path(path)
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a model folder; give the folder that save() wrote")
    document = _read_config(path / CONFIG_FILE)
    weights = _read_bytes(path / WEIGHTS_FILE)
    if hashlib.sha256(weights).hexdigest() != document["weights_sha256"]:
        raise ModelFileError(
            f"{path / WEIGHTS_FILE} is not the file this config was saved with (its hash differs): "
            "it was damaged, cut short or swapped; copy the folder again or refit the model"
        )
    try:
        tensors = load_safetensors(weights)
    except (SafetensorError, *_BUILD_ERRORS) as error:
        raise ModelFileError(f"{path / WEIGHTS_FILE} is not a safetensors file: {error}") from error
    return Folder(
        document["kind"],
        document["config"],
        tensors,
        document["library_version"],
        document["notes"],
    )


def annotate(path: str | os.PathLike[str], notes: dict[str, Any]) -> None:
    """Add notes to a model folder; the model itself stays as it is."""
    folder = read_folder(path)
    merged = {**folder.notes, **notes}
    save_folder(path, folder.kind, folder.config, folder.tensors, merged)


def load(path: str | os.PathLike[str], kind: str | None = None) -> Any:
    """Rebuild what a model folder holds, on the CPU; ``kind`` insists on one kind."""
    folder = read_folder(path)
    if kind is not None and folder.kind != kind:
        raise ModelFileError(f"{path} holds a {folder.kind}, not a {kind}; load it with that class")
    if folder.kind not in _BUILDERS:
        raise ModelFileError(
            f"{path} asks for the unknown class {folder.kind[:80]!r}; this installation knows "
            f"{known_kinds()}"
        )
    try:
        return _BUILDERS[folder.kind](folder.config, folder.tensors)
    except _BUILD_ERRORS as error:
        detail = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise ModelFileError(
            f"{path}: config and weights do not fit together ({detail}); refit the model"
        ) from error


def _read_bytes(path: Path) -> bytes:
    try:
        if path.is_file():
            return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    raise ModelFileError(
        f"{path} is missing: a model folder holds {CONFIG_FILE} and {WEIGHTS_FILE}"
    )


def _read_config(path: Path) -> dict[str, Any]:
    content = _read_bytes(path)
    if len(content) > MAX_CONFIG_BYTES:
        raise ModelFileError(f"{path} is too large for a config ({len(content)} bytes)")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        detail = str(error).splitlines()[0][:200]
        raise ModelFileError(f"{path} is not valid JSON: {detail}") from error
    if not isinstance(document, dict):
        raise ModelFileError(f"{path} is not a model config: it holds no JSON object")
    version = document.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ModelFileError(f"{path} is not a model config: it has no schema version")
    if version > SCHEMA_VERSION:
        raise ModelFileError(
            f"{path} has schema version {version}, this installation reads up to {SCHEMA_VERSION}: "
            f"it was saved by a newer selfnorm ({str(document.get('library_version'))[:40]}); "
            "upgrade to load it"
        )
    expected: dict[str, type] = {
        "kind": str,
        "library_version": str,
        "weights_sha256": str,
        "config_sha256": str,
        "config": dict,
        "notes": dict,
    }
    for key, kind in expected.items():
        if not isinstance(document.get(key), kind):
            raise ModelFileError(f"{path} is not a model config: {key!r} is missing or malformed")
    if _config_hash(document) != document["config_sha256"]:
        raise ModelFileError(
            f"{path} was changed after the model was saved (its hash differs): "
            "copy the folder again or refit the model"
        )
    return document


def plain_number(value: Any) -> Any:
    """A NumPy number, as a grid search passes it, as Python's own, which JSON takes.

    Example:
        >>> import numpy as np
        >>> plain_number(np.int64(3)), plain_number("text")
        (3, 'text')
    """
    return value.item() if isinstance(value, np.generic) else value


def _config_hash(document: dict[str, Any]) -> str:
    """Hash of the content, not of the layout: reformatting the file changes nothing."""
    content = {key: value for key, value in document.items() if key != "config_sha256"}
    try:
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except (RecursionError, ValueError) as error:
        raise ModelFileError(f"the config cannot be hashed: {error}") from error
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
