"""fit_many: members end where runs of their own end, and do not disturb one another."""

import copy
import math

import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm.errors import DataError, EnergyError, ProposalError
from tests.fitting import fit, fit_many, skewed


def members(n, energy=None, base=True, seed=0):
    torch.manual_seed(seed)
    build = energy or (lambda: sn.MLP(2, (24, 24), saturate=10.0))
    q = sn.StudentT.fit_to(skewed())
    return [sn.EBM(build(), base=q if base else None) for _ in range(n)]


def flat(model, b=False):
    parts = [p.detach().flatten() for p in model.energy.parameters()]
    return torch.cat([*parts, model.log_norm.detach().view(1)] if b else parts)


QUICK = {"batch_size": 64, "n_samples": 128, "seed": 3, "progress": False}
SAME = {"same_batches": True, "same_samples": True}


def fourier():
    features = sn.FourierFeatures(2, n_features=8)
    return sn.MLP(2, (16, 16), activation="relu", features=features, zero_init=True, saturate=4.0)


class Bumps(nn.Module):
    """No MLP: goes through vmap."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(6, 2))
        self.heights = nn.Parameter(torch.randn(6))

    def forward(self, x):
        distance = (x.unsqueeze(-2) - self.centres).square().sum(-1)
        return -(torch.exp(-0.5 * distance) @ self.heights).unsqueeze(-1)


@pytest.mark.parametrize("energy", [None, fourier, Bumps], ids=["mlp", "fourier", "vmap"])
@pytest.mark.parametrize("objective", ["snl", "nce", "importance_ml"])
def test_same_batches_and_samples_give_the_parameters_of_single_runs(energy, objective):
    x = skewed()
    together, alone = members(3, energy), members(3, energy)
    q = sn.Defensive(sn.Gaussian.fit_to(x), sn.StudentT.fit_to(x, df=3.0))
    rates, decays = [1e-3, 3e-3, 1e-2], [0.0, 1e-2, 1e-1]
    options = {**QUICK, "proposal": q, "objective": objective, "max_steps": 20, "ema": 0.9}
    options["clip_norm"] = 0.5
    histories = fit_many(together, x, lr=rates, weight_decay=decays, **SAME, **options)
    for k in range(3):
        single = fit(alone[k], x, lr=rates[k], weight_decay=decays[k], **options)
        # Adam divides by the size of a gradient: where that is tiny, rounding shows.
        torch.testing.assert_close(flat(together[k]), flat(alone[k]), atol=1e-4, rtol=1e-4)
        learned = single.final["log_norm_learned"]
        assert histories[k].final["log_norm_learned"] == pytest.approx(learned, abs=1e-5)
        assert histories[k].records[-1]["loss"] == pytest.approx(
            single.records[-1]["loss"], abs=1e-4
        )
        assert histories[k].records[-1]["lr"] == pytest.approx(single.records[-1]["lr"])


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_held_out_scores_best_states_and_patience_are_those_of_single_runs(optimizer):
    x, val = skewed(150), skewed(200, seed=7)
    together, alone = members(3), members(3)
    rates = [1e-3, 3e-2, 1e-1]
    options = {**QUICK, "val_data": val, "optimizer": optimizer, "schedule": "constant"}
    options |= {"patience": 3, "max_epochs": 30, "weight_decay": 1e-2}
    found = fit_many(together, x, lr=rates, **SAME, **options)
    for k in range(3):
        single = fit(alone[k], x, lr=rates[k], **options)
        assert found[k].stopped == single.stopped
        assert found[k].best_step == single.best_step
        assert found[k].n_steps == single.n_steps
        assert found[k].best_score == pytest.approx(single.best_score, abs=1e-3)
        assert len(found[k].records) == len(single.records)
        torch.testing.assert_close(flat(together[k]), flat(alone[k]), atol=2e-3, rtol=2e-3)
    # Members stop one by one: the test means nothing if they all stopped at once.
    assert len({h.n_steps for h in found}) > 1


def test_own_data_proposals_bases_and_objectives_each_reach_their_own_target():
    shifts = [0.0, 3.0, -2.0, 1.0]
    data = [skewed(700 - 50 * k, seed=k, shift=s) for k, s in enumerate(shifts)]
    torch.manual_seed(0)
    sharp = [sn.Defensive.fit_to(x, n_components=3) for x in data[:2]]
    proposals = [*sharp, *(sn.Uniform.fit_to(x, margin=0.5) for x in data[2:])]
    bases = [sn.StudentT.fit_to(data[0]), sn.StudentT.fit_to(data[1]), None, None]
    models = [sn.EBM(sn.MLP(2, (24, 24), saturate=10.0), base=base) for base in bases]
    names = ["snl", "nce", "snl", "nce"]
    val = [skewed(300 + 50 * k, seed=20 + k, shift=s) for k, s in enumerate(shifts)]
    given = {"proposal": proposals, "objective": names, "val_data": val}
    histories = fit_many(models, data, **given, **QUICK, lr=5e-3, max_epochs=50, max_steps=150)
    for model, q, x, history in zip(models, proposals, val, histories, strict=True):
        bounds = sn.evaluate(model, x, proposal=q, n_samples=40_000, seed=1)
        assert bounds.gap < 0.01  # b is the member's own log Z
        assert bounds.upper == pytest.approx(history.best_score, abs=0.1)
        assert bounds.upper > float(sn.Gaussian.fit_to(x).log_prob(x).mean())
        assert float(model.log_norm.detach()) == pytest.approx(history.final["log_norm"])


class NaNWhenAsked(nn.Module):
    """A flag that is no parameter decides whether the member breaks: the others must not notice."""

    def __init__(self, poison):
        super().__init__()
        self.net = sn.MLP(2, (16,))
        self.register_buffer("poison", torch.tensor(poison))

    def forward(self, x):
        energy = self.net(x)
        broken = self.poison * (x[..., 0] > 1.0).float()
        return energy * torch.where(broken > 0, math.inf, 1.0) if self.training else energy


def test_a_non_finite_member_does_not_touch_the_others():
    x = skewed()
    poisoned = [NaNWhenAsked(p) for p in (0.0, 1.0, 0.0)]
    clean = copy.deepcopy(poisoned)
    clean[1] = NaNWhenAsked(0.0)
    clean[1].net.load_state_dict(poisoned[1].net.state_dict())
    q = sn.StudentT.fit_to(x)
    start = flat(sn.EBM(poisoned[1]))
    results = []
    for energies in (poisoned, clean):
        models = [sn.EBM(e, base=q) for e in energies]
        options = {**QUICK, "max_steps": 60, "max_epochs": 50, "validate_every": 5}
        histories = fit_many(models, x, **SAME, **options, schedule="constant")
        results.append((models, histories))
    (broken, bad), (fine, good) = results
    for k in (0, 2):
        assert torch.equal(flat(broken[k], b=True)[:-1], flat(fine[k], b=True)[:-1])
        assert bad[k].skipped_steps == 0
        assert bad[k].rollbacks == 0
    assert bad[1].stopped == "diverged"
    assert bad[1].rollbacks > 8
    assert good[1].stopped == "max_epochs"
    assert torch.equal(flat(broken[1]), start)
    assert not torch.equal(flat(fine[1]), start)


def test_members_see_different_batches_and_samples_by_default():
    x = skewed()
    models = members(2)
    models[1].load_state_dict(models[0].state_dict())
    fit_many(models, x, **QUICK, max_steps=10)
    assert not torch.allclose(flat(models[0]), flat(models[1]), atol=1e-5)
    again = members(2)
    again[1].load_state_dict(again[0].state_dict())
    fit_many(again, x, **QUICK, max_steps=10)
    assert torch.equal(flat(models[0], b=True), flat(again[0], b=True))


def test_what_cannot_train_together_is_refused():
    x, pair = skewed(100), members(2)
    q = pair[0].base
    other, no_module = sn.EBM(sn.MLP(2, (8,)), base=q), sn.EBM(lambda v: v.sum(-1), base=q)
    shared, box = sn.EBM(pair[0].energy, base=q), sn.Uniform.fit_to(x)
    for models, rows, options, error, words in (
        ([pair[0], other], x, {}, EnergyError, "members 0 and 1"),
        ([no_module], x, {}, EnergyError, "is no nn"),
        ([pair[0], pair[0]], x, {}, ValueError, "members 0 and 1 share a trained parameter"),
        ([pair[0], shared], x, {}, ValueError, "members 0 and 1 share a trained parameter"),
        ([], x, {}, TypeError, "one or more"),
        (pair, [x, x, x], {}, DataError, "3 tables in x_train for 2 models"),
        (pair, [x, x + 1000], {"proposal": box}, ProposalError, "member 1: "),
        (pair, x, {"patience": 2}, DataError, "val_data"),
        (members(2, base=False), x, {}, ProposalError, "needs a proposal"),
        (pair, x, {"proposal": [q]}, ProposalError, "1 proposals for 2"),
        (pair, x, {"proposal": [q, box], **SAME}, ValueError, "one proposal common to all"),
        (pair, x, {"lr": [1e-3] * 3}, ValueError, "3 numbers in lr for 2"),
        (pair, x, {"objective": "dsm"}, ValueError, "functions of weights"),
        (pair, x, {"n_samples": 0}, ValueError, "n_samples"),
    ):
        with pytest.raises(error, match=words):
            fit_many(models, rows, **{**QUICK, **options})


def test_layers_that_change_buffers_while_training_are_refused():
    """Their members would end with the buffers of the start: other densities, silently."""

    def network(layer):
        return nn.Sequential(nn.Linear(2, 8), layer, nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    for layer in (nn.BatchNorm1d(8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))):
        pair = members(2, energy=lambda layer=layer: network(copy.deepcopy(layer)))
        with pytest.raises(EnergyError, match=r"buffer '1\..* train each by fit"):
            fit_many(pair, skewed(100), **QUICK)
    fit_many(members(2, energy=lambda: network(nn.LayerNorm(8))), skewed(100), **QUICK)


class Scaled(nn.Module):
    """A scalar parameter, one weight in two places, and an output of shape (n, 1)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.last = nn.Linear(2, 1)

    def forward(self, x):
        return self.scale * self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_scalars_and_weights_in_two_places_train_as_alone():
    x = skewed(300)
    base = sn.Gaussian.fit_to(x)
    torch.manual_seed(0)
    together = [sn.EBM(Scaled(), base=base) for _ in range(2)]
    alone = copy.deepcopy(together)
    options = {**QUICK, "max_epochs": 2}
    fit_many(together, x, **SAME, **options)
    for one, other in zip(together, alone, strict=True):
        fit(other, x, **options)
        assert one.energy.second.weight is one.energy.first.weight
        assert torch.allclose(flat(one), flat(other), atol=1e-4)


def test_double_members_with_and_without_base_and_clipped_steps():
    x = skewed(300)
    q = sn.Gaussian.fit_to(x)
    models = [sn.EBM(sn.MLP(2, (8,)).double(), base=q), sn.EBM(sn.MLP(2, (8,)).double())]
    models[0].log_norm.data = models[0].log_norm.data.float()  # as after model.energy.double()
    models[1].log_norm.data = models[1].log_norm.data.float()
    options = {**QUICK, "max_epochs": 2, "clip_norm": 1e-3}
    histories = fit_many(models, x, proposal=q, **options)
    assert [h.skipped_steps for h in histories] == [0, 0]
