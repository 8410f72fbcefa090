"""Labels of images with their whole distribution: :class:`ImageRegressor`."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from selfnorm import saving
from selfnorm._context import seed_of, seeded, whole_or_not_at_all
from selfnorm._inputs import as_rows, check_device, check_rows
from selfnorm.conditional import PredictiveLaw
from selfnorm.distributions import MDN
from selfnorm.errors import DataError, ModelFileError, SelfnormWarning
from selfnorm.evaluation import Bounds, check_coverage
from selfnorm.images.labels import NOISE_SEED, LabelSpace, dequantised
from selfnorm.images.model import LAWS, EnergyHead, ImageEBM, ImageFeatures, ResNet18, build
from selfnorm.images.task import Augmentation, ImageTask, LawTask
from selfnorm.training import History, TrainingOptions, run

OBJECTIVES = ("snl", "nce", "ranking_nce", "importance_ml")
IMAGE_OPTIONS = TrainingOptions(weight_decay=0.05, ema=0.998, progress=False)
_IMAGES_AT_ONCE = 512
_TEMPERATURES = (0.25, 4.0)  # between which one is looked for
_REFINE_IMAGES = 128  # on which the grid is judged
_MAX_REFINE = 64
_GRID_TOLERANCE = 1e-3  # nats, the worst image
_LABELS_AT_ONCE = 400_000  # of a grid, times images, that go through the energy at once
_DRAWS = 4096  # labels per image where quadrature is out of reach
_DRAWN_AT_ONCE = 48  # images
_SAVED = ("objective", "proposal", "n_samples", "label_step", "dropout")
_FITTED = ("channels", "image_size", "n_features", "flat_target", "temperature", "refine")
_SAVED_HEAD = ("base", "anchors", "share_gradient", "proposal_loss")


class ImageRegressor(saving.Saved, BaseEstimator):
    r"""The distribution ``p(y|image)`` of one or more labels, as an energy on ResNet features.

    ``log p(y|x) = -E(h, y) + log q(y|h) - b(h)`` with ``h = ResNet(x)``, computed once per image;
    ``E``, ``b`` and the proposal ``q`` are heads on it. Densities refer to Lebesgue measure in the
    units of ``y``.

    Args:
        objective: ``"snl"``, ``"nce"``, ``"ranking_nce"``, ``"importance_ml"``; or a model without
            an energy: ``"mdn"`` (maximum likelihood), ``"gaussian"``, ``"l2"`` (least squares).
        proposal: ``"mdn-4"``, ``"mdn-8"``, ``"gaussian"``, ``"uniform"``.
        n_samples: ``M``, label samples per image and step.
        energy: ``"steps"`` (ours: indicators of label steps and waves), ``"paper"``, or an
            :class:`~selfnorm.images.EnergyHead` with more to say: base, anchors of ``b``, what the
            features and the proposal learn from.
        backbone: ``"resnet18"`` or a module ``(n, c, h, w) -> (n, features)``.
        label_step: distance of neighbouring labels; ``None``: 1 where all labels are integers, else
            0. Such labels get uniform noise of that width (a density at integers is unbounded);
            with 0 labels are fitted as they are, the literal protocol.
        label_range: ``(low, high)`` of labels that can occur; their own range by default.
        augmentation: what may be done to an image (and its label).
        dropout: on the features.
        batch_size, max_epochs, lr: training.
        options: everything else of the training loop, by default
            ``TrainingOptions(weight_decay=0.05, ema=0.998, progress=False)``; batch size, epochs,
            learning rate and seed are those given here.
        device: ``"cpu"``, ``"cuda"`` (where the backbone runs in bfloat16).
        random_state: seed, or a generator of NumPy.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> images = rng.integers(0, 255, (40, 1, 8, 8), dtype=np.uint8)
        >>> y = images.mean((1, 2, 3)) / 10
        >>> model = ImageRegressor(backbone=nn.Flatten(), max_epochs=1, random_state=0)
        >>> model.fit(images, y).predict(images[:3]).shape
        (3,)
    """

    temperature_: float = 1.0
    refine_: int = 1
    image_size_: tuple[int, int] | None = None  # height and width fitted on, where known

    def __init__(
        self,
        objective: str = "snl",
        proposal: str = "mdn-4",
        *,
        n_samples: int = 64,
        energy: str | EnergyHead = "steps",
        backbone: str | nn.Module = "resnet18",
        label_step: float | None = None,
        label_range: tuple[float, float] | None = None,
        augmentation: Augmentation | None = None,
        dropout: float = 0.2,
        batch_size: int = 128,
        max_epochs: int = 40,
        lr: float = 1e-3,
        options: TrainingOptions | None = None,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        if objective not in (*OBJECTIVES, *LAWS):
            raise DataError(f"objective must be one of {(*OBJECTIVES, *LAWS)}, not {objective!r}")
        if n_samples < 1:
            raise DataError(f"n_samples must be at least 1, got {n_samples}")
        self.objective, self.proposal, self.n_samples = objective, proposal, n_samples
        self.energy, self.backbone = energy, backbone
        self.label_step, self.label_range = label_step, label_range
        self.augmentation, self.dropout = augmentation, dropout
        self.batch_size, self.max_epochs, self.lr = batch_size, max_epochs, lr
        self.options, self.device, self.random_state = options, device, random_state
        self._head()  # refused here where it is none

    def _head(self) -> EnergyHead:
        return self.energy if isinstance(self.energy, EnergyHead) else EnergyHead(self.energy)

    @whole_or_not_at_all
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
        x, labels = _pairs(images, y)
        if val is not None:
            x_val, y_val = _pairs(*val, labels.shape[1])
        else:
            with seeded(self._seed()):
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

    def _seed(self) -> Any:
        state = self.random_state
        of_numpy = isinstance(state, np.random.Generator | np.random.RandomState)
        return seed_of(state) if of_numpy else state

    def prepare(self, x: Tensor, y: Tensor, y_val: Tensor | None = None) -> None:
        """Fix the labels' scale and build the untrained model on the device."""
        anchors = self._head().anchors
        if anchors and y.shape[1] > 1:
            warnings.warn(
                f"anchors are for one label only, here are {y.shape[1]}: anchors={anchors} is not "
                "used",
                SelfnormWarning,
                stacklevel=3,
            )
        self.space_ = LabelSpace.of(
            y, held_out=y_val, step=self.label_step, label_range=self.label_range
        )
        self.channels_, self.image_size_ = x.shape[1], (x.shape[2], x.shape[3])
        with seeded(self._seed()):
            features = self._new_features()
            with torch.no_grad():
                self.n_features_ = features.eval()(x[:1].cpu()).shape[-1]
            self.model_ = self._model_on(features)
        if isinstance(self.model_.proposal, MDN):
            self.model_.proposal.place(self.space_.standardise(y).float())
        self.model_.to(check_device(self.device))

    def _new_features(self) -> ImageFeatures:
        backbone = self.backbone
        if isinstance(backbone, str):
            if backbone != "resnet18":
                raise DataError(f"backbone must be 'resnet18' or a module, not {backbone!r}")
            backbone = ResNet18(self.channels_)
        else:
            # The user's module stays as it was given: another fit, or another model, starts there.
            backbone = copy.deepcopy(backbone).cpu()
        return ImageFeatures(backbone, channels=self.channels_, dropout=self.dropout)

    def _model_on(self, features: ImageFeatures) -> ImageEBM:
        head, names = self._head(), {"objective": self.objective, "proposal": self.proposal}
        return build(features, self.n_features_, self.space_, head=head, **names)

    def task(self) -> ImageTask:
        """What the training loop is given."""
        if self.objective in LAWS:
            return LawTask(self.model_, self.space_, self.augmentation)
        return ImageTask(
            self.model_,
            self.space_,
            self.augmentation,
            objective=self.objective,
            n_samples=self.n_samples,
            proposal_loss=self._head().proposal_loss,
            # The ranking form compares a label with draws that must be independent of each other.
            stratified=self.objective != "ranking_nce",
        )

    def _train(self, data: tuple[Tensor, Tensor], val_data: tuple[Tensor, Tensor]) -> History:
        options = dataclasses.replace(
            self.options or IMAGE_OPTIONS,
            batch_size=self.batch_size,
            max_epochs=self.max_epochs,
            lr=self.lr,
            seed=self._seed(),
        )
        history = run(self.task(), data, val_data=val_data, options=options)
        self.model_.eval()
        return history

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, backbone: nn.Module | None = None, device: str = "cpu"
    ) -> ImageRegressor:
        """Read a model folder; a backbone of your own must be given again, weights apart."""
        own = {} if backbone is None else {"backbone": backbone}
        found: ImageRegressor = saving.load(path, kind="ImageRegressor", **own)
        found.device = device
        found.model_.to(check_device(device))
        return found

    def to_folder(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and weights of a model folder."""
        check_is_fitted(self, "model_")
        head = dataclasses.asdict(self._head())
        own = {k: getattr(self, k) for k in _SAVED} | {"energy": head.pop("network"), **head}
        config = {
            "options": {k: saving.plain_number(v) for k, v in own.items()},
            "backbone": "custom" if isinstance(self.backbone, nn.Module) else self.backbone,
            "space": dataclasses.asdict(self.space_),
            **{k: getattr(self, f"{k}_") for k in _FITTED},
        }
        return config, dict(self.model_.state_dict())

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
        saved, space = config["options"], config["space"]
        own = {name: saved[name] for name in _SAVED}
        head = EnergyHead(saved["energy"], **{name: saved[name] for name in _SAVED_HEAD})
        found = cls(**own, energy=head, backbone=backbone or config["backbone"])
        ends = {name: tuple(values) for name, values in space.items() if name != "step"}
        found.space_ = LabelSpace(**ends, step=space["step"])
        for name in _FITTED:
            setattr(found, f"{name}_", config[name])
        size = config["image_size"]
        found.image_size_ = (size[0], size[1]) if size else None
        found.model_ = found._model_on(found._new_features())
        found.model_.load_state_dict(tensors)
        found.model_.eval()
        return found

    @torch.no_grad()
    def features(self, images: Any) -> Tensor:
        """ResNet features ``(n, d_h)`` on the model's device."""
        check_is_fitted(self, "model_")
        model = self.model_.eval()
        device = next(model.parameters()).device
        x = _as_images(images)
        same_size = self.image_size_ in (None, tuple(x.shape[-2:]))
        cause = None
        try:
            h = torch.cat([model.features(part.to(device)) for part in x.split(_IMAGES_AT_ONCE)])
            if same_size or h.shape[-1] == self.n_features_:
                return h
        except RuntimeError as error:
            if same_size or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            cause = error
        given, own = ("{} x {}".format(*size) for size in (x.shape[-2:], self.image_size_ or ()))
        raise DataError(
            f"the backbone cannot take images of {given} pixels: this model was fitted on {own}; "
            "resize them"
        ) from cause

    def _features_and_labels(self, images: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Features and labels in their own units, on the model's device."""
        check_is_fitted(self, "model_")
        x, labels = _pairs(images, y, self.space_.dim)
        h = self.features(x)
        return h, labels.to(h.device)

    def law(self, images: Any) -> PredictiveLaw:
        """The predictive density of one label on the cells of a grid, normalised by quadrature."""
        return self._law(self.features(images))

    def _law(self, h: Tensor) -> PredictiveLaw:
        grid, width = self.grid()
        edges = torch.cat([grid - 0.5 * width, grid[-1:] + 0.5 * width])
        return PredictiveLaw.from_cells(self._log_densities(h, grid) / self.temperature_, edges)

    def _over_laws(self, h: Tensor, take: Callable[[PredictiveLaw, slice], Tensor]) -> Tensor:
        """``take(law, rows)`` over chunks of images: the densities of all may not fit."""
        starts = range(0, len(h), _IMAGES_AT_ONCE)
        chunks = [slice(start, start + _IMAGES_AT_ONCE) for start in starts]
        return torch.cat([take(self._law(h[rows]), rows) for rows in chunks])

    def _log_densities(self, h: Tensor, y: Tensor) -> Tensor:
        """``log p~(y|x)``, ``(n, G)``, of labels ``y (G,)`` for every row of ``h``."""
        # The labels are the same for all images: the label network sees each of them once.
        same, at_once = y.to(h.device).view(-1, 1, 1), max(1, _LABELS_AT_ONCE // len(y))
        return torch.cat([self._log_density(rows, same).T for rows in h.split(at_once)])

    @torch.no_grad()
    def _log_density(self, h: Tensor, labels: Tensor, *, learned: bool = False) -> Tensor:
        """``log p~`` of labels ``(..., n, d)`` for the rows of ``h``, or with the learned ``b``.

        It refers to Lebesgue measure in the labels' own units.
        """
        model, z = self.model_, self.space_.standardise(labels).to(h)
        log_p = model.log_prob(h, z) if learned else model.log_unnormalized(h, z)
        return log_p.double() - self.space_.log_scale

    def grid(self, refine: int | None = None) -> tuple[Tensor, float]:
        """The quadrature grid in the label's units, and the width of its cells.

        It reaches half a range beyond the labels' on each side, or not at all where the model lives
        on the range (uniform base or proposal). ``refine`` divides the cells, by default as much as
        the fitted distributions need.
        """
        refine = self.refine_ if refine is None else refine
        return self.space_.grid(margin=0.0 if self.lives_on_range else 0.5, refine=refine)

    @property
    def lives_on_range(self) -> bool:
        """Whether labels outside the range have no density: uniform base or proposal."""
        return self.proposal == "uniform" and self.objective not in LAWS

    def _possible(self, y: Tensor) -> Tensor:
        """Whether labels ``(n,)`` can have a density: all, or those on the range."""
        if not self.lives_on_range:
            return torch.ones_like(y, dtype=torch.bool)
        low, high = self.space_.grid_range()
        return (y >= low) & (y <= high)

    def refine_grid(self, images: Any) -> float:
        """Halve the grid's cells until ``log Z`` of these images stands still; the last change.

        Densities of continuous labels may be as narrow as they like. Warns where the finest grid is
        still too coarse.
        """
        h = self.features(images)[:_REFINE_IMAGES]
        self.refine_ = 1
        before = self._law(h).log_norm
        change = math.inf
        while self.refine_ < _MAX_REFINE:
            self.refine_ *= 2
            after = self._law(h).log_norm
            change = float((after - before).abs().max())
            if change < _GRID_TOLERANCE:
                self.refine_ //= 2  # the coarser of the two was fine already
                return change
            before = after
        warnings.warn(
            f"the predictive densities are narrower than the finest quadrature grid resolves (log "
            f"Z still moves by {change:.2g}): exact figures are off by as much. Give label_step if "
            "the labels are rounded, or a narrower label_range",
            SelfnormWarning,
            stacklevel=3,
        )
        return change

    def predict(self, images: Any) -> np.ndarray:
        """Mean of ``p(y|image)``: ``(n,)``, or ``(n, d)`` for several labels."""
        h = self.features(images)
        if self.space_.dim == 1:
            means = self._over_laws(h, lambda law, _: law.mean)[:, None]
        else:
            means = self._over_draws(h, lambda y: y.mean(1))
        found = means.cpu().numpy()
        return found[:, 0] if self.flat_target_ else found

    def predict_quantiles(self, images: Any, q: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """``(n, len(q))`` quantiles of one label; ``(n, len(q), d)`` of each of several."""
        levels = torch.tensor(list(q), dtype=torch.float64)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise DataError(f"quantile levels must lie between 0 and 1, got {list(q)}")
        h = self.features(images)
        if self.space_.dim == 1:
            found = self._over_laws(h, lambda law, _: law.quantile(levels))
        else:
            at = levels.to(h.device)
            found = self._over_draws(h, lambda y: y.quantile(at, dim=1).movedim(0, 1))
        return found.cpu().numpy()

    def predict_interval(self, images: Any, coverage: float = 0.9) -> np.ndarray:
        """``(n, 2)`` ends of central intervals; ``(n, 2, d)`` for several labels."""
        tail = 0.5 * (1.0 - check_coverage(coverage))
        return self.predict_quantiles(images, (tail, 1.0 - tail))

    def density(self, image: Any, grid: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """The predictive density of one image ``(c, h, w)``: labels ``(G,)`` and density there."""
        given = image if isinstance(image, Tensor) else np.asarray(image)
        one = _as_images(given[None] if given.ndim == 3 else given)
        if len(one) > 1:
            raise DataError(f"density() is for one image, got {len(one)}: ask for one at a time")
        h = self.features(one)
        law = self._law(h)
        if grid is None:
            return law.middle[0].cpu().numpy(), law.pdf[0].cpu().numpy()
        at = torch.as_tensor(np.asarray(grid, dtype=np.float64))
        log_p = self._log_densities(h, at) / self.temperature_
        density = (log_p - law.log_norm[:, None])[0].exp().cpu()
        return at.numpy(), torch.where(self._possible(at), density, 0.0).numpy()

    def log_prob(self, images: Any, y: Any, method: str = "exact") -> np.ndarray:
        """``log p(y|image)`` of pairs, ``(n,)``.

        ``method="exact"`` normalises by quadrature (one label), ``"learned"`` by ``b``, which knows
        nothing of a temperature.
        """
        if method not in ("exact", "learned"):
            raise DataError(f'method must be "exact" or "learned", not {method!r}')
        h, labels = self._features_and_labels(images, y)
        normalised = self.objective in LAWS and self.temperature_ == 1.0
        if normalised or method == "learned":
            return self._log_density(h, labels, learned=True).cpu().numpy()
        if self.space_.dim > 1:
            raise DataError(
                f"quadrature is for one label, this model has {self.space_.dim}: use "
                'method="learned" (not for ranking NCE, which learns no b), or bounds()'
            )
        log_norm = self._over_laws(h, lambda law, _: law.log_norm)
        log_p = self._log_density(h, labels) / self.temperature_ - log_norm
        return torch.where(self._possible(labels[:, 0]), log_p, -math.inf).cpu().numpy()

    def pit(self, images: Any, y: Any) -> np.ndarray:
        """``F(y|image)``, uniform for a calibrated model: ``(n,)``."""
        h, labels = self._features_and_labels(images, y)
        found = self._over_laws(h, lambda law, rows: law.cdf_at(labels[rows, 0]))
        return found.cpu().numpy()

    def calibrate(self, images: Any, y: Any) -> float:
        """Fit a temperature ``T`` to held-out pairs and use ``p^(1/T)``, renormalised, from now on.

        ``T`` maximises their mean log-density, which is concave in ``1/T``: its slope is that of
        the labels' ``log p`` against its mean under the tempered density. Above 1 it widens those
        that are too sure. It is looked for between 1/4 and 4, with a warning where it lies beyond.
        For
        one label. Returns ``T``, which is also ``temperature_``.
        """
        h, labels = self._features_and_labels(images, y)
        log_p = self._log_densities(h, self.grid()[0])
        at_labels = self._log_density(h, labels)
        if not bool(torch.isfinite(at_labels).all()):
            row = int((~torch.isfinite(at_labels)).nonzero()[0])
            raise DataError(f"label {row}, {labels[row].tolist()}, has no density: drop that row")

        def slope(inverse: float) -> float:
            weights = torch.softmax(inverse * log_p, dim=1)
            return float((at_labels - (weights * log_p).sum(1)).mean())

        low, high = (math.log(1.0 / t) for t in reversed(_TEMPERATURES))
        while high - low > 1e-3:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if slope(math.exp(middle)) > 0 else (low, middle)
        self.temperature_ = math.exp(-0.5 * (low + high))
        if not _TEMPERATURES[0] * 1.002 < self.temperature_ < _TEMPERATURES[1] / 1.002:
            warnings.warn(
                f"the best temperature lies beyond {_TEMPERATURES[0]:g} to {_TEMPERATURES[1]:g}: "
                f"{self.temperature_:.3g}, the nearest one, is used. Models so far off are better "
                "fitted anew; look at the labels of the held-out pairs, too",
                SelfnormWarning,
                stacklevel=2,
            )
        if self.temperature_ < 1.0:
            self.refine_grid(images)  # narrower laws may need finer cells
        return self.temperature_

    def bounds(
        self, images: Any, y: Any, *, n_samples: int = 20_000, seed: int | None = None
    ) -> Bounds:
        """``l_SNL`` and ``l_IS`` of the mean log-density, with samples of the model's proposal.

        They are of the model as trained, at temperature 1.
        """
        if self.objective in LAWS:
            raise DataError(
                f"objective {self.objective!r} has a normalised density: log_prob is exact, there "
                "is nothing to bound"
            )
        h, labels = self._features_and_labels(images, y)
        z = self.space_.standardise(labels).to(h)
        found = self.model_.bounds((h, z), n_samples=n_samples, seed=seed)
        shift = self.space_.log_scale
        return dataclasses.replace(found, lower=found.lower - shift, upper=found.upper - shift)

    def score(self, images: Any, y: Any) -> float:
        """Mean log-density of the labels (nats per image): higher is better."""
        return float(np.mean(self.log_prob(images, y)))

    def sample(self, images: Any, n: int = 1, *, seed: int | None = None) -> np.ndarray:
        """``(n_images, n[, d])`` labels drawn from each distribution."""
        h = self.features(images)
        if self.space_.dim > 1:
            return self._over_draws(h, lambda y: y, n, seed).cpu().numpy()
        with seeded(seed, h.device):
            u = torch.rand(len(h), n, dtype=torch.float64, device=h.device)
        found = self._over_laws(h, lambda law, rows: law.quantile(u[rows])).cpu().numpy()
        return found if self.flat_target_ else found[..., None]

    def _over_draws(
        self,
        h: Tensor,
        take: Callable[[Tensor], Tensor],
        n: int = _DRAWS,
        seed: int | None = NOISE_SEED,
    ) -> Tensor:
        """``take`` of ``n`` draws of several labels, ``(images, n, d)``, over chunks of images."""
        parts = []
        with seeded(seed, h.device):
            for rows in h.split(_DRAWN_AT_ONCE):
                drawn = self.model_.sample(rows, n, n_candidates=_DRAWS).movedim(0, 1)
                parts.append(take(self.space_.restore(drawn.double())))
        return torch.cat(parts)


def _as_images(images: Any) -> Tensor:
    """Images as a checked tensor ``(n, c, h, w)`` of bytes or numbers in [0, 1]."""
    x = images if isinstance(images, Tensor) else torch.as_tensor(np.ascontiguousarray(images))
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise DataError(
            f"expected images of shape (n, channels, height, width) with 1 or 3 channels, got "
            f"{tuple(x.shape)}"
        )
    if x.numel() == 0:
        raise DataError(f"there are no images: got shape {tuple(x.shape)}, at least one is needed")
    if x.dtype == torch.uint8:
        return x
    x = x.float()
    if not bool(torch.isfinite(x).all()) or float(x.min()) < 0.0 or float(x.max()) > 1.0:
        raise DataError("images that are not bytes must hold numbers between 0 and 1")
    return x


def _pairs(images: Any, y: Any, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Checked images and as many labels, double ``(n, d)``; ``dim``: the ``d`` that is needed."""
    x, labels = _as_images(images), as_rows(y, "the labels", torch.float64)
    labels = labels[:, None] if labels.ndim == 1 else labels
    labels = check_rows(labels, "the labels", width=dim, minimum=1)
    if len(x) != len(labels):
        raise DataError(f"{len(x)} images but {len(labels)} labels")
    return x, labels
