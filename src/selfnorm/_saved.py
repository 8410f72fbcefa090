"""``@saved``: the classes whose objects a model folder may hold.

A folder names classes, and only registered ones are ever built from it. The rooms are imported when
a folder names a class that is not registered yet.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, TypeVar

from selfnorm.errors import ModelFileError

Class = TypeVar("Class", bound=type)
_ROOMS = (
    *("training", "columns", "networks", "distributions", "density", "conditional", "chain"),
    *("tables", "vae", "images"),
)


@dataclass(frozen=True)
class Recipe:
    """How an object is taken apart and built again.

    Attributes:
        kind: its class.
        arguments: what the constructor is to be given.
        build: makes an object of the class and these arguments.
        fitted: names and types of the attributes that are set afterwards, of estimators.
    """

    kind: type
    arguments: Callable[[Any], dict[str, Any]]
    build: Callable[..., Any]
    fitted: Mapping[str, Any]


_RECIPES: dict[str, Recipe] = {}


def saved(
    *names: str,
    arguments: Callable[[Any], dict[str, Any]] | None = None,
    build: Callable[..., Any] = lambda kind, /, **arguments: kind(**arguments),
    fitted: Mapping[str, Any] | None = None,
) -> Callable[[Class], Class]:
    """Register a class whose objects can be saved.

    Args:
        names: attributes that hold what the constructor of the same names was given.
        arguments: computes what the constructor is to be given. Without it and without names these
            are the fields of a dataclass, the parameters of an estimator, or what the constructor
            was given: objects of the class keep that as ``config``.
        build: makes an object of the class and these arguments.
        fitted: the attributes that make up the state of a fitted estimator, and their types.

    Example:
        >>> @saved("width")
        ... class Box:
        ...     def __init__(self, width):
        ...         self.width = width
        >>> recipe_of("Box").arguments(Box(2.0))
        {'width': 2.0}
    """

    def register(kind: Class) -> Class:
        if arguments is not None:
            read = arguments
        elif names:
            read = attributes(*names)
        elif is_dataclass(kind):
            read = attributes(*(field.name for field in fields(kind)))
        elif fitted:
            read = _parameters
        else:
            from selfnorm._inputs import remembered  # a class without torch has no need of it

            read = operator.attrgetter("config")
            kind.__init__ = remembered(kind.__init__)  # type: ignore[misc]
        _RECIPES[kind.__name__] = Recipe(kind, read, build, fitted or {})
        return kind

    return register


def attributes(*names: str) -> Callable[[Any], dict[str, Any]]:
    """A function that reads attributes of an object into a dict."""
    return lambda value: {name: getattr(value, name) for name in names}


def _parameters(estimator: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = estimator.get_params(deep=False)
    return parameters


def recipe_for(value: object) -> Recipe | None:
    """The recipe of an object's class, ``None`` if that is not registered."""
    recipe = _RECIPES.get(type(value).__name__)
    return recipe if recipe is not None and recipe.kind is type(value) else None


def recipe_of(name: object) -> Recipe:
    """The recipe of a class by its name; a ``ModelFileError`` for any other name."""
    if isinstance(name, str) and name not in _RECIPES:
        getattr(import_module("selfnorm"), name, None)  # the room of a public name is imported
        for room in _ROOMS:
            if name not in _RECIPES:
                import_module(f"selfnorm.{room}")
    if not isinstance(name, str) or name not in _RECIPES:
        raise ModelFileError(
            f"the folder names the unknown class {str(name)[:80]!r}; known are {sorted(_RECIPES)}"
        )
    return _RECIPES[name]
