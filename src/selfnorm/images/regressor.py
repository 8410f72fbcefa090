"""Labels of images with their whole law: :class:`ImageRegressor`."""

from __future__ import annotations

import copy
import dataclasses
import numbers
import os
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import Tensor, nn

from selfnorm import saving
from selfnorm._context import seeded
from selfnorm.distributions import MDN
from selfnorm.errors import DataError, ModelFileError, SelfnormWarning
from selfnorm.images.augmentation import Augmentation
from selfnorm.images.labels import LabelSpace, dequantised
from selfnorm.images.model import ImageEBM, ImageFeatures, LawModel, build
from selfnorm.images.predictions import ImagePredictions, as_images, as_labels, same_length
from selfnorm.images.task import ImageTask, LawTask, Presentation
from selfnorm.networks import resnet18
from selfnorm.training import History, TrainingOptions, run

__all__ = ["LAWS", "OBJECTIVES", "ImageRegressor"]

OBJECTIVES = ("snl", "nce", "ranking_nce", "importance_ml")
_MAX_LOST = 0.02  # share of steps that may be lost to non-finite values without a word
LAWS = ("mdn", "gaussian", "l2")  # baselines without an energy


class ImageRegressor(ImagePredictions, BaseEstimator):
    r"""The law ``p(y|image)`` of one or more labels, as an energy on ResNet features.

    ``log p(y|x) = -E(h, y) + log q(y|h) - b(h)`` with ``h = ResNet(x)``, computed once per image;
    ``E``, ``b`` and the proposal ``q`` are heads on it. Densities refer to Lebesgue measure in the
    units of ``y``.

    Args:
        objective: ``"snl"``, ``"nce"``, ``"ranking_nce"``, ``"importance_ml"``; or a law without an
            energy: ``"mdn"`` (maximum likelihood), ``"gaussian"``, ``"l2"`` (least squares).
        proposal: ``"mdn-4"``, ``"mdn-8"``, ``"gaussian"``, ``"uniform"``.
        n_samples: ``M``, label samples per image and step.
        energy: ``"steps"`` (ours: indicators of label steps and waves) or ``"paper"``.
        base: ``"proposal"`` or ``None`` (the paper's).
        anchors: midpoints of the proposal's slices at which ``b`` sees the energy (one label only);
            0: ``b`` is a network on the features alone, as in the paper. See
            :class:`~selfnorm.images.model.ImageEBM`.
        share_gradient: features also learn from the proposal's likelihood; ``False``: from the
            objective alone, as in the paper.
        proposal_loss: see :class:`~selfnorm.conditional.task.ConditionalTask`.
        backbone: ``"resnet18"`` or a module ``(n, c, h, w) -> (n, features)``.
        label_step: distance of neighbouring labels; ``None``: 1 where all labels are integers, else
            0. Such labels get uniform noise of that width (a density at integers is unbounded).
        dequantise: ``False`` fits the labels as they are: the literal protocol.
        label_range: ``(low, high)`` of labels that can occur; their own range by default.
        augmentation: what may be done to an image (and its label).
        dropout: on the features.
        batch_size, max_epochs, lr, weight_decay, ema, patience, schedule, optimizer: training.
        bf16: bfloat16 for the ResNet and the wide layers on CUDA.
        compile_heads: fuse the heads' step by ``torch.compile``: for long runs.
        cuda_graph: capture the training step as a CUDA graph.
        device: ``"cpu"``, ``"cuda"``.
        random_state: seed.
        verbose: progress bar.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> images = rng.integers(0, 255, (40, 1, 8, 8), dtype=np.uint8)
        >>> y = images.mean((1, 2, 3)) / 10
        >>> model = ImageRegressor(backbone=nn.Flatten(), max_epochs=1, random_state=0)
        >>> model.fit(images, y).predict(images[:3]).shape
        (3,)
    """

    def __init__(
        self,
        objective: str = "snl",
        proposal: str = "mdn-4",
        *,
        n_samples: int = 64,
        energy: str = "steps",
        base: str | None = "proposal",
        anchors: int = 0,
        share_gradient: bool = True,
        proposal_loss: str = "likelihood",
        backbone: str | nn.Module = "resnet18",
        label_step: float | None = None,
        dequantise: bool = True,
        label_range: tuple[float, float] | None = None,
        augmentation: Augmentation | None = None,
        dropout: float = 0.2,
        batch_size: int = 128,
        max_epochs: int = 40,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        optimizer: str = "adamw",
        schedule: str = "one_cycle",
        ema: float | None = 0.998,
        patience: int | None = None,
        validate_every: int | None = None,
        bf16: bool = True,
        compile_heads: bool = False,
        cuda_graph: bool = True,
        device: str = "cpu",
        random_state: int | None = None,
        verbose: bool = False,
    ) -> None:
        if objective not in (*OBJECTIVES, *LAWS):
            raise DataError(f"objective must be one of {(*OBJECTIVES, *LAWS)}, not {objective!r}")
        if energy not in ("steps", "paper"):
            raise DataError(f"energy must be 'steps' or 'paper', not {energy!r}")
        if energy == "steps" and base is None and objective in OBJECTIVES:
            raise DataError(
                "the energy 'steps' is constant outside the labels' range and has no normaliser "
                "without a base: use base='proposal', or energy='paper'"
            )
        if n_samples < 1:
            raise DataError(f"n_samples must be at least 1, got {n_samples}")
        _check_anchors(anchors)
        self.objective, self.proposal, self.n_samples = objective, proposal, n_samples
        self.energy, self.base, self.anchors = energy, base, anchors
        self.share_gradient = share_gradient
        self.proposal_loss, self.backbone = proposal_loss, backbone
        self.label_step, self.dequantise, self.label_range = label_step, dequantise, label_range
        self.augmentation, self.dropout = augmentation, dropout
        self.batch_size, self.max_epochs, self.lr = batch_size, max_epochs, lr
        self.weight_decay, self.optimizer, self.schedule = weight_decay, optimizer, schedule
        self.ema, self.patience, self.validate_every = ema, patience, validate_every
        self.bf16, self.compile_heads, self.cuda_graph = bf16, compile_heads, cuda_graph
        self.device, self.random_state = device, random_state
        self.verbose = verbose
        self.model_: Any = None

    def fit(
        self,
        images: Any,
        y: Any,
        *,
        val: tuple[Any, Any] | None = None,
        validation_fraction: float = 0.15,
    ) -> ImageRegressor:
        """Train on images ``(n, c, h, w)`` (bytes, or numbers in [0, 1]) and labels ``(n[, d])``.

        The state with the best held-out score is kept; ``val`` gives the held-out pairs, otherwise
        a random share of the images is set aside.
        """
        x, labels = as_images(images), as_labels(y)
        same_length(x, labels)
        if val is not None:
            x_val, y_val = as_images(val[0]), as_labels(val[1], labels.shape[1])
            same_length(x_val, y_val)
        else:
            with seeded(self.random_state):
                order = torch.randperm(len(x))
            n_val = max(1, round(validation_fraction * len(x)))
            x_val, y_val = x[order[:n_val]], labels[order[:n_val]]
            x, labels = x[order[n_val:]], labels[order[n_val:]]
        if len(x) < 2:
            raise DataError(
                f"too few images: {len(x)} to train on and {len(x_val)} held out; at least 2 and 1 "
                "are needed, and many more to learn anything"
            )
        self.flat_target_, self.temperature_ = np.ndim(y) == 1, 1.0
        self.prepare(x, labels, y_val)
        z = self.space_.standardise(labels).float()
        z_val = self.space_.standardise(dequantised(y_val, self.space_.step)).float()
        self.history_ = self._train((x, z), (x_val, z_val))
        if self.space_.dim == 1:
            self.refine_grid(x_val)
        return self

    def prepare(self, x: Tensor, y: Tensor, y_val: Tensor | None = None) -> None:
        """Fix the labels' scale and build the untrained model on the device."""
        _check_anchors(self.anchors)
        if self.anchors and y.shape[1] > 1:
            warnings.warn(
                f"anchors are for one label only, here are {y.shape[1]}: anchors={self.anchors} is "
                "not used",
                SelfnormWarning,
                stacklevel=3,
            )
        for labels, what in ((y, "a training label"), (y_val, "a held-out label")):
            if labels is not None:
                self._refuse_out_of_range(labels, what)
        self.space_ = self._label_space(y, y if y_val is None else torch.cat([y, y_val]))
        self.channels_, self.image_size_ = x.shape[1], (x.shape[2], x.shape[3])
        with seeded(self.random_state):
            self.model_ = self._build(x[:1])
        if isinstance(self.model_.proposal, MDN):
            self.model_.proposal.place(self.space_.standardise(y).float())
        self.model_.to(self.device)

    def _label_space(self, train: Tensor, every: Tensor) -> LabelSpace:
        whole = bool((every == every.round()).all())
        step = self.label_step if self.label_step is not None else float(whole)
        step = step if self.dequantise else 0.0
        low, high = every.amin(0), every.amax(0)
        if self.label_range is not None:
            # With a step the whole range has its bins; continuous labels keep near where they are,
            # for a grid over all that could occur would be too coarse.
            slack = torch.inf if step > 0 else 0.1 * (high - low)
            low = torch.maximum(low - slack, torch.full_like(low, self.label_range[0]))
            high = torch.minimum(high + slack, torch.full_like(high, self.label_range[1]))
        # The ends come from all labels known, the scale from those trained on.
        ends = LabelSpace.of(every, step=step, low=low.tolist(), high=high.tolist())
        own = LabelSpace.of(train)
        return dataclasses.replace(ends, center=own.center, scale=own.scale)

    def _refuse_out_of_range(self, y: Tensor, what: str) -> None:
        if self.label_range is None:
            return
        low, high = self.label_range
        bad = ((y < low) | (y > high)).any(1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise DataError(
                f"{what} lies outside the given range [{low:g}, {high:g}]: row {row}, "
                f"{y[row].tolist()}; drop it or widen label_range"
            )

    def _build(self, example: Tensor) -> ImageEBM | LawModel:
        backbone = self.backbone
        if isinstance(backbone, str):
            if backbone != "resnet18":
                raise DataError(f"backbone must be 'resnet18' or a module, not {backbone!r}")
            backbone = resnet18(self.channels_)
        else:
            # The user's module stays as it was given: another fit, or another model, starts there.
            backbone = copy.deepcopy(backbone).cpu()
        features = ImageFeatures(
            backbone, channels=self.channels_, dropout=self.dropout, bf16=self.bf16
        )
        with torch.no_grad():
            self.n_features_ = features.eval()(example.cpu()).shape[-1]
        return self._heads_on(features)

    def _heads_on(self, features: ImageFeatures) -> ImageEBM | LawModel:
        model = build(
            features,
            self.n_features_,
            self.space_,
            objective=self.objective,
            proposal=self.proposal,
            energy=self.energy,
            base=self.base,
        )
        if isinstance(model, ImageEBM):
            model.share_gradient = self.share_gradient
            model.anchors = int(self.anchors) if self.space_.dim == 1 else 0
        return model

    def task(self) -> Any:
        """What the training loop is given."""
        model, show = self.model_, Presentation(self.space_, self.augmentation)
        if isinstance(model, LawModel):
            return LawTask(model, show, squares=self.objective == "l2")
        assert model is not None
        return ImageTask(
            model,
            show,
            objective=self.objective,
            n_samples=self.n_samples,
            proposal_loss=self.proposal_loss,
            # The ranking form compares a label with draws that must be independent of each other.
            stratified=self.objective != "ranking_nce",
            compile_heads=self.compile_heads,
        )

    def _train(self, data: tuple[Tensor, Tensor], val_data: tuple[Tensor, Tensor]) -> History:
        options = TrainingOptions(
            batch_size=self.batch_size,
            max_epochs=self.max_epochs,
            lr=self.lr,
            weight_decay=self.weight_decay,
            optimizer=self.optimizer,
            schedule=self.schedule,
            ema=self.ema,
            patience=self.patience,
            validate_every=self.validate_every,
            seed=self.random_state,
            progress=self.verbose,
            cuda_graph=self.cuda_graph,
        )
        history = run(self.task(), data, val_data=val_data, options=options)
        assert self.model_ is not None
        self.model_.eval()
        lost = history.skipped_steps
        if lost > max(5, _MAX_LOST * history.n_steps):
            warnings.warn(
                f"{lost} of {history.n_steps} training steps were left out because their loss or "
                "gradient was not finite: the model is undertrained. Try a smaller lr, bf16=False, "
                "or on a GPU cuda_graph=False",
                SelfnormWarning,
                stacklevel=3,
            )
        return history

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a model folder (safetensors and JSON)."""
        saving.save(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, backbone: nn.Module | None = None, device: str = "cpu"
    ) -> ImageRegressor:
        """Read a model folder; a backbone of your own must be given again, weights apart."""
        own = {} if backbone is None else {"backbone": backbone}
        found: ImageRegressor = saving.load(path, kind="ImageRegressor", **own)
        found.device = device
        found.model_.to(device)
        return found

    def to_folder(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and weights of a model folder."""
        model = self._fitted()
        own = isinstance(self.backbone, nn.Module)
        config = {
            "options": {k: saving.plain_number(getattr(self, k)) for k in _SAVED_OPTIONS},
            "backbone": "custom" if own else self.backbone,
            "space": self.space_.to_dict(),
            "channels": self.channels_,
            "image_size": self.image_size_,
            "n_features": self.n_features_,
            "flat_target": self.flat_target_,
            "temperature": self.temperature_,
            "refine": self.refine_,
        }
        return config, dict(model.state_dict())

    @classmethod
    def from_folder(
        cls, config: dict[str, Any], tensors: dict[str, Tensor], backbone: nn.Module | None = None
    ) -> ImageRegressor:
        """The model of a folder's config and weights."""
        custom = config["backbone"] == "custom"
        if custom and backbone is None:
            raise ModelFileError(
                "this model was saved with a backbone module of its own: pass load(path, "
                "backbone=module) with a module of the same shape"
            )
        if backbone is not None and not custom:
            raise ModelFileError("this model has a backbone in it: load it without backbone=")
        found = cls(**config["options"], backbone=backbone or config["backbone"])
        found.space_ = LabelSpace.from_dict(config["space"])
        found.channels_, found.flat_target_ = config["channels"], config["flat_target"]
        found.n_features_, found.refine_ = config["n_features"], config["refine"]
        found.temperature_ = config["temperature"]
        size = config.get("image_size")  # folders of earlier versions do not tell
        found.image_size_ = None if size is None else (int(size[0]), int(size[1]))
        network = resnet18(found.channels_) if backbone is None else copy.deepcopy(backbone)
        found.model_ = found._heads_on(
            ImageFeatures(network, channels=found.channels_, dropout=found.dropout, bf16=found.bf16)
        )
        found.model_.load_state_dict(tensors)
        found.model_.eval()
        return found


def _check_anchors(anchors: Any) -> None:
    if not isinstance(anchors, numbers.Integral) or isinstance(anchors, bool) or anchors < 0:
        raise DataError(f"anchors must be an int of at least 0, got {anchors!r}")


_SAVED_OPTIONS = (
    "objective",
    "proposal",
    "n_samples",
    "energy",
    "base",
    "anchors",
    "share_gradient",
    "proposal_loss",
    "label_step",
    "dequantise",
    "dropout",
    "bf16",
)
