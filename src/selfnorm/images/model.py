"""A conditional EBM on images: ResNet-18, features, energy, fixed proposals; how it is trained.

The ResNet runs once per image; energy, ``b`` and proposal are heads on its features, and the energy
head takes all ``M`` label samples at once. Labels are standardised here; a
:class:`~selfnorm.images.labels.LabelSpace` knows the scale, the range and the step of the original
ones.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm import functional as F
from selfnorm._saved import saved
from selfnorm.conditional import ConditionalEBM, ConditionalTask, LabelEnergy, with_proposal
from selfnorm.distributions import MDN, MixtureLabels, Uniform
from selfnorm.errors import DataError, ProposalError
from selfnorm.images.labels import LabelSpace, StepFeatures

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
PROPOSALS = ("mdn-4", "mdn-8", "gaussian", "uniform")
WITHOUT_ENERGY = ("mdn", "gaussian", "l2")  # objectives without an energy


@saved()
@dataclass(frozen=True)
class EnergyHead:
    """Which networks stand on the features, and what the features learn from.

    ``EnergyHead("paper", base=None, share_gradient=False, proposal_loss="both")`` is the paper's.

    Args:
        network: ``"steps"`` (ours: the energy sees indicators of label steps and waves) or
            ``"paper"``.
        base: ``"proposal"`` or ``None`` (the paper's).
        anchors: midpoints of the proposal's slices at which ``b`` sees the energy (one label only);
            0: ``b`` is a network on the features alone, as in the paper. See :class:`ImageEBM`.
        share_gradient: features also learn from the proposal's likelihood; ``False``: from the
            objective alone, as in the paper.
        proposal_loss: see :class:`~selfnorm.conditional.ConditionalTask`.
    """

    network: str = "steps"
    base: str | None = "proposal"
    anchors: int = 0
    share_gradient: bool = True
    proposal_loss: str = "likelihood"

    def __post_init__(self) -> None:
        if self.network not in ("steps", "paper"):
            raise DataError(f"energy must be 'steps' or 'paper', not {self.network!r}")
        if self.network == "steps" and self.base is None:
            raise DataError(
                "the energy 'steps' is constant outside the labels' range and has no normaliser "
                "without a base: use base='proposal', or the energy 'paper'"
            )
        is_count = isinstance(self.anchors, numbers.Integral) and not isinstance(self.anchors, bool)
        if not is_count or self.anchors < 0:
            raise DataError(f"anchors must be an int of at least 0, got {self.anchors!r}")


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(x + shortcut)


@saved(arguments=lambda net: {"channels": net.conv1.in_channels})
class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) without its classifier: images ``(n, c, h, w)`` to ``(n, 512)``.

    Names and shapes of its parameters are those of torchvision's, so weights saved from one load
    into the other.

    Args:
        channels: colour channels of the images.
    """

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _stage(64, 64, 1)
        self.layer2 = _stage(64, 128, 2)
        self.layer3 = _stage(128, 256, 2)
        self.layer4 = _stage(256, 512, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(n, 512)`` of images ``(n, c, h, w)``."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.avgpool(x).flatten(1)


def _stage(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_Block(before, after, stride), _Block(after, after, 1))


@saved(arguments=lambda m: {"backbone": m.backbone, "channels": m.channels, "dropout": m.dropout.p})
class ImageFeatures(nn.Module):
    """Images ``(n, c, h, w)``, bytes or numbers in ``[0, 1]``, to features ``(n, d_h)``.

    Normalises with ImageNet's mean and deviation (three channels) or 0.5 and 0.25, runs the
    backbone in channels-last order and, on CUDA, in bfloat16. Features ``(n, d_h)`` computed before
    come back as they are: a model on top of it takes images or features.
    """

    factor: Tensor
    shift: Tensor

    def __init__(self, backbone: nn.Module, *, channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.channels = channels
        self.dropout = nn.Dropout(dropout)
        colour = channels == 3
        mean = torch.tensor(_IMAGENET_MEAN if colour else (0.5,) * channels).view(-1, 1, 1)
        std = torch.tensor(_IMAGENET_STD if colour else (0.25,) * channels).view(-1, 1, 1)
        self.register_buffer("factor", 1.0 / std, persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)
        self.backbone = backbone.to(self.factor.dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Features in float32."""
        if x.ndim == 2:
            return x
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise DataError(
                f"expected images of shape (n, {self.channels}, height, width), "
                f"got {tuple(x.shape)}"
            )
        factor = self.factor / 255.0 if x.dtype == torch.uint8 else self.factor
        x = (x.to(self.factor.dtype) * factor + self.shift).contiguous(
            memory_format=torch.channels_last
        )
        # No cache of cast weights: one made while a CUDA graph is captured must not outlive it.
        with torch.autocast(
            x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda, cache_enabled=False
        ):
            h = self.backbone(x)
        if not isinstance(h, Tensor) or h.shape[:-1] != x.shape[:1]:
            made = tuple(h.shape) if isinstance(h, Tensor) else f"a {type(h).__name__}"
            raise DataError(
                f"the backbone must map (n, c, h, w) to (n, features); of {tuple(x.shape)} it "
                f"makes {made}: end it with nn.Flatten(), or pool its maps first"
            )
        return self.dropout(h.to(self.factor.dtype))


@saved(
    arguments=lambda head: {
        "dim": len(head.scale),
        "context": None if head.means is None else head.means.in_features,
    }
)
class GaussianHead(nn.Module):
    """Independent Gaussians with one deviation for all images.

    Args:
        dim: size of the label.
        context: size of the features, in which the mean is linear: what L2 regression fits.
            ``None``: mean 0, the distribution of standardised labels, the same for every image.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, dim: int, context: int | None = None) -> None:
        super().__init__()
        self.means = None if context is None else nn.Linear(context, dim)
        self.register_buffer("mean", torch.zeros(dim) if context is None else None)
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, h: Tensor) -> MixtureLabels:
        """The distribution, one for each row of ``h``."""
        mean = self.mean.expand(*h.shape[:-1], -1) if self.means is None else self.means(h)
        means = mean.unsqueeze(-2)
        return MixtureLabels(means.new_zeros(means.shape[:-1]), means, self.scale.expand_as(means))


def make_proposal(
    name: str, context: int, space: LabelSpace, *, hidden: Sequence[int] = (512,)
) -> nn.Module:
    """A proposal by name: ``"mdn-K"``, ``"gaussian"`` or ``"uniform"``, in standardised units."""
    dim = space.dim
    if name == "gaussian":
        return GaussianHead(dim)
    if name == "uniform":
        low, high = space.standardised_ends()
        slack = 1e-4 * (high - low)  # rounding must not put a label at the end outside
        box = Uniform(low - slack, high + slack)
        box.shared = False
        return box
    components = name.removeprefix("mdn-")
    if not name.startswith("mdn-") or not components.isdigit() or int(components) < 1:
        raise ProposalError(
            f"no proposal is called {name!r}; choose 'gaussian', 'uniform', or 'mdn-K' with K "
            "components, e.g. 'mdn-4'"
        )
    # Uniform noise of one step leaves nothing to find below an eighth of it.
    floor = max(1e-3, 0.125 * max(space.noise))
    return MDN(context, dim, int(components), hidden=hidden, min_scale=floor)


@saved(arguments=lambda model: model.config, build=with_proposal)
class ImageEBM(ConditionalEBM):
    r"""A :class:`~selfnorm.ConditionalEBM` of labels given images, or features computed before.

    With ``share_gradient`` the proposal's likelihood teaches the features too; without, the paper's
    way, they learn from the energy's objective alone and the proposal sees them detached.

    With ``anchors`` ``b`` knows the energy: ``b(h) = head(h) + log (1/K) sum_k w(h, y_k)`` with the
    weights ``w = exp(-E) d / q`` at the midpoints ``y_k`` of ``K`` slices of the proposal, the same
    for the same image. SNL bounds the likelihood for every function ``b`` of the image. This one
    follows the energy at once, the head is left with what the rule misses, and the level of the
    energy, which does not matter, is no longer pushed about by the draws. For proposals whose
    slices resolve the density (uniform with one anchor in each label step, a mixture): where the
    rule is poor, its error makes the gradient noisier instead.
    """

    def __init__(
        self,
        energy: nn.Module,
        proposal: nn.Module,
        *,
        share_gradient: bool = False,
        anchors: int = 0,
        **parts: Any,
    ) -> None:
        super().__init__(energy, proposal, **parts)
        self.share_gradient, self.anchors = share_gradient, anchors

    @property
    def config(self) -> dict[str, Any]:
        """What the constructor was given."""
        return {**super().config, "share_gradient": self.share_gradient, "anchors": self.anchors}

    def proposal_at(self, x: Tensor, h: Tensor) -> Any:  # noqa: ARG002 all that is used of x is in h
        """The proposal's distribution at features ``h``."""
        return self.proposal(h if self.share_gradient else h.detach())

    def b(self, h: Tensor) -> Tensor:
        """``b`` at features ``h``, anchored or not."""
        head = super().b(h)
        if self.anchors < 1:
            return head
        q = self.proposal_at(h, h)
        with torch.no_grad():
            y = q.midpoints(self.anchors)
        log_w = self.minus_energy(h, y, q) + self.base_over_proposal(h, y, q)
        return head + F.log_mean_exp(log_w)


@saved()
class NoEnergy(nn.Module):
    """``E = 0``: a model with the proposal as its base is then the proposal, normalised."""

    broadcasts = True

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        """Zeros, one for each label."""
        return h.new_zeros(torch.broadcast_shapes(h.shape[:-1], y.shape[:-1]))


def build(
    features: ImageFeatures,
    width: int,
    space: LabelSpace,
    *,
    objective: str,
    proposal: str,
    head: EnergyHead,
) -> ImageEBM:
    """Heads on ``features`` with ``width`` outputs; see :class:`~selfnorm.ImageRegressor`.

    The paper's energy: label 16-32-64-128, joined with the features, one hidden layer of their
    common size; ``b`` and the three networks of the mixture with one hidden layer as wide as the
    features. Ours sees :class:`StepFeatures` of the label and starts at zero: at the proposal.
    """
    if objective == "l2":
        source: nn.Module = GaussianHead(space.dim, width)
    else:
        hidden = (width,) if head.network == "paper" else (256,)
        name = "mdn-1" if objective == "gaussian" else proposal
        source = make_proposal(name, width, space, hidden=hidden)
    if objective == "mdn" and not isinstance(source, MDN):
        raise ProposalError(
            f"objective 'mdn' fits a mixture to each image: proposal={proposal!r} is the same "
            "for all; use proposal='mdn-K' with K components, e.g. 'mdn-4'"
        )
    if objective in WITHOUT_ENERGY:
        return ImageEBM(NoEnergy(), source, features=features, base="proposal")
    b: nn.Module
    if head.network == "paper":
        label_features = None
        energy = LabelEnergy(
            width,
            space.dim,
            label_hidden=(16, 32, 64, 128),
            hidden=(width + 128,),
            activation="relu",
        )
        b = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    else:
        label_features = StepFeatures(space)
        energy = LabelEnergy(width, label_features.n_features, hidden=(256, 256), zero=True)
        last = nn.Linear(256, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        b = nn.Sequential(nn.Linear(width, 256), nn.SiLU(), last)
    return ImageEBM(
        energy,
        source,
        features=features,
        log_norm=b,
        base=head.base,
        label_features=label_features,
        share_gradient=head.share_gradient,
        anchors=int(head.anchors) if space.dim == 1 else 0,
    )


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
