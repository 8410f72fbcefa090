"""How models of labels given images are trained: energies with their proposals, or laws alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfnorm.conditional import ConditionalTask
from selfnorm.errors import DataError
from selfnorm.images.augmentation import Augmentation
from selfnorm.images.labels import LabelSpace
from selfnorm.images.model import GaussianHead, ImageEBM

__all__ = ["ImageTask", "LawTask"]


class ImageTask(ConditionalTask):
    """A :class:`ConditionalTask` on images: each batch is presented, the step can be captured."""

    module: ImageEBM
    capturable = True

    def __init__(
        self,
        model: ImageEBM,
        space: LabelSpace,
        augmentation: Augmentation | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.space, self.augmentation = space, augmentation or Augmentation()
        self.zero = [-c / s for c, s in zip(space.center, space.scale, strict=True)]
        signs = self.augmentation.flip_signs
        if signs is not None and len(signs) != space.dim:
            raise DataError(
                f"the augmentation has flip_signs for {len(signs)} label(s), here are {space.dim}: "
                "give one sign for each"
            )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Kernels and matrices are decayed; norms, biases and ``b``'s are not."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]

    def present(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Images and standardised labels as a training step sees them: augmented, dequantised.

        Uniform noise of one label step is drawn afresh at every step.
        """
        x, y = self.augmentation(x, y, self.zero)
        if self.space.step > 0:
            noise = (torch.rand_like(y) - 0.5).unbind(-1)
            # Plain numbers again, for the sake of a captured step.
            y = y + torch.stack([u * w for u, w in zip(noise, self.space.noise, strict=True)], -1)
        return x, y

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective on one presented batch."""
        return super().loss(self.present(batch[0], batch[1]))

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Held-out bounds; always with stratified draws, whatever the objective trains with."""
        kept, self.stratified = self.stratified, True
        try:
            return super().validate(data)
        finally:
            self.stratified = kept


class LawTask(ImageTask):
    """Maximum likelihood for a law (a mixture density network, a Gaussian), or least squares."""

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Minus the mean log-density, or the mean squared error."""
        x, y = self.present(batch[0], batch[1])
        q = self.module.proposal(self.module.features(x))
        if isinstance(self.module.proposal, GaussianHead):
            error = (y - q.mean).square().mean()
            return error, {"error": error.detach()}
        value = q.log_prob(y).mean()
        return -value, {"lower": value.detach()}

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Held-out mean log-density, or minus the squared error.

        Least squares give no deviation: that of the held-out residuals is kept with the state.
        """
        log_p, errors = [], []
        for x, y in zip(data[0].split(512), data[1].split(512), strict=True):
            q = self.module.proposal(self.module.features(x))
            log_p.append(q.log_prob(y))
            errors.append((y - q.mean).square())
        head = self.module.proposal
        if isinstance(head, GaussianHead):
            square = torch.cat(errors).double().mean(0)
            head.scale.copy_(square.sqrt())
            return {"score": -float(square.mean())}
        score = float(torch.cat(log_p).double().mean())
        return {"score": score, "lower": score}
