"""Errors and warnings of the library: each message names the cause and the cure.

Every error derives from :class:`SelfnormError`, so ``except SelfnormError`` catches whatever the
library itself decided to refuse, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType


class SelfnormError(Exception):
    """Base class of all errors raised on purpose by selfnorm.

    Example:
        >>> import selfnorm as sn
        >>> try:
        ...     sn.load("no such folder")
        ... except sn.SelfnormError as error:
        ...     print(type(error).__name__)
        ModelFileError
    """


class DataError(SelfnormError, ValueError):
    """The data cannot be used as they are (NaN, wrong shape, constant column, too few rows).

    Attributes:
        problems: all that were found, where several were looked for.
    """

    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, problems: Sequence[str]) -> DataError:
        """One error for all problems; twenty of them are named."""
        shown = [f"- {problem}" for problem in problems[:20]]
        if len(problems) > 20:
            shown.append(f"- and {len(problems) - 20} more")
        lines = [f"{len(problems)} problems:", *shown] if len(problems) > 1 else problems
        error = cls("\n".join(lines))
        error.problems = tuple(problems)
        return error


class ProposalError(SelfnormError, ValueError):
    """The proposal cannot serve: wrong shape, or zero density where there are data."""


class EnergyError(SelfnormError, ValueError):
    """The energy returned something that is not one finite scalar per row."""


class CheckpointError(SelfnormError):
    """A training checkpoint is truncated, damaged, or belongs to another run."""


class ModelFileError(SelfnormError):
    """A saved model folder cannot be loaded."""


class MissingDataError(SelfnormError, FileNotFoundError):
    """A data file is not there; the message says where it was looked for and where to get it."""


class SelfnormWarning(UserWarning):
    """Something was done that the user should know of.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", SelfnormWarning)  # or "ignore": to stop, or not to know
        >>> warnings.resetwarnings()
    """


def optional(module: str, cure: str, error: type[SelfnormError] = DataError) -> ModuleType:
    """A library that not everybody has, or an error that says how to get it."""
    try:
        return import_module(module)
    except ImportError as cause:
        raise error(cure) from cause


def listed(names: Iterable[object], most: int = 12) -> str:
    """The first of some names, for a message.

    >>> listed(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    return shortened([repr(name) for name in names], most)


def shortened(words: Sequence[str], most: int = 20) -> str:
    """The first of some words.

    >>> shortened(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")
