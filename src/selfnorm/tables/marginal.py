"""The distribution of some columns of a table, the others unknown."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import on_cpu, seed_of
from selfnorm._inputs import RandomState
from selfnorm.columns import BY_PLACE, GAP, Schema, Table, TableLike
from selfnorm.errors import DataError
from selfnorm.tables.distribution import MAX_COMPLETIONS, RowDistribution

MARGINAL_PLACES = 2048  # rows drawn x values whose probability is asked


class Marginal:
    """The distribution of some columns of a fitted :class:`EnergyDensity`, the others unknown.

    Other columns of rows are not looked at; an array may have all columns of the table, or these
    alone, as ``columns`` orders them: as in the table.

    Probabilities of categories (64 combinations at most) are those of the joint distribution, up to
    the error of a mean over rows drawn from it. Numbers of one energy over all columns are
    integrated out. Other scores are the network's own answers with the other columns missing:
    normalised for each choice of columns, not exactly the integral of the joint distribution (see
    ``consistency_``).

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
        self, schema: Schema, distribution: RowDistribution, columns: Sequence[Hashable]
    ) -> None:
        self.mask = mask_of(schema, columns)
        if not self.mask.any():
            raise DataError("marginal needs the names of one column or more")
        self.schema, self.distribution = schema, distribution
        self.columns = tuple(c.name for c in schema.modelled if c.name in columns)

    @on_cpu()
    def score_samples(self, X: TableLike) -> np.ndarray:
        """Log-likelihood ``(n,)`` of rows."""
        table = Table.of(X)
        if table.kind in BY_PLACE and len(table.columns) == len(self.columns):
            X = dict(zip(self.columns, table.columns.values(), strict=True))
        coded, open_ = map(torch.from_numpy, self.schema.encode(X, partial=True))
        coded[:, ~self.mask] = torch.tensor([float(GAP), 0.0], dtype=coded.dtype)
        log_p = self.distribution.log_prob(coded) + open_.where(self.mask, 0.0).sum(-1)
        if self._masses is not None:
            codes, log_masses = self._masses  # none for what was never seen
            same = (coded[:, self.mask, 0].unsqueeze(1) == codes).all(-1)
            log_p = torch.where(same.any(1), log_masses[same.int().argmax(1)], log_p)
        return log_p.numpy()

    @on_cpu()
    def sample(self, n_samples: int = 1, random_state: RandomState = None) -> Any:
        """A table of ``n_samples`` rows of these columns."""
        seed = seed_of(random_state)
        drawn = drawn_rows(self.schema, self.distribution, self._unknown(n_samples), seed)
        return self.schema.decode(drawn, seed, columns=self.columns)

    def _unknown(self, n: int) -> Tensor:
        """``n`` coded rows of gaps."""
        rows = torch.zeros(n, len(self.mask), 2, dtype=torch.float64)
        rows[..., 0] = GAP
        return rows

    @cached_property
    def _masses(self) -> tuple[Tensor, Tensor] | None:
        """Codes ``(C, k)`` of ``k`` finite parts, and their log-probabilities ``(C,)``.

        The mean of ``p(x_T | rest)`` over rows drawn from the joint, each a sum of the joint over
        ``T``. ``None`` where ``T`` has numbers, or too many values.
        """
        places = self.mask.nonzero().flatten().tolist()
        parts = [self.schema.parts[j] for j in places]
        n_codes = math.prod(part.n_codes for part in parts)
        if any(part.rest for part in parts) or n_codes > MAX_COMPLETIONS:
            return None
        codes = torch.cartesian_prod(*(torch.arange(part.n_codes) for part in parts))
        codes = codes.view(n_codes, -1)
        rows = self._unknown(MARGINAL_PLACES // n_codes)
        drawn = torch.from_numpy(drawn_rows(self.schema, self.distribution, rows, 0))
        log_p = self.distribution.log_completed(drawn, places, codes)
        shares = (log_p - torch.logsumexp(log_p, 1, keepdim=True)).exp().mean(0)
        unseen = torch.tensor([part.unseen for part in parts], dtype=torch.float32)
        return codes.double(), shares.log() + torch.log1p(-unseen).double().sum()


def mask_of(schema: Schema, columns: Sequence[Hashable]) -> Tensor:
    """``(p,)``: the parts of named columns."""
    if isinstance(columns, str):
        raise DataError(f"given must be a list of columns: [{columns!r}]")
    mask = torch.zeros(len(schema.parts), dtype=torch.bool)
    mask[schema.parts_of(list(columns), alone=True)] = True
    return mask


def drawn_rows(
    schema: Schema, distribution: RowDistribution, coded: Tensor, seed: int, missing: bool = False
) -> np.ndarray:
    """Coded rows ``(n, p, 2)`` with their gaps drawn, given the rest of the row."""
    seen = torch.from_numpy(~schema.is_gap(coded.numpy()))
    drawn = distribution.complete(coded, seen, seed, missing)
    return schema.within_seen(drawn, seen.numpy())
