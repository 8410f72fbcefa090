"""What a column can be; each kind is a class in a file, registered under its names."""

from selfnorm.columns.kinds import angle, aside, date, level, number, sum
from selfnorm.columns.kinds.base import KINDS, Coded, Column, Draft, Kind, Part, register

__all__ = [
    "KINDS",
    "Coded",
    "Column",
    "Draft",
    "Kind",
    "Part",
    "angle",
    "aside",
    "date",
    "level",
    "number",
    "register",
    "sum",
]
