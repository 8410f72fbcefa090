"""``selfnorm.save`` and ``selfnorm.load``: models as folders, never a pickle.

A folder holds ``model.safetensors`` and ``config.json``: the schema version, the library version,
the kind of object, what is needed to rebuild it, and two hashes, of the weights file and of the
config itself; and ``model_card.md``, which only people read. It loads with exactly the numbers it
was saved with, or not at all; every failure is a :class:`ModelFileError`.

A model is replaced by one rename, that of its config: the new weights lie beside the old ones by
then, under a name made of their hash, and take their place afterwards. Whenever the process is
killed, the folder holds the old model or the new one.

A module is described by its class and what its constructor was given, module by module
(:func:`describe`). Only the classes of the table at the end are ever built: a config cannot name
anything else to import or call. What has code of its own (your energy, your encoder) is saved by
its weights alone and handed to :func:`load` again.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import html
import json
import math
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from selfnorm._context import evaluating, float32_on_cpu, seeded
from selfnorm.errors import ModelFileError, SelfnormWarning

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
T = TypeVar("T")
__version__: str = import_module("selfnorm").__version__  # to mypy a plain import is a circle
SCHEMA_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
CARD_FILE = "model_card.md"
MAX_CONFIG_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 100 * 10**6  # of safetensors
_TEMPORARY = f".{CONFIG_FILE}.tmp"
# buffers of columns and tables: "none", "no limit", the logarithm of a share of zero
_MAY_BE_INFINITE = {"atoms", "high", "log_codes", "low", "span"}

# What a constructor may raise on a config or on tensors that do not fit together.
_BUILD_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
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
    notes: dict[str, Any]


def save(model: Any, path: str | os.PathLike[str], *, notes: dict[str, Any] | None = None) -> None:
    """Write any model of the library to a folder; an older model in it is replaced.

    Estimators (``EnergyDensity``, ``EnergyRegressor``, ``ImageRegressor``) and modules (``EBM``,
    ``ConditionalEBM``, ``AutoregressiveEBM``, ``EnergyVAE``, ``Flow``, ...) alike. Parts with code
    of your own are saved by their weights; give them to :func:`load` again. ``notes`` are what a
    program wants to remember beside the model; they must be JSON-safe.

    Example:
        >>> import tempfile
        >>> import selfnorm as sn
        >>> model = sn.EBM(sn.MLP(2), base=sn.Gaussian(torch.zeros(2), scale=1.0))
        >>> folder = tempfile.mkdtemp()
        >>> sn.save(model, folder)
        >>> x = torch.ones(3, 2)
        >>> torch.equal(sn.load(folder).log_prob(x), model.log_prob(x))
        True
    """
    name = type(model).__name__
    if _is_known(model) and hasattr(model, "to_folder"):
        config, tensors = model.to_folder()
    elif "class" in (config := describe(model)):
        tensors = model.state_dict()
        del config["class"]  # it is the folder's kind
        config |= _witness(model, config)
    else:
        raise ModelFileError(
            f"a {name} cannot be saved to a model folder, for its code is not part of the library; "
            "save its state_dict() and build it in code"
        )
    save_folder(path, name, config, tensors, notes, card=_card(model))


@torch.no_grad()
def _witness(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """``log p~`` at samples of the base, where a part is the user's: given again, it must agree."""
    own = any(isinstance(part, dict) and "own" in part for part in config.values())
    if not own or not isinstance(getattr(model, "base", None), nn.Module):
        return {}
    if not (hasattr(model.base, "sample") and hasattr(model, "log_unnormalized")):
        return {}
    # parts of one's own may be on two devices
    with suppress(RuntimeError), seeded(0, getattr(model, "device", None)), evaluating(model):
        rows = model.base.sample((4,))
        values = model.log_unnormalized(rows).double()
        if bool(values.isfinite().all()):
            return {"witness": {"rows": rows.tolist(), "values": values.tolist()}}
    return {}


@torch.no_grad()
def _warn_of_another_model(witness: dict[str, Any], model: Any) -> None:
    """Warn of parts with which the model is another one than was saved."""
    was = torch.tensor(witness["values"], dtype=torch.float64)
    rows = torch.tensor(witness["rows"], dtype=getattr(model, "dtype", None))
    try:
        off = (model.log_unnormalized(rows).double() - was).abs()
    except RuntimeError:  # a part of one's own is on another device
        return
    if not bool((off <= 1e-3 * (1 + was.abs())).all()):
        warnings.warn(
            "with the parts given, the model is not the one that was saved: its log-density before "
            f"normalisation differs by {float(off.max()):.3g}, and the saved b is not its "
            "normaliser; build the parts as they were",
            SelfnormWarning,
            stacklevel=3,
        )


def _card(model: Any) -> str:
    """What a person who finds the folder should know."""
    name = type(model).__name__
    about = (type(model).__doc__ or "").strip().partition("\n")[0]
    facts = model.facts() if hasattr(model, "facts") else {}
    # names of columns are a stranger's text: no tag, link or cell of the table's own
    cells = (
        (key, re.sub(r"[|\[\]`]", r"\\\g<0>", html.escape(value, quote=False)).replace("\n", " "))
        for key, value in facts.items()
    )
    table = ["| what | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in cells)]
    told = "\n".join([*table, "", ""]) if facts else ""
    return (
        f"# {name}\n\n{about}\n\n{told}"
        f"Saved by selfnorm {__version__}; loading it runs no code of the folder's:\n\n"
        '```python\nimport selfnorm\n\nmodel = selfnorm.load("this folder")\n```\n'
    )


def load(path: str | os.PathLike[str], *, kind: str | None = None, **own: Any) -> Any:
    """Rebuild what a model folder holds, on the CPU and in evaluation mode.

    Args:
        path: the folder.
        kind: insist on this class.
        own: parts with code of your own, by their name in the model's constructor
            (``energy=net``), built as they were: copies of them are filled with the saved weights.

    Example:
        >>> import tempfile
        >>> import selfnorm as sn
        >>> model = sn.EBM(sn.MLP(2), base=sn.Gaussian(torch.zeros(2), scale=1.0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sn.save(model, folder)
        ...     again = sn.load(folder)
        >>> rows = torch.ones(3, 2)
        >>> torch.equal(again.log_prob(rows), model.log_prob(rows))
        True
    """
    folder = read_folder(path)
    if kind is not None and folder.kind != kind:
        raise ModelFileError(f"{path} holds a {folder.kind}, not a {kind}; load it with that class")
    return restored(folder, path, **own)


def restored(folder: Folder, path: str | os.PathLike[str], **own: Any) -> Any:
    """What a folder that was read at ``path`` holds: see :func:`load`."""
    found = _class(folder.kind).find(folder.kind)
    _refuse_not_finite(folder.tensors, path, own)
    try:
        # what is built begins with random weights, for which the caller's stream is not to pay
        with seeded(0), float32_on_cpu(), _WithinItsWeights(folder.tensors):
            if hasattr(found, "from_folder"):
                return found.from_folder(folder.config, folder.tensors, **own)
            witness = folder.config.pop("witness", None)
            model = build({"class": folder.kind, **folder.config}, folder.tensors, **own)
        if witness is not None:
            with float32_on_cpu():
                _warn_of_another_model(witness, model)
        return model
    except _BUILD_ERRORS as error:
        # torch says which weight does not fit on the second line
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        parts = ", ".join(["config and weights", *own])
        raise ModelFileError(
            f"{path}: {parts} do not fit together ({detail}); refit the model"
        ) from error


def expect(config: dict[str, Any], **kinds: Any) -> None:
    """A ``ValueError`` if entries are not of these types, or column names not as many as said.

    >>> expect({"n_features": "two"}, n_features=int)
    Traceback (most recent call last):
    ValueError: the config's 'n_features' is missing or malformed
    """
    for name, kind in kinds.items():
        value = config.get(name)
        right = name in config and isinstance(value, kind)
        if name == "columns" and isinstance(value, list):
            right = all(isinstance(each, str) for each in value)
            right = right and len(value) == config.get("n_features")
        if not right or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"the config's {name!r} is missing or malformed")


class _WithinItsWeights(TorchDispatchMode):
    """Ends the building of a model that takes far more than the weights it is built for.

    Anybody can write a config with a right hash. A size in it that the weights do not have would
    otherwise fill the memory, or build layers for hours, before the weights are seen not to fit.
    An honest model makes each weight a few times; what is refused is a hundred times all of them.
    """

    call = 1000  # elements that a call of torch costs at least: loops come to an end, too

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.left = 10**7 + 100 * sum(t.numel() + self.call for t in tensors.values())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
        counts = [abs(leaf) for leaf in leaves if isinstance(leaf, int)]
        # what may be large is paid before it is made
        if not sizes or math.prod(max(size, 1) for size in sizes + counts) > 10**6:
            self._pay(_elements_made(function, args, kwargs))
        made = function(*args, **kwargs)
        self._pay(made.numel() if isinstance(made, Tensor) else 0)
        return made

    def _pay(self, elements: int) -> None:
        self.left -= max(elements, self.call)
        if self.left < 0:
            raise ValueError("the config asks for a much larger model than its weights are")


def _elements_made(function: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """The size of what a call of torch makes, by a call on tensors without memory."""
    if isinstance(kwargs.get("generator"), torch.Generator):
        kwargs = {**kwargs, "generator": None}
    args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
    if "device" in kwargs or not any(isinstance(a, Tensor) for a in tree_leaves((args, kwargs))):
        kwargs = {**kwargs, "device": "meta"}
    try:
        made = function(*args, **kwargs)
    except (NotImplementedError, RuntimeError, TypeError):  # it needs the numbers, or has no size
        return 0
    return sum(part.numel() for part in tree_leaves(made) if isinstance(part, Tensor))


class Saved:
    """A class whose objects say themselves what a folder holds: ``to_folder``, ``from_folder``."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a folder: weights, config and a card for people.

        Parts with code of your own are saved by their weights; give them to ``load`` again.
        """
        save(self, path)

    @classmethod
    def load(cls: type[T], path: str | os.PathLike[str]) -> T:
        """Read back what :meth:`save` wrote; a damaged folder is a ``ModelFileError``."""
        loaded: T = load(path, kind=cls.__name__)
        return loaded


def describe(value: Any) -> Any:
    """The blueprint of a module; together with its ``state_dict`` it gives the module back.

    Numbers and lists stay what they are, modules of the library are told by their class, parts
    with code of the user's by the name of theirs.

    >>> from selfnorm import Gaussian
    >>> describe(Gaussian(torch.zeros(2), scale=1.0))
    {'class': 'Gaussian', 'dim': 2}
    """
    if value is None or isinstance(value, str | int | float | np.generic):
        return plain_number(value)
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    name = type(value).__name__
    if not (isinstance(value, nn.Module) and _is_known(value)):
        return {"own": name}
    config = _CLASSES[name].config(value)
    # Spectral norm and the like: other weights than the class is built with.
    normed = [key.split(".") for key, _ in value.named_parameters() if "parametrizations" in key]
    if any(config.keys().isdisjoint(key) for key in normed):
        return {"own": name}
    parts = {key: describe(item) for key, item in config.items()}
    if name == "Sequential":
        numbered = all(key.split(".")[0].isdigit() for key in value.state_dict())
        if not numbered or any("own" in part for part in parts["parts"]):
            return {"own": name}  # as a whole: nobody could give its parts by name
    return {"class": name, **parts}


def build(blueprint: dict[str, Any] | None, tensors: dict[str, Tensor], **own: Any) -> Any:
    """The module of a blueprint with the given state, which must match it key by key.

    ``own`` holds parts with code of the user's, see :func:`load`.
    """
    if blueprint is None:
        return None
    _refuse_more_than_weights(blueprint, tensors)
    taken: set[str] = set()
    module = _built(blueprint, "model", own, taken)
    for part in own.keys() - taken:
        raise ModelFileError(f"a {blueprint['class']} has no part {part!r} to take from you")
    kinds = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if len(kinds) == 1:  # a model in double precision comes back as one
        module.to(*kinds)
    module.cpu().load_state_dict(tensors, strict=True, assign=len(kinds) > 1)
    return module.eval()


def _refuse_more_than_weights(blueprint: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A ``ValueError`` if a blueprint has sizes or parts that its weights do not have.

    >>> _refuse_more_than_weights({"class": "MLP", "dim": 10**9}, {"bias": torch.zeros(2)})
    Traceback (most recent call last):
    ValueError: the config asks for a much larger model than its weights are
    """
    largest = 10**6 + sum(tensor.numel() for tensor in tensors.values())
    left = 10**5 + largest - 10**6
    classes = 1000 + 10 * len(tensors)
    nodes: list[Any] = [blueprint]
    while nodes:
        node = nodes.pop()
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        left, classes = left - len(inner), classes - isinstance(node, dict)
        if min(left, classes) < 0 or (isinstance(node, int) and abs(node) > largest):
            raise ValueError("the config asks for a much larger model than its weights are")
        nodes += inner


def _refuse_not_finite(tensors: dict[str, Tensor], path: Any, own: dict[str, Any]) -> None:
    """Refuse weights that are NaN or infinite, but in parts of one's own and limits of columns."""
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[-1] in _MAY_BE_INFINITE or not own.keys().isdisjoint(parts):
            continue
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ModelFileError(
                f"{path}: the weights {name!r} hold NaN or infinity, which gives no densities; "
                "fit the model again"
            )


def save_folder(
    path: str | os.PathLike[str],
    kind: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    notes: dict[str, Any] | None = None,
    card: str | None = None,
) -> None:
    """Write a model folder; an older model in it is replaced.

    ``config`` and ``notes`` (what a program wants to remember beside the model, such as the name of
    the target column) must be JSON-safe. Tensors are stored on the CPU in their own dtype. ``card``
    is a text for people.
    """
    path = _folder(path)
    stored = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    weights = save_safetensors(stored)
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "library_version": __version__,
        "kind": kind,
        "config": config,
        "notes": notes or {},
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    document["config_sha256"] = _config_hash(document)
    text = json.dumps(document, indent=1, allow_nan=False)
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with only_writer(path):
            _replace_model(path, weights, document["weights_sha256"], text.encode())
            with suppress(OSError):  # the model is there, and no worse without
                (path / CARD_FILE).unlink(missing_ok=True)
                if card is not None:
                    (path / CARD_FILE).write_text(card, "utf-8", errors="backslashreplace")
    except OSError as error:
        if made:
            with suppress(OSError):
                path.rmdir()
        raise ModelFileError(f"cannot write the model to {path}: {error.strerror}") from error


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Wait until nobody else writes to the folder, where the system has such locks."""
    if fcntl is None:
        yield
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks have no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
        with suppress(OSError):  # nor can every folder be flushed
            os.fsync(folder)
    finally:
        os.close(folder)


def _replace_model(path: Path, weights: bytes, digest: str, config: bytes) -> None:
    """Put a model in the place of the one that is there, by the rename of its config."""
    _settle(path)
    waiting, temporary = path / _waiting(digest), path / _TEMPORARY
    try:
        for part, content in ((waiting, weights), (temporary, config)):
            with part.open("wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
        temporary.replace(path / CONFIG_FILE)
    finally:
        _settle(path)


def _settle(path: Path) -> None:
    """Give waiting weights their name if their config is in place; remove what else is left.

    They must be whole: where the same weights are saved again, those of the config are there
    already, and what waits under their name may be half written.
    """
    with suppress(ModelFileError, OSError):
        digest = _read_config(path / CONFIG_FILE)["weights_sha256"]
        waiting = path / _waiting(digest)
        if _read_weights(waiting, digest) is not None:
            waiting.replace(path / WEIGHTS_FILE)
    for left in (path / _TEMPORARY, *path.glob(f".{WEIGHTS_FILE}.*")):
        left.unlink(missing_ok=True)


def _waiting(digest: str) -> str:
    """Name of weights whose config is in place or about to be, until they have their own name."""
    return f".{WEIGHTS_FILE}.{digest[:16]}"


def read_folder(path: str | os.PathLike[str]) -> Folder:
    """Read and check a model folder without building anything."""
    path = _folder(path)
    if not os.path.isdir(path):  # Path's own fails on a name too long
        raise ModelFileError(f"{path} is not a model folder; give the folder that save() wrote")
    for _ in range(5):  # once, or the model is being replaced while it is read
        document = _read_config(path / CONFIG_FILE)
        try:
            weights = _weights_of(document, path)
        except (OSError, MemoryError) as error:
            raise ModelFileError(f"cannot read the weights in {path}: {error}") from error
        if weights is not None:
            break
    else:
        _refuse_missing(path / WEIGHTS_FILE)
        raise ModelFileError(
            f"{path / WEIGHTS_FILE} is not the file this config was saved with (its size or hash "
            "differs): it was damaged, cut short or swapped; copy the folder again or refit the "
            "model"
        )
    try:
        tensors = load_safetensors(weights)
    except (SafetensorError, *_BUILD_ERRORS) as error:
        raise ModelFileError(f"{path / WEIGHTS_FILE} is not a safetensors file: {error}") from error
    return Folder(document["kind"], document["config"], tensors, document["notes"])


def _weights_of(document: dict[str, Any], path: Path) -> bytes | None:
    """The bytes of the weights that a config names by their hash, ``None`` if they are not there.

    Of a save that was killed at its end they still have the name under which they waited.
    """
    digest = document["weights_sha256"]
    for file in (path / WEIGHTS_FILE, path / _waiting(digest)):
        with suppress(FileNotFoundError, IsADirectoryError):
            if (content := _read_weights(file, digest)) is not None:
                return content
    return None


def _read_weights(file: Path, digest: str) -> bytes | None:
    """The bytes of a safetensors file, ``None`` if its size or hash is not the right one."""
    with open_file(file) as (handle, size):
        length = int.from_bytes(handle.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            return None
        try:
            header = json.loads(handle.read(length))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
            if size != 8 + length + max(ends, default=0):
                return None
        except _BUILD_ERRORS:  # it is no header
            return None
        handle.seek(0)
        content = handle.read(size)
    return content if hashlib.sha256(content).hexdigest() == digest else None


@contextmanager
def open_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file to read and its size; an ``OSError`` if it is a pipe or device, which may not end."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would be waited for

    with open(path, "rb", opener=opened) as handle:
        status = os.fstat(handle.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield handle, status.st_size


def _folder(path: Any) -> Path:
    try:
        return Path(os.fsdecode(path))
    except TypeError as error:
        raise ModelFileError(f"a model folder is named by a path, not by {path!r:.80}") from error


def _refuse_missing(path: Path) -> None:
    if not path.exists():
        raise ModelFileError(
            f"{path} is missing: a model folder holds {CONFIG_FILE} and {WEIGHTS_FILE}"
        )


def _read_config(path: Path) -> dict[str, Any]:
    _refuse_missing(path)
    try:
        with open_file(path) as (handle, size):
            if size > MAX_CONFIG_BYTES:
                raise ModelFileError(f"{path} is too large for a config ({size} bytes)")
            content = handle.read(size)
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
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
    texts = dict.fromkeys(("kind", "library_version", "weights_sha256", "config_sha256"), str)
    for key, kind in {**texts, "config": dict, "notes": dict}.items():
        right = isinstance(document.get(key), kind)
        if key == "weights_sha256":  # it is part of a file's name
            right = right and bool(re.fullmatch("[0-9a-f]{64}", document[key]))
        if not right:
            raise ModelFileError(f"{path} is not a model config: {key!r} is missing or malformed")
    if _config_hash(document) != document["config_sha256"]:
        raise ModelFileError(
            f"{path} was changed after the model was saved (its hash differs): "
            "copy the folder again or refit the model"
        )
    return document


def plain_number(value: Any) -> Any:
    """A NumPy number, as a grid search passes it, as Python's own, which JSON takes."""
    return value.item() if isinstance(value, np.generic) else value


def json_safe(value: Any) -> Any:
    """A copy for JSON: scalars of NumPy and torch as numbers, those that are not finite ``None``.

    Example:
        >>> json_safe({"a": [np.float32(0.5), float("nan")], "b": torch.tensor(2)})
        {'a': [0.5, None], 'b': 2}
    """
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, np.generic | Tensor):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _config_hash(document: dict[str, Any]) -> str:
    """Hash of the content, not of the layout: reformatting the file changes nothing."""
    content = {key: value for key, value in document.items() if key != "config_sha256"}
    try:
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except (RecursionError, ValueError) as error:
        raise ModelFileError(f"the config cannot be hashed: {error}") from error
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class _Class:
    """Where a class lives, and what its constructor is to be given to build such an object again.

    The room is imported when it is asked for: this module stands below all of them.
    """

    room: str
    config: Callable[[Any], dict[str, Any]] = lambda module: module.config
    build: Callable[..., Any] = lambda found, **config: found(**config)

    def find(self, name: str) -> Any:
        return getattr(import_module(self.room), name)


def _class(name: Any) -> _Class:
    if not isinstance(name, str) or name not in _CLASSES:
        raise ModelFileError(
            f"the config asks for the unknown class {str(name)[:80]!r}; known are "
            f"{sorted(_CLASSES)}"
        )
    return _CLASSES[name]


def _is_known(model: Any) -> bool:
    name = type(model).__name__
    return name in _CLASSES and _CLASSES[name].find(name) is type(model)


def _built(value: Any, part: str, own: dict[str, Any], taken: set[str]) -> Any:
    """The object that :func:`describe` described, without its weights."""
    if part in own:
        taken.add(part)
        given, saved = type(own[part]).__name__, isinstance(value, dict) and value.get("own")
        if saved and saved[0] != "_" and saved not in (given, "a module"):
            warnings.warn(
                f"{part} was a {str(saved)[:80]} when the model was saved, and a {given} is given: "
                "if it computes anything else, the saved b is not its normaliser",
                SelfnormWarning,
                stacklevel=2,
            )
        return copy.deepcopy(own[part])
    if isinstance(value, list):
        return [_built(item, part, own, taken) for item in value]
    if not isinstance(value, dict):
        return value
    if "own" in value:
        raise ModelFileError(
            f"this model has {part} of your own making ({str(value['own'])[:80]}): pass "
            f"{part}=... to load, built as it was"
        )
    options = dict(value)
    name = options.pop("class")
    known = _class(name)
    parts = {key: _built(item, key, own, taken) for key, item in options.items()}
    return known.build(known.find(name), **parts)


def _attributes(*names: str) -> Callable[[Any], dict[str, Any]]:
    """What the constructor is given is kept under the same names."""
    return lambda module: {name: getattr(module, name) for name in names}


def _full(found: Any, dim: int, df: float | None = None) -> Any:
    given = (torch.zeros(dim),) if df is None else (df, torch.zeros(dim))
    return found(*given, covariance=torch.eye(dim))


def _box(found: Any, dim: int) -> Any:
    return found(torch.zeros(dim), torch.ones(dim))


def _mixture(found: Any, dim: int, n_components: int) -> Any:
    eye = torch.eye(dim).repeat(n_components, 1, 1)
    return found(torch.ones(n_components), torch.zeros(n_components, dim), eye)


def _conditional(found: Any, frozen: bool, **parts: Any) -> Any:
    model = found(**parts)
    if frozen:
        model.freeze_proposal()
    return model


def _config_with_parts(model: Any) -> dict[str, Any]:
    """The config of a distribution of tables, whose parts are dicts."""
    return {**model.config, "parts": [list(part.items()) for part in model.config["parts"]]}


def _with_parts(found: Any, parts: Any, **config: Any) -> Any:
    return found([dict(part) for part in parts], **config)


# Those whose objects keep what their constructor was given under the name `config`, or say
# themselves what a folder holds: to_folder() and from_folder().
_OWN_CONFIG = {
    "selfnorm.distributions": "Flow MDN",
    "selfnorm.conditional": "LabelEnergy",
    "selfnorm.chain": "AutoregressiveEBM",
    "selfnorm.vae": "ConvDecoder ConvEncoder DenseDecoder DenseEncoder Bernoulli Categorical "
    "GaussianNoise AutoregressivePrior MixturePrior StandardNormal",
    "selfnorm.tables": "EnergyDensity EnergyRegressor",
    "selfnorm.images": "ImageRegressor",
}
# Every class that a folder may name.
_CLASSES: dict[str, _Class] = {
    **{name: _Class(room) for room, names in _OWN_CONFIG.items() for name in names.split()},
    **{name: _Class("torch.nn", _attributes()) for name in ("Identity", "ReLU", "SiLU", "Tanh")},
    "Dropout": _Class("torch.nn", _attributes("p")),
    "GELU": _Class("torch.nn", _attributes("approximate")),
    "LeakyReLU": _Class("torch.nn", _attributes("negative_slope")),
    "Softplus": _Class("torch.nn", _attributes("beta", "threshold")),
    "Linear": _Class(
        "torch.nn",
        lambda m: _attributes("in_features", "out_features")(m) | {"bias": m.bias is not None},
    ),
    "Sequential": _Class(
        "torch.nn", lambda m: {"parts": list(m)}, lambda found, parts: found(*parts)
    ),
    "FourierFeatures": _Class("selfnorm.networks", _attributes("dim", "n_features", "scale")),
    "MLP": _Class(
        "selfnorm.networks",
        _attributes("dim", "hidden", "activation", "dropout", "features", "saturate"),
    ),
    "Gaussian": _Class("selfnorm.distributions", _attributes("dim"), _full),
    "StudentT": _Class(
        "selfnorm.distributions", lambda m: {"dim": m.dim, "df": float(m.df)}, _full
    ),
    "Uniform": _Class("selfnorm.distributions", _attributes("dim"), _box),
    "GaussianMixture": _Class(
        "selfnorm.distributions", lambda m: {"dim": m.dim, "n_components": len(m.weights)}, _mixture
    ),
    "Defensive": _Class(
        "selfnorm.distributions",
        _attributes("sharp", "heavy", "weight"),
        lambda found, sharp, heavy, weight: found(sharp, heavy, weight),
    ),
    "DefensiveLabels": _Class("selfnorm.distributions", _attributes("proposal", "wide", "weight")),
    "TableMixture": _Class("selfnorm.distributions", _config_with_parts, _with_parts),
    "EBM": _Class("selfnorm.density", _attributes("energy", "base")),
    "Ensemble": _Class("selfnorm.density", _attributes("members")),
    "ConditionalEBM": _Class("selfnorm.conditional", build=_conditional),
    "TableChain": _Class("selfnorm.chain", _config_with_parts, _with_parts),
    "EnergyPrior": _Class(
        "selfnorm.vae", lambda m: {**m.config, "base": m.base, "energy": m.energy}
    ),
    "EnergyVAE": _Class("selfnorm.vae", _attributes("encoder", "decoder", "likelihood", "prior")),
}
