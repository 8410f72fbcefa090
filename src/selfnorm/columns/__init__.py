"""What a column of a table is: kind, scale, grid, atoms, limits; the maps to codes and to units."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from selfnorm.columns.cells import Cells
from selfnorm.columns.frames import BY_PLACE, Table, TableLike, numbers_like
from selfnorm.columns.kinds import KINDS, Column, Part
from selfnorm.columns.kinds.base import label_text, rows_in_words
from selfnorm.columns.kinds.date import from_clock, to_clock
from selfnorm.columns.kinds.number import detect_step
from selfnorm.columns.scan import SAMPLED_ROWS, Scan, hashed
from selfnorm.columns.schema import Schema
from selfnorm.columns.shards import FORMATS, Shards, SourceLike, is_source
from selfnorm.columns.text import MISSING, is_gap, numbers_from, unmarked
from selfnorm.columns.values import LINE, PartValues, Values

if TYPE_CHECKING:
    from selfnorm.columns.coded import FAR, GAP, UNSEEN, CodedColumns, knots_for
    from selfnorm.columns.columns import Columns, label_step, log_cell_mass

__all__ = [
    "BY_PLACE",
    "FAR",
    "FORMATS",
    "GAP",
    "KINDS",
    "LINE",
    "MISSING",
    "SAMPLED_ROWS",
    "UNSEEN",
    "Cells",
    "CodedColumns",
    "Column",
    "Columns",
    "Part",
    "PartValues",
    "Scan",
    "Schema",
    "Shards",
    "SourceLike",
    "Table",
    "TableLike",
    "Values",
    "detect_step",
    "from_clock",
    "hashed",
    "is_gap",
    "is_source",
    "knots_for",
    "label_step",
    "label_text",
    "log_cell_mass",
    "numbers_from",
    "numbers_like",
    "rows_in_words",
    "to_clock",
    "unmarked",
]


def __getattr__(name: str) -> Any:
    """What is of tensors; the rest is there at once, for files are read before torch is."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = "columns" if name in ("Columns", "label_step", "log_cell_mass") else "coded"
    return getattr(import_module(f"{__name__}.{file}"), name)
