"""The distribution of a table whose trained model is one energy over all columns.

The columns are numbers without limits and steps. In one and two dimensions the normaliser is exact,
and every question about one column given the others is answered on a line: the joint density at
points along that column, from which its conditional is normalised.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import float32_on_cpu, seeded
from selfnorm._saved import saved
from selfnorm.columns import GAP, CodedColumns
from selfnorm.density import EBM
from selfnorm.distributions import Defensive, TableMixture, draw_log_weights
from selfnorm.errors import DataError
from selfnorm.evaluation import Bounds, GridDensity, evaluate
from selfnorm.sampling import draw
from selfnorm.tables.answers import Draws, Effort, Limits
from selfnorm.tables.distribution import RowDistribution, stream, unpacked
from selfnorm.tables.members import Member

# points per axis of a grid, in one and two dimensions: the first, and the most; between them they
# double until log Z is as sure as this; half-widths of the grid's parts
GRID, MOST_GRID, LOG_NORM_ERROR, CORE, REACH = (0, 2049, 257), (0, 8193, 1025), 2e-4, 4.0, 4.0
WALK = 4  # steps of a sampler from a draw of the grid to one of the density itself
# points of a line: the first, and the most; between them they double until no cell holds more of
# the mass; they lie at sinh(t) scales from its centre, |t| at most so much: out to 4,000 scales
LINE, MOST_LINE, CELL_MASS, LINE_REACH = 257, 4097, 0.05, 9.0
LINES_AT_ONCE, ROWS_AT_ONCE = 64, 4096  # densities at points that are kept at a time
POOL = 16_384  # completions of a row, of all rows together
GAP_ROWS = 100  # drawn for the mean log-likelihood of a cell


def grid_of(model: EBM, proposal: Defensive, span: Tensor) -> GridDensity:
    """The density of a model of one or two columns by quadrature, in the frame of its base.

    Rows between the ends ``span (d, 2)`` were trained on: the grid reaches twice as far, as an
    energy may hold mass around a row far out.
    """
    base: Any = proposal.heavy
    dim = int(proposal.dim)
    n_points, most = GRID[dim], MOST_GRID[dim]
    corners = torch.cartesian_prod(*span).reshape(-1, dim).to(base.loc) - base.loc
    far = torch.linalg.solve_triangular(base.scale_tril, corners.T, upper=False).abs().max()
    frame: dict[str, Any] = {
        "center": base.loc,
        "scale": base.scale_tril,
        "core": CORE,
        "reach": max(REACH, math.log1p(max(0.0, 2 * float(far) - CORE))),
    }
    while True:
        grid = GridDensity(model, dim, **frame, n_points=n_points)
        if grid.error < LOG_NORM_ERROR or n_points >= most:
            return grid
        n_points = 2 * n_points - 1


class Line(NamedTuple):
    """The joint density of ``n`` rows along one of their columns, at ``m`` points.

    Attributes:
        centre: ``(n,)`` normal score around which the points lie.
        scale: ``(n,)`` their unit, in normal scores.
        log_density: ``(n, m)`` of the joint, in the units of the table.
        log_mass: ``(n, m)`` of the cells around the points.
    """

    centre: Tensor
    scale: Tensor
    log_density: Tensor
    log_mass: Tensor

    def mass_below(self, log_density: Tensor) -> Tensor:
        """``(n,)``: share of the mass whose density is at most so high, on lines between points."""
        mass = torch.softmax(self.log_mass, -1).unfold(-1, 2, 1).mean(-1)
        low, high = self.log_density.unfold(-1, 2, 1).aminmax(dim=-1)
        share = (log_density.unsqueeze(-1) + 1e-9 - low) / (high - low).clamp_min(1e-12)
        return (mass * share.clamp(0.0, 1.0)).sum(-1).clamp_max(1.0)

    def draw(self) -> Tensor:
        """``(n,)``: normal scores by the inverse of the distribution function, even in a cell."""
        mass = torch.softmax(self.log_mass, -1)
        below = mass.cumsum(-1)
        level = torch.rand(len(mass), 1, dtype=mass.dtype) * below[:, -1:]
        last = mass.shape[-1] - 1
        cell = torch.searchsorted(below, level).clamp_max(last)
        share = (level - (below - mass).gather(-1, cell)) / mass.gather(-1, cell)
        t = LINE_REACH * (2 * (cell + share.clamp(0, 1) - 0.5) / last - 1)
        return self.centre + self.scale * t.sinh()[:, 0]


@saved("model", "members", "simple", "proposal", "columns")
@dataclass(eq=False)
class EnergyDistribution(RowDistribution):
    """One energy over the normal scores of all columns, and the simple densities beside it.

    Rows with gaps are scored by their marginal. In three dimensions and more one cell of a row may
    be missing, or all of them.

    Attributes:
        proposal: of the energy; its heavy part is the frame of grids and lines.
        columns: the map to normal scores.
    """

    method: ClassVar[str] = "joint"
    words: ClassVar[str] = "one energy over all columns"
    bound_samples: ClassVar[int] = 20_000
    trained: ClassVar[str] = "energy"

    model: EBM
    members: list[Member]
    simple: list[TableMixture]
    proposal: Defensive
    columns: CodedColumns

    @property
    def factors_per_row(self) -> int:
        """A network over all columns costs about two factors."""
        return 2

    @property
    def exact(self) -> bool:
        """Whether the energy has no weight."""
        return not self.model_counts

    def pack(self, coded: Tensor) -> Tensor:
        """``(n, p)``: normal scores."""
        return self.columns.pack(coded)[0][..., 1]

    # -- the energy alone -----------------------------------------------------------------------

    def _of_scores(self, z: Tensor) -> Tensor:
        """``(n,)``: log-density of normal scores, in their measure."""
        return torch.cat([self.model.log_prob(rows) for rows in z.split(16_384)])

    def _log_density(self, coded: Tensor, normalizer: str) -> Tensor:  # noqa: ARG002 one way
        packed, slope = self.columns.pack(coded)
        return self._of_scores(packed[..., 1]) + slope.sum(-1)

    @functools.cached_property
    def _sampler(self) -> tuple[EBM, Any, dict[str, Any]]:
        """Model, proposal and method of samples."""
        model, q = copy.deepcopy(self.model).float(), copy.deepcopy(self.proposal).float()
        if self.columns.dim > 2:
            return model, q, {}
        return model, grid_of(model, q, self.columns.span), {"method": "imh", "n_steps": WALK}

    def _draw(self, n: int, seed: int, missing: bool) -> np.ndarray:  # noqa: ARG002 no gaps
        rows = torch.zeros(n, self.columns.dim, 2, dtype=torch.float64)
        if n > 0:
            model, q, how = self._sampler
            z = draw(model.log_unnormalized, n, proposal=q, seed=seed, **how).samples.double()
            rows[..., 1] = self.columns.in_range(z)
        return unpacked(self.columns, rows)

    def _bounds(
        self,
        coded: Tensor,
        open_: Tensor,  # noqa: ARG002 is in the scores
        scores: Tensor,
        n_samples: int,
        seed: int,
    ) -> Bounds:
        rows = torch.from_numpy(self.complete(coded, coded[..., 0] != GAP, seed))
        z = self.pack(rows)
        bounds = evaluate(self.model, z, proposal=self.proposal, n_samples=n_samples, seed=seed)
        return bounds.shifted(float(scores.mean() - self._of_scores(z).mean()))

    def log_weights(self, coded: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Those of the energy at samples of its proposal, and at coded rows."""
        model, q = self.model, self.proposal
        with seeded(0), torch.no_grad():
            at_samples = draw_log_weights(model, q, 5000) - float(model.log_norm)
            if coded is None:
                return at_samples, None
            z = self.pack(coded)
            return at_samples, model.log_prob(z) - q.log_prob(z)

    # -- one column given the others ------------------------------------------------------------

    @torch.no_grad()
    def log_prob(self, coded: Tensor, normalizer: str = "quadrature") -> Tensor:
        """Log-likelihood ``(n,)`` of coded rows; gaps are integrated out."""
        gap = coded[..., 0] == GAP
        if not bool(gap.any()):
            return super().log_prob(coded, normalizer)
        log_p = torch.zeros_like(coded[:, 0, 0])
        for missing, rows in _patterns(gap):
            if not missing:
                log_p[rows] = super().log_prob(coded[rows], normalizer)
            elif len(missing) < self.columns.dim:  # without a value there is nothing to score
                for places, line in self._lines(coded[rows], missing[0]):
                    log_p[rows[places]] = torch.logsumexp(line.log_mass, -1)
        return log_p

    def marginal(
        self,
        coded: Tensor,
        effort: Effort | None,  # noqa: ARG002 exact
        seed: int = 0,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods ``(n,)`` of what coded rows have, by quadrature: without error."""
        log_p = self.log_prob(coded)
        return log_p, torch.zeros_like(log_p)

    def conditional(
        self, coded: Tensor, given: Tensor, effort: Effort | None = None
    ) -> tuple[Tensor, Tensor]:
        """``log p(x_T | x_S)`` ``(n,)`` of coded rows, ``S`` the parts of a mask ``given (p,)``."""
        alone = coded.clone()
        alone[:, ~given, 0] = GAP
        log_p = self.marginal(coded, effort)[0] - self.marginal(alone, effort)[0]
        return log_p, torch.zeros_like(log_p)

    def pool(self, coded: Tensor, seen: Tensor, effort: Effort, limits: Limits, seed: int) -> Draws:
        """Completions of coded rows, all as likely; those that do not obey weigh nothing."""
        counts = torch.full((len(coded),), max(effort.fewest, POOL // len(coded)))
        if limits.wanted is not None:
            counts = torch.maximum(counts, 2 * limits.wanted)
        row = torch.arange(len(coded)).repeat_interleave(counts)
        rows = torch.from_numpy(self.complete(coded[row], seen[row], seed))
        alone = coded.clone()
        alone[..., 0] = alone[..., 0].where(seen, float(GAP))
        log_w = self.log_prob(alone)[row].where(seen.any(1)[row], 0.0)
        none = torch.zeros(len(coded), dtype=torch.bool)
        draws = Draws(row, rows, log_w, none, log_w, torch.zeros_like(row))
        return draws if limits.obey is None else draws.without(~limits.obey(rows))

    @torch.no_grad()
    def complete(
        self,
        coded: Tensor,
        seen: Tensor,
        seed: int,
        missing: bool = False,
        effort: Effort | None = None,  # noqa: ARG002 exact
    ) -> np.ndarray:
        """Coded rows whose cells that are not ``seen (n, p)`` are drawn, given the others."""
        out = coded.clone()
        with float32_on_cpu():
            for free, rows in _patterns(~seen):
                if len(free) == self.columns.dim:
                    out[rows] = torch.from_numpy(self.sample(len(rows), seed, missing))
                    continue
                for part in free:
                    with seeded(stream(seed, part)):
                        for places, line in self._lines(coded[rows], part):
                            out[rows[places], part] = self._cell(line.draw(), part)
        return out.numpy()

    @torch.no_grad()
    def explain(self, coded: Tensor) -> np.ndarray:
        """``(n, p)``: ``P(p(X_j | rest) <= p(x_j | rest))`` of every part; NaN at gaps."""
        own, tails = self.log_prob(coded), np.full(coded.shape[:2], np.nan)
        for part in range(self.columns.dim):
            seen = torch.nonzero(coded[:, part, 0] != GAP).flatten()
            for places, line in self._lines(coded[seen], part):
                rows = seen[places]
                tails[rows.numpy(), part] = line.mass_below(own[rows]).numpy()
        return tails

    def _lines(self, coded: Tensor, part: int) -> Iterator[tuple[Tensor, Line]]:
        """Numbers of coded rows, and the line of each along one of its columns."""
        if len(coded) == 0:
            return
        rest = coded.clone()
        rest[:, part] = torch.tensor([GAP, 0.0])
        if self.columns.dim > 2 and bool(((rest[..., 0] == GAP).sum(-1) > 1).any()):
            raise DataError(
                f"this model has one energy over {self.columns.dim} columns, which answers for one "
                "missing column of a row; fit it with method='autoregressive' "
                "(--method autoregressive)"
            )
        once, place = torch.unique(rest, dim=0, return_inverse=True)
        counts = torch.bincount(place // LINES_AT_ONCE).tolist()
        blocks = torch.argsort(place, stable=True).split(counts)
        for lines, rows in zip(once.split(LINES_AT_ONCE), blocks, strict=True):
            line = self._line(lines, part)
            for places in rows.split(ROWS_AT_ONCE):
                at = place[places] % LINES_AT_ONCE
                yield places, Line(*(figure[at] for figure in line))

    def _line(self, coded: Tensor, part: int) -> Line:
        """Lines through coded rows, around what the base expects given the other columns."""
        base: Any = self.proposal.heavy
        precision = torch.cholesky_inverse(base.scale_tril.double())
        off = (self.pack(coded) - base.loc).where(coded[..., 0] != GAP, 0.0)
        shift = off @ precision[:, part] / precision[part, part]
        # squared distance of the other columns; far out the conditional of a Student-t is wider
        apart = ((off @ precision) * off).sum(-1) - precision[part, part] * shift.square()
        wider = ((base.df + apart) / (base.df + self.columns.dim - 1)).clamp_min(1.0).sqrt()
        centre, scale = base.loc[part] - shift, wider * precision[part, part].rsqrt()
        n_points = LINE
        while True:
            line = self._at_points(coded, part, centre, scale, n_points)
            most = float(torch.softmax(line.log_mass, -1).max())
            if most < CELL_MASS or n_points >= MOST_LINE:
                return line
            n_points = 2 * n_points - 1

    def _at_points(
        self, coded: Tensor, part: int, centre: Tensor, scale: Tensor, n_points: int
    ) -> Line:
        """Lines of ``n_points`` around their centres."""
        t = torch.linspace(-LINE_REACH, LINE_REACH, n_points, dtype=torch.float64)
        z = centre.unsqueeze(-1) + scale.unsqueeze(-1) * t.sinh()
        which = torch.tensor([part])
        number = self.columns.from_scores(z.unsqueeze(-1), which)
        slope = self.columns.to_scores(number, which)[1].squeeze(-1)
        rows = coded.repeat_interleave(n_points, 0)
        rows[:, part, 0] = self.columns.n_codes[part]
        rows[:, part, 1] = number.flatten()
        log_density = self.log_prob(rows).view(z.shape)
        log_width = (t.cosh() * (t[1] - t[0])).log() + scale.log().unsqueeze(-1) - slope.log()
        return Line(centre, scale, log_density, log_density + log_width)

    def _cell(self, z: Tensor, part: int) -> Tensor:
        """Coded cells ``(n, 2)`` of normal scores of draws."""
        which = torch.tensor([part])
        number = self.columns.from_scores(self.columns.in_range(z.unsqueeze(-1), which), which)
        code = self.columns.n_codes[part].to(number).expand(number.shape)
        return torch.cat([code, number], -1)

    # -- rows with gaps beside others -----------------------------------------------------------

    @functools.cached_property
    def _cell_scores(self) -> Tensor:
        """``(p,)``: mean log-likelihood of a cell given its row, over rows drawn."""
        rows = torch.from_numpy(self.sample(GAP_ROWS, 0))
        given = ~torch.eye(self.columns.dim, dtype=torch.bool)
        return torch.stack([self.conditional(rows, others)[0].mean() for others in given])

    def _gap_scores(self) -> Tensor:
        return self._cell_scores


def _patterns(missing: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """The parts of every pattern of a mask ``(n, p)``, and the numbers of its rows."""
    patterns, which = torch.unique(missing, dim=0, return_inverse=True)
    for k, pattern in enumerate(patterns):
        yield pattern.nonzero().flatten().tolist(), torch.nonzero(which == k).flatten()
