"""``selfnorm.save`` and ``selfnorm.load``: models as folders, never a pickle.

A folder holds ``model.safetensors`` and ``model_card.md``, which only people read. The first has
the tensors, and in its header, as JSON, everything else: the version, the classes, what their
constructors are given, and a hash of the file. It loads with exactly the numbers it was saved with,
or not at all; every failure is a :class:`ModelFileError`. One rename replaces a model.

An object is its class, what its constructor is given, and the state of a module or the fitted
attributes of an estimator. :func:`take_apart` walks through objects, :class:`_Builder` walks back.
Only classes registered by ``@saved`` are ever built: a folder cannot name anything else to import
or call. What has code of its own (your energy, your encoder) is saved by its weights alone and
handed to :func:`load` again.
"""

from __future__ import annotations

import copy
import hashlib
import html
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from selfnorm._context import evaluating, float32_on_cpu, seeded
from selfnorm._files import atomic, open_file
from selfnorm._saved import Recipe, recipe_for, recipe_of, saved
from selfnorm.errors import ModelFileError, SelfnormWarning

T = TypeVar("T")
Blueprint: TypeAlias = dict[str, Any]  # what JSON says of an object
Witness: TypeAlias = dict[str, list[Any]]  # rows, and what the model said of them
__version__: str = import_module("selfnorm").__version__  # to mypy a plain import is a circle
SCHEMA_VERSION = 1
MODEL_FILE = "model.safetensors"
CARD_FILE = "model_card.md"
MAX_HEADER_BYTES = 64 * 2**20
_NO_HASH = "0" * 64  # in the place of the hash where the file is hashed
_HASH = b'\\"sha256\\": \\"'  # what comes before the hash in the header, as JSON in JSON
# buffers of columns and tables: "no limit", the logarithm of a share of zero; "none"
_MAY_BE_INFINITE = {"high", "log_codes", "low", "span"}
_MAY_BE_NAN = {"atoms"}
# scikit-learn's, of tables whose columns have names; of a density, once not saved
_MAY_BE_ABSENT = {"feature_names_in_", "n_iter_", "learned_error_"}

# What a constructor may raise on a config or on tensors that do not fit together.
BUILD_ERRORS = (
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
    """A checked model folder.

    Attributes:
        blueprint: what JSON says of the model.
        tensors: its weights.
        notes: what a program remembers beside the model.
        witness: see :func:`_witness`.
        path: where it was read.
    """

    blueprint: Blueprint
    tensors: dict[str, Tensor]
    notes: dict[str, Any]
    witness: Witness | None = None
    path: Path = Path()

    @property
    def kind(self) -> str:
        """The class of the model."""
        return str(self.blueprint["class"])

    def model(self, **own: Any) -> Any:
        """The model, see :func:`load`."""
        recipe_of(self.kind)
        _refuse_not_finite(self, own)
        try:
            # what is built begins with random weights, for which the caller's stream is not to pay
            with seeded(0), float32_on_cpu(), _WithinItsWeights(self.tensors):
                builder = _Builder(self.tensors, own)
                model = builder.build(self.blueprint, "model")
            for part in own.keys() - builder.taken:
                raise ModelFileError(f"a {self.kind} has no part {part!r} to take from you")
            if self.witness is not None:
                with float32_on_cpu():
                    _warn_of_another_model(self.witness, model)
            return model
        except BUILD_ERRORS as error:
            # torch says which weight does not fit on the second line
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            parts = ", ".join(["config and weights", *own])
            raise ModelFileError(
                f"{self.path}: {parts} do not fit together ({detail}); refit the model"
            ) from error


def save(
    model: object, path: str | os.PathLike[str], *, notes: dict[str, object] | None = None
) -> None:
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
    tensors: dict[str, Tensor] = {}
    blueprint = {"own": ""} if recipe_for(model) is None else take_apart(model, tensors)
    if "own" in blueprint:
        raise ModelFileError(
            f"a {type(model).__name__} cannot be saved to a model folder, for its code is not part "
            "of the library; save its state_dict() and build it in code"
        )
    witness = _witness(model, blueprint)
    write_folder(path, Folder(blueprint, tensors, notes or {}, witness), card=_card(model))


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
    return folder.model(**own)


class Saved:
    """A class with the methods ``save`` and ``load``."""

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

    def _loaded(self) -> None:
        """Check a loaded object, and complete what is not saved."""


@torch.no_grad()
def _witness(model: Any, blueprint: Blueprint) -> Witness | None:
    """``log p~`` at samples of the base, where a part is the user's: given again, it must agree."""
    own = any(isinstance(part, dict) and "own" in part for part in blueprint.values())
    if not own or not isinstance(getattr(model, "base", None), nn.Module):
        return None
    # such a base may have no samples, and parts of one's own may be on two devices
    with suppress(AttributeError, RuntimeError), seeded(0, getattr(model, "device", None)):
        with evaluating(model):
            rows = model.base.sample((4,))
            values = model.log_unnormalized(rows).double()
        if bool(values.isfinite().all()):
            return {"rows": rows.tolist(), "values": values.tolist()}
    return None


@torch.no_grad()
def _warn_of_another_model(witness: Witness, model: Any) -> None:
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


def _card(model: object) -> str:
    """What a person who finds the folder should know."""
    name = type(model).__name__
    about = (type(model).__doc__ or "").strip().partition("\n")[0]
    facts: dict[str, str] = getattr(model, "facts", dict)()
    # names of columns are a stranger's text: no tag, link or cell of the table's own
    cells = (
        (key, re.sub(r"[|\[\]`]", r"\\\g<0>", html.escape(value, quote=False)).replace("\n", " "))
        for key, value in facts.items()
    )
    table = ["| what | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in cells)]
    summary = "\n".join([*table, "", ""]) if facts else ""
    return (
        f"# {name}\n\n{about}\n\n{summary}"
        f"Saved by selfnorm {__version__}; loading it runs no code of the folder's:\n\n"
        '```python\nimport selfnorm\n\nmodel = selfnorm.load("this folder")\n```\n'
    )


# -- objects to JSON and tensors, and back --------------------------------------------------------


def take_apart(value: object, tensors: dict[str, Tensor] | None = None, place: str = "") -> Any:
    """What JSON says of a value; its tensors go to ``tensors``, their names begin with ``place``.

    Parts with code of the user's are named only. Without ``tensors`` a module is described without
    its weights, and tensors are parts of the user's.

    >>> from selfnorm import Gaussian
    >>> take_apart(Gaussian(torch.zeros(2), scale=1.0))
    {'class': 'Gaussian', 'dim': 2}
    """
    if isinstance(value, np.generic):  # as a grid search passes it
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        items = [take_apart(item, tensors, _join(place, k)) for k, item in enumerate(value)]
        return items if isinstance(value, list) else {"class": "tuple", "items": items}
    if isinstance(value, dict):
        entries = {k: take_apart(item, tensors, _join(place, k)) for k, item in value.items()}
        if all(isinstance(key, str) for key in entries) and entries.keys().isdisjoint(_MARKS):
            return entries
        return {"class": "dict", "items": [[key, item] for key, item in entries.items()]}
    if isinstance(value, np.ndarray) and value.dtype == object:
        return {"class": "names", "items": [str(item) for item in value]}
    if tensors is not None and isinstance(value, Tensor | np.ndarray):
        tensors[place] = torch.as_tensor(value)
        return {"class": "tensor" if isinstance(value, Tensor) else "array"}
    recipe = recipe_for(value)
    if recipe is None:
        return {"own": type(value).__name__}
    if isinstance(value, nn.Module):
        return _module_taken_apart(value, recipe, tensors, place)
    return _object_taken_apart(value, recipe, tensors, place)


def _object_taken_apart(
    value: object, recipe: Recipe, tensors: dict[str, Tensor] | None, place: str
) -> Blueprint:
    """What JSON says of an object that is no module: its arguments, and what a fit has set."""
    blueprint: dict[str, Any] = {"class": recipe.kind.__name__}
    for name, argument in recipe.arguments(value).items():
        blueprint[name] = take_apart(argument, tensors, _join(place, name))
        own = recipe.fitted and blueprint[name] == {"own": type(argument).__name__}
        if own and not isinstance(argument, nn.Module):
            blueprint[name] = None  # a parameter that is no part of the model: a random generator
    if recipe.fitted:
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(value, [name for name in recipe.fitted if name not in _MAY_BE_ABSENT])
        state = {name: getattr(value, name, None) for name in recipe.fitted}
        blueprint["fitted"] = {
            name: take_apart(attribute, tensors, name)
            for name, attribute in state.items()
            if attribute is not None or name not in _MAY_BE_ABSENT
        }
    return blueprint


def _module_taken_apart(
    module: nn.Module, recipe: Recipe, tensors: dict[str, Tensor] | None, place: str
) -> Blueprint:
    """What JSON says of a module; its weights go to ``tensors``, if they are given."""
    blueprint = {"class": recipe.kind.__name__}
    blueprint |= {name: take_apart(value) for name, value in recipe.arguments(module).items()}
    if _is_own(module, blueprint):
        return {"own": recipe.kind.__name__}
    if tensors is not None:
        tensors |= {_join(place, name): t for name, t in module.state_dict().items()}
    return blueprint


_MARKS = {"class", "own"}  # of what is no plain dict
_CONTAINERS = ("tuple", "dict", "names", "tensor", "array")


def _join(place: str, name: object) -> str:
    return f"{place}.{name}" if place else str(name)


def _is_own(module: nn.Module, blueprint: Blueprint) -> bool:
    """Whether a module of the library has been changed so that only its owner can build it."""
    # Spectral norm and the like: other weights than the class is built with.
    normed = [key.split(".") for key, _ in module.named_parameters() if "parametrizations" in key]
    if any(blueprint.keys().isdisjoint(key) for key in normed):
        return True
    if not isinstance(module, nn.Sequential):
        return False
    numbered = all(key.split(".")[0].isdigit() for key in module.state_dict())
    # nobody could give its parts by name
    return not numbered or any("own" in part for part in blueprint["parts"])


class _Builder:
    """Builds what :func:`take_apart` described.

    ``own`` holds parts with code of the user's, see :func:`load`; ``taken`` are the names of those
    that were used.
    """

    def __init__(self, tensors: dict[str, Tensor], own: Mapping[str, object]) -> None:
        self.tensors, self.own = tensors, own
        self.taken: set[str] = set()

    def build(self, value: object, part: str, place: str | None = "") -> Any:
        """The object of a blueprint.

        ``part`` is its name in the constructor that it is given to, ``place`` the beginning of the
        names of its tensors; ``None`` inside a module, which loads them all.
        """
        if part in self.own:
            return self._given(value, part)
        if isinstance(value, list):
            return [self.build(v, part, self._at(place, k)) for k, v in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if "own" in value:
            raise ModelFileError(
                f"this model has {part} of your own making ({str(value['own'])[:80]}): pass "
                f"{part}=... to load, built as it was"
            )
        if "class" not in value:
            return self._entries(value, place)
        name = value["class"]
        if name in ("tuple", "dict"):
            items = self.build(value["items"], part, place)
            return tuple(items) if name == "tuple" else dict(items)
        if name == "names":
            return np.array([str(item) for item in value["items"]], dtype=object)
        if name in ("tensor", "array"):
            tensor = self.tensors[str(place)]
            return tensor if name == "tensor" else tensor.numpy()
        return self._object(recipe_of(name), value, place)

    def _object(self, recipe: Recipe, blueprint: Blueprint, place: str | None) -> Any:
        arguments = {k: v for k, v in blueprint.items() if k not in ("class", "fitted")}
        if issubclass(recipe.kind, nn.Module):
            if place is None:
                return recipe.build(recipe.kind, **self._entries(arguments, None))
            start = f"{place}." if place else ""
            inside = (name for name in self.tensors if name.startswith(start))
            state = {name.removeprefix(start): self.tensors[name] for name in inside}
            _refuse_more_than_weights(blueprint, state)
            module = recipe.build(recipe.kind, **self._entries(arguments, None))
            kinds = {t.dtype for t in state.values() if t.is_floating_point()}
            if len(kinds) == 1:  # a model in double precision comes back as one
                module.to(*kinds)
            module.cpu().load_state_dict(state, strict=True, assign=len(kinds) > 1)
            return module.eval()
        values = self._entries(arguments, place)
        if is_dataclass(recipe.kind):
            hints = _type_hints(recipe.kind)
            _check_types(values, {name: hints[name] for name in values if name in hints})
        built = recipe.build(recipe.kind, **values)
        if recipe.fitted:
            fitted = self._entries(blueprint["fitted"], "")
            _check_types(fitted, recipe.fitted)
            vars(built).update((name, fitted[name]) for name in recipe.fitted if name in fitted)
        if isinstance(built, Saved):
            built._loaded()  # noqa: SLF001 a hook of this module
        return built

    def _entries(self, values: Blueprint, place: str | None) -> dict[str, Any]:
        return {k: self.build(v, k, self._at(place, k)) for k, v in values.items()}

    def _at(self, place: str | None, name: object) -> str | None:
        return None if place is None else _join(place, name)

    def _given(self, value: object, part: str) -> object:
        """A copy of a part of the user's."""
        self.taken.add(part)
        given, before = type(self.own[part]).__name__, isinstance(value, dict) and value.get("own")
        if before and before[0] != "_" and before not in (given, "a module"):
            warnings.warn(
                f"{part} was a {str(before)[:80]} when the model was saved, and a {given} is "
                "given: if it computes anything else, the saved b is not its normaliser",
                SelfnormWarning,
                stacklevel=2,
            )
        return copy.deepcopy(self.own[part])


_type_hints = cache(get_type_hints)


def _check_types(values: Mapping[str, object], types: Mapping[str, object]) -> None:
    """A ``ValueError`` if values are missing or of other types.

    >>> _check_types({"width": "two"}, {"width": float})
    Traceback (most recent call last):
    ValueError: the config's 'width' is missing or malformed
    """
    for name, kind in types.items():
        absent = name not in values
        if name not in _MAY_BE_ABSENT if absent else not _is_of_type(values[name], kind):
            raise ValueError(f"the config's {name!r} is missing or malformed")


def _is_of_type(value: object, hint: Any) -> bool:
    """Whether a value is of a type such as ``int``, ``str | None`` or ``list[float]``."""
    if hint is Any:
        return True
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_of_type(value, choice) for choice in inner)
    if isinstance(value, bool) or kind not in (int, float):
        right = isinstance(value, kind)
    else:
        right = isinstance(value, int | float if kind is float else int)
    if right and inner and isinstance(value, list | tuple):
        open_ = kind is not tuple or inner[-1] is Ellipsis
        types = [inner[0]] * len(value) if open_ else inner
        right = len(types) == len(value)
        right = right and all(map(_is_of_type, value, types))
    if right and inner and isinstance(value, dict):
        return all(_is_of_type(item, inner[1]) for item in value.values())
    return right


# -- limits ---------------------------------------------------------------------------------------


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
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
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


def _elements_made(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> int:
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


def _refuse_more_than_weights(blueprint: Blueprint, tensors: dict[str, Tensor]) -> None:
    """A ``ValueError`` if a blueprint has sizes or parts that its weights do not have.

    >>> _refuse_more_than_weights({"class": "MLP", "dim": 10**9}, {"bias": torch.zeros(2)})
    Traceback (most recent call last):
    ValueError: the config asks for a much larger model than its weights are
    """
    largest = 10**6 + sum(tensor.numel() for tensor in tensors.values())
    left = 10**5 + largest - 10**6
    modules = 1000 + 10 * len(tensors)
    nodes: list[Any] = [blueprint]
    while nodes:
        node = nodes.pop()
        items = node.values() if isinstance(node, dict) else node
        inner = items if isinstance(node, dict | list) else ()
        left, modules = left - len(inner), modules - _is_module(node)
        if min(left, modules) < 0 or (isinstance(node, int) and abs(node) > largest):
            raise ValueError("the config asks for a much larger model than its weights are")
        nodes += inner


def _is_module(blueprint: object) -> bool:
    if not isinstance(blueprint, dict) or blueprint.get("class") in (None, *_CONTAINERS):
        return False
    return issubclass(recipe_of(blueprint["class"]).kind, nn.Module)


def _refuse_not_finite(folder: Folder, own: Mapping[str, object]) -> None:
    """Refuse weights that are NaN or infinite, but in parts of one's own and limits of columns."""
    for name, tensor in folder.tensors.items():
        parts = name.split(".")
        if parts[-1] in _MAY_BE_NAN or not own.keys().isdisjoint(parts):
            continue
        broken = tensor.isnan() if parts[-1] in _MAY_BE_INFINITE else ~tensor.isfinite()
        if bool(broken.any()):
            raise ModelFileError(
                f"{folder.path}: the weights {name!r} hold NaN or infinity, which gives no "
                "densities; fit the model again"
            )


# -- files ----------------------------------------------------------------------------------------


def write_folder(path: str | os.PathLike[str], folder: Folder, card: str = "") -> None:
    """Write a model folder; an older model in it is replaced. ``card`` is a text for people."""
    path = _path(path)
    document = {
        "sha256": _NO_HASH,
        "schema_version": SCHEMA_VERSION,
        "library_version": __version__,
        **{name: getattr(folder, name) for name in _ENTRIES},
    }
    content = _sealed(folder.tensors, json.dumps(document))
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with atomic(path / MODEL_FILE) as part:
            part.write_bytes(content)
        with suppress(OSError), atomic(path / CARD_FILE) as part:  # the model is there without it
            part.write_text(card, "utf-8", errors="backslashreplace")
    except OSError as error:
        if made:
            with suppress(OSError):
                path.rmdir()
        raise ModelFileError(f"cannot write the model to {path}: {error.strerror}") from error


def read_folder(path: str | os.PathLike[str]) -> Folder:
    """Read and check a model folder without building anything."""
    path = _path(path)
    if not os.path.isdir(path):  # Path's own fails on a name too long
        raise ModelFileError(f"{path} is not a model folder; give the folder that save() wrote")
    file = path / MODEL_FILE
    if not file.exists():
        raise ModelFileError(f"{file} is missing: a model folder holds {MODEL_FILE}")
    try:
        content = _checked_content(file)
    except OSError as error:
        raise ModelFileError(f"cannot read {file}: {error.strerror}") from error
    except MemoryError as error:
        raise ModelFileError(f"there is not enough memory to read {file}") from error
    try:
        tensors = load_safetensors(content)
        document = _document_of(content)
        folder = Folder(path=path, tensors=tensors, **{k: document[k] for k in _ENTRIES})
        _check_types(vars(folder), _type_hints(Folder))
        if not isinstance(folder.blueprint["class"], str):
            raise ValueError("it names no class")
    except (SafetensorError, *BUILD_ERRORS) as error:
        raise ModelFileError(f"{file} is not the file of a model: {error}") from error
    return folder


_ENTRIES = ("blueprint", "notes", "witness")


def _sealed(tensors: dict[str, Tensor], document: str) -> bytes:
    """The content of a safetensors file, with its hash in the place of none."""
    stored = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    content = save_safetensors(stored, {"selfnorm": document})
    if int.from_bytes(content[:8], "little") > MAX_HEADER_BYTES:
        raise ModelFileError("the model has too many columns and levels to be saved")
    return content.replace(_NO_HASH.encode(), _hash_of(content).encode(), 1)


def _hash_of(content: bytes) -> str:
    """The hash of all bytes but those of the hash."""
    start = content.find(_HASH) + len(_HASH)
    view, digest = memoryview(content), hashlib.sha256()
    for piece in (view[:start], _NO_HASH.encode(), view[start + len(_NO_HASH) :]):
        digest.update(piece)
    return digest.hexdigest()


def _document_of(content: bytes) -> Blueprint:
    """What the header of a file holds beside tensors."""
    length = int.from_bytes(content[:8], "little")
    document: dict[str, Any] = json.loads(
        json.loads(content[8 : 8 + length])["__metadata__"]["selfnorm"]
    )
    return document


def _checked_content(file: Path) -> bytes:
    """The bytes of a model's file, if its size and hash are right."""
    damaged = ModelFileError(
        f"{file} is not the file that was saved (its size or hash differs): it was damaged, cut "
        "short or changed; copy the folder again or refit the model"
    )
    with open_file(file) as (handle, size):
        start = handle.read(8)
        length = int.from_bytes(start, "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise damaged
        start += handle.read(length)
        try:
            header = json.loads(start[8:])
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
            document = _document_of(start)
            version, expected = document["schema_version"], document["sha256"]
        except BUILD_ERRORS:
            raise damaged from None
        if type(version) is int and version > SCHEMA_VERSION:
            raise ModelFileError(
                f"{file} has schema version {version}, this installation reads up to "
                f"{SCHEMA_VERSION}: it was saved by a newer selfnorm "
                f"({str(document.get('library_version'))[:40]}); upgrade to load it"
            )
        if size != 8 + length + max(ends, default=0):
            raise damaged
        content = start + handle.read(size - len(start))
    if _hash_of(content) != expected:
        raise damaged
    return content


def _path(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.fsdecode(path))
    except TypeError as error:
        raise ModelFileError(f"a model folder is named by a path, not by {path!r:.80}") from error


def json_safe(value: object) -> Any:
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


# -- modules of torch -----------------------------------------------------------------------------

for _activation in (nn.Identity, nn.ReLU, nn.SiLU, nn.Tanh):
    saved(arguments=lambda _: {})(_activation)
saved("p")(nn.Dropout)
saved("approximate")(nn.GELU)
saved("negative_slope")(nn.LeakyReLU)
saved("beta", "threshold")(nn.Softplus)
saved(
    arguments=lambda m: {
        "in_features": m.in_features,
        "out_features": m.out_features,
        "bias": m.bias is not None,
    }
)(nn.Linear)
saved(arguments=lambda m: {"parts": list(m)}, build=lambda kind, parts: kind(*parts))(nn.Sequential)
