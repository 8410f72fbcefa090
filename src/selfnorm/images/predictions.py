"""What a fitted model says of the label of an image, in the label's units."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import NotFittedError
from torch import Tensor

from selfnorm._context import seeded
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.evaluation import Bounds
from selfnorm.images.grid_law import GridLaw, label_grid, log_densities
from selfnorm.images.labels import NOISE_SEED, LabelSpace
from selfnorm.images.model import LawModel

__all__ = ["ImagePredictions", "as_images", "as_labels", "same_length"]

_FEATURES_AT_ONCE = 512
_TEMPERATURES = (0.25, 4.0)  # between which one is looked for
_REFINE_IMAGES = 128  # on which the grid is judged
_MAX_REFINE = 64
_GRID_TOLERANCE = 1e-3  # nats, the worst image
_ROWS_AT_ONCE = 200_000  # label samples that go through the energy at once
_SAMPLES = 4096  # labels per image where quadrature is out of reach


class _NotFittedError(DataError, NotFittedError):
    """For those who expect an error of this library, and those who expect scikit-learn's."""


class ImagePredictions:
    """Predictions of ``model_`` on images, its heads applied to features computed once."""

    model_: Any
    space_: LabelSpace
    flat_target_: bool
    objective: str
    proposal: str
    temperature_: float = 1.0
    refine_: int = 1
    n_features_: int
    image_size_: tuple[int, int] | None = None  # height and width fitted on, where known

    @torch.no_grad()
    def features(self, images: Any) -> Tensor:
        """ResNet features ``(n, d_h)`` on the model's device."""
        model = self._fitted()
        model.eval()
        device = next(model.parameters()).device
        x = as_images(images)
        known_size = self.image_size_ in (None, tuple(x.shape[-2:]))
        try:
            h = torch.cat([model.features(part.to(device)) for part in x.split(_FEATURES_AT_ONCE)])
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if known_size:
                raise
            raise self._wrong_size(x) from error
        if not known_size and h.shape[-1] != self.n_features_:
            raise self._wrong_size(x)
        return h

    def _wrong_size(self, x: Tensor) -> DataError:
        assert self.image_size_ is not None
        (height, width), (own_height, own_width) = x.shape[-2:], self.image_size_
        return DataError(
            f"the backbone cannot take images of {height} x {width} pixels: this model was fitted "
            f"on {own_height} x {own_width}; resize them"
        )

    def law(self, images: Any) -> GridLaw:
        """The predictive law of one label on a grid, normalised by quadrature."""
        return self._law(self.features(images))

    def _law(self, h: Tensor) -> GridLaw:
        grid, width = self.grid()
        log_p = log_densities(self._fitted().heads(), h, grid, self.space_)
        return GridLaw.of(log_p / self.temperature_, grid, width)

    def grid(self, refine: int | None = None) -> tuple[Tensor, float]:
        """The quadrature grid in the label's units, and the width of its cells.

        It reaches half a range beyond the labels' on each side, or not at all where the model lives
        on the range (uniform base or proposal). ``refine`` divides the cells, by default as much as
        the fitted laws need.
        """
        refine = self.refine_ if refine is None else refine
        return label_grid(self.space_, margin=0.0 if self.lives_on_range else 0.5, refine=refine)

    @property
    def lives_on_range(self) -> bool:
        """Whether labels outside the range have no density: uniform base or proposal."""
        return self.proposal == "uniform" and not isinstance(self.model_, LawModel)

    def _possible(self, y: Tensor) -> Tensor:
        """Whether labels ``(n,)`` can have a density: all, or those on the range."""
        if not self.lives_on_range:
            return torch.ones_like(y, dtype=torch.bool)
        low, high = self.space_.grid_range()
        return (y >= low) & (y <= high)

    def refine_grid(self, images: Any) -> float:
        """Halve the grid's cells until ``log Z`` of these images stands still; the last change.

        Laws of continuous labels may be as narrow as they like. Warns where the finest grid is
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
            f"the predictive laws are narrower than the finest quadrature grid resolves (log Z "
            f"still moves by {change:.2g}): exact figures are off by as much. Give label_step if "
            "the labels are rounded, or a narrower label_range",
            SelfnormWarning,
            stacklevel=3,
        )
        return change

    def predict(self, images: Any) -> np.ndarray:
        """Mean of ``p(y|image)``: ``(n,)``, or ``(n, d)`` for several labels."""
        h = self.features(images)
        if self.space_.dim == 1:
            means = self._in_chunks(h, lambda law, _: law.mean)[:, None]
        else:
            means = self._by_samples(h, lambda y, w: (w.unsqueeze(-1) * y).sum(0))
        found = means.cpu().numpy()
        return found[:, 0] if self.flat_target_ else found

    def predict_quantiles(self, images: Any, q: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """``(n, len(q))`` quantiles of one label; ``(n, len(q), d)`` of each of several."""
        levels = torch.tensor(list(q), dtype=torch.float64)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise DataError(f"quantile levels must lie between 0 and 1, got {list(q)}")
        h = self.features(images)
        if self.space_.dim == 1:
            return self._in_chunks(h, lambda law, _: law.quantile(levels)).cpu().numpy()
        take = functools.partial(_weighted_quantiles, levels=levels.tolist())
        return self._by_samples(h, take).cpu().numpy()

    def predict_interval(self, images: Any, coverage: float = 0.9) -> np.ndarray:
        """``(n, 2)`` ends of central intervals; ``(n, 2, d)`` for several labels."""
        if not 0.0 < coverage < 1.0:
            raise DataError(f"coverage must lie between 0 and 1, got {coverage}")
        tail = 0.5 * (1.0 - coverage)
        return self.predict_quantiles(images, (tail, 1.0 - tail))

    def density(self, image: Any, grid: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """The predictive density of one image ``(c, h, w)``: labels ``(G,)`` and density there."""
        given = image if isinstance(image, Tensor) else np.asarray(image)
        one = as_images(given[None] if given.ndim == 3 else given)
        if len(one) > 1:
            raise DataError(f"density() is for one image, got {len(one)}: ask for one at a time")
        h = self.features(one)
        law = self._law(h)
        if grid is None:
            return law.grid.cpu().numpy(), law.pdf[0].cpu().numpy()
        at = torch.as_tensor(np.asarray(grid, dtype=np.float64))
        log_p = log_densities(self._fitted().heads(), h, at, self.space_) / self.temperature_
        density = (log_p - law.log_norm[:, None])[0].exp().cpu()
        return at.numpy(), torch.where(self._possible(at), density, 0.0).numpy()

    def log_prob(self, images: Any, y: Any, method: str = "exact") -> np.ndarray:
        """``log p(y|image)`` of pairs, ``(n,)``.

        ``method="exact"`` normalises by quadrature (one label), ``"learned"`` by ``b``, which knows
        nothing of a temperature.
        """
        if method not in ("exact", "learned"):
            raise DataError(f'method must be "exact" or "learned", not {method!r}')
        h, labels = self.features(images), as_labels(y, self.space_.dim)
        same_length(h, labels)
        z = self.space_.standardise(labels).to(h)
        heads = self._fitted().heads()
        with torch.no_grad():
            normalised = isinstance(heads, LawModel) and self.temperature_ == 1.0
            if self.space_.dim > 1 and method == "exact" and not normalised:
                raise DataError(
                    f"quadrature is for one label, this model has {self.space_.dim}: use "
                    'method="learned" (not for ranking NCE, which learns no b), or bounds()'
                )
            if normalised or method == "learned":
                log_p = heads.log_prob(h, z).double() - self.space_.log_scale
            else:
                log_p = heads.log_unnormalized(h, z).double() - self.space_.log_scale
                log_p = log_p / self.temperature_ - self._in_chunks(h, lambda law, _: law.log_norm)
                possible = self._possible(labels[:, 0]).to(log_p.device)
                log_p = torch.where(possible, log_p, -math.inf)
        return log_p.cpu().numpy()

    def pit(self, images: Any, y: Any) -> np.ndarray:
        """``F(y|image)``, uniform for a calibrated model: ``(n,)``."""
        h = self.features(images)
        labels = as_labels(y, self.space_.dim)[:, 0]
        same_length(h, labels)
        labels = labels.to(h.device)
        return self._in_chunks(h, lambda law, rows: law.cdf_at(labels[rows])).cpu().numpy()

    def calibrate(self, images: Any, y: Any) -> float:
        """Fit a temperature ``T`` to held-out pairs and use ``p^(1/T)``, renormalised, from now on.

        ``T`` maximises their mean log-density, which is concave in ``1/T``: its slope is that of
        the labels' ``log p`` against its mean under the tempered law. Above 1 it widens laws that
        are too sure. For one label. Returns ``T``, which is also ``temperature_``.
        """
        h = self.features(images)
        labels = as_labels(y, self.space_.dim).to(h.device)
        same_length(h, labels)
        grid, _ = self.grid()
        heads = self._fitted().heads()
        with torch.no_grad():
            z = self.space_.standardise(labels).to(h)
            at_labels = heads.log_unnormalized(h, z).double() - self.space_.log_scale
        if not bool(torch.isfinite(at_labels).all()):
            row = int((~torch.isfinite(at_labels)).nonzero()[0])
            raise DataError(f"label {row}, {labels[row].tolist()}, has no density: drop that row")
        log_p = log_densities(heads, h, grid, self.space_)

        def slope(inverse: float) -> float:
            weights = torch.softmax(inverse * log_p, dim=1)
            return float((at_labels - (weights * log_p).sum(1)).mean())

        low, high = (math.log(1.0 / t) for t in reversed(_TEMPERATURES))
        while high - low > 1e-3:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if slope(math.exp(middle)) > 0 else (low, middle)
        self.temperature_ = math.exp(-0.5 * (low + high))
        if self.temperature_ < 1.0:
            self.refine_grid(images)  # narrower laws may need finer cells
        return self.temperature_

    def bounds(
        self, images: Any, y: Any, *, n_samples: int = 20_000, seed: int | None = None
    ) -> Bounds:
        """``l_SNL`` and ``l_IS`` of the mean log-density, with samples of the model's proposal.

        They are of the model as trained, at temperature 1.
        """
        heads = self._fitted().heads()
        if isinstance(heads, LawModel):
            raise DataError(
                f"objective {self.objective!r} has a normalised law: log_prob is exact, there is "
                "nothing to bound"
            )
        h, labels = self.features(images), as_labels(y, self.space_.dim)
        same_length(h, labels)
        z = self.space_.standardise(labels).to(h)
        found = heads.bounds((h, z), n_samples=n_samples, seed=seed)
        shift = self.space_.log_scale
        return dataclasses.replace(found, lower=found.lower - shift, upper=found.upper - shift)

    def score(self, images: Any, y: Any) -> float:
        """Mean log-density of the labels (nats per image): higher is better."""
        return float(np.mean(self.log_prob(images, y)))

    def sample(self, images: Any, n: int = 1, *, seed: int | None = None) -> np.ndarray:
        """``(n_images, n[, d])`` labels drawn from each law."""
        h = self.features(images)
        with seeded(seed, h.device):
            if self.space_.dim == 1:
                levels = torch.rand(len(h), n, dtype=torch.float64, device=h.device)
                drawn = self._in_chunks(h, lambda law, rows: law.quantile(levels[rows]))
                drawn = drawn.unsqueeze(-1)
            else:
                drawn = self._by_samples(h, functools.partial(_resampled, n=n))
        found = drawn.cpu().numpy()
        return found[..., 0] if self.flat_target_ else found

    def _fitted(self) -> Any:
        if self.model_ is None:
            raise _NotFittedError(
                "this ImageRegressor is not fitted yet: call fit() or load() first"
            )
        return self.model_

    def _in_chunks(self, h: Tensor, take: Any) -> Tensor:
        """``take(law, rows)`` over chunks of images: the densities of all may not fit."""
        parts = []
        for start in range(0, len(h), _FEATURES_AT_ONCE):
            rows = slice(start, min(len(h), start + _FEATURES_AT_ONCE))
            parts.append(take(self._law(h[rows]), rows))
        return torch.cat(parts)

    def _by_samples(self, h: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``take(labels, weights)`` over chunks of images, ``(n, ...)``, in the labels' units."""
        rows = max(1, _ROWS_AT_ONCE // _SAMPLES)
        parts = [take(*self._weighted(part)) for part in h.split(rows)]
        return self.space_.restore(torch.cat(parts).double())

    @torch.no_grad()
    def _weighted(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised labels ``(M, n, d)`` of the proposal and their normalised weights."""
        heads = self._fitted().heads()
        with seeded(NOISE_SEED, h.device):
            if isinstance(heads, LawModel):
                y = heads.proposal(h).sample((_SAMPLES,))
                return y, torch.full(y.shape[:-1], 1.0 / len(y), device=y.device)
            q = heads.law(h, h)
            y = q.sample((_SAMPLES,))
            log_w = heads.minus_energy(h, y, q) + heads.log_base(h, y, q) - q.log_prob(y)
        return y, torch.softmax(log_w, dim=0)


def _weighted_quantiles(y: Tensor, weights: Tensor, levels: list[float]) -> Tensor:
    """``(n, len(levels), d)`` quantiles of labels ``(M, n, d)`` with weights ``(M, n)``."""
    order = y.argsort(0)
    mass = weights.unsqueeze(-1).expand_as(y).gather(0, order).cumsum(0)
    found = []
    for level in levels:
        index = (mass < level).sum(0, keepdim=True).clamp_max(len(y) - 1)
        found.append(y.gather(0, order.gather(0, index))[0])
    return torch.stack(found, dim=1)


def _resampled(y: Tensor, weights: Tensor, n: int) -> Tensor:
    """``(n_images, n, d)`` labels drawn by weight."""
    chosen = torch.multinomial(weights.T, n, replacement=True).T
    index = chosen.unsqueeze(-1).expand(-1, -1, y.shape[-1])
    return y.gather(0, index).movedim(0, 1)


def as_images(images: Any) -> Tensor:
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


def as_labels(y: Any, dim: int | None = None) -> Tensor:
    """Labels as a checked double tensor ``(n, d)``; ``dim``: the ``d`` that is needed."""
    given = y if isinstance(y, Tensor) else np.asarray(y)
    if given.is_complex() if isinstance(given, Tensor) else np.iscomplexobj(given):
        raise DataError("labels must be real numbers; give real and imaginary parts as two labels")
    labels = torch.as_tensor(given if isinstance(given, Tensor) else given.astype(np.float64))
    labels = labels.double()
    if labels.ndim == 1:
        labels = labels[:, None]
    if labels.ndim != 2 or not bool(torch.isfinite(labels).all()):
        raise DataError(
            f"labels must be finite, of shape (n,) or (n, d); got {tuple(labels.shape)}"
        )
    if dim is not None and labels.shape[1] != dim:
        raise DataError(f"expected {dim} label(s) for each image, got {labels.shape[1]}")
    return labels


def same_length(x: Tensor, y: Tensor) -> None:
    """Refuse images and labels of different number."""
    if len(x) != len(y):
        raise DataError(f"{len(x)} images but {len(y)} labels")
