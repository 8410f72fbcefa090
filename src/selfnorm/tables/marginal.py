"""The distribution of some columns of a table, the others unknown."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import on_cpu, seed_of
from selfnorm._inputs import RandomState
from selfnorm.columns import BY_PLACE, GAP, Schema, Table, TableLike
from selfnorm.errors import DataError
from selfnorm.tables.answers import Effort
from selfnorm.tables.distribution import RowDistribution


class Marginal:
    """The distribution of some columns of a fitted :class:`EnergyDensity`, the others unknown.

    Other columns of rows are not looked at; an array may have all columns of the table, or these
    alone, as ``columns`` orders them: as in the table.

    Scores integrate the joint density over the other columns, by weighted draws: ``accuracy`` of
    the density says how many.

    Examples
    --------
    >>> from selfnorm import EnergyDensity
    >>> rng = np.random.default_rng(0)
    >>> table = {"kind": rng.choice(["a", "b"], 300), "size": rng.normal(size=300)}
    >>> density = EnergyDensity(random_state=0, max_steps=50).fit(table)
    >>> kinds = density.marginal(["kind"])
    >>> kinds.score_samples({"kind": ["a", "b"]}).shape
    (2,)
    """

    @on_cpu()
    def __init__(
        self,
        schema: Schema,
        distribution: RowDistribution,
        columns: Sequence[Hashable],
        effort: Effort | None,
    ) -> None:
        self.mask = mask_of(schema, columns)
        if not self.mask.any():
            raise DataError("marginal needs the names of one column or more")
        self.schema, self.distribution, self.effort = schema, distribution, effort
        self.columns = tuple(c.name for c in schema.modelled if c.name in columns)

    @on_cpu()
    def score_samples(self, X: TableLike) -> np.ndarray:
        """Log-likelihood ``(n,)`` of rows."""
        table = Table.of(X)
        if table.kind in BY_PLACE and len(table.columns) == len(self.columns):
            X = dict(zip(self.columns, table.columns.values(), strict=True))
        coded, open_ = map(torch.from_numpy, self.schema.encode(X, partial=True))
        coded[:, ~self.mask] = torch.tensor([float(GAP), 0.0], dtype=coded.dtype)
        log_p, _ = self.distribution.marginal(coded, self.effort)
        return (log_p + open_.where(self.mask, 0.0).sum(-1)).numpy()

    @on_cpu()
    def sample(self, n_samples: int = 1, random_state: RandomState = None) -> Any:
        """A table of ``n_samples`` rows of these columns."""
        seed = seed_of(random_state)
        drawn = self.distribution.sample(n_samples, seed)
        return self.schema.decode(self.schema.within_seen(drawn), seed, columns=self.columns)


def mask_of(schema: Schema, columns: Sequence[Hashable]) -> Tensor:
    """``(p,)``: the parts of named columns."""
    if isinstance(columns, str):
        raise DataError(f"given must be a list of columns: [{columns!r}]")
    mask = torch.zeros(len(schema.parts), dtype=torch.bool)
    mask[schema.parts_of(list(columns), alone=True)] = True
    return mask
