"""Findings: checks that a number did not pass, with figure and limit; a verdict lists them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A check that a number did not pass.

    Attributes:
        code: name of the check, for programs: ``"pareto_k"``, ``"standard_error"``, ...
        figure: what was measured.
        limit: the value beyond which the check is not passed.
        words: the cause, then the cure.

    Example:
        >>> Finding("pareto_k", 0.9, 0.7, "The weights have a heavy tail: widen the proposal.").code
        'pareto_k'
    """

    code: str
    figure: float
    limit: float
    words: str


class Judged:
    """Numbers and their findings: none where the numbers are reliable."""

    findings: tuple[Finding, ...]

    @property
    def reliable(self) -> bool:
        """Whether every check was passed."""
        return not self.findings

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings in words: why the numbers are not reliable, and what to do."""
        return tuple(finding.words for finding in self.findings)

    def _verdict(self) -> str:
        return "reliable" if self.reliable else "NOT RELIABLE: " + " ".join(self.reasons)
