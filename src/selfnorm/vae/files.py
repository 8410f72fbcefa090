"""Model folders of VAEs: known modules are rebuilt, your own are filled with weights."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from selfnorm.errors import ModelFileError
from selfnorm.networks import MLP
from selfnorm.saving import read_folder, register, save_folder
from selfnorm.vae.energy_prior import EnergyPrior
from selfnorm.vae.likelihoods import Bernoulli, Categorical, GaussianNoise, Likelihood
from selfnorm.vae.model import EnergyVAE
from selfnorm.vae.networks import ConvDecoder, ConvEncoder, DenseDecoder, DenseEncoder
from selfnorm.vae.priors import AutoregressivePrior, LatentPrior, MixturePrior, StandardNormal

__all__ = ["KIND", "load", "save"]

KIND = "EnergyVAE"
_NETWORKS: dict[str, Any] = {
    c.__name__: c for c in (ConvDecoder, ConvEncoder, DenseDecoder, DenseEncoder)
}
_LIKELIHOODS: dict[str, Any] = {c.__name__: c for c in (Bernoulli, Categorical, GaussianNoise)}
_PRIORS: dict[str, Any] = {
    c.__name__: c for c in (AutoregressivePrior, EnergyPrior, MixturePrior, StandardNormal)
}


def save(vae: EnergyVAE, path: str | os.PathLike[str]) -> None:
    """Write ``vae`` to a folder."""
    config = {
        "encoder": _described(vae.encoder, _NETWORKS),
        "decoder": _described(vae.decoder, _NETWORKS),
        "likelihood": _described(vae.likelihood, _LIKELIHOODS),
        "prior": _prior(vae.prior),
    }
    save_folder(path, KIND, config, vae.state_dict())


def _described(module: Any, known: dict[str, Any]) -> dict[str, Any] | None:
    name = type(module).__name__
    return {"class": name, **module.config} if known.get(name) is type(module) else None


def _prior(prior: LatentPrior) -> dict[str, Any]:
    described = _described(prior, _PRIORS)
    if described is None:
        raise ModelFileError(
            f"a prior of class {type(prior).__name__} cannot be saved: save its state_dict()"
        )
    if isinstance(prior, EnergyPrior):
        described["base"] = _prior(prior.base)
        energy = prior.energy
        spectral = isinstance(energy, MLP) and any("parametrizations" in n for n in _names(energy))
        if isinstance(energy, MLP) and not spectral and energy.features is None:
            described["energy"] = {
                "hidden": list(energy.hidden),
                "activation": energy.activation,
                "dropout": energy.dropout,
                "saturate": energy.saturate,
            }
    return described


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def _built(config: dict[str, Any], known: dict[str, Any]) -> Any:
    options = dict(config)
    name = options.pop("class")
    if name not in known:
        raise ModelFileError(f"the config asks for the unknown class {str(name)[:80]!r}")
    if isinstance(options.get("hidden"), list):
        options["hidden"] = tuple(options["hidden"])
    return known[name](**options)


def _built_prior(config: dict[str, Any], energy: nn.Module | None) -> LatentPrior:
    options = dict(config)
    if options["class"] != "EnergyPrior":
        prior: LatentPrior = _built(options, _PRIORS)
        return prior
    options.pop("class")
    base, sizes = _built_prior(options.pop("base"), None), options.pop("energy", None)
    if energy is None:
        if sizes is None:
            raise ModelFileError("this model has an energy of your own: pass energy=... to load")
        energy = MLP(options["dim"], sizes.pop("hidden"), **sizes)
    return EnergyPrior(energy, base, **options)


def _build(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    encoder: nn.Module | None = None,
    decoder: nn.Module | None = None,
    energy: nn.Module | None = None,
    likelihood: Likelihood | None = None,
) -> EnergyVAE:
    parts = []
    for name, given in (("encoder", encoder), ("decoder", decoder)):
        if given is None:
            if config[name] is None:
                raise ModelFileError(
                    f"this model has {name} of your own making: pass {name}=... to "
                    "EnergyVAE.load, built as it was"
                )
            given = _built(config[name], _NETWORKS)
        parts.append(given)
    if likelihood is None:
        if config["likelihood"] is None:
            raise ModelFileError(
                "this model has a likelihood of your own: pass likelihood=... to EnergyVAE.load"
            )
        likelihood = _built(config["likelihood"], _LIKELIHOODS)
    vae = EnergyVAE(parts[0], parts[1], _built_prior(config["prior"], energy), likelihood)
    kinds = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if len(kinds) == 1:  # a model in double precision comes back as one
        vae.to(kinds.pop())
    vae.load_state_dict(tensors)
    return vae.eval()


def load(
    path: str | os.PathLike[str],
    encoder: nn.Module | None = None,
    decoder: nn.Module | None = None,
    energy: nn.Module | None = None,
    likelihood: Likelihood | None = None,
) -> EnergyVAE:
    """Read a folder written by :func:`save`."""
    folder = read_folder(path)
    if folder.kind != KIND:
        raise ModelFileError(f"{path} holds a {folder.kind}, not a {KIND}; load it with that class")
    try:
        return _build(folder.config, folder.tensors, encoder, decoder, energy, likelihood)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # torch says which weight does not fit on the second line
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelFileError(
            f"{path}: config, weights and modules do not fit together ({detail})"
        ) from error


register(KIND, _build)
