"""Encoders and decoders as people bring them: other shapes, other modes, rows of other kinds."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm.errors import DataError, EnergyError, ModelFileError
from selfnorm.vae import (
    AutoregressivePrior,
    DenseDecoder,
    DenseEncoder,
    EnergyPrior,
    EnergyVAE,
    StandardNormal,
    add_energy_prior,
    evaluate_vae,
)
from selfnorm.vae.model import Bernoulli, Categorical, GaussianNoise, as_likelihood
from tests.contract.specimens import IMAGES, Decoder, Encoder
from tests.fitting import fit


def small(prior=2):
    torch.manual_seed(0)
    return EnergyVAE(Encoder(), Decoder(1, 4, 6), prior)


def test_the_mode_comes_back_after_an_error():
    vae = small()
    with pytest.raises(TypeError):
        vae.sample(3, no_such_option=1)
    assert all(m.training for m in vae.modules())


@pytest.mark.parametrize("kind", [np.uint8, np.float64, torch.uint8, torch.float64])
def test_rows_of_other_kinds(kind):
    vae = small().eval()
    rows = IMAGES.numpy().astype(kind) if isinstance(kind, type) else IMAGES.to(kind)
    for call in (vae.log_prob, vae.elbo):
        assert torch.equal(call(rows, n_samples=2, seed=0), call(IMAGES, n_samples=2, seed=0))
    assert torch.equal(vae.reconstruct(rows), vae.reconstruct(IMAGES))
    options = {"posterior_samples": 3, "seed": 0}
    found, expected = (evaluate_vae(vae, x, reference=x, **options) for x in (rows, IMAGES))
    assert found.to_dict() == expected.to_dict()


def test_an_encoder_may_give_a_list():
    vae = small()
    listed = EnergyVAE(Encoder(list), vae.decoder, 2)
    listed.load_state_dict(vae.state_dict())
    assert torch.equal(listed.log_prob(IMAGES, seed=0), vae.log_prob(IMAGES, seed=0))


def test_modules_without_parameters():
    """A fixed projection is an encoder too."""

    class Corner(nn.Module):
        def forward(self, x):
            mean = x.flatten(1)[:, :2]
            return mean, torch.zeros_like(mean)

    class Rows(nn.Module):
        def forward(self, z):
            return z.repeat(1, 12)

    assert EnergyVAE(Corner(), Rows(), 2).elbo(IMAGES, seed=0).shape == (40,)
    vae, _ = add_energy_prior(
        Corner(),
        Rows(),
        IMAGES,
        latent=2,
        prior=EnergyPrior(dim=2),
        max_steps=1,
        task_options={"monitor": "off"},
    )
    assert vae.prior.energy.layers[0].weight.isfinite().all()


def test_a_decoder_with_the_classes_first_is_read_as_cross_entropy_reads_it():
    vae = EnergyVAE(Encoder(), Decoder(3, 4, 6), 2, "categorical:3").eval()
    x, z = torch.arange(24 * 5).reshape(5, 4, 6) % 3, torch.randn(2, 5, 2)
    found = vae.log_likelihood(x.float(), z)
    for k in range(2):
        logits = vae.decoder(z[k])
        expected = -nn.functional.cross_entropy(logits, x, reduction="none").sum((1, 2))
        torch.testing.assert_close(found[k], expected)
    mean = vae.reconstruct(x)
    torch.testing.assert_close(
        mean, vae.decoder(vae.encode(x.float()).mean).softmax(1).flatten(2).transpose(1, 2)
    )
    last = Decoder(4, 6, 3)
    assert torch.equal(vae.likelihood.flat(last.eval()(z[0])), last(z[0]).flatten(1))


class Softened(Bernoulli):
    """A likelihood of one's own, with a weight in it."""

    def __init__(self):
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(0.7))

    def log_prob(self, output, x):
        return super().log_prob(self.sharpness * output, x)


def dense(prior, likelihood="bernoulli"):
    return EnergyVAE(DenseEncoder(24, 2, (8,)), DenseDecoder(2, 24, (8,)), prior, likelihood)


def test_a_likelihood_of_ones_own_comes_back_when_it_is_given(tmp_path):
    vae = dense(2, Softened())
    with torch.no_grad():
        vae.likelihood.sharpness.fill_(0.3)
    vae.save(tmp_path / "m")
    with pytest.raises(ModelFileError, match="pass likelihood="):
        EnergyVAE.load(tmp_path / "m")
    again = EnergyVAE.load(tmp_path / "m", likelihood=Softened())
    assert torch.equal(again.log_prob(IMAGES, seed=0), vae.log_prob(IMAGES, seed=0))


def test_a_module_that_does_not_fit_a_folder_is_told_by_its_weight(tmp_path):
    dense(2).save(tmp_path / "m")
    with pytest.raises(ModelFileError, match=r"size mismatch for encoder.layers.0.weight"):
        EnergyVAE.load(tmp_path / "m", encoder=DenseEncoder(24, 2, (9,)))


# -- what is refused -----------------------------------------------------------------------------

ROWS = torch.arange(40).reshape(8, 5) % 3 % 2 * 1.0


def five(prior=2, likelihood="bernoulli", decoder=None):
    decoder = DenseDecoder(2, 5, (8,)) if decoder is None else decoder
    return EnergyVAE(DenseEncoder(5, 2, (8,)), decoder, prior, likelihood)


def fitted(vae, rows=ROWS, **options):
    return fit(vae, rows, max_steps=1, progress=False, **options)


def on(rows=ROWS, **options):
    vae = five(EnergyPrior(dim=2))
    return evaluate_vae(vae, rows, **{"n_prior_samples": 100, "posterior_samples": 2, **options})


def chain():
    return AutoregressivePrior(2, hidden=8, components=2, context=4, energy_hidden=4)


IN_0_1 = r"needs values in \[0, 1\]"
REFUSED = [
    (lambda: fitted(five(), ROWS + 1), DataError, "Bernoulli"),
    (lambda: fitted(five(), ROWS[:, :0]), DataError, "shape"),
    (lambda: fitted(five(), ROWS * math.nan), DataError, "NaN"),
    (lambda: fitted(five(), ROWS[:0]), DataError, "no rows"),
    (lambda: fitted(five(), ROWS[:, :4]), DataError, r"shape \(4,\): .*multiplied"),
    (lambda: fitted(five(), (ROWS, ROWS)), DataError, "one tensor"),
    (lambda: fitted(five(), ROWS.double()), DataError, "rows of torch.float32, got torch.float64"),
    (lambda: fitted(five(), val_data=ROWS * math.nan), DataError, "NaN"),
    (lambda: fitted(five(4)), DataError, "the prior has 4 latent numbers"),
    (lambda: fitted(five(2, "categorical:4")), DataError, "decoder"),
    (lambda: fitted(five(), objective="nce"), ValueError, "trained by"),
    (lambda: fitted(five(), train="decoder"), ValueError, "'all', 'prior', 'encoder'"),
    (lambda: fitted(five(), monitor="pray"), ValueError, "monitor"),
    (lambda: fitted(five(chain()), objective="elbo"), ValueError, "normalised"),
    (lambda: five().log_prob(255 * ROWS), DataError, IN_0_1),
    (lambda: five().elbo(ROWS / 0), DataError, "NaN or infinity"),
    (lambda: five().reconstruct(ROWS[0]), DataError, r"shape \(n, ...\), got \(5,\)"),
    (lambda: five(decoder=lambda z: (z, z)).sample(2), DataError, "one tensor.*not a tuple"),
    (
        lambda: EnergyVAE(Encoder(lambda pair: (*pair, *pair)), Decoder(), 2).elbo(IMAGES),
        DataError,
        r"a mean and a log-variance.*it gives 4 parts",
    ),
    (lambda: on(ROWS[:, :4]), DataError, r"shape \(4,\): .*multiplied"),
    (lambda: on(posterior_samples=1), DataError, "posterior_samples"),
    (lambda: on(reference=ROWS / 0), DataError, "reference holds NaN"),
    (lambda: on(reference=255 * ROWS), DataError, IN_0_1),
    (lambda: on(reference=ROWS[:, :4]), DataError, "reference has shape .* rows of 5 values"),
    (lambda: on(reference=ROWS[:0]), DataError, "reference has shape .* rows of 5 values"),
    (lambda: evaluate_vae(nn.Linear(5, 2), ROWS), TypeError, "needs an EnergyVAE, got Linear"),
    *[(lambda p=p: five(p), DataError, "number of latent numbers, not") for p in (0, -1, 2.0)],
    (lambda: five("normal"), DataError, "prior must be a module"),
    (
        lambda: add_energy_prior(nn.Linear(5, 4), nn.Linear(2, 5), ROWS, latent=3, prior=chain()),
        DataError,
        "latent=3, but the prior has 2 latent numbers",
    ),
    (lambda: EnergyPrior(), ValueError, "give dim, .*; got none"),
    (lambda: EnergyPrior(dim=2, proposal="flow"), ValueError, "proposal"),
    (lambda: EnergyPrior(dim=4, base=StandardNormal(3)), ValueError, r"of one number; got 3 and 4"),
    (lambda: EnergyPrior(sn.MLP(3), dim=2), ValueError, "got 2 and 3"),
    (
        lambda: EnergyPrior(nn.Linear(2, 3), dim=2).log_prob(torch.zeros(5, 2)),
        EnergyError,
        r"one number for each latent vector.*\(5, 3\)",
    ),
    *[
        (lambda s=s: GaussianNoise(s), ValueError, "scale must be a positive number")
        for s in (0.0, -1.0, math.nan, math.inf)
    ],
    (lambda: as_likelihood("poisson"), ValueError, "likelihood"),
    *[
        (
            lambda s=s: Categorical(3).flat(torch.zeros(2, *s)),
            DataError,
            "does not tell where the logits of the 3 classes are",
        )
        for s in ((3, 8, 3), (9, 8))
    ],
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_cause(call, error, message):
    torch.manual_seed(0)
    with pytest.raises(error, match=message):
        call()


def test_options_of_an_added_prior_are_kept():
    x = (torch.rand(60, 6) > 0.5).float()
    options = sn.TrainingOptions(max_steps=3, lr=1e-6, progress=False)
    added = {"latent": 2, "options": options, "task_options": {"monitor": "off"}}
    _, history = sn.add_energy_prior(nn.Linear(6, 4), nn.Linear(2, 6), x, **added)
    assert history.n_steps == 3
    assert history.records[-1]["lr"] <= 1e-6
