"""Why a row is strange: the columns to blame, and the values with which it would be ordinary."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfnorm.columns import Schema
from selfnorm.tables.distribution import RowDistribution

DRAWS = 64  # completions of a row, of which the most probable is taken
MOST_BLAMED = 3  # columns


@dataclass(frozen=True)
class Reason:
    """Why one row is strange.

    Attributes:
        columns: to blame, the first one most; none of an ordinary row.
        probability: that a draw of the first, given the rest of its row, is as improbable.
        values: of these columns, by name: the most probable ones drawn, given all others.
        ordinary: whether the row is ordinary with these.
    """

    columns: tuple[Hashable, ...]
    probability: float
    values: dict[Hashable, Any]
    ordinary: bool

    def __str__(self) -> str:
        if not self.columns:
            return "ordinary"
        cells = " and ".join(f"{name} = {_shown(value)}" for name, value in self.values.items())
        would = "would be ordinary" if self.ordinary else "less strange, but not ordinary,"
        return f"{would} with {cells}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def reasons_of(
    schema: Schema,
    distribution: RowDistribution,
    coded: Tensor,
    decision: Callable[[Tensor], np.ndarray],
    seed: int,
) -> list[Reason]:
    """Of coded rows; ``decision`` is negative for those that are strange."""
    columns = [column.name for column in schema.modelled]
    places = [list(schema.parts_of([name])) for name in columns]
    tails = np.nan_to_num(distribution.explain(coded), nan=1.0)
    of_columns = np.stack([1 - (1 - tails[:, at].min(1)) ** len(at) for at in places], 1)
    reasons = []
    for row, shares, inside in zip(coded, of_columns, decision(coded), strict=True):
        order = np.argsort(shares, kind="stable")[:MOST_BLAMED]
        blamed, ordinary, best = order[:0], bool(inside >= 0), row
        for k in range(1, 1 + (0 if ordinary else len(order))):
            blamed = order[:k]
            seen = torch.ones(DRAWS, len(row), dtype=torch.bool)
            seen[:, [part for column in blamed for part in places[column]]] = False
            drawn = distribution.complete(row.repeat(DRAWS, 1, 1), seen, seed)
            rows = torch.from_numpy(schema.within_seen(drawn, seen.numpy()))
            scores = decision(rows)
            best, ordinary = rows[int(scores.argmax())], bool(scores.max() >= 0)
            if ordinary:
                break
        table = schema.decode(best.unsqueeze(0).numpy(), seed)
        names = [columns[column] for column in blamed]
        least = float(shares[order[0]])
        reasons.append(Reason(tuple(names), least, _cells(schema, table, names), ordinary))
    return reasons


def _cells(schema: Schema, table: Any, names: Sequence[Hashable]) -> dict[Hashable, Any]:
    """Values of the one row of a table."""
    if isinstance(table, np.ndarray):
        all_names = [column.name for column in schema.columns]
        return {name: table[0, all_names.index(name)] for name in names}
    return {name: next(iter(table[name])) for name in names}
