"""Everything that is trained: by every objective and task, improved, resumed, and set apart."""

import math
from functools import partial

import pytest
import torch

import selfnorm as sn
from selfnorm._context import seeded
from selfnorm.density.model import objective_names
from selfnorm.errors import DataError
from selfnorm.training import Stepper
from tests.contract.specimens import with_features
from tests.fitting import fit, fit_many, weights
from tests.golden import cases

# Walks and scores: their steps draw chains, or take a second derivative.
WALKS = ("cd", "pcd")
SCORES = ("dsm", "ssm")


def skewed(n=2000, seed=0):
    g = torch.Generator().manual_seed(seed)
    gumbel = -(-torch.rand(n, 2, generator=g).log()).log()
    return torch.stack([gumbel[:, 0], 0.5 * gumbel[:, 1] + 0.4 * gumbel[:, 0]], 1)


X = skewed(300)


def small(hidden=(16,)):
    with seeded(0):
        energy = sn.MLP(2, hidden, zero_init=True)
    return sn.EBM(energy, base=sn.Gaussian.fit_to(X, inflate=1.1))


# Members of the Bregman family whose weights explode where a Gaussian's tails are too light.
HEAVY = ("bregman_lsif", "bregman_reverse", "bregman_exponential")


@pytest.mark.parametrize("objective", [name for name in objective_names() if name not in HEAVY])
def test_it_improves_on_its_base_and_ends_normalised(objective):
    """Whatever the objective, ``fit`` ends with b = log Z, by quadrature and by evaluate."""
    x, test, model = skewed(), skewed(1500, seed=1), small((32, 32))
    q = sn.Defensive.fit_to(x, n_components=3)
    start = sn.evaluate(model, test, proposal=q, seed=0)
    options = {"batch_size": 256, "n_samples": 128, "lr": 5e-3, "max_epochs": 999, "seed": 0}
    options["max_steps"] = 800 if objective in SCORES else 250
    fit(model, x, proposal=q, objective=objective, ema=0.98, progress=False, **options)
    end = sn.evaluate(model, test, proposal=q, seed=0)
    second = (test[:, 1] - 0.4 * test[:, 0]) / 0.5
    log_p = -test[:, 0] - torch.exp(-test[:, 0]) - second - torch.exp(-second) - math.log(0.5)
    assert start.upper + 0.15 < end.upper < float(log_p.mean()) + 0.02
    assert end.gap < 0.01
    log_z, _ = sn.exact_log_norm(model, 2, n_points=257)
    assert float(model.log_norm.detach()) == pytest.approx(log_z, abs=0.02)


QUICK = {"max_steps": 12, "max_epochs": 99, "batch_size": 64, "n_samples": 32, "seed": 0}
QUICK |= {"progress": False, "ema": 0.9}


def objective_run(name):
    return [small()], lambda m, **options: fit(m, X, val_data=X[:60], objective=name, **options)


def many_run():
    models = [small(), small((16,))]
    return models, lambda *pair, **options: fit_many(list(pair), X, lr=[1e-3, 5e-3], **options)


def chain_run():
    with seeded(0):
        model = sn.AutoregressiveEBM(2, blocks=1, drop=0.2, **cases.TINY)
    return [model], lambda m, **options: fit(m, X, polish_steps=3, **options)


def conditional_run():
    with seeded(0):
        model = with_features()
    return [model], lambda m, **options: fit(m, (X[:, :1], X[:, 1:]), **options)


def flow_run():
    with seeded(0):
        flow = sn.Flow(2, transforms=2, hidden=(8,))
    return [flow], lambda m, n_samples, **options: fit(m, X, **options)


def vae_run(prior):
    with seeded(0):
        encoder, decoder = cases.DenseEncoder(2, 2, (8,)), cases.DenseDecoder(2, 2)
        vae = sn.EnergyVAE(encoder, decoder, cases.PRIORS[prior]())
    return [vae], lambda m, **options: fit(m, (X > 0).float(), kl_warmup=8, **options)


RUNS = {
    **{name: partial(objective_run, name) for name in objective_names()},
    **{"many": many_run, "chain": chain_run, "conditional": conditional_run, "flow": flow_run},
    **{f"vae {prior}": partial(vae_run, prior) for prior in cases.PRIORS},
}


@pytest.mark.usefixtures("few_closing_samples")
@pytest.mark.parametrize("stop_at", [1, 7])
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_ends_as_one_never_stopped_and_draws_nothing_of_the_callers(
    name, stop_at, tmp_path, monkeypatch
):
    def train(seed, **options):
        models, run = RUNS[name]()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        run(*models, **QUICK | options)
        assert torch.equal(torch.get_rng_state(), before)
        return weights(*models)

    whole, plain, left = train(1), Stepper.step, [stop_at]

    def step(self, *args):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return plain(self, *args)

    checkpoint = sn.Checkpoint(tmp_path / "run.ckpt", every=1)
    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "step", step)
        with pytest.warns(sn.SelfnormWarning, match="interrupted"):
            train(2, checkpoint=checkpoint)
    assert torch.equal(train(3, checkpoint=checkpoint), whole)
    assert torch.equal(train(4, checkpoint=checkpoint), whole)  # a finished run is only loaded


@pytest.mark.usefixtures("few_closing_samples")
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("objective", objective_names())
def test_gradients_are_on_in_training_whatever_the_caller_has_set(around, objective):
    plain, inside = small(), small()
    rows = X.clone().requires_grad_()
    fit(plain, rows, objective=objective, val_data=rows, **QUICK)
    with around():
        fit(inside, X, objective=objective, val_data=X, **QUICK)
    assert torch.equal(weights(plain), weights(inside))
    assert rows.grad is None


@pytest.mark.parametrize("objective", [*WALKS, *SCORES])
def test_a_spread_is_not_taken_from_one_row(objective):
    with pytest.raises(DataError, match="raise batch_size"):
        fit(small(), X, objective=objective, **QUICK | {"batch_size": 1})


def test_fit_tells_the_names_of_its_objectives():
    assert [name for name in objective_names() if f'"{name}"' not in sn.fit.__doc__] == []
