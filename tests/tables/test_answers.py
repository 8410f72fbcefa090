"""Answers are those of the joint density, within the errors that they state."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from selfnorm.chain import TableChain
from selfnorm.columns import GAP, UNSEEN
from selfnorm.tables import answers
from selfnorm.tables.answers import ChainAnswers, Effort, Limits
from tests.chain.test_table_chain import codes, shaken

# sizes of parts, and options of the chains of finite tables
TABLES = [
    ((2, 3, 4), {}),
    ((5, 2, 3), {"orderings": 1}),
    ((3, 3, 2, 2), {"orderings": 3}),
    ((2, 2, 2, 2, 2), {"conditioned": True, "lines": True}),
    ((4, 4, 4), {}),
    ((6, 5), {"orderings": 2}),
]
LOUD = 4  # the table whose network is far from its own joint density


def finite(which: int) -> tuple[TableChain, Tensor]:
    """The chain of a finite table, and packed rows with gaps."""
    sizes, options = TABLES[which]
    parts, x = codes(sizes, 60)
    model = shaken(parts, x, **options)
    if which == LOUD:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    x[:, :, 0] = x[:, :, 0].where(torch.rand(x.shape[:2]) < 0.5, float(GAP))
    x[0, 0, 0], x[0, 1:, 0] = UNSEEN, GAP
    return model, model.columns.pack(x)[0]


def summed(model: TableChain, packed: Tensor, values: list[Tensor]) -> Tensor:
    """Log of the sum over all values ``(K, 4)`` of the gaps of packed rows, each alone."""
    found = []
    for row in packed:
        free = (row[:, 0] == GAP).nonzero()[:, 0].tolist()
        every = list(itertools.product(*(values[j] for j in free)))
        rows = row.repeat(len(every), 1, 1)
        if free:
            rows[:, free] = torch.stack([torch.stack(of_row) for of_row in every]).to(rows)
        log_seen = model.layout.log_seen[free].sum()
        found.append(torch.logsumexp(model.log_prob(rows), 0) - log_seen)
    return torch.stack(found)


def within_errors(found: Tensor, se: Tensor, truth: Tensor, sigmas: float) -> float:
    """Share of log-densities that are as near the truth as their errors say."""
    return float(((found - truth).abs() <= sigmas * se + 1e-4).double().mean())


@pytest.mark.parametrize("which", range(len(TABLES)))
def test_marginals_of_finite_tables_are_the_sums_over_all_completions(which, monkeypatch):
    model, packed = finite(which)
    values = [
        torch.nn.functional.pad(torch.arange(k).unsqueeze(1), (0, 3)) for k in TABLES[which][0]
    ]
    truth, seen = summed(model, packed, values), packed[..., 0] != GAP
    engine, effort = ChainAnswers(model), Effort(total=8192)
    draws = engine.draws(packed, seen, effort, Limits())
    found, se = engine.log_marginal(draws)
    assert draws.exact.all()
    assert torch.allclose(found, truth, atol=1e-4)
    assert not se.any()
    monkeypatch.setattr(answers, "MAX_COMPLETIONS", 1)
    draws = engine.draws(packed, seen, effort, Limits())
    found, se = engine.log_marginal(draws)
    assert not draws.exact[~seen.all(1)].any()
    assert se.max() < 0.5
    assert within_errors(found, se, truth, 3.5) >= 0.99
