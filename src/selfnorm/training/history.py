"""What happened in training, as plain objects: the record of a run, what a fit came to."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from selfnorm._saved import saved
from selfnorm.saving import json_safe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from selfnorm.training.task import State


@saved(
    arguments=lambda value: {"values": value.to_dict()},
    build=lambda kind, values: kind.from_dict(values),
)
@dataclass(repr=False)
class History:
    """Record of one training run.

    Attributes:
        records: one dict per validation (or per epoch without validation): ``step``, ``epoch``,
            ``loss``, ``lower``, ``upper``, ``lr``, ``seconds`` and what the task adds.
        n_steps: optimiser steps taken.
        best_step: step of the state that was kept.
        best_score: its validation score, if there was validation.
        skipped_steps: steps left out because loss or gradient was not finite.
        rollbacks: how often training went back to the last good state.
        stopped: why it ended: ``"max_epochs"``, ``"max_time"``, ``"patience"``,
            ``"interrupted"``, ``"diverged"``.
        seconds: wall-clock time.
        final: what the closing step reported, e.g. ``log_norm`` and its standard error.

    Example:
        >>> h = History(records=[{"step": 1, "loss": 2.0}], n_steps=1)
        >>> History.from_dict(h.to_dict()) == h
        True
        >>> h
        History(1 steps in 0.0 s, stopped='', best_step=0, 1 records)
    """

    records: list[dict[str, float]] = field(default_factory=list)
    n_steps: int = 0
    best_step: int = 0
    best_score: float | None = None
    skipped_steps: int = 0
    rollbacks: int = 0
    stopped: str = ""
    seconds: float = 0.0
    final: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: what happened, without the records."""
        best = "" if self.best_score is None else f" (score {self.best_score:.4f})"
        trouble = {"skipped_steps": self.skipped_steps, "rollbacks": self.rollbacks}
        extra = "".join(f", {name}={count}" for name, count in trouble.items() if count)
        return (
            f"History({self.n_steps} steps in {self.seconds:.1f} s, stopped={self.stopped!r}, "
            f"best_step={self.best_step}{best}{extra}, {len(self.records)} records)"
        )

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of one recorded quantity, where it was recorded."""
        pairs = [(r["step"], r[key]) for r in self.records if key in r]
        return [p[0] for p in pairs], [p[1] for p in pairs]

    def to_dict(self) -> State:
        """A JSON-safe dict (non-finite numbers become ``None``)."""
        cleaned: State = json_safe(asdict(self))
        return cleaned

    @classmethod
    def from_dict(cls, values: State) -> History:
        """Inverse of :meth:`to_dict`; a ``ValueError`` where it could not have come from there."""
        history = cls(**values)
        counts = (history.n_steps, history.best_step, history.skipped_steps, history.rollbacks)
        numbers: list[object] = [history.best_score, history.seconds]
        tables = (*history.records, history.final) if isinstance(history.records, list) else ()
        if tables and all(isinstance(table, dict) for table in tables):
            numbers += [number for table in tables for number in table.values()]
            if (
                all(type(count) is int for count in counts)
                and all(isinstance(number, float | int | None) for number in numbers)
                and isinstance(history.stopped, str)
            ):
                return history
        raise ValueError("this is no record of a training run")

    def to_json(self, path: str | Path) -> None:
        """Write the record to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))

    def plot(self, path: str | Path | None = None) -> Figure:
        """Training curves with the bounds closing in (needs matplotlib)."""
        from selfnorm.plotting import plot_history

        return plot_history(self, path)


@saved()
@dataclass(frozen=True)
class Judgement:
    """What a fit came to, on rows that it had not seen.

    Attributes:
        rows: that were used.
        how: it was judged.
        score: mean log-likelihood of rows not seen, in the units of the table (NaN: none were
            spared); of a regressor that of a target, given the inputs, by single members.
        error: standard error of the score.
        gain: what the energies add to the best of simple densities, with its standard error
            ``gain_error`` (NaN: nothing to compare with).
        seconds: that the fit took.

    Example:
        >>> Judgement(200, "3 folds", -4.2, 0.1, gain=0.3, gain_error=0.02).verdict
        'the energies add 0.3 ± 0.02 to the best mixture'
    """

    rows: int
    how: str
    score: float = math.nan
    error: float = math.nan
    gain: float = math.nan
    gain_error: float = math.nan
    seconds: float = math.nan

    @classmethod
    def of(
        cls, rows: int, how: str, scores: np.ndarray, gain: np.ndarray, weights: np.ndarray
    ) -> Judgement:
        """From what rows not seen, which count by ``weights``, score and gain ``(n,)``.

        Example:
            >>> fit = Judgement.of(9, "2 folds", np.array([1.0, 3.0]), np.zeros(2), np.ones(2))
            >>> fit.score, fit.error
            (2.0, 1.0)
        """
        share, figures = weights / weights.sum(), np.stack([scores, gain])
        means = figures @ share
        few = float(np.square(share).sum())  # one over the number of rows
        spread = np.square(figures - means[:, None]) @ share
        # one row alone does not tell how far others are
        errors = np.sqrt(few / (1 - few) * spread) if few < 1 else np.full(2, math.inf)
        (score, added), (error, added_error) = means.tolist(), errors.tolist()
        return cls(rows, how, score, error, added, added_error)

    @property
    def verdict(self) -> str:
        """What the energies add, in words; empty where there is nothing to compare with."""
        if math.isnan(self.gain):
            return ""
        if self.gain < max(2 * self.gain_error, 0.01):
            return "the mixture alone is as good: the energies add nothing that can be told"
        return f"the energies add {self.gain:.2g} ± {self.gain_error:.2g} to the best mixture"

    def __str__(self) -> str:
        parts = [f"{self.rows} rows in {self.seconds:.1f} s"]
        if math.isfinite(self.score):
            score = f"log-likelihood {self.score:.4g} ± {self.error:.2g} nats a row"
            parts.append(f"{score} ({self.how})")
        else:
            parts.append(self.how)
        return "; ".join(parts + [self.verdict] * bool(self.verdict))

    def to_dict(self) -> State:
        """Plain values; ``None`` for what is not known."""
        cleaned: State = json_safe(asdict(self) | {"verdict": self.verdict})
        return cleaned
