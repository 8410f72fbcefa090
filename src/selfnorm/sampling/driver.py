"""``draw``: run any sampler to ``n`` samples and say how it went."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfnorm._context import SeedLike, alone, seeded
from selfnorm.errors import ProposalError
from selfnorm.sampling import smc
from selfnorm.sampling.steps import (
    GradientState,
    LogDensity,
    MoveInfo,
    ProposalLike,
    StepSize,
    WeightedState,
    as_log_density,
    gradient_init,
    hmc_step,
    imh_step,
    mala_step,
    sir_step,
    weighted_init,
)


@dataclass(frozen=True)
class Draws:
    """``samples (n, d)`` and the sampler's own account of them.

    ``ess`` is the number of independent samples that these are worth, ``n`` at most;
    ``acceptance`` the mean acceptance rate; ``log_norm`` the estimate of log Z where the method
    has one (sir, smc). ``r_hat`` near 1 says that chains agree (mala and hmc with at
    least 100 steps per chain; shorter chains do not show it).
    """

    samples: Tensor
    ess: float
    acceptance: float | None = None
    log_norm: float | None = None
    pareto_k: float | None = None
    r_hat: float | None = None


@torch.no_grad()
def draw(
    target: object,
    n: int,
    *,
    proposal: ProposalLike,
    method: str = "sir",
    seed: SeedLike = None,
    **options: object,
) -> Draws:
    """Draw ``n`` samples from a density that need not be normalised.

    ``target`` has ``log_unnormalized(x)`` or ``log_prob(x)``, or is a function ``(n, d) -> (n,)``;
    ``proposal`` has ``sample(shape)`` and ``log_prob(x)``. An option that the method does not know
    is an error.

    >>> q = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), 2.0), 1)
    >>> p = torch.distributions.Independent(torch.distributions.Normal(torch.ones(2), 1.0), 1)
    >>> draw(p, 100, proposal=q, method="imh", seed=0).samples.shape
    torch.Size([100, 2])
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if method not in METHODS:
        raise ValueError(f"unknown sampling method {method!r}: choose from {sorted(METHODS)}")
    run = METHODS[method]
    accepted = set(inspect.signature(run).parameters) - {"log_density", "proposal", "n"}
    unknown = sorted(set(options) - accepted)
    if unknown:
        raise TypeError(f"{method} has no option {unknown[0]!r}: it takes {sorted(accepted)}")
    log_density = as_log_density(target)
    with seeded(seed, _device_of(proposal)):
        return run(log_density, proposal, n, **options)


def _device_of(proposal: ProposalLike) -> torch.device:
    """Where the proposal's samples live, without advancing the caller's random stream."""
    if isinstance(proposal, torch.nn.Module):
        tensors = itertools.chain(proposal.parameters(), proposal.buffers())
        if (first := next(tensors, None)) is not None:
            return first.device
    with alone(), torch.random.fork_rng(devices=[]):
        return proposal.sample((1,)).device


def _sir(
    log_density: LogDensity, proposal: ProposalLike, n: int, n_candidates: int | None = None
) -> Draws:
    n_candidates = max(10 * n, 10_000) if n_candidates is None else n_candidates
    state = WeightedState(proposal.sample((n,)), torch.zeros(n))
    state, info = sir_step(state, log_density, proposal, n_candidates=n_candidates)
    return Draws(
        state.positions,
        ess=min(float(info.ess) * n_candidates, float(n)),
        log_norm=float(info.log_norm),
        pareto_k=float(info.pareto_k),
    )


def _imh(log_density: LogDensity, proposal: ProposalLike, n: int, n_steps: int = 100) -> Draws:
    state = weighted_init(log_density, proposal, n)
    rates = []
    for _ in range(n_steps):
        state, info = imh_step(state, log_density, proposal)
        rates.append(info.acceptance.double().mean())
    rate = float(torch.stack(rates).mean()) if rates else 0.0
    moved = 1.0 - (1.0 - rate) ** n_steps if rates else 0.0
    return Draws(state.positions, ess=n * moved, acceptance=rate)


def _gradient_chains(
    step: Callable[..., tuple[GradientState, MoveInfo]],
    target_acceptance: float,
    log_density: LogDensity,
    proposal: ProposalLike,
    n: int,
    n_chains: int | None,
    warmup: int,
    thin: int,
    **extra: int,
) -> Draws:
    """Chains started by SIR (so that the modes have about their weights), adapted, then run."""
    n_chains = min(n, 10_000) if n_chains is None else min(n_chains, n)
    start = _sir(log_density, proposal, n_chains).samples
    integral = (start == start.round()).all(0)
    if bool(integral.any()):
        raise ProposalError(
            f"columns {integral.nonzero().flatten().tolist()} of the model hold whole numbers "
            "only, and mala and hmc walk between them, where it is not defined: use method='sir' "
            "or 'imh'"
        )
    scale = start.std(0).clamp_min(1e-12) if n_chains > 1 else torch.ones_like(start[0])
    state = gradient_init(log_density, start)
    tuner = StepSize.start(0.5)
    for _ in range(warmup):
        step_size = math.exp(tuner.log_step)
        state, info = step(state, log_density, step_size=step_size, scale=scale, **extra)
        tuner = tuner.after(float(info.acceptance.mean()), target=target_acceptance)
    step_size = math.exp(tuner.log_step_average)
    kept, rates = [], []
    for _ in range(math.ceil(n / n_chains) * thin):
        state, info = step(state, log_density, step_size=step_size, scale=scale, **extra)
        kept.append(state.positions)
        rates.append(info.acceptance.double().mean())
    history = torch.stack(kept)
    return Draws(
        history[thin - 1 :: thin].reshape(-1, history.shape[-1])[:n],
        ess=min(chain_ess(history), float(n)),  # of all steps, of which these are a part
        acceptance=float(torch.stack(rates).mean()),
        r_hat=r_hat(history) if len(history) >= 100 and n_chains > 1 else None,
    )


def _mala(
    log_density: LogDensity,
    proposal: ProposalLike,
    n: int,
    n_chains: int | None = None,
    warmup: int = 200,
    thin: int = 50,
) -> Draws:
    return _gradient_chains(mala_step, 0.574, log_density, proposal, n, n_chains, warmup, thin)


def _hmc(
    log_density: LogDensity,
    proposal: ProposalLike,
    n: int,
    n_chains: int | None = None,
    warmup: int = 100,
    thin: int = 20,
    n_leapfrog: int = 8,
) -> Draws:
    return _gradient_chains(
        hmc_step, 0.8, log_density, proposal, n, n_chains, warmup, thin, n_leapfrog=n_leapfrog
    )


def _smc(
    log_density: LogDensity,
    proposal: ProposalLike,
    n: int,
    n_particles: int | None = None,
    ess_target: float = 0.7,
    n_moves: int = 12,
    max_temperatures: int = 1000,
) -> Draws:
    n_particles = max(n, 1000) if n_particles is None else max(n_particles, n, 4)
    state = smc.init(log_density, proposal, n_particles)
    rates: list[float] = []
    while state.temperature < 1.0:
        state, info = smc.step(state, log_density, proposal, ess_target=ess_target, n_moves=n_moves)
        rates.append(float(info.acceptance))
        if len(rates) >= max_temperatures:
            raise ProposalError(
                f"SMC reached temperature {state.temperature:.3g} of 1 in {len(rates)} steps: the "
                "proposal is too far from the model; fit the proposal to the data"
            )
    order = torch.randperm(n_particles, device=state.positions.device)[:n]
    return Draws(
        state.positions[order],
        ess=float(n),
        acceptance=sum(rates) / len(rates),
        log_norm=float(state.log_norm),
    )


METHODS: dict[str, Callable[..., Draws]] = {
    "sir": _sir,
    "imh": _imh,
    "mala": _mala,
    "hmc": _hmc,
    "smc": _smc,
}


def chain_ess(draws: Tensor) -> float:
    r"""Effective number of independent draws in ``draws (steps, chains, d)``, worst coordinate.

    ``ESS = steps * chains / (1 + 2 sum_t rho_t)`` with the autocorrelations of all chains combined
    and Geyer's initial monotone sequence as cut-off (Vehtari et al. 2021).
    """
    steps, chains, d = draws.shape
    if steps < 4:
        return float(steps * chains)
    slowest = max(correlation_time(draws[..., i].double()) for i in range(d))
    if math.isinf(slowest):
        return 1.0
    # antithetic chains can have a time below 1; the cap keeps one lucky estimate from a wild value
    return steps * chains / max(slowest, 1.0 / max(math.log10(steps * chains), 1.0))


def r_hat(draws: Tensor) -> float:
    """Gelman-Rubin statistic of split chains ``(steps, chains, d)``, worst column; 1 is good."""
    half = draws.shape[0] // 2
    split = torch.cat([draws[:half], draws[-half:]], 1).double()
    within = split.var(0).mean(0)
    between = split.mean(0).var(0)
    total = (half - 1) / half * within + between
    return float((total / within.clamp_min(1e-300)).sqrt().max())


def correlation_time(x: Tensor) -> float:
    r"""``1 + 2 sum_t rho_t`` of chains ``(steps, chains)``; infinite where none has moved.

    Chains that disagree are correlated for as long as they run.
    """
    steps, chains = x.shape
    centered = x - x.mean(0)
    size = 2 ** (2 * steps - 1).bit_length()
    spectrum = torch.fft.rfft(centered, n=size, dim=0).abs() ** 2
    autocovariance = (torch.fft.irfft(spectrum, n=size, dim=0)[:steps] / steps).mean(1)
    within = float(autocovariance[0]) * steps / (steps - 1)
    total = within * (steps - 1) / steps
    if chains > 1:
        total += float(x.mean(0).var())
    if total <= 0.0:
        return math.inf
    rho = 1.0 - (within - autocovariance * steps / (steps - 1)) / total
    rho[0] = 1.0
    pairs = rho[: 2 * (steps // 2)].reshape(-1, 2).sum(1)
    negative = (pairs < 0).nonzero()
    end = int(negative[0]) if len(negative) else len(pairs)
    return -1.0 + 2.0 * float(torch.cummin(pairs[: max(end, 1)], 0).values.sum())
