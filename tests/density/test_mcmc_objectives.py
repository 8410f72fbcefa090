"""Contrastive divergence and score matching under the same fit, on a skewed target."""

import math

import pytest
import torch

import selfnorm as sn
from selfnorm.density import mcmc_objectives, score_matching
from selfnorm.density.mcmc_objectives import ContrastiveDivergence
from selfnorm.density.model import objective_named, objective_names
from selfnorm.density.score_matching import DenoisingScoreMatching, SlicedScoreMatching, score
from tests.contract.test_training import skewed


def test_score_is_the_gradient_and_dsm_vanishes_nowhere_else():
    """The exact score of the blurred Gaussian minimises DSM; a mis-scaled one does not."""
    x = torch.randn(20_000, 2) * torch.tensor([1.0, 3.0]) + 1.0
    sigma = 0.3
    losses = []
    for factor in (0.8, 1.0, 1.25):
        variance = factor * (1 + sigma**2) * torch.tensor([1.0, 9.0])
        model = sn.EBM(lambda v, s=variance: 0.5 * ((v - 1.0) ** 2 / s).sum(-1))
        torch.manual_seed(1)
        losses.append(float(DenoisingScoreMatching(sigma).loss(model, None, x, 0)[0].detach()))
    assert losses[1] < losses[0]
    assert losses[1] < losses[2]


def test_ssm_is_minimal_at_the_true_energy():
    x = skewed(20_000)

    def loss_at(shift):
        def energy(v):
            a, b = v[:, 0] - shift, (v[:, 1] - 0.4 * v[:, 0]) / 0.5
            return a + torch.exp(-a) + b + torch.exp(-b)

        torch.manual_seed(1)
        return float(SlicedScoreMatching(4).loss(sn.EBM(energy), None, x, 0)[0].detach())

    assert loss_at(0.0) < loss_at(0.25)
    assert loss_at(0.0) < loss_at(-0.25)
    model = sn.EBM(lambda v: v[:, 0] + torch.exp(-v[:, 0]))
    point = torch.tensor([[0.5, 0.0]])
    assert float(score(model, point)[0, 0].detach()) == pytest.approx(math.exp(-0.5) - 1)


def test_replay_buffer_keeps_chains_and_refreshes_some():
    x = skewed(256)
    q = sn.Gaussian.fit_to(x)
    model = sn.EBM(sn.MLP(2, hidden=(8,)), base=q)
    cd = ContrastiveDivergence("buffer", n_steps=2, buffer_size=100, refresh=0.0)
    torch.manual_seed(0)
    cd.loss(model, q, x, 100)
    before = cd._buffer.clone()
    cd.loss(model, q, x, 40)
    changed = (cd._buffer != before).any(1)
    assert 10 < int(changed.sum()) <= 40
    assert cd._buffer.shape == (100, 2)


def test_names_are_registered_and_bad_options_refused():
    assert {"cd", "pcd", "dsm", "ssm"} <= set(objective_names())
    assert objective_named("pcd").start == "buffer"
    assert mcmc_objectives.ContrastiveDivergence is type(objective_named("cd"))
    assert score_matching.SlicedScoreMatching is type(objective_named("ssm"))
    for wrong in (
        lambda: ContrastiveDivergence("noise"),
        lambda: ContrastiveDivergence(n_steps=0),
        lambda: DenoisingScoreMatching(0.0),
        lambda: SlicedScoreMatching(0),
    ):
        with pytest.raises(ValueError, match="must be"):
            wrong()


@pytest.mark.parametrize("objective", ["cd", "pcd"])
def test_chains_walk_on_the_density_that_is_evaluated(objective):
    """With batch normalisation, too: its averages are those of the training passes alone."""
    x = skewed(500)
    base = sn.Gaussian.fit_to(x)
    torch.manual_seed(0)
    layers = (torch.nn.Linear(2, 16), torch.nn.BatchNorm1d(16), torch.nn.SiLU())
    energy = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    model = sn.EBM(energy, base=base)
    seen = []
    energy[1].register_forward_pre_hook(lambda part, _: seen.append(part.training))
    how = sn.TrainingOptions(batch_size=64, max_steps=12, seed=0, progress=False)
    sn.fit(model, x, objective=objective, n_samples=32, val_data=None, options=how)
    assert int(energy[1].num_batches_tracked) == sum(seen) == 12
    assert math.isfinite(sn.evaluate(model, x, seed=0).lower)
