"""What a column can be; each kind is a class in a file, registered under its names."""

from selfnorm.columns.kinds import angle, aside, date, level, number, sum  # noqa: F401
from selfnorm.columns.kinds.base import KINDS, Coded, Column, Part

__all__ = ["KINDS", "Coded", "Column", "Part"]
