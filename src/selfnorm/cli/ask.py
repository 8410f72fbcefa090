"""Questions of the command line: ``P(event | events)`` and ``E(column | events)``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfnorm.errors import DataError, listed

if TYPE_CHECKING:
    from selfnorm.tables import EnergyDensity, Estimate, Expectation

_MOST = 10_000  # characters of a question
_FORM = re.compile(r"\s*([PE])\s*\((.*)\)\s*", re.DOTALL)
_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`[^`]*`"""
_SIGNS = re.compile(rf"{_QUOTED}|[][(){{}}|,]")


@dataclass(frozen=True)
class Question:
    """A question, read.

    Attributes:
        text: as it was typed.
        of: ``"P"`` of an event, ``"E"`` of a column of numbers.
        subject: the event or the column.
        given: an event; ``None``: nothing is given.

    Example:
        >>> Question.read("P(sex == 'F' | age > 60, state in ['NY', 'CA'])").given
        "(age > 60) and (state in ['NY', 'CA'])"
    """

    text: str
    of: str
    subject: str
    given: str | None

    @classmethod
    def read(cls, text: str) -> Question:
        """The question of a text."""
        if len(text) > _MOST:
            raise DataError(f"a question has {len(text):,} characters; {_MOST:,} are the most")
        form = _FORM.fullmatch(text)
        if form is None:
            raise DataError(
                f"{_short(text)} is no question: write 'P(event | events)' or "
                "'E(column | events)', such as \"P(sex == 'F' | age > 60)\""
            )
        of, inner = form.groups()
        subject, *given = _split(inner, "|")
        if len(given) > 1:
            raise DataError(f"{_short(text)} has more than one '|' outside of quotes")
        events = _split(given[0], ",") if given else []
        if not all(event.strip() for event in (subject, *events)):
            raise DataError(f"{_short(text)} lacks an event or a column")
        return cls(
            text, of, subject.strip(), " and ".join(f"({e.strip()})" for e in events) or None
        )

    def answer(self, density: EnergyDensity, seed: int | None) -> Estimate:
        """What a density says."""
        if self.of == "P":
            estimate: Estimate = density.probability(self.subject, self.given, random_state=seed)
            return estimate
        names = {str(column.name): column.name for column in density.schema_.modelled}
        name = self.subject.strip("`")
        if name not in names:
            raise DataError(f"there is no column {_short(name)}; there is {listed(names)}")
        expectation: Expectation = density.expect(names[name], self.given, random_state=seed)
        return expectation.mean


def _split(text: str, mark: str) -> list[str]:
    """The pieces between marks outside of brackets and quotes."""
    depth, begin, pieces = 0, 0, []
    for sign in _SIGNS.finditer(text):
        depth += (sign[0] in "([{") - (sign[0] in ")]}")
        if depth < 0:
            raise DataError(f"{_short(text)} closes a bracket that is not open")
        if sign[0] == mark and depth == 0:
            pieces.append(text[begin : sign.start()])
            begin = sign.end()
    return [*pieces, text[begin:]]


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
