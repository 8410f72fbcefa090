"""How models of labels given images are trained: energies with their proposals, or laws alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfnorm._context import seeded
from selfnorm.conditional import ConditionalTask, check_pairs
from selfnorm.errors import DataError
from selfnorm.images.augmentation import Augmentation
from selfnorm.images.labels import LabelSpace
from selfnorm.images.model import ImageEBM, LawModel, MeanHead
from selfnorm.training import Task

__all__ = ["ImageTask", "LawTask", "Presentation"]


class Presentation:
    """What training does to a batch before the model sees it: augmentation and dequantisation.

    Labels are standardised; uniform noise of one label step is drawn afresh at every step.
    """

    def __init__(self, space: LabelSpace, augmentation: Augmentation | None) -> None:
        self.augmentation = augmentation or Augmentation()
        signs = self.augmentation.flip_signs
        if signs is not None and len(signs) != space.dim:
            raise DataError(
                f"the augmentation has flip_signs for {len(signs)} label(s), here are {space.dim}: "
                "give one sign for each"
            )
        self.space = space
        self._constants: dict[torch.device, Tensor] = {}

    def _on(self, like: Tensor) -> Tensor:
        """Centre, scale and noise ``(3, d)``; copied once, as a captured step may not copy."""
        if like.device not in self._constants:
            rows = [self.space.center, self.space.scale, self.space.noise]
            self._constants[like.device] = torch.tensor(rows, device=like.device)
        return self._constants[like.device].to(like.dtype)

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Images and standardised labels of one training step."""
        center, scale, noise = self._on(y)
        if self.augmentation.flip_signs is not None:
            # A mirrored label changes its sign in its own units, not in standardised ones.
            x, y = self.augmentation(x, center + scale * y)
            y = (y - center) / scale
        else:
            x, y = self.augmentation(x, y)
        if self.space.step > 0:
            y = y + (torch.rand_like(y) - 0.5) * noise
        return x, y


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices and kernels with weight decay, everything else without."""
    named = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in named if p.ndim > 1]},
        {"params": [p for p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


class ImageTask(ConditionalTask):
    """A :class:`ConditionalTask` on images: presentation of the batch, captured as a CUDA graph.

    ``compile_heads`` fuses everything after the features by ``torch.compile``: worth its tens of
    seconds where training takes many minutes.
    """

    module: ImageEBM
    capturable = True

    def __init__(
        self,
        model: ImageEBM,
        presentation: Presentation,
        *,
        compile_heads: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.presentation = presentation
        self.heads_loss = ConditionalTask(model.heads(), **options).loss
        if compile_heads:
            # Eager random numbers: a compiled run is then the plain run up to rounding.
            self.heads_loss = torch.compile(
                self.heads_loss, dynamic=False, options={"fallback_random": True}
            )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Kernels and matrices are decayed; norms, biases and ``b``'s are not."""
        return _groups(self.module)

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective on one presented batch: features once, then all heads."""
        x, y = self.presentation(batch[0], batch[1])
        return self.heads_loss((self.module.features(x), y))

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Held-out bounds; always with stratified draws, whatever the objective trains with."""
        kept, self.stratified = self.stratified, True
        try:
            return super().validate(data)
        finally:
            self.stratified = kept


class LawTask(Task):
    """Maximum likelihood for a law (a mixture density network, a Gaussian), or least squares."""

    module: LawModel
    capturable = True

    def __init__(self, model: LawModel, presentation: Presentation, *, squares: bool) -> None:
        self.module, self.presentation, self.squares = model, presentation, squares

    def parameter_groups(self) -> list[dict[str, Any]]:
        """As for energies."""
        return _groups(self.module)

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Check the pairs."""
        check_pairs(data, "the training data")

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Minus the mean log-density, or the mean squared error."""
        x, y = self.presentation(batch[0], batch[1])
        q = self.module.proposal(self.module.features(x))
        if self.squares:
            error = (y - q.mean).square().mean()
            return error, {"error": error.detach()}
        value = q.log_prob(y).mean()
        return -value, {"lower": value.detach()}

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Held-out mean log-density, or minus the squared error.

        Least squares give no deviation: that of the held-out residuals is kept with the state.
        """
        laws, errors = [], []
        with seeded(20_231_106, data[0].device):
            for x, y in zip(data[0].split(512), data[1].split(512), strict=True):
                q = self.module.proposal(self.module.features(x))
                laws.append(q.log_prob(y))
                errors.append((y - q.mean).square())
        square = torch.cat(errors).double().mean(0)
        if self.squares:
            head = self.module.proposal
            assert isinstance(head, MeanHead)
            head.scale.copy_(square.sqrt())
            return {"score": -float(square.mean())}
        score = float(torch.cat(laws).double().mean())
        return {"score": score, "lower": score}
