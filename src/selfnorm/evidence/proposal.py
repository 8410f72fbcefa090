"""``q``: a normalised density close to the draws, which can be sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import float32_on_cpu, one_thread, seeded
from selfnorm.chain import AutoregressiveEBM
from selfnorm.density import fit
from selfnorm.distributions import StudentT
from selfnorm.errors import DataError
from selfnorm.training import TrainingOptions

N_NODES = 96  # per factor: the log Z of a chain of 20 is right to 1e-3
FEWEST_FOR_CHAIN = 200  # rows; fewer tell no more than location, scatter and tails
TAILS = (3.0, 5.0, 10.0, 30.0, 1000.0)  # degrees of freedom tried
LEAST_GAIN = 0.01  # nats per held-out row that a part of the mixture must bring


class FittedProposal:
    r"""``q = s q_chain + (1 - s) q_t``, fitted to draws in unconstrained space.

    ``q_t`` is a multivariate Student-t by maximum likelihood; its scatter also whitens the rows for
    the chain, an :class:`~selfnorm.AutoregressiveEBM` normalised by quadrature. The share ``s`` is
    the one of highest likelihood on rows the chain did not see: a posterior that is Gaussian keeps
    the t, which a network trained on 2,000 rows does not reach, any other gets the chain. All
    columns are continuous: repeated rows are rejected moves of a sampler, no point masses.

    Args:
        rows: ``(chains, n, d)`` draws to fit.
        seed: of the chain's training.
        steps: of the training; ``None`` chooses.
    """

    def __init__(self, rows: np.ndarray, seed: int, steps: int | None = None) -> None:
        n = rows.shape[1]
        # the end of each chain: neighbours of training rows would say little
        held = max(1, n // 6) if rows.shape[0] * n >= FEWEST_FOR_CHAIN else 0
        train = rows[:, : n - held].reshape(-1, rows.shape[2])
        self.center, self.scale = np.median(train, 0), train.std(0)
        if not (self.scale > 0).all():
            raise DataError(
                f"column {int(np.argmin(self.scale))} of the draws does not move in part of them: "
                "the sampler is stuck; run it longer"
            )
        z = self._scaled(train)
        z_held = self._scaled(rows[:, n - held :].reshape(-1, rows.shape[2]))
        self.ellipse = _ellipse(z)
        self.chain: AutoregressiveEBM | None = None
        self.share = 0.0
        if held:
            self.chain = _fitted_chain(self._white(z), self._white(z_held), seed, steps)
            log_chain, log_t = self._log_chain(z_held), self.ellipse.log_prob(z_held)
            self.share = _best_share((log_chain - log_t).numpy())
            if self.share == 0:
                self.chain = None

    def _scaled(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy((x - self.center) / self.scale)

    def _white(self, z: Tensor) -> Tensor:
        """Rows whitened by the t's scatter, in float32: what the chain sees."""
        away = (z - self.ellipse.loc).T
        return torch.linalg.solve_triangular(self.ellipse.scale_tril, away, upper=False).T.float()

    def _log_chain(self, z: Tensor) -> Tensor:
        assert self.chain is not None
        log_q = self.chain.log_prob(self._white(z), normalizer="quadrature", n_nodes=N_NODES)
        return log_q.double() - self.ellipse.scale_tril.diagonal().log().sum()

    @torch.no_grad()
    def log_prob(self, x: np.ndarray) -> np.ndarray:
        """``log q`` ``(n,)`` of rows in unconstrained space."""
        z = self._scaled(x)
        log_q = self.ellipse.log_prob(z)
        if self.chain is not None:
            log_shares = torch.tensor([self.share, 1 - self.share], dtype=torch.float64).log()
            log_q = torch.logaddexp(log_shares[0] + self._log_chain(z), log_shares[1] + log_q)
        return log_q.numpy() - np.log(self.scale).sum()

    @torch.no_grad()
    def sample(self, n: int, seed: int) -> np.ndarray:
        """``(n, d)`` independent rows."""
        with seeded(seed):
            from_chain = torch.rand(n) < self.share
            z = self.ellipse.sample((n,)).double()
            count = int(from_chain.sum())
            if self.chain is not None and count:
                white = self.chain.sample(count).double()
                z[from_chain] = white @ self.ellipse.scale_tril.T + self.ellipse.loc
        return z.numpy() * self.scale + self.center


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
