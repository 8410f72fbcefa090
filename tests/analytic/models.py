"""Models with a known log Z, each with a proposal that does not match it.

Asymmetric on purpose: a sign error or a dropped term that a centred Gaussian would forgive shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributions as D

import selfnorm as sn


class Potential(nn.Module):
    """Energy given by a fixed function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclass(frozen=True)
class Analytic:
    """An unnormalised model, its log Z, a mismatched proposal, and exact samples."""

    name: str
    log_density: Callable[[Tensor], Tensor]  # normalised
    log_norm: float
    proposal: object
    sample: Callable[[int], Tensor]

    def ebm(self) -> sn.EBM:
        return sn.EBM(Potential(lambda x: -(self.log_density(x) + self.log_norm)))


def _mixture() -> Analytic:
    mix = D.MixtureSameFamily(
        D.Categorical(torch.tensor([0.7, 0.3])),
        D.Independent(D.Normal(torch.tensor([[-1.0, 2.0], [3.0, -1.0]]), torch.tensor(0.6)), 1),
    )
    return Analytic(
        "asymmetric_mixture",
        mix.log_prob,
        2.3,
        sn.Gaussian(torch.tensor([0.5, 0.5]), scale=torch.tensor([3.0, 2.5])),
        lambda n: mix.sample((n,)),
    )


def _student() -> Analytic:
    t = D.Independent(D.StudentT(torch.tensor([4.0]), 1.5, 0.7), 1)
    return Analytic(
        "student_t",
        t.log_prob,
        -1.7,
        sn.StudentT(2.0, torch.tensor([0.5]), scale=1.4),
        lambda n: t.sample((n,)),
    )


def _skewed_gaussian() -> Analytic:
    mean = torch.tensor([1.0, -2.0, 0.5])
    cov = torch.tensor([[1.0, 0.6, -0.2], [0.6, 0.8, 0.1], [-0.2, 0.1, 0.5]])
    gauss = D.MultivariateNormal(mean, cov)
    wide = sn.Gaussian(mean + torch.tensor([0.4, 0.2, -0.3]), scale=torch.tensor([1.6, 1.5, 1.2]))
    return Analytic("gaussian_3d", gauss.log_prob, 5.1, wide, lambda n: gauss.sample((n,)))


def _bernoulli() -> Analytic:
    coin = D.Independent(D.Bernoulli(logits=torch.tensor([0.8])), 1)
    return Analytic(
        "bernoulli",
        coin.log_prob,
        math.log1p(math.exp(0.8)),
        D.Bernoulli(probs=torch.tensor([0.3])),
        lambda n: coin.sample((n,)),
    )


def _truncated_exponential() -> Analytic:
    rate, top = 1.3, 2.0
    log_mass = math.log(1 - math.exp(-rate * top))

    def log_density(x: Tensor) -> Tensor:
        x = x.squeeze(-1)
        inside = (x >= 0) & (x <= top)
        return torch.where(inside, math.log(rate) - rate * x - log_mass, -math.inf)

    def sample(n: int) -> Tensor:
        u = torch.rand(n, 1)
        return -torch.log1p(-u * math.exp(log_mass)) / rate

    return Analytic(
        "truncated_exponential",
        log_density,
        0.9,
        sn.Uniform(torch.tensor([-0.5]), torch.tensor([3.0])),
        sample,
    )


ANALYTIC = [_mixture(), _student(), _skewed_gaussian(), _bernoulli(), _truncated_exponential()]
