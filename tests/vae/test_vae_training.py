"""Training of VAEs: unbiased gradients, spikes, warm-up, checkpoints, interruption."""

import math

import pytest
import torch
from torch import nn

from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.training import TrainingOptions
from selfnorm.vae import (
    AutoregressivePrior,
    EnergyPrior,
    EnergyVAE,
    MixturePrior,
    StandardNormal,
    evaluate_vae,
)
from selfnorm.vae.networks import DenseDecoder, DenseEncoder
from selfnorm.vae.posterior import AggregatePosterior, BaseAndAggregate, GaussianPosterior
from tests.fitting import fit


def chain(dim=2, tilt=1.5, **sizes):
    """A chain whose energies are far from zero and whose proposals depend on what came before."""
    torch.manual_seed(0)
    options = {"hidden": 16, "components": 3, "context": 4, "energy_hidden": 16, **sizes}
    prior = AutoregressivePrior(dim, **options)
    with torch.no_grad():
        prior.chain.energy.last.weight.normal_(0, tilt)
        prior.chain.mixture_head.weight.mul_(8)
        prior.chain.energy.norm_last.weight.normal_(0, 0.3)
    return prior


def test_a_chain_is_normalised_exactly():
    prior = chain(dim=1, tilt=0.2)
    axis = torch.sinh(torch.linspace(-9, 9, 4001)) / 3
    exact, learned, lower = prior.log_prob_exact(axis.unsqueeze(1))
    mass = torch.trapezoid(exact.double().exp(), axis.double())
    assert float(mass) == pytest.approx(1, abs=0.005)
    assert bool((lower <= exact + 1e-4).all())
    assert torch.allclose(learned, prior.log_prob(axis.unsqueeze(1)), atol=1e-4)
    assert float((learned - exact).abs().max()) > 0.01  # b is wrong here, and seen to be


@pytest.mark.parametrize("orderings", [1, 2])
def test_exact_values_are_those_of_the_autoregressive_model(orderings):
    prior = chain(dim=3, orderings=orderings)
    z = torch.randn(20, 3)
    exact, learned, _ = prior.log_prob_exact(z, 128)
    by_model = prior.chain.log_prob(z, normalizer="quadrature", n_nodes=128)
    assert torch.allclose(exact, by_model, atol=1e-4)
    assert torch.allclose(learned, prior.chain.log_prob(z, normalizer="learned"), atol=1e-4)


def test_the_gradient_through_a_chain_is_that_of_its_bound():
    """The mean gradient in z equals the derivative of the SNL bound by exact quadrature.

    Without the score of the proposal it is off by 0.03 here, nine standard errors.
    """
    prior = chain(score=True).double()
    prior.n_samples = 16
    point = torch.tensor([-0.8, 0.2], dtype=torch.float64)
    z = point.repeat(20_000, 1).requires_grad_(True)
    torch.manual_seed(1)
    value, _ = prior.objective(z, GaussianPosterior(z, z), 1)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    error = gradient.std(0) / math.sqrt(len(z))
    step = 1e-4

    def bound(at):
        return float(prior.log_prob_exact(at.unsqueeze(0), 4096)[2])

    assert float(value.detach().mean()) == pytest.approx(bound(point), abs=0.02)
    for i in range(2):
        move = torch.zeros(2, dtype=torch.float64)
        move[i] = step
        slope = (bound(point + move) - bound(point - move)) / (2 * step)
        assert float(gradient[:, i].mean()) == pytest.approx(slope, abs=4 * float(error[i]) + 0.002)


def test_an_aggregate_posterior_integrates_to_one_and_matches_its_samples():
    torch.manual_seed(0)
    posterior = GaussianPosterior(torch.randn(6, 2), torch.randn(6, 2) * 0.3 - 0.5)
    q = BaseAndAggregate(StandardNormal(2), posterior.aggregate(), 0.4)
    axis = torch.linspace(-8, 8, 401)
    density = q.log_prob(torch.cartesian_prod(axis, axis)).exp().reshape(401, 401)
    assert float(torch.trapezoid(torch.trapezoid(density, axis), axis)) == pytest.approx(
        1, abs=1e-3
    )
    z = torch.randn(5, 2)
    parts = torch.stack([posterior.log_prob(z[i].expand(6, 2)).logsumexp(0) for i in range(5)])
    assert torch.allclose(q.aggregate.log_prob(z), parts - math.log(6), atol=1e-5)
    y = q.sample((40_000,))
    expected = 0.6 * posterior.mean.mean(0)
    assert torch.allclose(y.mean(0), expected, atol=0.05)
    assert posterior.aggregate(2.0).log_sd.mean() > posterior.log_sd.mean()
    assert isinstance(q.aggregate, AggregatePosterior)


def test_mixture_prior_integrates_to_one():
    torch.manual_seed(0)
    prior = MixturePrior(2, 4)
    axis = torch.linspace(-9, 9, 301)
    density = prior.log_prob(torch.cartesian_prod(axis, axis)).exp().reshape(301, 301).detach()
    assert float(torch.trapezoid(torch.trapezoid(density, axis), axis)) == pytest.approx(
        1, abs=1e-3
    )
    sampled = prior.sample((20_000,))
    share = torch.softmax(prior.logits, 0)
    assert torch.allclose(sampled.mean(0), (share @ prior.means).detach(), atol=0.06)


# -- spikes --------------------------------------------------------------------------------------

LATENT = 10


class Spikes(nn.Module):
    """An energy that is zero but for deep narrow wells at given places."""

    dim = LATENT

    def __init__(self, places, depth):
        super().__init__()
        self.register_buffer("places", places)
        self.depth = nn.Parameter(torch.tensor(depth))

    def forward(self, z):
        near = torch.cdist(z, self.places).min(-1).values / 0.3
        return -self.depth * torch.exp(-0.5 * near.square())


@pytest.fixture(scope="module")
def sharp():
    """A VAE with sharp posteriors, and rows."""
    torch.manual_seed(0)
    encoder, decoder = DenseEncoder(20, LATENT, (32,)), DenseDecoder(LATENT, 20, (32,))
    with torch.no_grad():
        encoder.layers[-1].bias[LATENT:] = -6.0
        encoder.layers[-1].weight[:LATENT].mul_(4)
    return encoder, decoder, (torch.rand(200, 20) < 0.5).float()


@pytest.mark.parametrize(("depth", "flagged"), [(35.0, True), (0.5, False)])
def test_spikes_at_posteriors_are_flagged(sharp, depth, flagged):
    encoder, decoder, x = sharp
    places = encoder(x)[:, :LATENT].detach()
    vae = EnergyVAE(encoder, decoder, EnergyPrior(Spikes(places, depth)))
    report = evaluate_vae(vae, x, posterior_samples=5, n_prior_samples=20_000, seed=0)
    assert report.reliable is not flagged, report
    if flagged:
        # what the warning is about: base samples alone would have made this likelihood enormous
        assert report.log_norm["mixture"].value > report.log_norm["base"].value + 3
        assert "disagree" in report.reasons[0]


@pytest.mark.parametrize("where", ["training", "second half"])
def test_spikes_where_no_estimator_looks_are_flagged(sharp, where):
    """Wells at rows that are not the reference: base, mixture and SMC agree on a wrong log Z."""
    encoder, decoder, x = sharp
    known, rows = x[:100], x[100:]
    wells_at = known if where == "training" else rows[50:]
    prior = EnergyPrior(Spikes(encoder(wells_at)[:, :LATENT].detach(), 35.0))
    vae = EnergyVAE(encoder, decoder, prior)
    with torch.no_grad():
        prior.finish(*vae.aggregate_samples(wells_at, 500))
    if where == "second half":
        prior.log_norm.data.fill_(0.0)
    report = evaluate_vae(vae, rows, posterior_samples=5, n_prior_samples=20_000, seed=0)
    assert report.log_norm["mixture"].value < report.log_norm["base"].value + 0.05
    assert not report.reliable
    word = "b = " if where == "training" else "held-out rows"
    assert any(word in reason for reason in report.reasons)


@pytest.fixture
def few_samples(monkeypatch):
    monkeypatch.setattr("selfnorm.vae.task._CHUNKS", 1)


@pytest.mark.usefixtures("few_samples")
def test_the_monitor_speaks_without_held_out_rows(sharp):
    encoder, decoder, x = sharp
    prior = EnergyPrior(Spikes(encoder(x)[:, :LATENT].detach(), 1.0), proposal="base")
    with pytest.warns(SelfnormWarning, match="spikes"):
        history = fit(
            EnergyVAE(encoder, decoder, prior),
            x,
            lr=1.0,
            max_steps=40,
            max_epochs=99,
            n_samples=200,
            batch_size=100,
            seed=0,
            progress=False,
            task_options={"train": "prior"},
            schedule="constant",
            clip_norm=None,
        )
    assert history.final["spiked"] == 1.0


@pytest.mark.usefixtures("few_samples")
def test_the_monitor_stops_training_on_spikes(sharp):
    encoder, decoder, x = sharp
    places = encoder(x)[:, :LATENT].detach()

    def train(monitor):
        prior = EnergyPrior(Spikes(places, 1.0), proposal="base", lr_scale=1.0)
        vae = EnergyVAE(encoder, decoder, prior)
        return fit(
            vae,
            x,
            val_data=x,
            objective="snelbo",
            lr=1.0,
            max_steps=40,
            max_epochs=99,
            n_samples=200,
            batch_size=100,
            seed=0,
            progress=False,
            task_options={"train": "prior", "monitor": monitor},
            schedule="constant",
            validate_every=5,
            clip_norm=None,
        )

    with pytest.warns(SelfnormWarning, match="spikes"):
        stopped = train("stop")
    assert stopped.stopped == "spikes"
    assert stopped.best_step < stopped.n_steps
    with pytest.warns(SelfnormWarning, match="spikes"):
        warned = train("warn")
    assert warned.stopped == "max_epochs"
    assert warned.n_steps == 40


# -- the loop ------------------------------------------------------------------------------------


def small(prior=None):
    torch.manual_seed(0)
    prior = MixturePrior(2, 3) if prior is None else prior
    return EnergyVAE(DenseEncoder(6, 2, (8,)), DenseDecoder(2, 6, (8,)), prior)


X = (torch.arange(60 * 6).reshape(60, 6) % 7 % 2).float()
OPTIONS = {"max_steps": 24, "max_epochs": 99, "batch_size": 20, "seed": 3, "progress": False}


def state(vae):
    return torch.cat([p.detach().flatten() for p in vae.parameters()])


@pytest.mark.parametrize("prior", ["mixture", "energy", "chain"])
def test_an_interrupted_run_resumes_with_the_same_bits(prior, tmp_path):
    def make():
        torch.manual_seed(1)
        return small(
            {
                "mixture": lambda: MixturePrior(2, 3),
                "energy": lambda: EnergyPrior(dim=2),
                "chain": lambda: chain(tilt=0.1),
            }[prior]()
        )

    extra = {"kl_warmup": 16, "n_samples": 32, "ema": 0.9}
    whole = make()
    fit(whole, X, **OPTIONS, **extra)
    calls = [0]

    def interrupt(x):
        calls[0] += 1
        if calls[0] == 15:
            raise KeyboardInterrupt
        return x

    path = str(tmp_path / "run.pt")
    broken = make()
    with pytest.warns(SelfnormWarning, match="interrupted"):
        history = fit(
            broken,
            X,
            **OPTIONS,
            **extra,
            task_options={"augment": interrupt},
            checkpoint=path,
            checkpoint_every=5,
        )
    assert history.stopped == "interrupted"
    resumed = make()
    history = fit(
        resumed,
        X,
        **OPTIONS,
        **extra,
        checkpoint=path,
        checkpoint_every=5,
    )
    assert history.n_steps == 24
    assert torch.equal(state(resumed), state(whole))


def test_kl_warm_up_weights_the_divergence():
    vae = small()
    task = vae.training_task(kl_warmup=10)
    task.start((X,))
    for expected in (0.1, 0.2):
        loss, metrics = task.loss((X,))
        fit = metrics["lower"] + metrics["kl"]
        assert float(loss) == pytest.approx(float(expected * metrics["kl"] - fit), rel=1e-4)


def test_corruption_reaches_the_encoder_only_and_augmentation_both():
    vae = small()
    seen = []
    vae.encoder.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    task = vae.training_task(corrupt=torch.zeros_like)
    torch.manual_seed(0)
    blind, _ = task.loss((X,))
    assert float(seen[-1].abs().sum()) == 0
    torch.manual_seed(0)
    both, _ = vae.training_task(augment=torch.zeros_like).loss((X,))
    assert float(both.detach()) != pytest.approx(float(blind.detach()), rel=1e-3)


def test_more_posterior_samples_do_not_change_the_expected_loss():
    vae = small()
    torch.manual_seed(0)
    with torch.no_grad():
        one = torch.stack([vae.training_task().loss((X,))[0] for _ in range(200)])
        ten = torch.stack(
            [vae.training_task(posterior_samples=10).loss((X,))[0] for _ in range(50)]
        )
    assert float(one.mean()) == pytest.approx(float(ten.mean()), abs=0.05)
    assert float(ten.std()) < float(one.std())


def test_post_hoc_training_moves_the_prior_alone():
    vae = small(chain(tilt=0.1))
    before = [p.detach().clone() for p in vae.encoder.parameters()]
    prior_before = torch.cat([p.detach().flatten() for p in vae.prior.parameters()])
    fit(vae, X.repeat(4, 1), **OPTIONS, task_options={"train": "prior"})
    assert all(torch.equal(a, b) for a, b in zip(before, vae.encoder.parameters(), strict=True))
    moved = torch.cat([p.detach().flatten() for p in vae.prior.parameters()])
    assert not torch.equal(prior_before, moved)


def test_post_hoc_training_leaves_statistics_and_dropout_of_the_vae_alone():
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.SiLU(), nn.Linear(8, 4)
    )
    modes = []
    encoder.register_forward_hook(lambda m, _i, _o: modes.append(m[2].training))
    encoder.eval()
    before = encoder(X)
    vae = EnergyVAE(encoder, DenseDecoder(2, 6, (8,)), MixturePrior(2, 3))
    fit(vae, X, **OPTIONS, task_options={"train": "prior"})
    assert torch.equal(encoder.eval()(X), before)
    assert not any(modes)


def test_a_penalty_is_no_part_of_the_bound():
    plain, penalised = (EnergyPrior(dim=2, gradient_penalty=g) for g in (0.0, 5.0))
    torch.manual_seed(0)
    with torch.no_grad():
        plain.energy.layers[-1].weight.normal_()
    penalised.load_state_dict(plain.state_dict())
    values, losses = [], []
    for prior in (plain, penalised):
        task = small(prior).training_task(n_samples=64)
        task.start((X,))
        values.append(task.validate((X,))["lower"])
        torch.manual_seed(1)
        loss, metrics = task.loss((X,))
        assert "penalty" not in metrics
        losses.append(float(loss.detach()))
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    assert losses[1] > losses[0] + 0.1


def test_held_out_rows_with_nan_are_refused():
    bad = X.clone()
    bad[7, 2] = math.nan
    with pytest.raises(DataError, match="NaN"):
        fit(small(), X, val_data=bad, **OPTIONS)


def test_the_betas_of_adam_reach_the_optimiser():
    task = small().training_task(betas=(0.5, 0.999))
    optimizer = task.make_optimizer(TrainingOptions(optimizer="adam"))
    assert all(group["betas"] == (0.5, 0.999) for group in optimizer.param_groups)
    assert isinstance(optimizer, torch.optim.Adam)
