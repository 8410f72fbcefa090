"""Conditional EBMs against models whose log Z(x) is known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import selfnorm as sn
from selfnorm import functional as F
from selfnorm.conditional import ConditionalTask
from selfnorm.distributions import MDN, Gaussian, Uniform
from selfnorm.errors import DataError, EnergyError, ProposalError


class LinearGaussian(nn.Module):
    """``E(x, y) = (y - a x)^2 / (2 s(x)^2) - c x``, ``s = exp(0.3 x)``.

    ``log Z(x) = c x + log s(x) + log sqrt(2 pi)``: skewed in ``x``, never constant.
    """

    broadcasts = True

    def __init__(self, slope: float = 1.5, tilt: float = 0.7) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))
        self.tilt = nn.Parameter(torch.tensor(tilt))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        x = h[..., 0]
        z = (y[..., 0] - self.slope * x) * torch.exp(-0.3 * x)
        return 0.5 * z.square() - self.tilt * x

    def log_norm(self, x: Tensor) -> Tensor:
        return self.tilt * x[..., 0] + 0.3 * x[..., 0] + 0.5 * math.log(2 * math.pi)


def normalised(energy: LinearGaussian, shift: float | None = None) -> sn.ConditionalEBM:
    """A model whose ``b(x)`` is a line, with the exact answer in reach: there, moved by a shift."""
    line = nn.Linear(1, 1)
    if shift is not None:
        nn.init.constant_(line.weight, 1.0)
        nn.init.constant_(line.bias, 0.5 * math.log(2 * math.pi) + shift)
    return sn.ConditionalEBM(energy, mismatched(), log_norm=line)


def mismatched() -> Gaussian:
    return Gaussian(torch.tensor([0.5]), scale=2.5)


def pairs(n: int = 400) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.rand(n, 1) * 2 - 1
    return x, 1.5 * x + torch.exp(0.3 * x) * torch.randn(n, 1)


@torch.no_grad()
def test_importance_weights_recover_log_z_with_a_mismatched_proposal() -> None:
    energy = LinearGaussian()
    model = normalised(energy)
    x = torch.linspace(-1, 1, 9)[:, None]
    torch.manual_seed(0)
    log_w, *_ = model.log_weights(x, 200_000)
    torch.testing.assert_close(F.log_mean_exp(log_w), energy.log_norm(x), atol=0.02, rtol=0)
    grid = torch.linspace(-15, 15, 6001)
    exact = model.exact_log_norm(x, grid).float()
    torch.testing.assert_close(exact, energy.log_norm(x), atol=1e-4, rtol=0)


@torch.no_grad()
def test_base_density_enters_numerator_and_normaliser() -> None:
    energy, x = LinearGaussian(), torch.linspace(-1, 1, 5)[:, None]
    base = Gaussian(torch.tensor([-1.0]), scale=0.8)
    model = sn.ConditionalEBM(energy, mismatched(), base=base)
    grid = torch.linspace(-15, 15, 6001)
    values = -energy(x, grid.view(-1, 1, 1)) + base(x).log_prob(grid.view(-1, 1, 1))
    by_hand = torch.trapezoid(values.exp(), grid, dim=0).log()
    torch.testing.assert_close(model.exact_log_norm(x, grid).float(), by_hand, atol=1e-4, rtol=0)
    torch.manual_seed(0)
    log_w, *_ = model.log_weights(x, 200_000)
    torch.testing.assert_close(F.log_mean_exp(log_w), by_hand, atol=0.03, rtol=0)


@torch.no_grad()
def test_bounds_bracket_the_exact_value_and_close_at_the_exact_b() -> None:
    energy, (x, y) = LinearGaussian(), pairs(150)
    exact = float((-energy(x, y) - energy.log_norm(x)).mean())
    tight = sn.evaluate(normalised(energy, 0.0), (x, y), n_samples=40_000, seed=0)
    assert tight.gap < 2e-3
    assert tight.lower == pytest.approx(exact, abs=0.02)
    assert tight.reliable
    loose = sn.evaluate(normalised(energy, 0.5), (x, y), n_samples=40_000, seed=0)
    assert loose.lower < exact < loose.upper + 0.02
    t = math.exp(-0.5)
    assert loose.gap == pytest.approx(t - 1 - math.log(t), abs=1e-2)
    assert loose.upper == pytest.approx(tight.upper, abs=1e-4)


def test_gradient_in_b_vanishes_only_at_log_z() -> None:
    def gradient(shift: float) -> float:
        model = normalised(LinearGaussian(), shift)
        torch.manual_seed(0)
        ConditionalTask(model, n_samples=60_000).loss(pairs(64))[0].backward()
        return float(model.log_norm_net.bias.grad)

    # Loss is -SNL: d/db = 1 - Z exp(-b).
    assert gradient(0.0) == pytest.approx(0.0, abs=0.01)
    assert gradient(0.4) == pytest.approx(1 - math.exp(-0.4), abs=0.01)
    assert gradient(-0.4) == pytest.approx(1 - math.exp(0.4), abs=0.02)


def test_energy_gradient_is_that_of_maximum_likelihood_at_the_exact_b() -> None:
    energy, (x, y) = LinearGaussian(slope=1.0), pairs(64)
    torch.manual_seed(0)
    ConditionalTask(normalised(energy, 0.0), n_samples=60_000).loss((x, y))[0].backward()
    # d log p / d slope = (y - a x) x / s^2; the tilt cancels against log Z.
    s2 = torch.exp(0.6 * x)
    expected = -float(((y - x) * x / s2).mean())
    assert float(energy.slope.grad) == pytest.approx(expected, abs=0.02)
    assert float(energy.tilt.grad) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("objective", ["nce", "ranking_nce", "nce_plus", "importance_ml"])
def test_only_objectives_that_see_functions_of_x_teach_b(objective: str) -> None:
    (x, y), energy = pairs(64), LinearGaussian()
    model = normalised(energy)
    task = ConditionalTask(model, objective=objective, n_samples=16)
    task.start((x, y))
    task.loss((x, y))[0].backward()
    if objective == "nce":
        assert float(model.log_norm_net.weight.grad.abs()) > 0
        return
    assert model.log_norm_net.weight.grad is None
    # The tilt c x is such a function: no gradient either.
    assert float(energy.tilt.grad) == pytest.approx(0.0, abs=1e-5)


def test_kl_loss_moves_the_proposal_towards_the_model() -> None:
    torch.manual_seed(0)
    x = torch.zeros(256, 1)
    energy = LinearGaussian().requires_grad_(False)  # at x = 0: a standard normal
    mdn = MDN(1, components=1, hidden=())
    with torch.no_grad():
        mdn.offsets.fill_(1.0)
        mdn.log_start.fill_(0.5)
    model = sn.ConditionalEBM(energy, mdn)
    far = torch.full((256, 1), 40.0)  # labels the likelihood loss would follow
    task = ConditionalTask(model, n_samples=64, proposal_loss="kl")
    optimizer = torch.optim.Adam(mdn.parameters(), lr=3e-2)
    for _ in range(200):
        optimizer.zero_grad()
        task.loss((x, far))[0].backward()
        optimizer.step()
    law = mdn(x[:1])
    assert float(law.mean.detach()) == pytest.approx(0.0, abs=0.15)
    assert float(law.stddev.detach()) == pytest.approx(1.0, abs=0.15)


def test_a_weight_counts_as_repeated_pairs_when_validating() -> None:
    x, y = pairs(200)
    weight = torch.where(x[:, 0] > 0.3, 3.0, 1.0)
    times = weight.long()
    repeated = (x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))
    model = normalised(LinearGaussian(slope=0.5))
    task = ConditionalTask(model)  # its proposal ignores x: the same draws serve all pairs
    weighted = task.validate((x, y, weight))
    for key, value in task.validate(repeated).items():
        assert weighted[key] == pytest.approx(value, abs=1e-5), key
    assert abs(weighted["score"] - task.validate((x, y))["score"]) > 0.02


@pytest.mark.parametrize("proposal_loss", ["likelihood", "both"])
def test_weights_choose_the_state_and_the_proposal(proposal_loss: str) -> None:
    torch.manual_seed(0)
    x = torch.zeros(400, 1)
    upper = torch.arange(400) % 2 == 0
    y = (torch.where(upper, 2.0, -2.0) + 0.3 * torch.randn(400))[:, None]
    weight = torch.where(upper, 1.9, 0.1)
    mdn = MDN(1, components=1, hidden=())
    mdn.place(y)
    model = sn.ConditionalEBM(sn.LabelEnergy(1, hidden=(8,), zero=True), mdn, base="proposal")
    options = {"n_samples": 16, "max_epochs": 15, "lr": 5e-2, "seed": 0, "progress": False}
    how = {"proposal_loss": proposal_loss}
    sn.fit(model, (x, y, weight), val_data=(x, y, weight), task_options=how, **options)
    assert float(mdn(x[:1]).mean.detach()) == pytest.approx(1.8, abs=0.4)


def test_scalar_b_ends_at_the_log_of_the_mean_z() -> None:
    x, y = pairs(256)
    energy = LinearGaussian().requires_grad_(False)
    model = sn.ConditionalEBM(energy, mismatched(), log_norm=0.0)
    sn.fit(model, (x, y), n_samples=2048, max_epochs=1, seed=0, progress=False)
    expected = F.log_mean_exp(energy.log_norm(x))
    assert float(model.log_norm_scalar.detach()) == pytest.approx(float(expected), abs=0.05)


def test_frozen_proposal_stays_in_eval_mode_and_has_no_gradient() -> None:
    proposal_features = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5))
    model = sn.ConditionalEBM(
        sn.LabelEnergy(1, hidden=(4,)), MDN(4), proposal_features=proposal_features
    )
    model.freeze_proposal()
    model.train()
    assert not proposal_features[1].training
    assert not any(p.requires_grad for p in model.proposal.parameters())
    assert model.energy.training


class BrokenAbove(Gaussian):
    """A law of labels whose log-density is NaN at labels above some number."""

    above = 0.0

    def forward(self, h: Tensor) -> object:
        law, above = super().forward(h), self.above
        found = SimpleNamespace(sample=law.sample)
        found.log_prob = lambda y: law.log_prob(y).masked_fill(y[..., 0] > above, torch.nan)
        return found


@pytest.mark.parametrize("above", [-9.0, 4.0])
def test_nan_of_a_proposal_is_the_proposals(above: float) -> None:
    x, y = pairs(64)
    y = y.clamp(-3, 3)
    proposal = BrokenAbove.fit_to(2 * y)
    proposal.above = above
    model = sn.ConditionalEBM(sn.LabelEnergy(1), proposal, log_norm=0.0)
    with pytest.raises(ProposalError, match=r"the proposal's log_prob is NaN at \d+ of \d+"):
        sn.fit(model, (x, y), max_epochs=1, progress=False)
    found = sn.evaluate(model, (x, y), n_samples=1000, seed=0)
    assert not found.reliable
    assert "log_prob of the proposal" in found.reasons[0]
    assert not any("energy" in reason for reason in found.reasons)


def test_nan_of_an_energy_is_the_energys() -> None:
    x, y = pairs(64)

    class Broken(sn.LabelEnergy):
        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            return super().forward(h, y).masked_fill(y[..., 0] > 0, torch.nan)

    model = sn.ConditionalEBM(Broken(1), Gaussian.fit_to(y), log_norm=0.0)
    with pytest.raises(EnergyError, match="energy returns NaN"):
        sn.fit(model, (x, y), max_epochs=1, progress=False)


def test_errors_name_cause_and_cure() -> None:
    x, y = pairs(32)
    narrow = Uniform(torch.tensor([-0.1]), torch.tensor([0.1]))
    model = sn.ConditionalEBM(sn.LabelEnergy(1), narrow, log_norm=0.0)
    with pytest.raises(ProposalError, match="zero density"):
        sn.fit(model, (x, y), max_epochs=1, progress=False)
    model = sn.ConditionalEBM(sn.LabelEnergy(1), mismatched(), log_norm=0.0)
    with pytest.raises(DataError, match="labels of shape"):
        sn.fit(model, (x, y[:, 0]), max_epochs=1, progress=False)
    with pytest.raises(DataError, match="labels of shape"):
        sn.evaluate(model, (x, y[:, 0]), n_samples=10)
    with pytest.raises(DataError, match="different numbers of rows"):
        sn.evaluate(model, (x, y[:5]), n_samples=10)
    arrays = sn.evaluate(model, (x.numpy(), y.numpy()), n_samples=10, seed=0)
    assert arrays.lower == sn.evaluate(model, (x, y), n_samples=10, seed=0).lower
    bad = y.clone()
    bad[3] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        sn.fit(model, (x, bad), max_epochs=1, progress=False)
    with pytest.raises(ValueError, match="objective must be one of"):
        sn.fit(model, (x, y), objective="nope", max_epochs=1, progress=False)
    with pytest.raises(TypeError, match="owns its proposal"):
        sn.fit(model, (x, y), proposal=mismatched(), max_epochs=1, progress=False)

    class Wrong(nn.Module):
        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            return y * h.mean() * torch.ones(3)

    broken = sn.ConditionalEBM(Wrong(), MDN(1))
    with pytest.raises(EnergyError, match="one scalar per label"):
        broken.log_prob(x, y)

    class OfAllLabels(nn.Module):
        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            return y.sum(-1).sum(0)

    fits = {"n_samples": 4, "max_epochs": 1, "seed": 0, "progress": False}
    with pytest.raises(EnergyError, match="one scalar per label"):
        sn.fit(sn.ConditionalEBM(OfAllLabels(), mismatched(), log_norm=0.0), (x, y), **fits)
    two = sn.ConditionalEBM(sn.LabelEnergy(1), mismatched(), log_norm=nn.Linear(1, 2))
    with pytest.raises(EnergyError, match="log_norm must return one value a row"):
        sn.fit(two, (x, y), **fits)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_pairs_in_any_floating_point_type_train_a_model(kind: torch.dtype) -> None:
    x, y = pairs(64)
    options = {"n_samples": 4, "max_epochs": 1, "seed": 0, "progress": False}

    def trained(data: tuple[torch.Tensor, ...]) -> torch.Tensor:
        torch.manual_seed(0)
        model = sn.ConditionalEBM(sn.LabelEnergy(1), mismatched(), log_norm=0.0).to(kind)
        sn.fit(model, data, val_data=data, **options)
        return model.log_norm_scalar.detach()

    assert trained((x.float(), y.double())) == trained((x.to(kind), y.to(kind)))


def test_weights_are_one_number_per_pair() -> None:
    x, y = pairs(32)
    model = sn.ConditionalEBM(sn.LabelEnergy(1), mismatched(), log_norm=0.0)
    for weight, words in (
        (torch.ones(32, 1), r"shape \(32,\), one per pair, got \(32, 1\)"),
        (-torch.ones(32), "not negative"),
        (torch.full((32,), float("nan")), "finite"),
    ):
        with pytest.raises(DataError, match=words):
            sn.fit(model, (x, y, weight), max_epochs=1, progress=False)
