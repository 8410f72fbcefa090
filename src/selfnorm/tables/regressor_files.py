"""Fitted regressors as folders: what is written, and how it is put back together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from selfnorm.conditional import PredictiveModel, build_ensemble
from selfnorm.saving import plain_number
from selfnorm.training import History

if TYPE_CHECKING:
    from selfnorm.tables.regressor import EnergyRegressor

__all__ = ["contents", "restore"]

_RANGES = ("low", "high", "label_low", "label_high")
_SCALINGS = ("x_center", "x_scale", "y_center", "y_scale")


def contents(estimator: EnergyRegressor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of a fitted estimator."""
    parameters = estimator.get_params()
    if not isinstance(estimator.random_state, int | None):
        parameters["random_state"] = None
    names = getattr(estimator, "feature_names_in_", None)
    config = {
        "parameters": {k: plain_number(v) for k, v in parameters.items()},
        "columns": None if names is None else [str(name) for name in names],
        "n_features": int(estimator.n_features_in_),
        "n_outputs": int(estimator.n_outputs_),
        "flat_target": bool(estimator._flat_target),
        "label_step": float(estimator.label_step_),
        "log_norm_error": float(estimator.log_norm_error_),
        "training": [h.to_dict() for h in estimator.history_],
    }
    predictive = estimator._predictive
    tensors = {f"model.{k}": v for k, v in predictive.model.state_dict().items()}
    tensors |= {name: getattr(predictive, name) for name in _RANGES}
    for name in _SCALINGS:
        tensors[name] = torch.from_numpy(getattr(estimator, f"_{name}"))
    return config, tensors


def restore(estimator: EnergyRegressor, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give an estimator of the saved parameters the fitted state of a folder."""
    n_features, n_outputs = int(config["n_features"]), int(config["n_outputs"])
    bins = {
        "input_edges": (n_features, estimator.input_bins),
        "label_edges": (n_outputs, estimator.label_bins),
    }
    own = (estimator.n_members, 1) if estimator.bin_jitter > 0 else ()
    edges: dict[str, Any] = {
        k: torch.zeros(*own, rows, n + 1) if n else None for k, (rows, n) in bins.items()
    }
    model = build_ensemble(n_features, n_outputs, **estimator._architecture(), **edges)
    state = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    model.double().load_state_dict(state, strict=True)
    model.freeze_proposal()
    estimator._predictive = PredictiveModel(model, *(tensors[k] for k in _RANGES))
    for name in _SCALINGS:
        setattr(estimator, f"_{name}", tensors[name].numpy())
    estimator.n_features_in_, estimator.n_outputs_ = n_features, n_outputs
    if config["columns"] is not None:
        estimator.feature_names_in_ = np.array(config["columns"], dtype=object)
    estimator._flat_target, estimator._one_target = bool(config["flat_target"]), n_outputs == 1
    estimator.label_step_ = float(config["label_step"])
    estimator.log_norm_error_ = float(config["log_norm_error"])
    estimator.history_ = [History.from_dict(h) for h in config["training"]]
    estimator.n_iter_ = sum(h.n_steps for h in estimator.history_)
