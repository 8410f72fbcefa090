"""How an :class:`~selfnorm.chain.model.AutoregressiveEBM` is trained, and with which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.columns import Part
from selfnorm.functional import bound_gap, ess, log_mean_exp, mixture_lower, snl
from selfnorm.training import Task

if TYPE_CHECKING:
    from selfnorm.chain.model import Chain

MAX_SAMPLES = 32
FEWEST_IN_FOLDS, FOLDED_BELOW = 15, 2500  # rows of tables that are judged by folds
N_FOLDS = 3
MASKED = 0.4, 0.9  # share of the rows trained with columns given: without gaps, with gaps in all
# rows x columns x orders of all steps on a small table (of fewer than 500 rows, of more), in units
# of its cells, which count as so many at least
PLACES, FEWEST_CELLS = (42, 27), 24_000


@dataclass(frozen=True)
class Defaults:
    """Recommended sizes: ``model`` for the constructor, ``task`` and ``fit`` for training.

    ``orders_per_fold`` orders are trained without the same fold of a small table; 0: no folds.
    """

    model: dict[str, Any]
    task: dict[str, Any]
    fit: dict[str, Any]
    orders_per_fold: int = 0


def default_options(n: int, d: int, device: str | torch.device = "cpu") -> Defaults:
    """Sizes and training options for ``n`` rows of ``d`` columns.

    Small tables overfit: they get fewer steps, more dropout and, on a GPU, more orderings to
    average. On a CPU four chains of moderate width (fewer in more than 20 dimensions) train in
    minutes: some three for 15,000 rows of ten columns on two cores.

    Example:
        >>> default_options(20_000, 8).model["orderings"]
        4
    """
    many, wide, small = n >= 30_000, d > 20, n < 2000
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        large = many and not wide
        model: dict[str, Any] = {
            "orderings": 4 if many or wide else 8,
            "hidden": 1024 if wide else 512,
            "blocks": 3 if large else 2,
            "components": 20 if large else 10,
            "context": 64,
            "energy_hidden": 64,
            "energy_blocks": 2,
            "drop": 0.1 if large else 0.3 if wide else 0.2,
            "drop_context": False,
        }
        steps = 5000 if large else 2500 if wide else 2000
        batch, n_samples = 512, 12 if wide else 16
    else:
        model = {
            "hidden": 64 if small else 256,
            "components": 5 if small else 8,
            "context": 16 if small else 32,
            "energy_hidden": 32,
            "energy_blocks": 1,
            "drop": 0.1,
            "drop_context": small,
            "orderings": 1 if small or d > 40 else 2 if d > 20 else 4,
        }
        # Twice as many steps of half the batch take as long and reach a little further; from some
        # 8,000 rows on, a longer run pays as well.
        steps = int(max(60, 4 * n**0.6) if small else min(4000, max(8 * n**0.6, 1.2 * n**0.81)))
        batch, n_samples = (min(256, max(16, n // 8)), 8) if small else (128, 4)
    fit = {
        "batch_size": batch,
        "max_epochs": 10**6,
        "max_steps": steps,
        "lr": 1e-3 if on_gpu else 3e-3 if small else 2e-3,
        "weight_decay": 1e-2,
        "clip_norm": 5.0,
        "ema": 0.99 if steps <= 1000 else 0.998 if on_gpu or steps > 2000 else 0.995,
        "validate_every": max(20, steps // (25 if on_gpu else 12 if small else 8)),
    }
    polish_steps = min(200 if on_gpu else 60, steps // 8)
    if on_gpu and wide:
        polish_steps = 600  # the gap is a sum over the columns
    task = {"n_samples": n_samples, "validation_samples": 16, "polish_steps": polish_steps}
    return Defaults({"encoding": "quantiles", "blocks": 2, **model}, task, fit)


def table_options(
    n: int, parts: Sequence[Part], device: str | torch.device = "cpu", *, gaps: float = 0.0
) -> Defaults:
    """Sizes and training options of a :class:`~selfnorm.chain.TableChain`.

    Categories are overfitted after some twenty passes over the rows, numbers after a hundred and
    more: the length of the run follows from the share of the parts that are numbers. The best
    state by held-out rows is kept, and a run that no longer gains ends early. Where numbers repeat
    weights decay faster. On a CPU a table of numbers has a short run. The more rows have
    gaps, the more are trained with random columns given, so that gaps can be filled; that takes
    longer to learn, and to overfit.

    Args:
        n: rows of the table.
        parts: its parts.
        device: where it is trained.
        gaps: share of the rows that have some.

    Example:
        >>> table_options(20_000, [Part(0, "size", 0, rest=True)]).model["orderings"]
        2
    """
    on_gpu = torch.device(device).type == "cuda"
    parts = [part for part in parts if not part.certain] or parts  # nothing is to be learned there
    asked: dict[str, Any] = {"masked": MASKED[0] + gaps * (MASKED[1] - MASKED[0]), "ordered": True}
    most = max(part.n_codes for part in parts)
    if not on_gpu and (most == 0 or n >= FOLDED_BELOW):
        asked["embedding"] = min(16, most + 2)  # of as many tokens: the codes, a number, a gap
    if FEWEST_IN_FOLDS <= n < FOLDED_BELOW:
        return _folded_options(n, len(parts), asked, gaps)
    p = len(parts)
    numbers = sum(part.rest for part in parts) / p
    # a table of numbers, and whether hardly any of them repeats
    of_numbers = gaps == 0 and all(part.rest or len(part.values) > 2 for part in parts)
    plain = of_numbers and all(part.rest and part.n_codes <= 2 for part in parts)
    decay, few = 1e-2, n < 30_000
    wide, large = p > 20, not few and numbers > 0.5
    passes = (20 + 150 * numbers**2) * (1 + 2 * gaps)
    if on_gpu and n >= FOLDED_BELOW:
        model: dict[str, Any] = {
            "orderings": 8 if numbers > 0.5 and few and not wide else 4,
            "hidden": 1024 if wide and numbers > 0.5 else 512,
            "blocks": 3 if large and not wide else 2,
            "components": 20 if large and not wide else 10,
            "energy_hidden": 64,
            "drop": 0.1 if large and not wide else 0.3 if wide or numbers < 0.5 else 0.2,
        }
        batch, n_samples, lr, ema = 512, 8, 1e-3, 0.998
        if of_numbers and few:
            # levels of few rows are known by heart, which weight decay prevents, dropout alone not
            decay, model["drop"] = (0.2, model["drop"]) if plain else (1.0, 0.3)
        elif plain and not wide:
            asked["masked"] = 0.25
        steps = min(3000 if wide else 6000, max(500 * (1 + 2 * gaps), passes * n / batch))
    else:
        model = {
            "orderings": 1 if p > 40 else 2,
            "hidden": 320,
            "components": 8,
            "context": 32,
            "energy_hidden": 32,
            "drop": 0.2 if numbers < 0.5 else 0.1,
        }
        batch, n_samples, lr, ema = 128, 4, 1.5e-3, 0.998
        if numbers > 0.5:
            batch, lr = 256, 2e-3
        steps = min(8000, max(500, passes * n / batch))
        if numbers > 0.5:  # a longer run gains little, and takes as long as it is
            steps = min(steps, 4500, 34 * n**0.5)
        if numbers > 0.5 and gaps == 0 and not of_numbers and not wide:
            # categories beside them: overfitted early, so more orders, of which each errs otherwise
            model |= {"orderings": 6, "hidden": 208, "components": 10}
            steps, lr, asked["masked"] = min(steps, 2700, 20 * n**0.5), 4e-3, 0.25
        if of_numbers:
            steps = min(steps, p**0.25 * min(0.6 * n**0.7, 4.0 * n**0.5))
            # a short run takes longer strides
            lr, ema = min(6e-3, 12 / steps), 0.998 if steps > 2000 else 0.995
            if n < 100_000:  # twice as many steps of half the batch reach further
                batch, steps, lr = 128, 2 * steps, min(4e-3, 6 / steps)
                asked["masked"] = 0.25
            if not plain:  # the run may be longer with decay; finite parts make a step slower
                decay = 0.5 if few else decay
                steps *= max(0.6, numbers * (1.7 if few else 1.0))
        if n < FEWEST_IN_FOLDS:
            model |= {"orderings": 1, "hidden": 16, "components": 2, "context": 4}
            batch, steps, lr, ema = n, 20, 2e-3, 0.9
    fit = {
        "batch_size": batch,
        "max_epochs": 10**6,
        "max_steps": int(steps),
        "lr": lr,
        "weight_decay": decay,
        "clip_norm": 5.0,
        "ema": ema,
        "validate_every": max(20, int(steps) // (20 if gaps > 0.5 else 12)),
        "patience": 4,
    }
    task = {
        "n_samples": n_samples,
        "validation_samples": 16 if on_gpu else 8,
        "polish_steps": 0,  # b is hardly asked for: every factor is normalised by a quadrature
    }
    return Defaults(model | asked, task, fit)


def _folded_options(n: int, p: int, asked: dict[str, Any], gaps: float) -> Defaults:
    """Those of a small table, whose orders are trained without one fold each, all at once.

    Those of up to 800 rows of 30 columns take some ten seconds on one core.
    """
    tiny, orders_per_fold = n < 500, 2 if n * p <= 6000 else 1
    orders = orders_per_fold * N_FOLDS
    batch = min(64, max(16, n // 8)) if n < 1000 else 128
    slower = 1 + gaps * (not tiny)  # conditionals of more rows take longer to learn
    places = PLACES[not tiny] * max(n * p, FEWEST_CELLS) * (2 * slower - 1)
    steps = int(max(40, min(8 * n**0.65, places / (batch * p * orders))))
    model = {
        "orderings": orders,
        "hidden": 32 if tiny else 64,
        "components": 4,
        "context": 8,
        "energy_hidden": 16,
        "drop": 0.2,
    }
    fit = {
        "batch_size": batch,
        "max_epochs": 10**6,
        "max_steps": steps,
        "lr": 8e-3 / slower,
        "weight_decay": 1e-2 + 0.3 * gaps,  # rows that are drawn anew are seen the longest
        "clip_norm": 5.0,
        "ema": 0.95 if tiny else 0.98,
        "validate_every": max(5, steps // (20 if tiny else 12)),
        "patience": 4,
    }
    task = {"n_samples": 4, "validation_samples": 6, "polish_steps": 0}
    return Defaults(model | asked, task, fit, orders_per_fold)


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
        self.capturable = not getattr(model, "has_roots", False)
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
        at, log_q, f, log_w, log_det = self.module.at_batch(batch, self.n_samples)
        b = self.module.log_norm(at)
        tilt = snl(f, log_w, b, reduction="none")
        of_rows = log_q.sum(-1) + tilt.sum(-1)  # (R, n)
        weights = self.module.weights_of(batch)
        loss = -(of_rows if weights is None else weights * of_rows).mean()
        with torch.no_grad():
            gap = bound_gap(log_mean_exp(log_w) - b).sum(-1).mean()
        return loss, {"lower": log_det.mean() - loss.detach(), "gap": gap}

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
                at, log_q, f, log_w, log_det = self.module.at_batch(part, self.validation_samples)
                log_z, b = log_mean_exp(log_w), self.module.log_norm(at)
                log_q = log_q.sum(-1) + log_det
                upper = log_q + (f - log_z).sum(-1)
                lower = upper - bound_gap(log_z - b).sum(-1)
                own = log_q + (f - b).sum(-1)
                weights, of_row = self.module.weights_of(part), torch.ones(len(part[0]))
                if weights is not None:  # a row may be held out for some of the orders only
                    of_row = weights.mean(0)
                    among = (weights / of_row.clamp_min(1e-30)).log().clamp_min(-1e3)
                    lower, own, upper, log_q = (t + among for t in (lower, own, upper, log_q))
                bounds = mixture_lower(lower, own), log_mean_exp(upper)
                score = bounds[0]
                of_some = self.module.of_random_columns(part, self.validation_samples)
                if of_some is not None:
                    score = score + log_mean_exp(of_some if weights is None else of_some + among)
                figures = (score, *bounds, ess(log_w).mean((0, 2)), log_mean_exp(log_q))
                of_row = of_row.to(totals)
                totals += torch.stack([(of_row * t).sum() for t in figures])
                counted += float(of_row.sum())
        names = ("score", "lower", "upper", "ess", "proposal")
        return dict(zip(names, (totals / counted).tolist(), strict=True))

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Fit ``b`` to the finished energy: minimise the gap of the bounds over ``b`` alone."""
        return self.module.fit_log_norm(data, self.polish_steps)
