"""Rows, references and priors that do not belong to a VAE."""

import numpy as np
import pytest
import torch

import selfnorm as sn
from selfnorm.errors import DataError
from selfnorm.vae import (
    AutoregressivePrior,
    EnergyPrior,
    EnergyVAE,
    StandardNormal,
    add_energy_prior,
    evaluate_vae,
)
from selfnorm.vae.networks import DenseDecoder, DenseEncoder

ROWS = torch.arange(40).reshape(8, 5) % 3 % 2 * 1.0


def small(prior=2):
    torch.manual_seed(0)
    return EnergyVAE(DenseEncoder(5, 2, (8,)), DenseDecoder(2, 5, (8,)), prior)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_arrays_count_as_tensors(kind):
    vae, rows = small(), ROWS.numpy().astype(kind)
    expected = evaluate_vae(vae, ROWS, posterior_samples=3, seed=0)
    found = evaluate_vae(vae, rows, posterior_samples=3, reference=rows, seed=0)
    assert found.to_dict() == expected.to_dict()


def test_rows_of_another_width():
    vae = small()
    for call in (
        lambda: evaluate_vae(vae, ROWS[:, :4]),
        lambda: sn.fit(vae, ROWS[:, :4], max_steps=1, progress=False),
    ):
        with pytest.raises(DataError, match="rows have 4 values, expected 5"):
            call()


def test_an_encoder_that_fails_on_rows_of_the_right_width_says_why_itself():
    vae = EnergyVAE(DenseEncoder(5, 2, (8,)), DenseDecoder(2, 4, (8,)), 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        vae.check(ROWS[:, :4])


@pytest.mark.parametrize("prior", [StandardNormal, lambda dim: EnergyPrior(dim=dim)])
@pytest.mark.parametrize("reference", [ROWS[:, :4], ROWS[:0]])
def test_a_reference_of_another_shape(prior, reference):
    with pytest.raises(DataError, match=r"reference has shape .* expected rows of 5 values"):
        evaluate_vae(small(prior(2)), ROWS, reference=reference, n_prior_samples=100)


def test_what_is_no_vae():
    with pytest.raises(TypeError, match="needs an EnergyVAE, got DenseEncoder"):
        evaluate_vae(DenseEncoder(5, 2, (8,)), ROWS)


def test_a_prior_of_another_size_than_latent():
    vae = small()
    prior = AutoregressivePrior(2, hidden=8, components=2, context=4, energy_hidden=4)
    with pytest.raises(DataError, match="latent=3, but the prior has 2 latent numbers"):
        add_energy_prior(vae.encoder, vae.decoder, ROWS, latent=3, prior=prior, max_steps=1)
