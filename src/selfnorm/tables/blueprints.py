"""Blueprints: the library's own modules as plain JSON, and back, with the tensors kept apart.

Only the classes below can be described and built. A module with code of its own (a user's energy)
has no blueprint: save its ``state_dict`` and build it in code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfnorm._context import float32_on_cpu
from selfnorm.chain import AutoregressiveEBM
from selfnorm.density import EBM
from selfnorm.distributions import Defensive, Gaussian, GaussianMixture, StudentT, Uniform
from selfnorm.errors import ModelFileError
from selfnorm.networks import MLP, FourierFeatures

__all__ = ["build", "describe"]

Blueprint = dict[str, Any]


def describe(module: nn.Module | None) -> Blueprint | None:
    """The blueprint of a module; together with its ``state_dict`` it gives the module back.

    >>> import torch
    >>> from selfnorm import Gaussian
    >>> describe(Gaussian(torch.zeros(2), scale=1.0))
    {'class': 'Gaussian', 'dim': 2}
    """
    if module is None:
        return None
    name = type(module).__name__
    if type(module) not in _DESCRIBE:
        raise ModelFileError(
            f"a {name} cannot be saved to a model folder, for its code is not part of the library; "
            "save its state_dict() and build it in code"
        )
    return {"class": name, **_DESCRIBE[type(module)](module)}


def build(blueprint: Blueprint | None, tensors: dict[str, Tensor]) -> Any:
    """The module of a blueprint with the given state, which must match it key by key."""
    if blueprint is None:
        return None
    with float32_on_cpu():
        module = _skeleton(blueprint)
    module.load_state_dict(tensors, strict=True)
    return module.eval()


def _skeleton(blueprint: Blueprint | None) -> Any:
    if blueprint is None:
        return None
    options = dict(blueprint)
    name = options.pop("class")
    if not isinstance(name, str) or name not in _BUILD:
        raise ModelFileError(
            f"the config asks for the unknown class {str(name)[:80]!r}; known are {sorted(_BUILD)}"
        )
    return _BUILD[name](**options)


def _describe_mlp(m: Any) -> Blueprint:
    features = None
    if m.features is not None:
        features = {
            "dim": m.features.dim,
            "n_features": m.features.n_features,
            "scale": m.features.scale,
        }
    return {
        "dim": m.dim,
        "hidden": list(m.hidden),
        "activation": m.activation,
        "dropout": m.dropout,
        "features": features,
        "saturate": m.saturate,
    }


def _build_mlp(dim: int, hidden: list[int], features: dict[str, Any] | None, **options: Any) -> MLP:
    waves = None if features is None else FourierFeatures(**features)
    return MLP(dim, hidden, features=waves, **options)


def _build_mixture(n_components: int, dim: int) -> GaussianMixture:
    eye = torch.eye(dim).repeat(n_components, 1, 1)
    return GaussianMixture(torch.ones(n_components), torch.zeros(n_components, dim), eye)


def _build_full(dim: int, df: float | None = None) -> Gaussian | StudentT:
    eye = torch.eye(dim)
    if df is None:
        return Gaussian(torch.zeros(dim), covariance=eye)
    return StudentT(df, torch.zeros(dim), covariance=eye)


def _describe_ebm(m: Any) -> Blueprint:
    return {"energy": describe(m.energy), "base": describe(m.base)}


def _build_ebm(energy: Blueprint, base: Blueprint | None) -> EBM:
    return EBM(_skeleton(energy), base=_skeleton(base))


def _describe_defensive(m: Any) -> Blueprint:
    return {"sharp": describe(m.sharp), "heavy": describe(m.heavy), "weight": m.weight}


def _build_defensive(sharp: Blueprint, heavy: Blueprint, weight: float) -> Defensive:
    return Defensive(_skeleton(sharp), _skeleton(heavy), weight)


_DESCRIBE: dict[type, Any] = {
    MLP: _describe_mlp,
    EBM: _describe_ebm,
    Defensive: _describe_defensive,
    Gaussian: lambda m: {"dim": m.dim},
    StudentT: lambda m: {"dim": m.dim, "df": float(m.df)},
    Uniform: lambda m: {"dim": m.dim},
    GaussianMixture: lambda m: {"dim": m.dim, "n_components": len(m.weights)},
    AutoregressiveEBM: lambda m: dict(m.config),
}
_BUILD: dict[str, Any] = {
    "MLP": _build_mlp,
    "EBM": _build_ebm,
    "Defensive": _build_defensive,
    "Gaussian": _build_full,
    "StudentT": _build_full,
    "Uniform": lambda dim: Uniform(torch.zeros(dim), torch.ones(dim)),
    "GaussianMixture": _build_mixture,
    "AutoregressiveEBM": AutoregressiveEBM,
}
