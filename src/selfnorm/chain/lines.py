"""Lines of a table: regressions of numbers, and of levels, on the columns before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm.chain.layout import PackedRows, PartLayout
from selfnorm.columns import Part
from selfnorm.distributions import HIDDEN, LEAST_SPREAD, completed, ridge_lines

MOST_LINES = 24  # columns: beyond, levels of categories have none, and rows are not conditioned on
LEAST_CHANGE = 0.1  # of its frequency: the least probability that lines predict of a level


class LinePrediction(NamedTuple):
    """What lines predict of rows.

    Args:
        mean, sd: ``(R, n, D)`` of the numbers.
        logits: ``(R, n, F, widest)`` what is added to the logits of finite parts.
    """

    mean: Tensor
    sd: Tensor
    logits: Tensor


class ConditionalNormal(NamedTuple):
    """The normal distribution of ``U`` columns, each given those before it and all given ones.

    ``N`` is the number of rows, or 1 where the same columns of all rows are observed.

    Args:
        order: ``(R, N, U)`` the columns, first to last.
        root: ``(R, N, U, U)`` of their covariance, in that order.
        before: the same where the second column is of a part before that of the first, else 0.
        sd: ``(R, N, U)`` around the line.
    """

    order: Tensor
    root: Tensor
    before: Tensor
    sd: Tensor

    def mean(self, u: Tensor) -> Tensor:
        """``(R, n, U)``: means given the columns before each one, at rows ``u (.., n, U)``."""
        order = self.order.expand(-1, u.shape[-2], -1)
        off = u.to(self.root).expand(order.shape).gather(-1, order).unsqueeze(-1)
        independent = torch.linalg.solve_triangular(self.root, off, upper=False)
        ordered = torch.matmul(self.before, independent).squeeze(-1)
        return torch.zeros_like(ordered).scatter(-1, order, ordered).to(u)


class Lines(nn.Module):
    """Regressions of the numbers of a table on those before them, for each of ``R`` orders.

    A gap counts as the mean. *Conditioned* predictions are those of the normal distribution that
    the regressions make up, given all that a row has before a column or is given; then small
    categories take part, with a column of zeros and ones for each level but the first.

    Args:
        parts, layout: of the table.
        ranks: ``(R, p)`` the orders.
        conditioned: see above; tables of more than 24 numbers are not.
    """

    slopes: Tensor
    sd: Tensor
    ranks: Tensor
    level_part: Tensor
    level_code: Tensor

    def __init__(
        self, parts: Sequence[Part], layout: PartLayout, ranks: Tensor, *, conditioned: bool
    ) -> None:
        super().__init__()
        self.layout, self.n_numbers = layout, len(layout.numbers)
        self.conditioned = conditioned and self.n_numbers <= MOST_LINES
        small = [j for j, p in enumerate(parts) if conditioned and not p.rest and p.n_codes > 1]
        levels: list[tuple[int, int]] = []
        for j in sorted(small, key=lambda j: parts[j].n_codes):
            if self.n_numbers + len(levels) + parts[j].n_codes <= MOST_LINES:
                levels += [(j, code) for code in range(1, parts[j].n_codes)]
        part, code = torch.tensor(levels, dtype=torch.long).reshape(-1, 2).T.contiguous()
        self.register_buffer("level_part", part, persistent=False)
        self.register_buffer("level_code", code, persistent=False)
        ranks = ranks[:, torch.cat([layout.numbers, part])]
        self.register_buffer("ranks", ranks, persistent=False)
        stack, size = ranks.shape
        self.register_buffer("slopes", torch.zeros(stack, size, size))
        self.register_buffer("sd", torch.ones(stack, size))

    def forward(
        self,
        rows: PackedRows,
        log_share: Tensor,
        given: Tensor | None = None,
        normal: ConditionalNormal | None = None,
    ) -> LinePrediction:
        """Predictions of rows.

        Args:
            rows: of the table.
            log_share: ``(p, K)`` log-frequencies of the outcomes of the parts.
            given: ``(.., n, p)`` parts that are given.
            normal: the distribution of the columns, where it is known already.
        """
        u, observed = self.standardised(rows, log_share)
        if self.conditioned:
            normal = normal or self.normal(observed, given)
            mean, sd = normal.mean(u), normal.sd
        else:
            mean = torch.matmul(u.double(), self.slopes.double().mT).to(u)
            sd = self.sd.unsqueeze(1)
        sd = sd.to(mean).expand_as(mean)
        numbers = slice(self.n_numbers)
        return LinePrediction(mean[..., numbers], sd[..., numbers], self._logits(mean, log_share))

    def standardised(self, rows: PackedRows, log_share: Tensor) -> tuple[Tensor, Tensor]:
        """``(..., U)``: columns in units of about one, 0 where not observed; which are."""
        numbers = self.layout.numbers
        hot = (rows.code[..., self.level_part] == self.level_code).to(rows.z)
        share, scale = self._of_levels(log_share)
        is_number = rows.is_number(self.layout)
        observed = torch.cat([is_number[..., numbers], rows.observed[..., self.level_part]], -1)
        u = torch.cat([rows.z[..., numbers], (hot - share) / scale], -1)
        return u.where(observed, 0.0), observed

    def _of_levels(self, log_share: Tensor) -> tuple[Tensor, Tensor]:
        """``(C,)``: the frequencies of the levels, and their standard deviations."""
        share = log_share[self.level_part, self.level_code].exp().to(self.sd)
        return share, (share * (1 - share)).sqrt()

    def normal(self, observed: Tensor, given: Tensor | None = None) -> ConditionalNormal:
        """The normal distribution of the columns where some are observed and some parts are given.

        Args:
            observed: ``(.., n, U)``.
            given: ``(.., n, p)``, or ``None``.
        """
        slopes, rank = self.slopes.double(), self.ranks.unsqueeze(1)  # (R, 1, U)
        if given is not None:
            part = torch.cat([self.layout.numbers, self.level_part])
            rank = rank - given.shape[-1] * given[..., part].to(rank)
        elif not self.training and bool(observed.all()):
            observed = observed.flatten(0, -2)[:1]
        rank, observed = torch.broadcast_tensors(rank, observed)
        order = rank.argsort(dim=-1, stable=True)
        eye = torch.eye(slopes.shape[-1]).to(slopes)
        root = torch.linalg.solve(eye - slopes, torch.diag_embed(self.sd.double()))
        chain = torch.arange(len(slopes), device=order.device).view(-1, 1, 1, 1)
        covariance = (root @ root.mT)[chain, order.unsqueeze(-1), order.unsqueeze(-2)]
        hidden = HIDDEN * (~observed).gather(-1, order).double()
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        root, failed = torch.linalg.cholesky_ex(covariance + torch.diag_embed(hidden))
        # columns that repeat others to the last digit: each by itself
        alone = torch.diag_embed((variance + hidden).sqrt())
        root = torch.where((failed > 0)[..., None, None], alone, root)
        rank = rank.gather(-1, order)
        before = root * (rank.unsqueeze(-1) > rank.unsqueeze(-2))
        left = variance - before.square().sum(-1)
        sd = left.clamp_min(LEAST_SPREAD**2).sqrt()
        return ConditionalNormal(order, root, before, torch.zeros_like(sd).scatter(-1, order, sd))

    def _logits(self, mean: Tensor, log_share: Tensor) -> Tensor:
        """``(R, n, F, widest)``: what predicted levels add to the logits of finite parts."""
        finite, widest = self.layout.finite, self.layout.widest
        _, scale = self._of_levels(log_share)
        first = torch.searchsorted(finite, self.level_part) * widest
        change = mean[..., self.n_numbers :] * scale
        added = mean.new_zeros(*mean.shape[:2], len(finite) * widest)
        added = added.index_copy(-1, first + self.level_code, change)
        added = added.index_add(-1, first, -change)
        shares = log_share[finite][:, :widest].exp().to(added)
        added = added.view(*mean.shape[:2], len(finite), widest)
        return (1 + added / shares).clamp_min(LEAST_CHANGE).log()

    @torch.no_grad()
    def fit(
        self, rows: PackedRows, log_share: Tensor, weights: Tensor, levels: np.ndarray, first: int
    ) -> dict[int, np.ndarray]:
        """Ridge regressions of rows, for the orders from ``first`` on.

        Args:
            rows, log_share: as in :meth:`forward`.
            weights: ``(n, R)``: how much a row counts for an order.
            levels: ``(Q,)`` probabilities.

        Returns:
            By order, quantiles ``(D, Q)`` of the standardised residuals of numbers at the levels;
            NaN where a number was not observed.
        """
        u, observed = (t.cpu().numpy() for t in self.standardised(rows, log_share))
        filled: dict[bytes, np.ndarray] = {}  # orders that count the same rows share them
        quantiles = {}
        for r, rank in enumerate(self.ranks.cpu().numpy()[first:], first):
            weight = weights[:, r].double().cpu().numpy()
            if weight.tobytes() not in filled:
                filled[weight.tobytes()] = completed(u.astype(np.float64), observed, weight)
            order = np.argsort(rank, kind="stable")
            slopes, sd, residuals = ridge_lines(filled[weight.tobytes()], order, weight)
            self.slopes[r], self.sd[r] = torch.from_numpy(slopes), torch.from_numpy(sd)
            quantiles[r] = np.full((self.n_numbers, len(levels)), np.nan)
            for i in range(self.n_numbers):
                counted = residuals[(weight > 0) & observed[:, i], i]
                if len(counted):
                    quantiles[r][i] = np.quantile(counted / sd[i], levels)
        return quantiles
