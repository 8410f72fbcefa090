"""``q``: a normalised density close to the draws and to the density, which can be sampled."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm._context import float32_on_cpu, one_thread, seeded
from selfnorm.chain import AutoregressiveEBM
from selfnorm.density import fit
from selfnorm.distributions import GaussianMixture, StudentMixture, StudentT, mix_log_probs
from selfnorm.errors import DataError
from selfnorm.training import TrainingOptions

N_NODES = 96  # per factor: the log Z of a chain of 20 is right to 1e-3
FEWEST_FOR_CHAIN = 200  # rows; fewer show no more than location, scatter and tails
TAILS = (1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 1000.0)  # degrees of freedom tried
COMPONENTS = (1, 2, 4, 8)  # of the mixtures tried
PROBE_TAILS, PROBE_WIDTH = 3.0, 2.0
LEAST_GAIN = 0.01  # nats per held-out row that the chain must gain
CLOSE = 2e-3  # discrepancy of a mixture that needs no chain
LIKELIHOOD = 0.1  # weight of the likelihood in the loss, next to the discrepancy
LARGEST_RATIO = 10.0  # by which a sample's density may grow while q is adjusted


class FittedProposal:
    r"""``q = s q_chain + (1 - s) q_mixture`` in unconstrained space.

    Mixtures of Student-t distributions are fitted by likelihood, then adjusted to the density
    itself by :meth:`learn`. Where that does not come close, or the density is not to be had, a
    chain joins them: an :class:`~selfnorm.AutoregressiveEBM` normalised by quadrature, on rows that
    a single t has whitened. All columns are continuous: repeated rows are rejected moves of a
    sampler, no point masses.

    Args:
        rows: ``(chains, n, d)`` draws to fit.
        seed: of the fits.
        steps: of the chain's training; ``None`` chooses.
    """

    def __init__(self, rows: np.ndarray, seed: int, steps: int | None = None) -> None:
        n, self.seed, self.steps = rows.shape[1], seed, steps
        # the end of each chain: neighbours of training rows would say little
        held = max(1, n // 6) if rows.shape[0] * n >= FEWEST_FOR_CHAIN else 0
        train = rows[:, : n - held].reshape(-1, rows.shape[2])
        self.center, self.scale = np.median(train, 0), train.std(0)
        if not (self.scale > 0).all():
            raise DataError(
                f"column {int(np.argmin(self.scale))} of the draws does not move in part of them: "
                "the sampler is stuck; run it longer"
            )
        self.train = self._scaled(train)
        self.held = self._scaled(rows[:, n - held :].reshape(-1, rows.shape[2]))
        self.ellipse = _ellipse(self.train)
        self.mixtures = _mixtures(self.train, self.ellipse, seed)
        self.mixture = self.mixtures[0]
        self.chain: AutoregressiveEBM | None = None
        self.share, self.log_level = 0.0, 0.0
        if held:
            with torch.no_grad():
                likely = [float(mixture.log_prob(self.held).mean()) for mixture in self.mixtures]
            self.mixture = self.mixtures[int(np.argmax(likely))]

    def add_chain(self) -> None:
        """Fit the chain; its share is the one of highest likelihood on rows that it did not see."""
        if not len(self.held):
            return
        white = self._white(self.train), self._white(self.held)
        self.chain = _fitted_chain(*white, self.seed, self.steps)
        with torch.no_grad():
            log_ratio = self._log_chain(self.held) - self.mixture.log_prob(self.held)
        self.share = _best_share(log_ratio.numpy())
        if self.share == 0:
            self.chain = None

    def learn(
        self,
        rows: np.ndarray,
        log_p: np.ndarray,
        evaluate: Callable[[np.ndarray], np.ndarray],
        n_samples: int,
        seed: int,
    ) -> None:
        r"""Adjust the mixtures to ``log p~`` at the draws that were fitted and at samples of them.

        What is made small is what bridge sampling has as its variance, with ``u = log p~ - log q``
        up to a constant,

        .. math:: E_p[\tanh^2(u / 2)] + E_q[\tanh^2(u / 2)].

        Likelihood uses the draws alone. The values of the density have no noise: a ``p`` of the
        family is recovered exactly. Of all mixtures, with and without a chain, and all stages of
        their adjustment, the one of least discrepancy on held-out rows is kept.

        Args:
            rows: ``(chains, n, d)``, of the draws given before.
            log_p: ``log p~`` there, ``(chains, n)``.
            evaluate: ``log p~`` of other rows.
            n_samples: how many to evaluate at most; half of them if there is no need of a chain.
            seed: of those samples.
        """
        self.log_level = float(np.median(log_p))
        split = rows.shape[1] - max(1, rows.shape[1] // 6)
        draws = [(rows[:, part], log_p[:, part]) for part in (slice(split), slice(split, None))]
        with seeded(seed):
            samples = self._of_mixtures(n_samples // 2)
        log_p_samples = _log_p(evaluate, self._unscaled(samples))
        parts = self._parts(draws, samples, log_p_samples)
        candidates = [_adjusted(deepcopy(mixture), None, *parts) for mixture in self.mixtures]
        best = min(candidates, key=lambda candidate: candidate[0])
        if best[0] > CLOSE:
            self.add_chain()
        if self.chain is not None:
            with seeded(seed + 1):
                more = self._of_chain(n_samples - len(samples))
            log_p_more = _log_p(evaluate, self._unscaled(more))
            log_p_samples = np.concatenate([log_p_samples, log_p_more])
            parts = self._parts(draws, torch.cat([samples, more]), log_p_samples)
            candidates = [_adjusted(mixture, self.share, *parts) for mixture in self.mixtures]
            alone = replace(parts[1], log_chain=None)
            candidates.append((alone.judged(best[1]), best[1], 0.0))
            best = min(candidates, key=lambda candidate: candidate[0])
        _, self.mixture, self.share = best
        if self.share == 0:
            self.chain = None

    def _parts(
        self, draws: list[tuple[np.ndarray, np.ndarray]], samples: Tensor, log_p: np.ndarray
    ) -> list[_Evaluated]:
        """What is fitted and what is held out: draws as they are, every sixth of the samples."""
        log_scale, last = np.log(self.scale).sum(), torch.arange(len(samples)) % 6 == 5
        parts = []
        for (rows, log_p_rows), chosen in zip(draws, (~last, last), strict=True):
            z = torch.cat([self._scaled(rows.reshape(-1, rows.shape[2])), samples[chosen]])
            values = np.concatenate([log_p_rows.ravel(), log_p[chosen.numpy()]]) + log_scale
            with torch.no_grad():
                log_q = torch.stack([mixture.log_prob(z) for mixture in self.mixtures], 1)
            log_q0 = log_q.logsumexp(1) - math.log(log_q.shape[1])
            log_chain = None if self.chain is None else self._log_chain(z)
            if log_chain is not None:  # half of the samples are its own
                log_q0 = torch.logaddexp(log_q0, log_chain) - math.log(2)
            log_q0 = log_q0[log_p_rows.size :]
            parts.append(_Evaluated(z, torch.from_numpy(values), log_q0, log_chain))
        return parts

    def _unscaled(self, z: Tensor) -> np.ndarray:
        return z.numpy() * self.scale + self.center

    def _of_mixtures(self, n: int) -> Tensor:
        """``(n, d)`` scaled rows, in turn from all mixtures."""
        per_mixture = -(-n // len(self.mixtures))
        rows = torch.stack([mixture.sample(per_mixture) for mixture in self.mixtures], 1)
        return rows.flatten(0, 1)[:n]

    @torch.no_grad()
    def _of_chain(self, n: int) -> Tensor:
        assert self.chain is not None
        return self.chain.sample(n).double() @ self.ellipse.scale_tril.T + self.ellipse.loc

    def _scaled(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(self.standardised(x))

    def _white(self, z: Tensor) -> Tensor:
        """Rows whitened by the t's scatter, in float32: what the chain sees."""
        away = (z - self.ellipse.loc).T
        return torch.linalg.solve_triangular(self.ellipse.scale_tril, away, upper=False).T.float()

    def standardised(self, x: np.ndarray) -> np.ndarray:
        """Rows relative to the median and the standard deviation of the draws fitted."""
        return (x - self.center) / self.scale

    @torch.no_grad()
    def _log_chain(self, z: Tensor) -> Tensor:
        assert self.chain is not None
        log_q = self.chain.log_prob(self._white(z), normalizer="quadrature", n_nodes=N_NODES)
        return log_q.double() - self.ellipse.scale_tril.diagonal().log().sum()

    @torch.no_grad()
    def log_prob(self, x: np.ndarray) -> np.ndarray:
        """``log q`` ``(n,)`` of rows in unconstrained space."""
        z = self._scaled(x)
        log_q = self.mixture.log_prob(z)
        if self.chain is not None:
            share = torch.tensor(self.share, dtype=torch.float64)
            log_q = mix_log_probs(log_q, self._log_chain(z), share)
        return log_q.numpy() - np.log(self.scale).sum()

    @torch.no_grad()
    def sample(self, n: int, seed: int) -> np.ndarray:
        """``(n, d)`` independent rows."""
        with seeded(seed):
            from_chain = torch.rand(n) < self.share
            z = self.mixture.sample(n)
            count = int(from_chain.sum())
            if self.chain is not None and count:
                z[from_chain] = self._of_chain(count)
        return self._unscaled(z)

    @torch.no_grad()
    def probe(self, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """``(n, d)`` rows far and wide around the draws, and the log-density they have."""
        t = self.ellipse
        wide = StudentT(
            PROBE_TAILS, t.loc, covariance=PROBE_WIDTH**2 * t.scale_tril @ t.scale_tril.T
        )
        with seeded(seed):
            z = wide.sample((n,))
        log_r = wide.log_prob(z).numpy() - np.log(self.scale).sum()
        return self._unscaled(z), log_r


@dataclass(frozen=True)
class _Evaluated:
    """Draws of ``p``, then samples, with ``log p~``; in scaled coordinates.

    ``log_q0`` is the density ``(m,)`` that the samples come from, ``log_chain`` the chain's at all.
    """

    rows: Tensor
    log_p: Tensor
    log_q0: Tensor
    log_chain: Tensor | None

    def discrepancy(
        self, mixture: StudentMixture, share: Tensor | None, likelihood: float = 0.0
    ) -> Tensor:
        """``E_p[tanh^2(u / 2)] + E_q[tanh^2(u / 2)]``; some likelihood keeps ``q`` at the draws."""
        log_q = mixture.log_prob(self.rows)
        if self.log_chain is not None and share is not None:
            log_q = torch.logaddexp(
                nn.functional.logsigmoid(share) + self.log_chain,
                nn.functional.logsigmoid(-share) + log_q,
            )
        n = len(log_q) - len(self.log_q0)
        grown = (log_q[n:] - self.log_q0).exp().clamp_max(LARGEST_RATIO)
        weights = torch.cat([torch.full((n,), 1 / n).to(grown), grown / len(grown)])
        u = self.log_p - log_q
        level = ((u - _middle(u.detach(), weights.detach())) / 2).tanh()
        # Where p is almost zero, q may move away; elsewhere it must agree with p.
        weights = torch.where(level.detach() < -0.9, weights, weights.detach())
        # mass of q that is where no sample is, beyond chance, is charged in full
        chance = 3 * grown.detach().std(correction=0) / math.sqrt(len(grown))
        hidden = (1 - grown.mean() - chance).clamp_min(0)
        return (weights * level.square()).sum() + hidden - likelihood * log_q[:n].mean()

    @torch.no_grad()
    def judged(self, mixture: StudentMixture, share: Tensor | None = None) -> float:
        """The discrepancy alone; infinite where it is no number."""
        discrepancy = float(self.discrepancy(mixture, share))
        return discrepancy if math.isfinite(discrepancy) else math.inf


def _log_p(evaluate: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """``log p~`` of rows, ``-inf`` where it is no number."""
    return np.nan_to_num(evaluate(rows), nan=-math.inf, neginf=-math.inf)


def _middle(u: Tensor, weights: Tensor) -> Tensor:
    """The ``c`` for which ``sum w tanh((u - c) / 2) = 0``: the bridge estimate of ``log Z``."""
    c = u.median()
    for _ in range(8):
        t = ((u - c) / 2).tanh()
        slope = (weights * (1 - t.square())).sum() / 2
        c = c + ((weights * t).sum() / slope.clamp_min(1e-3)).clamp(-3, 3)
    return c


def _adjusted(
    mixture: StudentMixture, share: float | None, train: _Evaluated, held: _Evaluated
) -> tuple[float, StudentMixture, float]:
    """Least discrepancy on rows held out, and the mixture and the chain's share that have it."""
    parameters: list[Tensor] = [*mixture.parameters()]
    logit = None
    if share is not None:
        logit = torch.tensor(share).double().logit().clamp(-3, 3).requires_grad_()
        parameters.append(logit)
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=1, max_eval=10, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = train.discrepancy(mixture, logit, LIKELIHOOD)
        loss.backward()
        return loss

    best = (held.judged(mixture, logit), [p.detach().clone() for p in parameters])
    since = 0
    for _ in range(80):
        optimizer.step(closure)
        loss = held.judged(mixture, logit)
        since = 0 if loss < best[0] - 1e-6 else since + 1
        if loss < best[0]:
            best = (loss, [p.detach().clone() for p in parameters])
        if since >= 8 or not math.isfinite(loss):
            break
    with torch.no_grad():
        for parameter, kept in zip(parameters, best[1], strict=True):
            parameter.copy_(kept)
    chain_share = 0.0 if logit is None else float(logit.detach().sigmoid())
    return best[0], mixture.requires_grad_(False), chain_share


def _mixtures(z: Tensor, ellipse: StudentT, seed: int) -> list[StudentMixture]:
    """The ellipse, and mixtures of as many components as the rows allow, by likelihood."""
    n, d = z.shape
    whiten = torch.linalg.inv(ellipse.scale_tril)
    first = StudentMixture(
        torch.ones(1).double(), ellipse.loc[None], whiten[None], float(ellipse.df)
    )
    mixtures = [first]
    for k in COMPONENTS[1:]:
        if n < max(100, 10 * k * (d + 1)) or k * d * (d + 3) / 2 > 4 * n:
            break
        gaussians = GaussianMixture.fit_to(z, n_components=k, seed=seed % 2**31)
        mixtures.append(StudentMixture(gaussians.weights, gaussians.means, gaussians.whiten, 100.0))
    return mixtures


def _ellipse(z: Tensor) -> StudentT:
    """The Student-t of highest likelihood; with few rows for its scatter, a shrunken Gaussian's."""
    n, d = z.shape
    if n < 5 * d + 20:
        kept = n / (5 * d + 20)
        covariance = torch.cov(z.T).reshape(d, d)
        covariance = kept * covariance + (1 - kept) * covariance.diagonal().diag()
        return StudentT(30.0, z.mean(0), covariance=covariance * 28 / 30)
    pivots = np.linalg.eigvalsh(np.corrcoef(z.numpy().T).reshape(d, d))
    if pivots[0] < 1e-10 * pivots[-1]:
        raise DataError(
            "some columns of the draws are determined by the others: they have no joint density; "
            "drop those columns (a simplex: state it as the support)"
        )
    fits = [StudentT.fit_to(z, df=df, n_iter=20) for df in TAILS]
    return max(fits, key=lambda t: float(t.log_prob(z).mean()))


def _fitted_chain(
    train: Tensor, held_out: Tensor, seed: int, steps: int | None
) -> AutoregressiveEBM:
    """A small chain on whitened rows, trained briefly: the bridge makes up for the rest."""
    n, d = train.shape
    sizes: dict[str, Any] = {"hidden": 64, "blocks": 1, "components": 5, "context": 16}
    sizes |= {"energy_hidden": 32, "energy_blocks": 1, "drop": 0.1, "drop_context": True}
    steps = steps or int(min(600, max(100, 12 * n**0.5)))
    options = TrainingOptions(
        batch_size=min(128, max(16, n // 8)),
        max_epochs=10**6,
        max_steps=steps,
        lr=3e-3,
        weight_decay=1e-2,
        clip_norm=5.0,
        ema=0.98,
        validate_every=max(20, steps // 10),
        patience=3,
        seed=seed,
        progress=False,
    )
    with float32_on_cpu(), one_thread(), seeded(seed):
        chain = AutoregressiveEBM(d, discrete=None, encoding="quantiles", **sizes)
        chain.set_scaling(train)
        # b is not used: every factor is normalised by quadrature
        task = {"polish_steps": 0, "validation_samples": 8}
        fit(chain, train, n_samples=4, val_data=held_out, task_options=task, options=options)
    return chain.eval()


def _best_share(log_ratio: np.ndarray) -> float:
    """The share ``s`` that maximises ``mean log(s r + 1 - s)``, by EM.

    A part that adds less than ``LEAST_GAIN`` to that mean is left out.
    """
    share = 0.5
    for _ in range(200):
        with np.errstate(over="ignore"):
            share = float(np.mean(1 / (1 + (1 - share) / share * np.exp(-log_ratio))))
        share = min(max(share, 1e-6), 1 - 1e-6)
    mixed = np.logaddexp(np.log(share) + log_ratio, np.log1p(-share)).mean()
    if mixed - max(0.0, log_ratio.mean()) < LEAST_GAIN:
        return float(log_ratio.mean() > 0)
    return share
