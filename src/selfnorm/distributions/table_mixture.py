"""Mixtures of Gaussians over the coded rows of a table: the simple distributions of its columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.linalg import solve_triangular
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus

from selfnorm._context import SeedLike, seeded
from selfnorm._saved import saved
from selfnorm.columns import GAP, UNSEEN, CodedColumns, Part
from selfnorm.distributions.mixtures import log_normal_mass

PLACES_AT_ONCE = 2**20  # rows x components x numbers: malloc keeps larger blocks
BANDWIDTHS = np.geomspace(0.08, 1.2, 16)  # of kernels, in units of the spread around the lines
STRENGTHS = 10.0 ** np.arange(-6.0, 2.1, 0.5)  # of a ridge, per row
MOST_LEVERAGE = 0.9  # of rows on average, under which residuals of rows left out mean something
LEAST_SHARE = 1e-12  # of the row that counts most: a row that counts less does not count
LEAST_SPREAD = 1e-4  # around a line, in units of the columns
HIDDEN = 1e6  # variance added to what a row does not have, so that nothing follows from it
_LOG_2PI = math.log(2 * math.pi)


@saved()
class TableMixture(nn.Module):
    r"""``p(x) = sum_k w_k prod_j P_k(c_j) f_k(z_j | z_before j)`` over parts of every kind.

    A component has probabilities ``P_k`` of the codes of each part and a Gaussian of its numbers,
    written as a chain of lines: ``f_k`` is normal around a linear function of the numbers before
    it, or the mass of that in the cell of the number, given the centres of the cells before.
    So all of it is exactly normalised, in the measure of a :class:`~selfnorm.chain.TableChain`.
    Numbers that a row does not have (gaps, point masses) are integrated out.

    One component is a Gaussian distribution, several are a mixture, and one for each row, all of
    one shape (``shared``), are a kernel density.

    Args:
        parts: what the parts of the table are.
        components: how many.
        shared: whether all components have one shape.
        n_knots: of the map of the numbers.

    Example:
        >>> parts = [Part(0, "a", 0, rest=True), Part(1, "b", 0, rest=True)]
        >>> x = torch.randn(200, 2, dtype=torch.float64)
        >>> coded = torch.stack([torch.zeros_like(x), x], -1)
        >>> mixture = TableMixture(parts).double()
        >>> packed, _ = mixture.columns.fit(coded, straight=True).pack(coded)
        >>> mixture.fit(packed, torch.ones(200, 1)).log_prob(packed).shape
        torch.Size([200])
    """

    log_weights: Tensor
    means: Tensor
    slopes: Tensor
    spread: Tensor
    log_codes: Tensor

    def __init__(
        self,
        parts: Sequence[Any],
        *,
        components: int = 1,
        shared: bool = False,
        n_knots: int = 2,
    ) -> None:
        super().__init__()
        parts = [part if isinstance(part, Part) else Part(**part) for part in parts]
        self.config = {"parts": parts}
        self.columns = CodedColumns(parts, n_knots)
        self.n_components, self.shared, self.dim = components, shared, len(parts)
        self.numbers = [j for j, part in enumerate(parts) if part.rest]
        d, shapes = len(self.numbers), 1 if shared else components
        outcomes = [part.n_codes + part.rest for part in parts]
        self.finite = [j for j, part in enumerate(parts) if outcomes[j] > 1 or part.unseen > 0]
        self.register_buffer("log_weights", torch.full((components,), -math.log(components)))
        self.register_buffer("means", torch.zeros(components, d))
        self.register_buffer("slopes", torch.zeros(shapes, d, d))
        self.register_buffer("spread", torch.ones(shapes, d))
        log_codes = torch.full((components, len(self.finite), max(outcomes)), -torch.inf)
        for i, j in enumerate(self.finite):
            log_codes[:, i, : outcomes[j]] = -math.log(outcomes[j])
        self.register_buffer("log_codes", log_codes)

    # -- fits -----------------------------------------------------------------------------------

    @torch.no_grad()
    def fit(self, packed: Tensor, shares: Tensor) -> TableMixture:
        """Fit each component to packed rows ``(n, p, 4)`` by its shares ``(n, K)`` in them."""
        z, present = (t.numpy() for t in self._numbers(packed))
        for k in range(self.n_components):
            weight = shares[:, k].double().numpy()
            weight = np.where(weight < LEAST_SHARE * weight.max(), 0.0, weight)
            of = weight[:, None] * present
            counts = np.maximum(of.sum(0), 1e-12)
            mean = (of * z).sum(0) / counts
            away = np.where(present, z - mean, 0.0)
            slopes, spread, _ = ridge_lines(away, np.arange(z.shape[1]), weight)
            spread = spread / np.sqrt(np.clip(counts / weight.sum(), 1e-2, 1))  # of those present
            self.means[k], self.slopes[k] = torch.from_numpy(mean), torch.from_numpy(slopes)
            self.spread[k] = torch.from_numpy(spread)
        self.log_weights.copy_((shares.sum(0) / shares.sum()).log())
        self._fit_codes(packed, shares)
        return self

    @torch.no_grad()
    def fit_kernels(self, packed: Tensor, weights: Tensor) -> TableMixture:
        """One component around each of the packed rows, which have all their numbers.

        All have the shape of the lines; their width is the one under which each row is most likely
        given the others.
        """
        z, _ = self._numbers(packed)
        d = z.shape[1]
        away = (z - z.mean(0)).numpy()
        slopes, spread, _ = ridge_lines(away, np.arange(d), weights.double().numpy())
        self.slopes[0], self.spread[0] = torch.from_numpy(slopes), torch.from_numpy(spread)
        self.means.copy_(z)
        log_weights = (weights / weights.sum()).double().log()
        self.log_weights.copy_(log_weights)
        straight = (z - z @ self.slopes[0].double().T) / self.spread[0].double()
        distance = torch.cdist(straight, straight).square().fill_diagonal_(torch.inf)
        scores = []
        for width in BANDWIDTHS:
            log_p = torch.logsumexp(log_weights - distance / (2 * width**2), 1)
            scores.append(float((log_weights.exp() * (log_p - d * math.log(width))).sum()))
        self.spread.mul_(float(BANDWIDTHS[int(np.nanargmax(scores))]))
        return self

    def _fit_codes(self, packed: Tensor, shares: Tensor) -> None:
        """Frequencies of the codes in each component, drawn to those of all rows by one row."""
        for i, j in enumerate(self.finite):
            part = self.columns.parts[j]
            code, outcomes = packed[:, j, 0].long(), part.n_codes + part.rest
            seen = (code >= 0).to(shares)
            hot = one_hot(code.clamp_min(0), outcomes).to(shares)
            counts = (shares * seen.unsqueeze(1)).T @ hot  # (K, outcomes)
            pooled = (counts.sum(0) + 0.5) / (counts.sum(0) + 0.5).sum()
            shares_of_codes = (counts + pooled) / (counts.sum(1, keepdim=True) + 1)
            self.log_codes[:, i, :outcomes] = shares_of_codes.log().to(self.log_codes)

    # -- densities ------------------------------------------------------------------------------

    def _numbers(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of numbers ``(n, D)``, 0 where there is none, and where there is one."""
        code, z = packed[:, self.numbers, :2].unbind(-1)
        present = code == self.columns.n_codes[self.numbers]
        return z.where(present, 0.0).double(), present

    @torch.no_grad()
    def log_prob(self, packed: Tensor) -> Tensor:
        """``(n,)``: log-probability of packed rows; gaps are left out."""
        pieces = [torch.logsumexp(self._of_components(rows), 1) for rows in self._pieces(packed)]
        return torch.cat(pieces)

    def _pieces(self, packed: Tensor) -> Iterator[Tensor]:
        """A few rows at a time."""
        size = max(1, PLACES_AT_ONCE // (self.n_components * max(1, len(self.numbers))))
        return (rows.to(self.means) for rows in packed.split(size))

    def _of_components(self, packed: Tensor) -> Tensor:
        """``(n, K)``: log of weight times probability of packed rows."""
        log_p = self.log_weights + self._log_of_codes(packed)
        for rows, pattern in _alike(self._numbers(packed)[1]):
            log_p[rows] += self._log_of_numbers(packed[rows], pattern)
        return log_p

    def _normal(self, pattern: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers, given those of a pattern that come before.

        A root of their covariance ``(k, d, d)``, in which the others are noise, and the spreads
        ``(k, d)``.
        """
        root = torch.linalg.solve_triangular(
            torch.eye(len(pattern)).to(self.slopes) - self.slopes,
            torch.diag_embed(self.spread), upper=False,
        )  # fmt: skip
        if bool(pattern.all()):
            return root, self.spread
        covariance = root @ root.mT
        noise = torch.diag_embed(HIDDEN**2 * (~pattern).to(root))
        root = torch.linalg.cholesky(covariance + noise)
        left = covariance.diagonal(dim1=1, dim2=2) - root.tril(-1).square().sum(-1)
        return root, left.clamp_min(LEAST_SPREAD**2).sqrt()

    def _log_of_numbers(self, packed: Tensor, pattern: Tensor) -> Tensor:
        """``(n, K)``: of the numbers of rows that all have those of one pattern."""
        _, z, left, right = packed[:, self.numbers].unbind(-1)
        root, spread = self._normal(pattern)
        means, z = self.means * pattern, z * pattern
        if self.shared:
            off = torch.linalg.solve_triangular(root[0], torch.cat([z, means]).T, upper=False).T
            off = off[: len(z)].unsqueeze(1) - off[len(z) :]
        else:
            away = z.unsqueeze(1) - means  # (n, K, d)
            off = torch.linalg.solve_triangular(root, away.permute(1, 2, 0), upper=False)
            off = off.permute(2, 0, 1)
        log_f = -0.5 * (off.square() + _LOG_2PI) - spread.log()
        cells = (self.columns.step[self.numbers] > 0) & pattern
        if bool(cells.any()):
            ends = (
                off[..., cells] + (end - z)[:, cells].unsqueeze(1) / spread[:, cells]
                for end in (left, right)
            )
            log_f[..., cells] = log_normal_mass(*ends)
        added = self._log_of_cells_at_masses(packed, off, root, spread)
        return log_f[..., pattern].sum(-1) + added

    def _log_of_cells_at_masses(
        self, packed: Tensor, off: Tensor, root: Tensor, spread: Tensor
    ) -> Tensor | float:
        """``(n, K)``: what numbers in the cells of point masses add to the log of their codes.

        Args:
            packed: ``(n, p, 4)``.
            off: ``(n, K, d)`` how far numbers are from their lines.
            root, spread: of the numbers, see :meth:`_normal`.
        """
        parts = self.columns.parts
        shared = [j for j in self.finite if parts[j].rest and parts[j].step > 0]
        n_codes = self.columns.n_codes[shared]
        code = packed[:, shared, 0].long()
        at_mass = (code >= 0) & (code < n_codes)
        used = at_mass.any(0)
        if not bool(used.any()):
            return 0.0
        of_parts = [j for j, is_used in zip(shared, used.tolist(), strict=True) if is_used]
        place = torch.tensor([self.numbers.index(j) for j in of_parts])
        finite = torch.tensor([self.finite.index(j) for j in of_parts])
        code, n_codes, at_mass = code[:, used], n_codes[used], at_mass[:, used]
        lines = self.means[:, place] + torch.einsum("nki,kji->nkj", off, root.tril(-1)[:, place])
        ends = (
            (end.unsqueeze(1) - lines) / spread[:, place]
            for end in packed[:, of_parts, 2:].unbind(-1)
        )
        log_rest = self.log_codes[:, finite, n_codes] + log_normal_mass(*ends)
        own = self.log_codes[:, finite, torch.minimum(code.clamp_min(0), n_codes)].movedim(0, 1)
        return softplus(log_rest - own).where(at_mass.unsqueeze(1), 0.0).sum(-1)

    def _log_of_codes(self, packed: Tensor) -> Tensor:
        """``(n, K)``: of the codes of the parts that have any."""
        log_p = packed.new_zeros(len(packed), self.n_components)
        for i, j in enumerate(self.finite):
            part, code = self.columns.parts[j], packed[:, j, 0].long()
            outcomes = part.n_codes + part.rest
            log_code = self.log_codes[:, i].T[code.clamp(0, outcomes - 1)]  # (n, K)
            if part.unseen > 0:
                log_seen = log_code + math.log1p(-part.unseen)
                unseen = (code == UNSEEN).unsqueeze(1)
                log_code = torch.where(unseen, math.log(part.unseen), log_seen)
            log_p = log_p + log_code.where((code != GAP).unsqueeze(1), 0.0)
        return log_p

    # -- samples --------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self, n: int, given: Tensor | None = None, *, within: bool = False, seed: SeedLike = None
    ) -> Tensor:
        """Packed rows ``(n, p, 4)``, whose last two numbers are not filled in.

        ``given``: packed rows ``(n, p, 4)`` whose gaps are drawn, given all that they have. This is
        exact, except where cells are wide beside the spread around a line. ``within`` moves numbers
        beyond the range of the training rows to its ends.
        """
        if given is None:
            given = torch.zeros(n, self.dim, 4)
            given[..., 0] = GAP
        rows = given.to(self.means, copy=True)
        if n == 0:
            return rows
        free, present = rows[..., 0] == GAP, self._numbers(rows)[1]
        with seeded(seed):
            component = torch.cat([self._draw_components(piece) for piece in self._pieces(rows)])
            drawn = self.columns.n_codes.to(rows).repeat(n, 1)
            for i, j in enumerate(self.finite):
                drawn[:, j] = torch.multinomial(self.log_codes[component, i].exp(), 1)[:, 0]
            noise = torch.randn(n, len(self.numbers)).to(rows)
        rows[..., 0] = drawn.where(free, rows[..., 0])
        of = torch.zeros_like(component) if self.shared else component
        root = self._normal(torch.ones(len(self.numbers), dtype=torch.bool))[0]
        for k in torch.unique(of):
            of_component = torch.nonzero(of == k).flatten()
            for places, pattern in _alike(present[of_component]):
                at = of_component[places]
                at_once = self.means[component[at]], noise[at], free[at]
                rows[at] = self._with_numbers(rows[at], pattern, root[k], *at_once, within)
        return rows

    def _draw_components(self, rows: Tensor) -> Tensor:
        """``(n,)``: a component for each of the packed rows."""
        once, place = torch.unique(rows, dim=0, return_inverse=True)
        return torch.multinomial(torch.softmax(self._of_components(once), 1)[place], 1)[:, 0]

    def _with_numbers(
        self, rows: Tensor, given: Tensor, root: Tensor, means: Tensor, noise: Tensor,
        free: Tensor, within: bool,
    ) -> Tensor:  # fmt: skip
        """Packed rows of one component, with numbers drawn where they are not ``given (d,)``.

        A number is drawn given the centres of the cells before, as in :meth:`log_prob`. Where a
        point mass has no number, one is drawn all the same and not rounded, which integrates it
        out.
        """
        order = torch.argsort((~given).long(), stable=True)  # those that are given come first
        lines = torch.linalg.qr(root[order].mT).R.mT
        lines = lines * lines.diagonal().sign()
        means, off, first = means[:, order], noise[:, order], int(given.sum())
        places = [self.numbers[i] for i in order]
        away = rows[:, places[:first], 1] - means[:, :first]
        off[:, :first] = torch.linalg.solve_triangular(lines[:first, :first], away.T, upper=False).T
        for i, j in list(enumerate(places))[first:]:
            line = means[:, i] + off[:, :i] @ lines[i, :i]
            z = line + lines[i, i] * off[:, i]
            kept = z.clamp(*self.columns.span[j]) if within else z
            if self.columns.step[j] > 0:
                kept = self.columns.rounded(kept.unsqueeze(1), 0.0, torch.tensor([j]))[:, 0]
            z = kept.where(rows[:, j, 0] == self.columns.n_codes[j], z)
            off[:, i] = (z - line) / lines[i, i]
            rows[:, j, 1] = z.where(free[:, j], rows[:, j, 1])
        return rows


def _alike(present: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Places of rows ``(n, d)`` that have the same numbers, and which these are ``(d,)``."""
    if present.shape[1] == 0:
        return
    if bool(present.all()):  # to sort many rows takes longer than to score them
        yield torch.arange(len(present)), torch.ones_like(present[0])
        return
    patterns, which = torch.unique(present, dim=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        yield torch.nonzero(which == number).flatten(), pattern


def ridge_lines(
    z: np.ndarray, order: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ridge regressions of each column of ``z (n, d)`` on those before it in ``order``.

    The strength of a ridge is the one that predicts rows left out best, and the spread is that of
    their residuals. The residual of a row left out is its own residual over one minus its leverage.

    Args:
        z: rows in units of about one.
        order: the columns, first to last.
        weights: ``(n,)`` how much a row counts; 0: not at all.

    Returns:
        Slopes ``(d, d)``, spread ``(d,)`` and residuals ``(n,)`` of all rows, those that
        count as if they had been left out.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> a, b = rng.normal(size=(2, 500))
        >>> slopes, spread, _ = ridge_lines(np.c_[a, a + 0.1 * b], np.array([0, 1]), np.ones(500))
        >>> slopes.round(2)[1].tolist(), spread.round(1).tolist()
        ([1.0, 0.0], [1.0, 0.1])
    """
    d = z.shape[1]
    root = np.sqrt(weights / weights.sum())[:, None]  # squares add to one
    counted = root[:, 0] > 0
    rows, share = (root * z[:, order])[counted], root[counted]
    slopes, spread, out = np.zeros((d, d)), np.sqrt((rows**2).sum(0)), rows.copy()
    least, upper = np.full(d, np.inf), np.linalg.qr(rows, mode="r")
    for strength in STRENGTHS:
        # rows and ridge are R' R: the columns of R above a place are a root for those before it,
        # and rows over R have squares that add up to the leverages
        ridge = np.vstack([upper, np.sqrt(strength) * np.eye(d)])
        corner = np.asarray(np.linalg.qr(ridge, mode="r"))
        apart = solve_triangular(corner, rows.T, trans="T", check_finite=False).T
        leverage = share**2 + np.pad(np.cumsum(apart[:, :-1] ** 2, 1), ((0, 0), (1, 0)))
        away = apart * corner.diagonal() / np.clip(1 - leverage, 1e-3, None)
        squares = (away**2).sum(0)
        # lines through all rows, where there are fewer rows than columns, predict none of them
        if strength < STRENGTHS[-1]:
            squares[leverage.mean(0) > MOST_LEVERAGE] = np.inf
        better = np.flatnonzero(squares < least)
        better = better[better > 0]  # the first has nothing before it
        lines = solve_triangular(corner, np.eye(d)[:, better], check_finite=False)
        slopes[better] = np.eye(d)[better] - (lines * corner.diagonal()[better]).T
        least[better], out[:, better] = squares[better], away[:, better]
    spread[1:] = np.sqrt(least[1:])
    place = np.argsort(order)
    slopes, spread = slopes[place][:, place], spread[place]
    left = z - z @ slopes.T
    left[counted] = (out / share)[:, place]
    return slopes, np.maximum(spread, LEAST_SPREAD), left
