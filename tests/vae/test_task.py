"""Training of VAEs: spikes, warm-up, checkpoints, interruption, an encoder from dreams."""

import pytest
import torch
from torch import nn

from selfnorm.errors import SelfnormWarning
from selfnorm.training import TrainingOptions
from selfnorm.vae import (
    DenseDecoder,
    DenseEncoder,
    EnergyPrior,
    EnergyVAE,
    MixturePrior,
    evaluate_vae,
)
from tests.fitting import fit
from tests.golden.cases import PRIORS

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
        prior.finish(*vae.training_task()._aggregate(wells_at))
    if where == "second half":
        prior.log_norm.data.fill_(0.0)
    report = evaluate_vae(vae, rows, posterior_samples=5, n_prior_samples=20_000, seed=0)
    assert report.log_norm["mixture"].value < report.log_norm["base"].value + 0.05
    assert not report.reliable
    word = "b = " if where == "training" else "held-out rows"
    assert any(word in reason for reason in report.reasons)


@pytest.fixture
def few_samples(monkeypatch):
    monkeypatch.setattr("selfnorm.vae.priors._CHUNKS", 1)


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("monitor", ["stop", "warn", "without held-out rows"])
def test_the_monitor_speaks_of_spikes_or_stops_on_them(sharp, monitor):
    encoder, decoder, x = sharp
    places = encoder(x)[:, :LATENT].detach()
    prior = EnergyPrior(Spikes(places, 1.0), proposal="base", lr_scale=1.0)
    options = {"val_data": x, "validate_every": 5, "monitor": monitor}
    if monitor == "without held-out rows":
        options = {}
    with pytest.warns(SelfnormWarning, match="spikes"):
        history = fit(
            EnergyVAE(encoder, decoder, prior), x, objective="snelbo", train="prior", lr=1.0,
            schedule="constant", max_steps=40, max_epochs=99, n_samples=200, batch_size=100, seed=0,
            progress=False, clip_norm=None, **options,
        )  # fmt: skip
    if monitor == "stop":
        assert history.stopped == "spikes"
        assert history.best_step < history.n_steps
    else:
        assert history.stopped == "max_epochs"
        assert history.n_steps == 40
        assert history.final["spiked"] == 1.0


# -- the loop ------------------------------------------------------------------------------------


def small(prior=None):
    torch.manual_seed(0)
    prior = MixturePrior(2, 3) if prior is None else prior
    return EnergyVAE(DenseEncoder(6, 2, (8,)), DenseDecoder(2, 6, (8,)), prior)


X = (torch.arange(60 * 6).reshape(60, 6) % 7 % 2).float()
OPTIONS = {"max_steps": 24, "max_epochs": 99, "batch_size": 20, "seed": 3, "progress": False}


def test_kl_warm_up_weights_the_divergence():
    vae = small()
    task = vae.training_task(kl_warmup=10)
    task.start((X,))
    for expected in (0.1, 0.2):
        loss, metrics = task.loss((X,))
        fit = metrics["lower"] + metrics["kl"]
        assert float(loss) == pytest.approx(float(expected * metrics["kl"] - fit), rel=1e-4)


def test_augmentation_reaches_what_is_encoded_and_what_is_told():
    vae = small()
    seen = []
    vae.encoder.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    torch.manual_seed(0)
    blind, _ = vae.training_task(augment=torch.zeros_like).loss((X,))
    assert float(seen[-1].abs().sum()) == 0
    torch.manual_seed(0)
    empty, _ = vae.training_task().loss((torch.zeros_like(X),))
    assert torch.equal(blind, empty)


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
    fit(vae, X, train="prior", **OPTIONS)
    assert torch.equal(encoder.eval()(X), before)
    assert not any(modes)


def test_the_betas_of_adam_reach_the_optimiser():
    task = small().training_task(betas=(0.5, 0.999))
    optimizer = task.make_optimizer(TrainingOptions(optimizer="adam"))
    assert all(group["betas"] == (0.5, 0.999) for group in optimizer.param_groups)
    assert isinstance(optimizer, torch.optim.Adam)


@pytest.mark.parametrize("kind", ["mixture", "energy", "chain"])
@pytest.mark.parametrize("train", ["encoder", "prior"])
def test_what_is_not_trained_stays_as_it_is(train, kind):
    vae = small(PRIORS[kind]())
    names = [n for n, _ in vae.named_parameters() if "norm" not in n]  # b is closed at the end
    before = {n: p.detach().clone() for n, p in vae.named_parameters()}
    modes = []
    vae.decoder.register_forward_hook(lambda m, _i, _o: modes.append(m.training))
    fit(vae, X, val_data=X[:20], train=train, monitor="off", **OPTIONS)
    after = dict(vae.named_parameters())
    for name in names:
        trained = name.startswith(train)
        assert torch.equal(before[name], after[name]) != trained, name
        assert trained or after[name].grad is None, name
    assert all(p.requires_grad for p in vae.parameters())
    assert not any(modes)


def test_rows_keep_the_shape_of_images():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(6, 4))
    vae = EnergyVAE(encoder, DenseDecoder(2, 6, (8,)), 2)
    rows = vae.dream(X.reshape(60, 1, 2, 3))
    assert rows.shape == (60, 1, 2, 3)
    assert set(rows.unique().tolist()) <= {0.0, 1.0}
