"""Are verdicts right: no wrong number called reliable, and few right ones called unreliable?

    python benchmarks/verdicts.py --out results/verdicts

Every model here has a ``log Z`` that is known. The pool holds random densities (mixtures, Student-t,
Gumbel, correlated normal laws; 1 to 8 columns, both floating-point types, ``log Z ~ N(0, 20^2)``,
``b`` off by ``N(0, 0.05^2)``) under proposals good and bad. A number is *wrong* where ``log Z`` is
off by more than 0.1 nats, a *silent failure* is wrong and called reliable, a *false alarm* right and
called unreliable. The adversarial cases are built to deceive: mass that neither proposal nor rows
have seen, tails that no proposal holds, energies without a normaliser, spikes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as td

import selfnorm as sn

WRONG = 0.1  # nats
PROPOSALS = ("fitted", "wide", "narrow", "shifted", "student", "defensive")
KINDS = ("mixture", "student", "gumbel", "normal")


class Potential(nn.Module):
    """Minus the log of a known density and a constant."""

    def __init__(self, log_density: Callable[[Tensor], Tensor], log_norm: float) -> None:
        super().__init__()
        self.log_density, self.log_norm = log_density, log_norm

    def forward(self, x: Tensor) -> Tensor:
        return -(self.log_density(x) + self.log_norm)


@dataclass
class Case:
    """A model whose ``log Z`` is known (``None``: infinite), its proposal and held-out rows."""

    name: str
    model: sn.EBM
    proposal: Any
    rows: Tensor
    log_norm: float | None
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        name: str,
        density: Callable[[Tensor], Tensor],
        proposal: Any,
        rows: Tensor,
        *,
        log_norm: float = 0.0,
        b_error: float = 0.0,
        exists: bool = True,
    ) -> Case:
        model = sn.EBM(Potential(density, log_norm), log_norm=log_norm + b_error)
        model.to(rows.dtype)
        return cls(name, model, proposal, rows, log_norm if exists else None, {})


def random_density(kind: str, dim: int, dtype: torch.dtype) -> td.Distribution:
    """A random density with exact samples, from torch's global generator."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=dtype)

    if kind == "mixture":
        k = int(torch.randint(2, 5, ()))
        parts = td.Independent(td.Normal(2.0 * normal(k, dim), 0.4 + uniform(k, dim)), 1)
        shares = td.Dirichlet(torch.full((k,), 2.0, dtype=dtype)).sample()
        return td.MixtureSameFamily(td.Categorical(shares), parts)
    if kind == "student":
        law = td.StudentT(3.0 + 7.0 * uniform(dim), normal(dim), 0.5 + uniform(dim))
        return td.Independent(law, 1)
    if kind == "gumbel":
        return td.Independent(td.Gumbel(normal(dim), 0.3 + uniform(dim)), 1)
    factor = normal(dim, dim)
    covariance = factor @ factor.T + 0.2 * torch.eye(dim, dtype=dtype)
    return td.MultivariateNormal(3 * normal(dim), covariance)


def random_proposal(kind: str, x: Tensor) -> Any:
    """A proposal of one kind, fitted to rows and then, for some, spoilt."""
    if kind == "student":
        return sn.StudentT.fit_to(x)
    if kind == "defensive":
        return sn.Defensive.fit_to(x, n_components=5)
    if kind == "fitted":
        return sn.Gaussian.fit_to(x)
    if kind == "shifted":
        q = sn.Gaussian.fit_to(x)
        covariance = q.scale_tril @ q.scale_tril.T
        direction = nn.functional.normalize(torch.randn(x.shape[1], dtype=x.dtype), dim=0)
        away = 0.5 + 1.5 * float(torch.rand(()))
        return sn.Gaussian(q.loc + away * q.scale_tril @ direction, covariance=covariance)
    spread = {"wide": 1.2 + 1.3 * torch.rand(()), "narrow": 0.5 + 0.4 * torch.rand(())}[kind]
    return sn.Gaussian.fit_to(x, inflate=float(spread))


def pool(n: int, rows: int = 500) -> Iterator[Case]:
    """The random models."""
    for seed in range(n):
        torch.manual_seed(seed)
        kind, proposal = KINDS[seed % 4], PROPOSALS[seed // 4 % 6]
        dtype = (torch.float32, torch.float64)[seed // 24 % 2]
        dim = 1 + seed // 48 % 8
        density = random_density(kind, dim, dtype)
        log_norm, b_error = 20 * float(torch.randn(())), 0.05 * float(torch.randn(()))
        q = random_proposal(proposal, density.sample((1000,)))
        name = f"{kind}/{proposal}/{dim}"
        x = density.sample((rows,))
        yield Case.of(name, density.log_prob, q, x, log_norm=log_norm, b_error=b_error)
