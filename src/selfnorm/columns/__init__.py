"""What a column of a table is: kind, scale, grid, atoms, limits; the maps to codes and to units."""

from typing import TYPE_CHECKING

from selfnorm._door import lazy

if TYPE_CHECKING:
    from selfnorm.columns.coded import FAR, GAP, UNSEEN, CodedColumns, knots_for
    from selfnorm.columns.coding import Column, Part
    from selfnorm.columns.columns import Columns, label_step, log_cell_mass
    from selfnorm.columns.detection import detect_step
    from selfnorm.columns.frames import numbers_like
    from selfnorm.columns.schema import Schema
    from selfnorm.columns.text import MISSING
else:  # files are read before torch is there
    _NAMES = {
        "coded": "FAR GAP UNSEEN CodedColumns knots_for",
        "coding": "Column Part",
        "columns": "Columns label_step log_cell_mass",
        "detection": "detect_step",
        "frames": "numbers_like",
        "schema": "Schema",
        "text": "MISSING",
    }
    __getattr__ = lazy(__name__, {n: file for file, names in _NAMES.items() for n in names.split()})

__all__ = [
    "FAR",
    "GAP",
    "MISSING",
    "UNSEEN",
    "CodedColumns",
    "Column",
    "Columns",
    "Part",
    "Schema",
    "detect_step",
    "knots_for",
    "label_step",
    "log_cell_mass",
    "numbers_like",
]
