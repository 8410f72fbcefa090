"""What doors need: the version of the library, and names that are imported when asked for."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__version__ = "0.1.0"  # also written into every model folder


def lazy(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__`` (PEP 562): modules are imported when a name of theirs is wanted.

    Args:
        package: its ``__name__``.
        places: for every name the module below the package that has it; a module of that name
            itself where nothing else is said.

    Example:
        >>> find = lazy("selfnorm", {"SelfnormError": "errors", "errors": "errors"})
        >>> find("SelfnormError").__name__, find("errors").__name__
        ('SelfnormError', 'selfnorm.errors')
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{places[name]}")
        is_module = places[name].split(".")[-1] == name and not hasattr(module, name)
        found = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    return find
