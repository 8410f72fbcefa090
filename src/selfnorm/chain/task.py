"""How chains of one-dimensional EBMs are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.functional import bound_gap, ess, log_mean_exp, mixture_lower, snl
from selfnorm.training import Task

if TYPE_CHECKING:
    from selfnorm.chain.model import Chain

MAX_SAMPLES = 32


class AutoregressiveTask(Task):
    r"""Maximum likelihood for the proposals, SNL for energy, context and ``b``, for all factors.

    The loss is ``-mean_x sum_i [ log q_i(x_i) + l_SNL,i ]`` with ``l_SNL,i`` the self-normalised
    log-likelihood of factor ``i`` relative to its proposal, which is held fixed in it. Discrete
    values are spread out afresh at every step (see :mod:`selfnorm.columns.columns`). A batch is
    ``(x,)`` or ``(x, condition)``; of a table ``(x,)`` or ``(x, weights)``, how much each row
    counts for each order, ``(n, R)``, and after these which cells are learned, ``(n, p)``.

    Args:
        objective: ``"snl"``, the only one.
        n_samples: stratified proposal samples per factor and row, 32 at most: a one-dimensional
            factor with a proposal close to it gains nothing from more.
        polish_steps: steps given to ``b`` alone at the end, everything else fixed.
        validation_samples: samples per factor when validating.
    """

    module: Chain
    capturable = True

    def __init__(
        self,
        model: Chain,
        *,
        objective: Any = "snl",
        n_samples: int = 16,
        polish_steps: int = 200,
        validation_samples: int = 32,
    ) -> None:
        if getattr(objective, "name", objective) != "snl":
            raise ValueError(f"a chain of factors is trained by 'snl', not by {objective!r}")
        if n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, got {n_samples}")
        self.module = model
        self.capturable = not model.asks_host
        self.n_samples = min(n_samples, MAX_SAMPLES)
        self.polish_steps = polish_steps
        self.validation_samples = validation_samples

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices with weight decay, biases without."""
        return self.module.parameter_groups()

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Check the rows; read the columns' scales unless they are set already."""
        self.module.start(*data)

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Negative of proposal log-likelihood plus SNL, per row, averaged over the orderings."""
        terms = self.module.at_batch(batch, self.n_samples)
        b = self.module.log_norm(terms.factors)
        tilt = snl(terms.minus_energy, terms.log_w, b, reduction="none")
        of_rows = terms.log_q.sum(-1) + tilt.sum(-1)  # (R, n)
        weights = self.module.weights_of(batch)
        loss = -(of_rows if weights is None else weights * of_rows).mean()
        with torch.no_grad():
            gap = bound_gap(log_mean_exp(terms.log_w) - b).sum(-1).mean()
        return loss, {"lower": terms.log_det.mean() - loss.detach(), "gap": gap}

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Bounds of the held-out log-likelihood, under noise that is the same every time.

        The ``score`` of a chain that is trained for conditionals counts those of random columns,
        given the others, as much as whole rows.
        """
        totals = torch.zeros(5, device=data[0].device, dtype=torch.float64)
        counted = 0.0
        with seeded(0, data[0].device):
            for rows in self.module.chunks(len(data[0]), self.validation_samples + 1):
                part = tuple(t[rows] for t in data)
                terms = self.module.at_batch(part, self.validation_samples)
                log_z, b = log_mean_exp(terms.log_w), self.module.log_norm(terms.factors)
                upper, learned = terms.log_prob(log_z), terms.log_prob(b)
                lower = upper - bound_gap(log_z - b).sum(-1)
                log_q = terms.log_q.sum(-1) + terms.log_det
                weights, of_row = self.module.weights_of(part), torch.ones(len(part[0]))
                if weights is not None:  # a row may be held out for some of the orders only
                    of_row = weights.mean(0)
                    among = (weights / of_row.clamp_min(1e-30)).log().clamp_min(-1e3)
                    lower, learned, upper, log_q = (
                        t + among for t in (lower, learned, upper, log_q)
                    )
                bounds = mixture_lower(lower, learned), log_mean_exp(upper)
                score = bounds[0]
                partial = self.module.of_random_columns(part, self.validation_samples)
                if partial is not None:
                    score = score + log_mean_exp(partial if weights is None else partial + among)
                figures = (score, *bounds, ess(terms.log_w).mean((0, 2)), log_mean_exp(log_q))
                of_row = of_row.to(totals)
                totals += torch.stack([(of_row * t).sum() for t in figures])
                counted += float(of_row.sum())
        names = ("score", "lower", "upper", "ess", "proposal")
        return dict(zip(names, (totals / counted).tolist(), strict=True))

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Fit ``b`` to the finished energy: minimise the gap of the bounds over ``b`` alone."""
        return self.module.fit_log_norm(data, self.polish_steps)
