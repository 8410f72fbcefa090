"""Labels of images with their whole distribution: :class:`ImageRegressor`."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from selfnorm import saving
from selfnorm._context import seed_of, seeded, whole_or_not_at_all
from selfnorm._inputs import RandomState, as_rows, check_device, check_rows
from selfnorm._saved import saved
from selfnorm.distribution1d import Distribution1d, PredictsDistributions
from selfnorm.distributions import MDN
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.evaluation import Bounds
from selfnorm.images.labels import NOISE_SEED, LabelSpace, dequantised
from selfnorm.images.model import (
    WITHOUT_ENERGY,
    Augmentation,
    EnergyHead,
    ImageEBM,
    ImageFeatures,
    ImageTask,
    LikelihoodTask,
    ResNet18,
    build,
)
from selfnorm.training import History, TrainingOptions, run

OBJECTIVES = ("snl", "nce", "ranking_nce", "importance_ml")
IMAGE_OPTIONS = TrainingOptions(weight_decay=0.05, ema=0.998, progress=False)
_IMAGES_AT_ONCE = 512
_TEMPERATURES = (0.25, 4.0)  # between which one is looked for
_REFINE_IMAGES = 128  # on which the grid is judged
_MAX_REFINE = 64
_GRID_TOLERANCE = 1e-3  # nats, the worst image
_DRAWS = 4096  # labels per image where quadrature is out of reach
_DRAWN_AT_ONCE = 48  # images


@saved(
    fitted={
        "space_": LabelSpace,
        "channels_": int,
        "image_size_": tuple[int, int] | None,
        "n_features_": int,
        "flat_target_": bool,
        "temperature_": float,
        "refine_": int,
        "model_": ImageEBM,
    }
)
class ImageRegressor(saving.Saved, PredictsDistributions, BaseEstimator):
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
        random_state: RandomState = None,
    ) -> None:
        if objective not in (*OBJECTIVES, *WITHOUT_ENERGY):
            raise DataError(
                f"objective must be one of {(*OBJECTIVES, *WITHOUT_ENERGY)}, not {objective!r}"
            )
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
        X: ArrayLike,
        y: ArrayLike,
        *,
        val: tuple[ArrayLike, ArrayLike] | None = None,
        validation_fraction: float = 0.15,
    ) -> ImageRegressor:
        """Train on images ``X (n, c, h, w)`` (bytes, or numbers in [0, 1]) and labels ``(n[, d])``.

        The state with the best held-out score is kept; ``val`` gives the held-out pairs, otherwise
        a random share of the images is set aside.
        """
        x, labels = _pairs(X, y)
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

    def _seed(self) -> int | None:
        state = self.random_state
        if isinstance(state, np.random.Generator | np.random.RandomState):
            return seed_of(state)
        return state

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
        if self.objective in WITHOUT_ENERGY:
            return LikelihoodTask(self.model_, self.space_, self.augmentation)
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
        model: ImageRegressor = saving.load(path, kind="ImageRegressor", **own)
        model.device = device
        model.model_.to(check_device(device))
        return model

    @torch.no_grad()
    def features(self, X: ArrayLike) -> Tensor:
        """ResNet features ``(n, d_h)`` on the model's device."""
        check_is_fitted(self, "model_")
        model = self.model_.eval()
        device = next(model.parameters()).device
        x = _as_images(X)
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

    @property
    def _dim(self) -> int:
        return self.space_.dim

    def _encoded(self, X: ArrayLike) -> Tensor:
        return self.features(X)

    def _pairs(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        check_is_fitted(self, "model_")
        x, labels = _pairs(X, y, self.space_.dim)
        h = self.features(x)
        return h, labels.to(h.device)

    def distribution(self, X: ArrayLike) -> Distribution1d:
        """The predictive density of one label on the cells of a grid, normalised by quadrature."""
        return self._distribution(self.features(X))

    def _distribution(self, h: Tensor) -> Distribution1d:
        grid, width = self.grid()
        edges = torch.cat([grid - 0.5 * width, grid[-1:] + 0.5 * width])
        return Distribution1d.from_cells(self._on_grid(h, grid) / self.temperature_, edges)

    def _distributions(self, inputs: Tensor) -> Iterator[tuple[slice, Distribution1d]]:
        for start in range(0, len(inputs), _IMAGES_AT_ONCE):
            rows = slice(start, start + _IMAGES_AT_ONCE)
            yield rows, self._distribution(inputs[rows])

    def _on_grid(self, h: Tensor, grid: Tensor) -> Tensor:
        """``log p~(y|x)``, ``(n, G)``, of labels ``grid (G,)`` for every row of features."""
        z = self.space_.standardise(grid[:, None])[:, 0]
        return self.model_.on_grid(h, z) - self.space_.log_scale

    @torch.no_grad()
    def _log_density(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        learned: bool = False,
    ) -> Tensor:
        normalised = self.objective in WITHOUT_ENERGY and self.temperature_ == 1.0
        if normalised or learned:
            z = self.space_.standardise(labels).to(inputs)
            return self.model_.log_prob(inputs, z).double() - self.space_.log_scale
        if self.space_.dim > 1:
            raise DataError(
                f"quadrature is for one label, this model has {self.space_.dim}: use "
                'method="learned" (not for ranking NCE, which learns no b), or bounds()'
            )
        log_norm = self._of_distributions(inputs, lambda part, _: part.log_norm)
        log_p = self._log_unnormalised(inputs, labels) / self.temperature_ - log_norm
        return torch.where(self._possible(labels[..., 0]), log_p, -math.inf)

    @torch.no_grad()
    def _log_unnormalised(self, h: Tensor, labels: Tensor) -> Tensor:
        """``log p~`` of labels ``(..., n, d)`` for the rows of features, in units of the labels."""
        z = self.space_.standardise(labels).to(h)
        return self.model_.log_unnormalized(h, z).double() - self.space_.log_scale

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
        return self.proposal == "uniform" and self.objective not in WITHOUT_ENERGY

    def _possible(self, y: Tensor) -> Tensor:
        """Whether labels can have a density: all, or those on the range."""
        if not self.lives_on_range:
            return torch.ones_like(y, dtype=torch.bool)
        low, high = self.space_.grid_range()
        return (y >= low) & (y <= high)

    def refine_grid(self, X: ArrayLike) -> float:
        """Halve the grid's cells until ``log Z`` of these images stands still; the last change.

        Densities of continuous labels may be as narrow as they like. Warns where the finest grid is
        still too coarse.
        """
        h = self.features(X)[:_REFINE_IMAGES]
        self.refine_ = 1
        before = self._distribution(h).log_norm
        change = math.inf
        while self.refine_ < _MAX_REFINE:
            self.refine_ *= 2
            after = self._distribution(h).log_norm
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

    def _mean_of_several(self, inputs: Tensor) -> Tensor:
        return self._of_draws(inputs, lambda y: y.mean(1))

    def _quantiles_of_several(self, inputs: Tensor, levels: Tensor) -> Tensor:
        at = levels.to(inputs.device)
        return self._of_draws(inputs, lambda y: y.quantile(at, dim=1).movedim(0, 1))

    def density(
        self, image: ArrayLike, grid: ArrayLike | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The predictive density of one image ``(c, h, w)``: labels ``(G,)`` and density there."""
        given = image if isinstance(image, Tensor) else np.asarray(image)
        one = _as_images(given[None] if given.ndim == 3 else given)
        if len(one) > 1:
            raise DataError(f"density() is for one image, got {len(one)}: ask for one at a time")
        if grid is not None:
            return np.asarray(grid, dtype=np.float64), self.pdf(one, grid)[0]
        part = self.distribution(one)
        return part.middle[0].cpu().numpy(), part.pdf[0].cpu().numpy()

    def calibrate(self, X: ArrayLike, y: ArrayLike) -> float:
        """Fit a temperature ``T`` to held-out pairs and use ``p^(1/T)``, renormalised, from now on.

        ``T`` maximises their mean log-density, which is concave in ``1/T``: its slope is that of
        the labels' ``log p`` against its mean under the tempered density. Above 1 it widens those
        that are too sure. It is looked for between 1/4 and 4, with a warning where it lies beyond.
        For
        one label. Returns ``T``, which is also ``temperature_``.
        """
        h, labels = self._pairs(X, y)
        log_p = self._on_grid(h, self.grid()[0])
        at_labels = self._log_unnormalised(h, labels)
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
            self.refine_grid(X)  # narrower densities may need finer cells
        return self.temperature_

    def bounds(
        self, X: ArrayLike, y: ArrayLike, *, n_samples: int = 20_000, seed: int | None = None
    ) -> Bounds:
        """``l_SNL`` and ``l_IS`` of the mean log-density, with samples of the model's proposal.

        They are of the model as trained, at temperature 1.
        """
        if self.objective in WITHOUT_ENERGY:
            raise DataError(
                f"objective {self.objective!r} has a normalised density: log_prob is exact, there "
                "is nothing to bound"
            )
        h, labels = self._pairs(X, y)
        z = self.space_.standardise(labels).to(h)
        bounds = self.model_.bounds((h, z), n_samples=n_samples, seed=seed)
        return bounds.shifted(-self.space_.log_scale)

    def sample(self, X: ArrayLike, n: int = 1, *, seed: int | None = None) -> np.ndarray:
        """``(n_images, n[, d])`` labels drawn from each distribution."""
        h = self.features(X)
        if self.space_.dim > 1:
            return self._of_draws(h, lambda y: y, n, seed).cpu().numpy()
        with seeded(seed, h.device):
            values = self._in_units(self._drawn(h, n))
        return values if self.flat_target_ else values[..., None]

    def _of_draws(
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


def _as_images(images: ArrayLike) -> Tensor:
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


def _pairs(images: ArrayLike, y: ArrayLike, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Checked images and as many labels, double ``(n, d)``; ``dim``: the ``d`` that is needed."""
    x, labels = _as_images(images), as_rows(y, "the labels", torch.float64)
    labels = labels[:, None] if labels.ndim == 1 else labels
    labels = check_rows(labels, "the labels", width=dim, minimum=1)
    if len(x) != len(labels):
        raise DataError(f"{len(x)} images but {len(labels)} labels")
    return x, labels
