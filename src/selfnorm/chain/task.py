"""How chains of one-dimensional EBMs are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selfnorm._context import seeded
from selfnorm.functional import bound_gap, ess, log_mean_exp, mixture_lower, snl
from selfnorm.training import ParameterGroup, Task, TensorSource, TrainingOptions, run

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
        objective: object = "snl",
        n_samples: int = 16,
        polish_steps: int = 200,
        validation_samples: int = 32,
    ) -> None:
        if getattr(objective, "name", objective) != "snl":
            raise ValueError(f"a chain of factors is trained by 'snl', not by {objective!r}")
        if n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, got {n_samples}")
        self.module = model
        self.n_samples = min(n_samples, MAX_SAMPLES)
        self.polish_steps = polish_steps
        self.validation_samples = validation_samples

    def parameter_groups(self) -> list[ParameterGroup]:
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


class _LogNormTask(Task):
    """``b`` alone, by the finished energies: the gap between the bounds becomes small."""

    def __init__(self, chain: Chain) -> None:
        self.chain, energy = chain, chain.energy
        self.module = nn.ModuleList([energy.norm_layers, energy.norm_last])
        self.gap = torch.tensor(torch.nan)

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """The gap, by 16 samples of every proposal."""
        with torch.no_grad():
            factors = self.chain.at_batch(batch, 0).factors
            y = self.chain.rounded(factors.proposal.sample(16))
            log_z = log_mean_exp(self.chain.tilt(y, factors))
        gap = bound_gap(log_z - self.chain.log_norm(factors)).sum(-1).mean()
        self.gap = gap.detach()
        return gap, {}

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:  # noqa: ARG002
        """The gap at the last step."""
        return {"gap": float(self.gap)}


class _Drawn(TensorSource):
    """Rows drawn with replacement, a batch an epoch."""

    def __init__(self, tensors: tuple[Tensor, ...], size: int) -> None:
        super().__init__(tensors)
        self.size = size

    def __len__(self) -> int:
        """Size of the batch."""
        return self.size

    def epoch(self, device: torch.device) -> Tensor:
        """Row numbers of one batch."""
        return torch.randint(len(self.tensors[0]), (self.size,), device=device)


def polished(chain: Chain, data: tuple[Tensor, ...], steps: int) -> dict[str, float]:
    """Fit ``b`` to the finished energies; the gap that is left."""
    if steps < 1:
        return {}
    # A step takes as long on a CPU as there are rows.
    size = min(len(data[0]), 512 if data[0].is_cuda else 128)
    options = TrainingOptions(
        batch_size=size,
        max_epochs=steps,
        lr=2e-3,
        optimizer="adam",
        schedule="linear",
        clip_norm=None,
        validate_every=steps,
        progress=False,
    )
    return run(_LogNormTask(chain), _Drawn(data, size), options=options).final
