"""Least-squares lines of the numbers of a table, where its chain begins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

RIDGE = 1e-8  # of a variance of one: a number that repeats others has a spread of 1e-4
MOST_ROWS = 20_000  # that lines are fitted to


class LinePrediction(NamedTuple):
    """Where numbers are expected: ``mean`` and ``spread`` of the same shape."""

    mean: Tensor
    spread: Tensor

    def off(self, z: Tensor) -> Tensor:
        """How far scores are from the line, for a network to see."""
        return torch.asinh((z - self.mean) / self.spread)


class Lines(nn.Module):
    """Lines of ``D`` numbers on the numbers before them, in each of ``R`` orders.

    Networks take long to learn a narrow ridge, which a line tells at once. A number that a row does
    not have counts as zero, its mean.
    """

    slopes: Tensor  # (R, D, D)
    spread: Tensor  # (R, D)

    def __init__(self, n_orders: int, n_numbers: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.zeros(n_orders, n_numbers, n_numbers))
        self.register_buffer("spread", torch.ones(n_orders, n_numbers))

    def forward(self, z: Tensor) -> LinePrediction:
        """The lines ``(R, n, D)`` of all numbers at scores ``z (.., n, D)``."""
        mean = torch.matmul(z.double(), self.slopes.double().mT).to(z)
        return LinePrediction(mean, self.spread.to(z).unsqueeze(1).expand_as(mean))

    def at(self, z: Tensor, which: Tensor) -> LinePrediction:
        """That ``(R, n)`` of number ``which[r]`` in order ``r`` at scores ``z (R, n, D)``."""
        order = torch.arange(len(which), device=which.device)
        slopes = self.slopes[order, which].double().unsqueeze(-1)
        mean = torch.matmul(z.double(), slopes).squeeze(-1).to(z)
        return LinePrediction(mean, self.spread[order, which].to(z).unsqueeze(1).expand_as(mean))

    @torch.no_grad()
    def fit(self, z: Tensor, weights: Tensor, ranks: Tensor) -> None:
        """Fit lines to scores ``z (n, D)`` of rows with ``weights (n,)``; ``ranks (R, D)``."""
        z, weights = z.double(), weights.double()
        covariance = z.mT @ (z * (weights / weights.sum()).unsqueeze(-1))
        covariance += RIDGE * torch.eye(len(covariance)).to(covariance)
        order = ranks.argsort(-1)
        covariance = covariance[order.unsqueeze(-1), order.unsqueeze(-2)]
        root = torch.linalg.cholesky(covariance)
        spread = root.diagonal(dim1=-2, dim2=-1)
        eye = torch.eye(root.shape[-1]).to(root)
        inverse = torch.linalg.solve_triangular(root / spread.unsqueeze(-2), eye, upper=False)
        place = order.argsort(-1)
        slopes = (eye - inverse).gather(-2, place.unsqueeze(-1).expand_as(inverse))
        self.slopes.copy_(slopes.gather(-1, place.unsqueeze(-2).expand_as(slopes)))
        self.spread.copy_(spread.gather(-1, place))
