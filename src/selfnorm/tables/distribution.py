"""What a fitted distribution of a table can do: the one interface of estimators and reports.

A distribution of coded rows ``(n, p, 2)`` is a mixture of a trained model and of simple densities,
``p(x) = w_0 p_0(x) + sum_k w_k p_k(x)``. There are two kinds of trained models:
:class:`~selfnorm.tables.chain_distribution.ChainDistribution` has a chain of factors, and
:class:`~selfnorm.tables.energy_distribution.EnergyDistribution` one energy over all columns.
Log-likelihoods are in the units of the table. What the codes leave open is not part of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm._context import float32_on_cpu
from selfnorm.columns import GAP, CodedColumns
from selfnorm.distributions import TableMixture
from selfnorm.evaluation import Bounds, Finding
from selfnorm.tables.answers import Draws, Effort, Limits
from selfnorm.tables.members import Member, log_density

FINEST = 1e-3  # of its spread: the step of the finest grid whose cells would be counted
PIECE = 2**16  # rows coded and scored at a time
# rows in products of matrices, whose rounding depends on their shapes, by the normaliser; what
# is left of that is far below the last decimal of a steady score
STEADY, DECIMALS = {"quadrature": 64, "learned": 256}, 8


class RowDistribution(ABC):
    """A normalised distribution of coded rows.

    Attributes:
        method: name of the kind, as an estimator's ``method`` has it, and ``words`` that say it.
        bound_samples: number of samples that bounds of a few rows need.
        trained: name of the trained model among the members.
        model: the trained density.
        proposal: of the trained model, where it is a part of its own.
        columns: the map between coded rows and those of the model.
        members: all densities that were tried, the trained one first.
        simple: the simple densities that have a weight.
    """

    method: ClassVar[str]
    words: ClassVar[str]
    bound_samples: ClassVar[int]
    trained: ClassVar[str]

    model: nn.Module
    proposal: nn.Module | None
    columns: CodedColumns
    members: list[Member]
    simple: list[TableMixture]

    # -- what depends on the trained model ------------------------------------------------------

    @property
    @abstractmethod
    def factors_per_row(self) -> int:
        """How many one-dimensional factors a score of one row costs."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the normaliser is a finite sum, so that there is nothing to bound."""

    @property
    def marginal_columns(self) -> CodedColumns | None:
        """Columns that have the marginals of the training rows, if there are any."""
        return None

    @abstractmethod
    def pack(self, coded: Tensor) -> Tensor:
        """Rows as the trained model sees them."""

    @abstractmethod
    def marginal(
        self, coded: Tensor, effort: Effort | None, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods ``(n,)`` of what coded rows have, and their standard errors.

        The other cells are integrated out, with so much effort; ``None``: in one pass.
        """

    @abstractmethod
    def conditional(
        self, coded: Tensor, given: Tensor, effort: Effort | None
    ) -> tuple[Tensor, Tensor]:
        """``log p(x_T | x_S)`` ``(n,)`` of coded rows, ``S`` the parts of the mask ``given (p,)``,
        and its standard error. Missing cells of ``T`` are left out.
        """

    @abstractmethod
    def complete(
        self,
        coded: Tensor,
        seen: Tensor,
        seed: int,
        missing: bool = False,
        effort: Effort | None = None,
    ) -> np.ndarray:
        """Coded rows whose cells that are not ``seen (n, p)`` are drawn, given the others.

        With ``missing`` gaps that are outcomes of a part are drawn as well.
        """

    @abstractmethod
    def pool(self, coded: Tensor, seen: Tensor, effort: Effort, limits: Limits, seed: int) -> Draws:
        """Weighted completions of coded rows whose parts ``seen (n, p)`` stay, coded as well.

        The mean weight is an estimate of the density of what is seen, within the limits.
        """

    def log_probability(self, limits: Limits, effort: Effort, seed: int) -> Draws:
        """Weights whose mean is the probability of limits; the draws need not be whole rows."""
        blank = self.blank(1)
        return self.pool(
            blank, torch.zeros(blank.shape[:2], dtype=torch.bool), effort, limits, seed
        )

    def blank(self, n: int) -> Tensor:
        """``n`` coded rows of gaps."""
        rows = torch.zeros(n, self.columns.dim, 2, dtype=torch.float64)
        rows[..., 0] = GAP
        return rows

    @abstractmethod
    def explain(self, coded: Tensor) -> np.ndarray:
        """``(n, p)``: ``P(p(X_j | rest) <= p(x_j | rest))`` of every part; NaN at gaps."""

    def with_gap_scores(self, coded: Tensor) -> RowDistribution:  # noqa: ARG002 for those that read them off rows
        """The same, which knows what a gap is worth by coded rows that were not trained on."""
        return self

    def consistency(self, coded: Tensor, seed: int) -> dict[str, float]:  # noqa: ARG002
        """How far answers are from those of one joint density; empty where they are exact."""
        return {}

    @abstractmethod
    def log_weights(self, coded: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        """Log-weights less ``log Z`` at samples, and at coded rows if there are any.

        ``None`` where the normaliser is a finite sum.
        """

    @abstractmethod
    def _log_density(self, coded: Tensor, normalizer: str) -> Tensor:
        """``(n,)``: log-density of the trained model alone."""

    @abstractmethod
    def _draw(self, n: int, seed: int, missing: bool) -> np.ndarray:
        """``n`` coded rows from the trained model alone."""

    @abstractmethod
    def _bounds(
        self, coded: Tensor, open_: Tensor, scores: Tensor, n_samples: int, seed: int
    ) -> Bounds:
        """Bounds of the trained model, moved to the mean of the ``scores`` of the mixture.

        The scores include what codes leave ``open_ (n, p)``.
        """

    @abstractmethod
    def _gap_scores(self) -> Tensor:
        """``(p,)``: mean log-likelihood of a cell of each part."""

    # -- the mixture ----------------------------------------------------------------------------

    @property
    def weights(self) -> list[float]:
        """Of the trained model, if it has one, and of the simple densities."""
        return [member.weight for member in self.members if member.weight > 0]

    @property
    def model_counts(self) -> bool:
        """Whether the trained model has a weight."""
        return self.members[0].weight > 0

    @torch.no_grad()
    def log_prob(self, coded: Tensor, normalizer: str = "quadrature") -> Tensor:
        """Log-likelihood ``(n,)`` of coded rows; gaps are left out."""
        return torch.logsumexp(self._of_members(coded, normalizer), -1)

    @torch.no_grad()
    def steady_log_prob(self, coded: Tensor, normalizer: str = "quadrature") -> Tensor:
        """The same, rounded, to the last digit whatever other rows a row is scored with."""
        size = STEADY[normalizer]
        padded = torch.cat([coded, coded[-1:].expand(-len(coded) % size, -1, -1)])
        pieces = [self._steady_piece(piece, normalizer) for piece in padded.split(size)]
        return torch.cat(pieces)[: len(coded)].round(decimals=DECIMALS)

    def _steady_piece(self, coded: Tensor, normalizer: str) -> Tensor:
        """:meth:`log_prob` of as many rows as :data:`STEADY` says."""
        return self.log_prob(coded, normalizer)

    def _of_members(
        self, coded: Tensor, normalizer: str = "quadrature", of_model: Tensor | None = None
    ) -> Tensor:
        """``(n, M)``: log of weight times density of coded rows, by the members with a weight."""
        log_p = [log_density(density, coded) for density in self.simple]
        if self.model_counts:
            if of_model is None:
                of_model = self._log_density(coded, normalizer)
            log_p.insert(0, of_model)
        return torch.stack(log_p, -1) + torch.tensor(self.weights, dtype=torch.float64).log()

    def sample(self, n: int, seed: int, missing: bool = False) -> np.ndarray:
        """``n`` coded rows; with ``missing`` gaps that are outcomes of a part are drawn as well."""
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(n, np.array(self.weights) / sum(self.weights)).tolist()
        rows = []
        with float32_on_cpu():
            if self.model_counts:
                rows.append(self._draw(counts.pop(0), seed, missing))
            for k, (density, count) in enumerate(zip(self.simple, counts, strict=True)):
                drawn = density.sample(
                    count, within=self.columns.keeps_range, seed=stream(seed, 1 + k)
                )
                rows.append(unpacked(density.columns, drawn))
        return np.concatenate(rows)[rng.permutation(n)] if self.simple else rows[0]

    @torch.no_grad()
    def bounds(self, coded: Tensor, open_: Tensor, n_samples: int, seed: int) -> Bounds:
        """Bounds of the mean log-likelihood, ``open_ (n, p)`` included.

        They are those of the trained model, moved: what its bounds are off by bounds what those of
        the mixture are.
        """
        with float32_on_cpu():
            scores = self.log_prob(coded) + open_.sum(-1)
            findings: tuple[Finding, ...] = ()
            if not bool(torch.isfinite(scores).all()):
                words = "Some rows have no finite log-likelihood."
                findings = (Finding("not_finite", math.inf, 0.0, words),)
            if self.exact:
                mean, error = float(scores.mean()), standard_error(scores)
                fixed = (0.0, 0.0, 1.0, -math.inf, n_samples)
                return Bounds(mean, mean, error, error, *fixed, findings)
            bounds = self._bounds(coded, open_, scores, n_samples, seed)
            return replace(bounds, findings=findings + bounds.findings)

    def comparable(self, coded: Tensor) -> Tensor:
        """``(n,)``: what makes scores of coded rows comparable, zero where all are numbers.

        A gap counts as much as a cell of its part does on average.
        """
        log_p = comparable(self.columns, coded)
        gap = coded[..., 0] == GAP
        return log_p + self._gap_scores().where(gap, 0.0).sum(-1) if bool(gap.any()) else log_p

    def log_codes(self, coded: Tensor, part: int, effort: Effort | None, seed: int) -> Tensor:
        """``(n, C)``: log-probabilities of the codes of a part, that of its numbers the last.

        Given what coded rows have of other parts; by draws of the part, where it has not few codes.
        """
        described, seen = self.columns.parts[part], coded[..., 0] != GAP
        draws = self.pool(coded, seen, effort or Effort(), Limits(), seed)
        share = torch.zeros(len(coded), described.n_codes + described.rest, dtype=torch.float64)
        code = draws.completed[:, part, 0].long()
        weight = draws.shares()
        return share.index_put((draws.row, code), weight, accumulate=True).log()


def standard_error(scores: Tensor) -> float:
    """Of the mean of scores ``(n,)``."""
    return float(scores.std(correction=min(1, len(scores) - 1))) / math.sqrt(len(scores))


def resolutions(columns: CodedColumns) -> Tensor:
    """``(p,)``: widths at which densities of numbers count as probabilities.

    A thousandth of the distance between the quartiles; it moves with the units. 1 where numbers
    have cells, whose mass is one already, and where there are none.
    """
    quarter = torch.full((1, columns.dim), 0.6745, dtype=torch.float32).to(columns.knots)
    spread = (columns.from_scores(quarter) - columns.from_scores(-quarter))[0].clamp_min(1e-300)
    continuous = torch.tensor([part.rest and part.step == 0 for part in columns.parts])
    return (FINEST * spread).where(continuous, 1.0)


def comparable(columns: CodedColumns, rows: Tensor) -> Tensor:
    """``(n,)``: what makes log-likelihoods of coded rows ``(n, p, 2)`` comparable with each other.

    Numbers are then taken as recorded to :func:`resolutions`, but for a constant that all rows
    share: zero where all are numbers, and at gaps.
    """
    finite = (rows[..., 0] != columns.n_codes) & (rows[..., 0] != GAP)
    return (-resolutions(columns).log()).where(finite, 0.0).sum(-1)


def stream(seed: int, which: int) -> int:
    """A seed of its own: one draw must not tell of another that is made beside it."""
    return int(np.random.SeedSequence([seed, which]).generate_state(1)[0])


def unpacked(columns: CodedColumns, packed: Tensor) -> np.ndarray:
    """Coded rows ``(n, p, 2)`` of packed ones, by the digits of their own map."""
    rows: np.ndarray = columns.unpack(packed[..., 0].double(), packed[..., 1].double()).numpy()
    return rows
