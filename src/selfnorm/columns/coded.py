"""Coded rows as a network sees them: a code for what is finite, a normal score for a number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor, nn

from selfnorm._saved import saved
from selfnorm.columns.kinds import Part
from selfnorm.errors import DataError

GAP, UNSEEN = -1, -2
ROWS_PER_STEP = 4  # equal values that make a step of the map
ROWS_PER_KNOT = 64  # of the map to normal scores, which costs half a nat of all rows for each knot
FAR = 1e6  # an open end of a cell, in normal scores
BEND = 1e3  # normal scores beyond this grow with the logarithm: all floats stay within FAR
EVERY = slice(None)  # of the parts


@saved("parts", "n_knots")
class CodedColumns(nn.Module):
    r"""The map of a table's numbers to normal scores, and the cells of those that have any.

    ``z = t_j(x)`` is piecewise linear between quantiles of the numbers of part ``j`` and the same
    quantiles of a standard normal, linear beyond the outermost ones. Some sixty rows stand
    behind each knot. Every marginal is then nearly normal, however skewed or heavy-tailed, and
    ``log dz/dx`` belongs to a density in the units of ``x``. Where numbers have cells the ends of a
    cell are mapped, and its mass needs no such term.

    Rows come coded, ``x (n, p, 2)``: ``x[..., 0]`` a code of :class:`Part` (-1 a gap, -2 a value
    never seen), ``x[..., 1]`` the number where there is one.

    Args:
        parts: what each of the ``p`` parts is.

    Example:
        >>> length = Part(0, "length", n_codes=0, rest=True)
        >>> number = torch.linspace(0, 1, 1001, dtype=torch.float64).square()
        >>> x = torch.stack([torch.zeros(1001), number], -1).unsqueeze(1)
        >>> columns = CodedColumns([length]).double().fit(x)
        >>> columns.pack(x)[0][500, 0].abs().max() < 0.05          # the median is the origin
        tensor(True)
    """

    step: Tensor
    origin: Tensor
    low: Tensor
    high: Tensor
    n_codes: Tensor
    n_values: Tensor
    values: Tensor
    scores: Tensor
    knots: Tensor
    span: Tensor
    log_share: Tensor
    fitted: Tensor

    def __init__(self, parts: Sequence[Part], n_knots: int = 64) -> None:
        super().__init__()
        if not parts:
            raise DataError("a table needs at least one column to be modelled")
        self.parts, self.n_knots = tuple(parts), n_knots
        for name, none in (("step", 0.0), ("origin", 0.0), ("low", -np.inf), ("high", np.inf)):
            numbers = [getattr(part, name) for part in parts]
            numbers = [none if number is None else number for number in numbers]
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.get_default_dtype()))
        self.limited = any(_limited(part) for part in parts)
        n_codes = torch.tensor([part.n_codes for part in parts])
        self.register_buffer("n_codes", n_codes, persistent=False)
        n_values = torch.tensor([part.n_codes - part.gap for part in parts])
        self.register_buffer("n_values", n_values, persistent=False)
        # the numbers that codes stand for, where they share their cells with other numbers
        places = torch.zeros(len(parts), int(n_codes.max()) + 1).to(self.step)
        for row, part in zip(places, parts, strict=True):
            row[: len(part.values)] = torch.tensor(part.values)
        self.register_buffer("values", places)
        levels = np.linspace(0, 1, n_knots + 2)[1:-1]
        scores = torch.tensor(ndtri(levels)).to(self.step)
        self.register_buffer("scores", scores.repeat(len(parts), 1))
        self.register_buffer("knots", self.scores.clone())
        # least and greatest score of a training row's number
        self.register_buffer("span", torch.tensor([-torch.inf, torch.inf]).repeat(len(parts), 1))
        # log-frequency of every outcome of a part: its codes, then the numbers
        self.register_buffer("log_share", torch.zeros_like(places))
        self.register_buffer("fitted", torch.tensor(False))

    @property
    def dim(self) -> int:
        """Number of parts."""
        return len(self.parts)

    @torch.no_grad()
    def fit(self, x: Tensor, *, straight: bool = False) -> CodedColumns:
        """Read quantiles and frequencies off coded rows ``(n, p, 2)``, in double precision.

        ``straight``: no quantiles; numbers are only centred and scaled.
        """
        table = x.detach().cpu().double().numpy()
        for j, part in enumerate(self.parts):
            code, number = table[:, j, 0], table[:, j, 1]
            values = number[code == part.n_codes] if part.rest else number[:0]
            counts = np.bincount(code[code >= 0].astype(int), minlength=part.n_codes + 1)
            outcomes = part.n_codes + part.rest
            share = (counts[:outcomes] + 0.5) / (counts[:outcomes] + 0.5).sum()
            self.log_share[j, :outcomes] = torch.from_numpy(np.log(share))
            if len(values) >= 2:
                which = torch.tensor([j])
                free = self._unlimited(torch.from_numpy(values)[:, None], which)[0][:, 0].numpy()
                width = 0.0 if _limited(part) else part.step or part.resolution
                if straight:
                    scores = np.linspace(-1.0, 1.0, self.n_knots)
                    knots = free.mean() + scores * max(free.std(), 1e-9 * abs(free).max(), 1e-30)
                else:
                    scores, knots = _quantile_knots(free, width, self.n_knots)
                self.scores[j], self.knots[j] = torch.from_numpy(scores), torch.from_numpy(knots)
            elif len(values) == 1:
                self.knots[j] = self.scores[j] * (part.step or 1.0) + float(values[0])
            if len(values) > 0:
                ends = torch.tensor([[values.min()], [values.max()]]).to(self.knots)
                self.span[j] = self.to_scores(ends, torch.tensor([j]))[0][:, 0]
        self.fitted.fill_(True)
        return self

    @property
    def keeps_range(self) -> bool:
        """Whether draws stay in the range of the training rows.

        Those of one or two continuous numbers do not: they follow the density out to its ends.
        """
        free = all(part.rest and part.n_codes == part.step == 0 for part in self.parts)
        return not free or self.dim > 2

    def in_range(self, z: Tensor, which: Tensor | slice = EVERY) -> Tensor:
        """Normal scores ``(..., p)`` of draws; those beyond a range that is kept, at its ends."""
        low, high = self.span[which].unbind(-1)
        return torch.maximum(torch.minimum(z, high), low) if self.keeps_range else z

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as a network sees them ``(n, p, 4)``, and ``log dz/dx`` ``(n, p)``.

        The four numbers are the code and, where it says "number", its normal score and those of
        the ends of its cell. ``log dz/dx`` is 0 but at continuous numbers, and minus infinity
        at their limits and beyond.
        """
        code, number = x.to(self.knots).unbind(-1)
        is_number = code == self.n_codes
        # a point mass has a place as well: where numbers have cells, one of them may be there too
        of_code = self.values.gather(1, code.clamp_min(0).long().T).T
        number = torch.where(is_number, number, of_code)
        z, slope = self.to_scores(number)
        left, right = self.ends(number)
        has_place = is_number | ((code >= 0) & (code < self.n_values) & (self.step > 0))
        packed = torch.stack([z, left, right], -1).where(has_place.unsqueeze(-1), 0.0)
        continuous = is_number & (self.step == 0)
        inside = (number > self.low) & (number < self.high)
        log_slope = slope.log().where(inside, -torch.inf).where(continuous, 0.0)
        return torch.cat([code.unsqueeze(-1), packed], -1), log_slope

    def unpack(self, code: Tensor, z: Tensor) -> Tensor:
        """Coded rows ``(n, p, 2)`` from codes and normal scores ``(n, p)``."""
        number = self.from_scores(z)
        number = torch.where(self.step > 0, self._centre(number), number)
        return torch.stack([code.to(number), number.where(code == self.n_codes, 0.0)], -1)

    def ends(self, number: Tensor, which: Tensor | slice = EVERY) -> tuple[Tensor, Tensor]:
        """Normal scores of the ends of the cells around numbers ``(..., p)``.

        A cell at a stated limit is open: it takes what lies beyond.
        """
        half = self.step[which] / 2
        left, right = number - half, number + half
        inside = 1e-3 * half
        return (
            self.to_scores(left, which)[0].where(left > self.low[which] + inside, -FAR),
            self.to_scores(right, which)[0].where(right < self.high[which] - inside, FAR),
        )

    def rounded(self, z: Tensor, shift: float, which: Tensor) -> Tensor:
        """Scores ``(..., len(which))`` of parts with cells, moved to the nearest centre of a cell.

        With ``shift=0.5`` to the nearest edge between two cells.
        """
        number = self._centre(self.from_scores(z, which), shift, which)
        return self.to_scores(number, which)[0]

    def to_scores(self, number: Tensor, which: Tensor | slice = EVERY) -> tuple[Tensor, Tensor]:
        """Normal scores of numbers ``(..., p)``, and the slope ``dz/dx`` there."""
        knots, scores = self.knots[which], self.scores[which]
        if not self.limited:
            return _bent(*_piecewise_linear(number, knots, scores))
        free, stretch = self._unlimited(number, which)
        z, slope = _bent(*_piecewise_linear(free, knots, scores))
        return z, slope * stretch

    def from_scores(self, z: Tensor, which: Tensor | slice = EVERY) -> Tensor:
        """Numbers from normal scores ``(..., p)``."""
        free = _piecewise_linear(_straightened(z), self.scores[which], self.knots[which])[0]
        if not self.limited:
            return free
        low, high, lower, upper = self._limits(which)
        inner = torch.where(lower & upper, low + (high - low) * torch.sigmoid(free), free)
        inner = torch.where(lower & ~upper, low + torch.exp(free), inner)
        return torch.where(upper & ~lower, high - torch.exp(-free), inner)

    def _limits(self, which: Tensor | slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Limits (0 where there is none) of continuous numbers, and which of them exist."""
        low, high, continuous = self.low[which], self.high[which], self.step[which] == 0
        lower, upper = torch.isfinite(low) & continuous, torch.isfinite(high) & continuous
        return low.where(lower, 0.0), high.where(upper, 0.0), lower, upper

    def _unlimited(self, number: Tensor, which: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Numbers mapped to the whole line (logarithm, logit), and the slope of that map."""
        low, high, lower, upper = self._limits(which)
        tiny = torch.finfo(number.dtype).tiny
        above = (number - low).clamp_min(tiny).where(lower, 1.0)
        below = (high - number).clamp_min(tiny).where(upper, 1.0)
        free = torch.where(lower | upper, above.log() - below.log(), number)
        slope_above = torch.where(upper, 1 / below, (~lower & ~upper).to(number))
        return free, torch.where(lower, 1 / above, 0.0) + slope_above

    def _centre(self, number: Tensor, shift: float = 0.0, which: Tensor | slice = EVERY) -> Tensor:
        step, origin = self.step[which].where(self.step[which] > 0, 1.0), self.origin[which]
        centre = origin + (torch.round((number - origin) / step - shift) + shift) * step
        if shift:
            return centre
        half = self.step[which] / 2  # limits are edges of cells
        return torch.maximum(torch.minimum(centre, self.high[which] - half), self.low[which] + half)


def _limited(part: Part) -> bool:
    """Whether continuous numbers of a part have a limit."""
    return part.step == 0 and (part.low is not None or part.high is not None)


def knots_for(n: int) -> int:
    """Number of knots for a table of ``n`` rows."""
    return 2 * (int(np.clip(n // ROWS_PER_KNOT, 4, 512)) + 14)


def _quantile_knots(
    values: np.ndarray, width: float, n_knots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Normal scores and numbers, ascending, ``n_knots`` each; equal values share their cell."""
    ordered = np.sort(values)
    m = len(ordered)
    own = int(np.clip(m / ROWS_PER_KNOT, 4, max(4, n_knots // 2 - 14)))
    levels = np.linspace(0, 1, own + 2)[1:-1]
    # ever finer towards the ends, down to a few rows
    tail = levels[0] / 2.0 ** np.arange(1, 8)
    levels = np.concatenate([levels, tail[tail * m >= 2], 1 - tail[tail * m >= 2]])
    if width > 0:
        # Equal values share the width by which they were recorded. Those that many rows have, but
        # too few for a point mass, are steps of the map: a sample falls on them as often.
        first = np.searchsorted(ordered, ordered, "left")
        count = np.searchsorted(ordered, ordered, "right") - first
        ordered = ordered + width * ((np.arange(m) - first + 0.5) / count - 0.5)
        starts = np.unique(first[count >= ROWS_PER_STEP])
        often = starts[np.argsort(-count[starts], kind="stable")][: (n_knots - len(levels)) // 2]
        levels = np.concatenate([levels, often / m, (often + count[often]) / m])
    levels = np.unique(levels[(levels > 0.5 / m) & (levels < 1 - 0.5 / m)])
    knots = np.interp(levels, (np.arange(m) + 0.5) / m, ordered)
    spread = max(knots[-1] - knots[0], abs(knots).max() * 1e-9, 1e-30)
    rising = np.maximum.accumulate(knots) + np.arange(len(knots)) * 1e-12 * spread
    scores = ndtri(levels)
    # as many knots for every part: further ones continue the last line
    beyond = np.arange(1, n_knots - len(levels) + 1)
    scores, rising = (
        np.concatenate([v, v[-1] + beyond * (v[-1] - v[-2])]) for v in (scores, rising)
    )
    return scores, rising


def _piecewise_linear(at: Tensor, points: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Interpolation of each part at ``(..., p)`` between ``points (p, k)``, and its slope.

    Beyond the ends it goes on with the slope of the outermost two knots.
    """
    flat = at.reshape(-1, at.shape[-1]).T.contiguous()  # (p, m)
    right = torch.searchsorted(points.contiguous(), flat).clamp(1, points.shape[-1] - 1)
    x0, x1, v0, v1 = (
        table.gather(-1, side) for table in (points, values) for side in (right - 1, right)
    )
    slope = (v1 - v0) / (x1 - x0).clamp_min(torch.finfo(at.dtype).tiny)
    interpolated = v0 + (flat - x0) * slope
    return interpolated.T.reshape(at.shape), slope.T.reshape(at.shape)


def _bent(z: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and slopes of a map that is logarithmic where the line goes beyond ``BEND``."""
    size = z.abs().clamp(BEND, torch.finfo(z.dtype).max)
    bent = torch.copysign(BEND * (1 + (size / BEND).log()), z)
    return torch.where(size > BEND, bent, z), slope * (BEND / size)


def _straightened(z: Tensor) -> Tensor:
    """The line at scores of :func:`_bent`; finite, and far from the end of the floats."""
    most = 0.8 * math.log(torch.finfo(z.dtype).max)
    size = (z.abs() / BEND - 1).clamp(0.0, most).exp() * BEND
    return torch.where(size > BEND, torch.copysign(size, z), z)
