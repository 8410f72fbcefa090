"""Questions about events and rules: what is asked of a density, in its own words.

An :class:`~selfnorm.tables.events.Event` says which rows obey, and a box of single columns without
which none does. The box is drawn within, exactly; the rest counts rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.columns import Cells, Schema, TableLike, rows_in_words
from selfnorm.errors import DataError
from selfnorm.tables.answers import COUNTED, Draws, Effort, Estimate, Limits, judged_weights
from selfnorm.tables.distribution import RowDistribution, stream
from selfnorm.tables.events import Event, in_words

ROWS_AT_ONCE = 20_000  # of a sample under a rule
TRIES = 20  # draws of a batch of such a sample before it is given up
HOPELESS = 3  # of these without a row that obeys
LEVEL_TRIES = 1000  # draws of levels that share a code
_TOO_RARE = (
    "of thousands of draws too few obey what rows are to be: its probability is too small to "
    "sample, or zero"
)


class Expectation(NamedTuple):
    """What is expected of a number.

    Attributes:
        mean: of the rows that have a value.
        quantiles: by their levels.
        probability: of a row that is asked of.
    """

    mean: Estimate
    quantiles: dict[float, float]
    probability: Estimate


@dataclass(frozen=True)
class Questions:
    """What can be asked of a distribution of coded rows, by the names of its schema.

    Attributes:
        schema, distribution: of the density.
        effort: how many draws answers take.
        rules: what all rows obey.
    """

    schema: Schema
    distribution: RowDistribution
    effort: Effort
    rules: tuple[str, ...] = ()

    def probability(self, event: Event, given: Event, seed: int = 0) -> Estimate:
        """Of an event, given another."""
        stated, rest = given.evidence()
        coded, seen = self._evidence(stated)
        rest = Event.every([rest, *(Event.of(self.schema, rule) for rule in self.rules)])
        both = Event.every([rest, event])
        whole = bool(seen.any())
        limits, others = self._limits(both, seen), self._limits(rest, seen)
        if limits.allowed is None and others.allowed is None:
            return self._of_share(coded, seen, others, event, stream(seed, 0))
        above = self._draws(coded, seen, limits, stream(seed, 0))
        log_value, se, _ = (float(figure[0]) for figure in above.log_mean())
        if whole or rest.box or not rest.exact:
            below = self._draws(coded, seen, others, stream(seed, 1))
            log_below, se_below, _ = (float(figure[0]) for figure in below.log_mean())
            if not math.isfinite(log_below):
                raise DataError("what is given has no probability: no draw obeys it")
            log_value, se = log_value - log_below, math.hypot(se, se_below)
        value = math.exp(log_value) if log_value > -math.inf else 0.0
        ess, pareto_k = judged_weights(above.log_w)
        ess = ess if value > 0 else float(len(above.log_w))
        se = se * value if value > 0 else 0.0
        return Estimate.of_probability(value, se, ess, pareto_k if value > 0 else 0.0)

    def _draws(self, coded: Tensor, seen: Tensor, limits: Limits, seed: int) -> Draws:
        if not limits.boxed or bool(seen.any()):
            limits = replace(limits, wanted=torch.tensor([COUNTED]))
        if bool(seen.any()):
            return self.distribution.pool(coded, seen, self.effort, limits, seed)
        return self.distribution.log_probability(limits, self.effort, seed)

    def _of_share(
        self, coded: Tensor, seen: Tensor, limits: Limits, event: Event, seed: int
    ) -> Estimate:
        """The share of the weight of draws that an event has."""
        limits = replace(limits, wanted=torch.tensor([COUNTED]))
        draws = self.distribution.pool(coded, seen, self.effort, limits, seed)
        ess, pareto_k = judged_weights(draws.log_w)
        if ess == 0:
            raise DataError("what is given has no probability: no draw obeys it")
        share = draws.shares()
        holds = torch.from_numpy(self.holding(event, draws.completed)).double()
        value = float((share * holds).sum())
        se = float((share * (holds - value)).square().sum().sqrt())
        return Estimate.of_probability(value, se, ess, pareto_k)

    def expect(
        self,
        column: Hashable,
        where: Event,
        by: Hashable | None,
        levels: Sequence[float],
        seed: int,
    ) -> Expectation | dict[Any, Expectation]:
        """Mean and quantiles of a column of numbers."""
        self._refuse_other(column, "number")
        if by is not None:
            self._refuse_other(by, "label")
        event = Event.every([where, *(Event.of(self.schema, rule) for rule in self.rules)])
        stated, rest = event.evidence()
        coded, seen = self._evidence(stated)
        limits = self._limits(rest, seen, wanted=torch.tensor([COUNTED]))
        draws = self.distribution.pool(coded, seen, self.effort, limits, seed)
        if not bool((draws.log_w > -torch.inf).any()):
            raise DataError("no draw obeys what is asked for: it has no probability")
        cells = self.schema.decoded(draws.completed.numpy(), seed)
        values = np.where(cells[column].missing, np.nan, cells[column].values.astype(float))
        share = draws.shares().numpy()
        if by is None:
            return _expectation(values, share, np.ones(len(share), bool), levels)
        texts = np.array([*cells[by].labels, None], dtype=object)
        of_rows = texts[np.where(cells[by].missing, -1, cells[by].values)]
        groups = [label for label in dict.fromkeys(of_rows.tolist()) if label is not None]
        return {
            label: _expectation(values, share, of_rows == label, levels)
            for label in sorted(groups, key=str)
        }

    def _refuse_other(self, column: Hashable, holds: str) -> None:
        """Refuse what is no column of numbers, or of labels."""
        names = [c.name for c in self.schema.modelled if c.holds == holds]
        if column not in names:
            raise DataError(f"{column!r} is no column of {holds}s; there are {names}")

    def sample(self, n: int, seed: int, where: Event, missing: bool) -> Any:
        """A table of ``n`` rows that obey."""
        event = Event.every([where, *(Event.of(self.schema, rule) for rule in self.rules)])
        stated, rest = event.evidence()
        coded, seen = self._evidence(stated)
        sizes = [min(ROWS_AT_ONCE, n - start) for start in range(0, n, ROWS_AT_ONCE)]
        parts = [
            self._sampled(coded, seen, size, rest, missing, stream(seed, k))
            for k, size in enumerate(sizes)
        ]
        rows = np.concatenate(parts)
        cells = self.schema.decoded(rows, seed)
        for attempt in range(1, LEVEL_TRIES):
            bad = np.flatnonzero(~event.holds(cells))
            if len(bad) == 0:
                return self.schema.written(cells)
            if attempt % (LEVEL_TRIES // TRIES) == 0:  # dates that were moved, say
                new = self._sampled(
                    coded, seen, len(bad), rest, missing, stream(seed, 2**20 + attempt)
                )
                rows[bad] = new
            # levels that share a code are drawn anew
            again = self.schema.decoded(rows[bad], stream(seed, attempt))
            cells = {name: _replaced(of, bad, again[name]) for name, of in cells.items()}
        raise DataError(_TOO_RARE)

    def _sampled(
        self, coded: Tensor, seen: Tensor, n: int, event: Event, missing: bool, seed: int
    ) -> np.ndarray:
        """``n`` coded rows that obey, but for levels that share a code, and dates."""
        limits = self._limits(event, seen, missing, torch.tensor([n]))
        for attempt in range(HOPELESS):
            draws = self.distribution.pool(coded, seen, self.effort, limits, stream(seed, attempt))
            if bool((draws.log_w > -torch.inf).any()):
                with seeded(stream(seed, HOPELESS + attempt)):
                    chosen = draws.pick(torch.tensor([n]))
                rows = draws.completed[chosen].numpy()
                kept = self.schema.within_seen(rows, seen.expand(n, -1).numpy())
                beyond = ~self.holding(event, torch.from_numpy(kept))  # an event may ask for that
                kept[beyond] = rows[beyond]
                return kept
        raise DataError(_TOO_RARE)

    def completed(self, coded: Tensor, seen: Tensor, seed: int, missing: bool) -> np.ndarray:
        """Coded rows whose cells that are not ``seen`` are drawn so that the rules hold."""
        out = self.distribution.complete(coded, seen, stream(seed, 0), missing, self.effort)
        out = self.schema.within_seen(out, seen.numpy())
        if not self.rules:
            return out
        rule = Event.every([Event.of(self.schema, rule) for rule in self.rules])
        free = (~seen).any(1).numpy()
        for attempt in range(1, TRIES + 1):
            bad = np.flatnonzero(free & ~self.holding(rule, torch.from_numpy(out)))
            if len(bad) == 0:
                return out
            if attempt == TRIES:
                break
            limits = self._limits(rule, seen[bad], missing, torch.ones(len(bad)).long())
            draws = self.distribution.pool(
                coded[bad], seen[bad], self.effort, limits, stream(seed, attempt)
            )
            with seeded(stream(seed, TRIES + attempt)):
                chosen = draws.pick(torch.ones(len(bad)).long())
            out[bad] = self.schema.within_seen(draws.completed[chosen].numpy(), seen[bad].numpy())
        raise DataError(
            f"{len(bad):,} rows cannot be completed so that the rules hold: what they have "
            f"contradicts {', '.join(map(repr, self.rules))}, or nearly"
        )

    def holding(self, event: Event, coded: Tensor) -> np.ndarray:
        """Which coded rows obey ``(n,)``."""
        if len(coded) == 0:
            return np.zeros(0, bool)
        return np.asarray(event.holds(self.schema.decoded(coded.numpy(), 0)))

    def _limits(
        self, event: Event, seen: Tensor, missing: bool = True, wanted: Tensor | None = None
    ) -> Limits:
        """What an event says of drawn rows."""
        parts, boxed = event.coded(self.schema)
        # what is seen is not drawn: the event may contradict it
        boxed = boxed and not any(
            values is not None and bool(seen[:, j].any()) for j, values in enumerate(parts)
        )
        allowed = parts if any(values is not None for values in parts) else None
        obey = None
        if event.parts or event.box or not event.exact:
            obey = lambda rows: torch.from_numpy(self.holding(event, rows))  # noqa: E731
        return Limits(allowed, obey, boxed, missing, wanted)

    def _evidence(self, stated: Mapping[Hashable, list[Any]]) -> tuple[Tensor, Tensor]:
        """One coded row, and which of its parts are given ``(1, p)``."""
        if not stated:
            row = self.distribution.blank(1)
        else:
            row = torch.from_numpy(self.schema.encode(dict(stated), partial=True)[0])
        seen = row[..., 0] != -1
        unseen = [self.schema.parts[j].name for j in (row[0, :, 0] == -2).nonzero()[:, 0].tolist()]
        if unseen:
            raise DataError(
                f"rows cannot be given a value that was never seen in training: {unseen}"
            )
        return row, seen


def _replaced(cells: Cells, rows: np.ndarray, others: Cells) -> Cells:
    """Cells of a column with others in some rows."""
    values, missing = cells.values.copy(), cells.missing.copy()
    labels = list(cells.labels)
    new = others.values
    if cells.kind == "label":
        labels += [label for label in others.labels if label not in labels]
        new = np.array([*map(labels.index, others.labels), -1])[others.values]
    values[rows], missing[rows] = new, others.missing
    return replace(cells, values=values, missing=missing, labels=labels)


def _expectation(
    values: np.ndarray, share: np.ndarray, chosen: np.ndarray, levels: Sequence[float]
) -> Expectation:
    """Of the numbers of ``chosen`` draws; gaps do not count."""
    probability = float(share[chosen].sum())
    spread = float(np.sqrt(((share * (chosen - probability)) ** 2).sum()))
    whole_ess = 1.0 / float((share**2).sum())
    of_group = Estimate.of_probability(probability, spread, whole_ess, 0.0)
    used = chosen & ~np.isnan(values) & (share > 0)
    if not used.any():
        none = Estimate.of_mean(math.nan, math.inf, 0.0, math.inf)
        return Expectation(none, dict.fromkeys(levels, math.nan), of_group)
    w = share[used] / share[used].sum()
    numbers = values[used]
    mean = float(w @ numbers)
    se = float(np.sqrt(((w * (numbers - mean)) ** 2).sum()))
    ess, pareto_k = judged_weights(torch.from_numpy(np.log(w)))
    order = np.argsort(numbers)
    below = np.cumsum(w[order])
    quantiles = {
        level: float(numbers[order][min(np.searchsorted(below, level), len(order) - 1)])
        for level in levels
    }
    return Expectation(Estimate.of_mean(mean, se, ess, pareto_k), quantiles, of_group)


def checked_rules(
    schema: Schema, frame: TableLike, rules: Sequence[str | Mapping[Any, Any]]
) -> tuple[str, ...]:
    """The texts of rules that all rows of a table obey; an error names rows that do not.

    Rows with a gap in a column that a rule names are not judged by it.
    """
    if isinstance(rules, str | Mapping):
        rules = [rules]
    texts, cells = [], None
    for rule in rules:
        if not isinstance(rule, str | Mapping):
            raise DataError("a rule is text or a dict, so that it can be saved with the model")
        text = rule if isinstance(rule, str) else " and ".join(in_words(*x) for x in rule.items())
        cells = schema.cells(frame) if cells is None else cells
        event = Event.of(schema, text)
        gap = np.any([cells[name].missing for name in event.columns], axis=0)
        bad = np.flatnonzero(
            ~(event.holds(cells) | gap)
        )  # nothing is known of rows with gaps there
        if len(bad):
            raise DataError(
                f"{rows_in_words(len(bad))} of the table, first in row {bad[0]}, break the rule "
                f"{text!r}"
            )
        texts.append(text)
    return tuple(texts)
