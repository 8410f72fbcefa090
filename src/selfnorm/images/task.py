"""How models of labels given images are trained: what a step is shown, and what it minimises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfnorm.conditional import ConditionalTask
from selfnorm.errors import DataError
from selfnorm.images.labels import LabelSpace
from selfnorm.images.model import GaussianHead, ImageEBM


@dataclass(frozen=True)
class Augmentation:
    """Random mirror images, shifts and turns; what the label becomes is part of it.

    Args:
        flip: mirror left and right with probability 1/2.
        flip_signs: the label's coordinates are multiplied by these where the image is mirrored:
            ``(-1.0,)`` for a steering angle, ``(-1.0, 1.0, -1.0)`` for yaw, pitch, roll.
        shift: move by up to so many pixels each way, edges repeated.
        dihedral: also mirror up and down, and transpose, for images without an upright.

    Every call returns new tensors: stored images and labels stay as they are.
    """

    flip: bool = False
    flip_signs: Sequence[float] | None = None
    shift: int = 0
    dihedral: bool = False

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise DataError(f"shift must not be negative, got {self.shift}")
        if self.flip_signs is not None and not self.flip:
            raise DataError("flip_signs without flip=True has no meaning")

    @property
    def active(self) -> bool:
        """Whether it does anything at all."""
        return self.flip or self.dihedral or self.shift > 0

    def __call__(
        self, x: Tensor, y: Tensor, zero: Sequence[float] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Images ``(n, c, h, w)`` and labels ``(n, d)``, both new.

        ``zero``: which ``y`` stand for labels of 0, where they are standardised; mirrored labels
        change their sign about it.
        """
        if not self.active:
            return x, y
        n, _, height, width = x.shape
        if self.dihedral and height != width:
            raise DataError(f"only square images can be transposed, these are {height}x{width}")
        device = x.device
        rows = torch.arange(height, device=device).view(1, -1, 1)
        columns = torch.arange(width, device=device).view(1, 1, -1)

        def chance() -> Tensor:
            return torch.rand(n, 1, 1, device=device) < 0.5

        if self.shift:
            moves = torch.randint(-self.shift, self.shift + 1, (2, n, 1, 1), device=device)
            rows, columns = rows + moves[0], columns + moves[1]
        if self.flip or self.dihedral:
            mirrored = chance()
            columns = torch.where(mirrored, width - 1 - columns, columns)
            if self.flip_signs is not None:
                # Plain numbers, not a tensor made here: a captured step may not copy from the host.
                turned_round = mirrored[:, 0, 0].to(y.dtype)
                signs = [1.0 + (sign - 1.0) * turned_round for sign in self.flip_signs]
                about = zero or (0.0,) * len(signs)
                offsets = [(1.0 - s) * at for s, at in zip(signs, about, strict=True)]
                y = y * torch.stack(signs, dim=-1) + torch.stack(offsets, dim=-1)
        if self.dihedral:
            rows = torch.where(chance(), height - 1 - rows, rows)
            turned = chance()
            rows, columns = torch.where(turned, columns, rows), torch.where(turned, rows, columns)
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        # Pixels come out with the channels last in memory, as the convolutions want them.
        pixels = x.permute(0, 2, 3, 1)
        index = torch.arange(n, device=device).view(-1, 1, 1)
        return pixels[index, rows, columns].permute(0, 3, 1, 2), y


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


class LikelihoodTask(ImageTask):
    """Maximum likelihood for a mixture density network or a Gaussian, or least squares."""

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
