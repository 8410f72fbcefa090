"""The parts of a conditional EBM on images: features, label features, energy, fixed proposals.

The ResNet runs once per image; energy, ``b`` and proposal are heads on its features, and the energy
head takes all ``M`` label samples at once. Labels are standardised here; a
:class:`~selfnorm.images.labels.LabelSpace` knows the scale, the range and the step of the original
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from selfnorm import functional as F
from selfnorm.conditional import ConditionalEBM, LabelEnergy
from selfnorm.distributions import MDN, LabelUniform, MixtureLabels, UniformLabels
from selfnorm.errors import DataError, ProposalError
from selfnorm.images.labels import LabelSpace, StepFeatures

__all__ = [
    "PROPOSALS",
    "FixedGaussian",
    "FixedUniform",
    "ImageEBM",
    "ImageEnergy",
    "ImageFeatures",
    "LawModel",
    "MeanHead",
    "build",
    "make_proposal",
]

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
PROPOSALS = ("mdn-4", "mdn-8", "gaussian", "uniform")
_BF16_DEVICES = ("cuda",)
_KNOWN_CODE = ("torch", "torchvision", "selfnorm")


def _rounded(like: Tensor, wanted: bool) -> torch.autocast:
    """Matrix products in bfloat16 within the block, where the device has them and ``wanted``."""
    # No cache of cast weights: one made while a CUDA graph is captured must not outlive it.
    return torch.autocast(
        like.device.type,
        dtype=torch.bfloat16,
        enabled=wanted and like.device.type in _BF16_DEVICES,
        cache_enabled=False,
    )


class ImageFeatures(nn.Module):
    """Images ``(n, c, h, w)``, bytes or numbers in ``[0, 1]``, to features ``(n, d_h)``.

    Normalises with ImageNet's mean and deviation (three channels) or 0.5 and 0.25, runs the
    backbone in channels-last order and, on CUDA, in bfloat16.

    >>> net = ImageFeatures(nn.Flatten(), dropout=0.0)
    >>> net(torch.zeros(2, 3, 4, 4, dtype=torch.uint8)).shape
    torch.Size([2, 48])
    """

    factor: Tensor
    shift: Tensor

    def __init__(
        self, backbone: nn.Module, *, channels: int = 3, dropout: float = 0.0, bf16: bool = True
    ) -> None:
        super().__init__()
        self.channels, self.bf16 = channels, bf16
        self.dropout = nn.Dropout(dropout)
        colour = channels == 3
        mean = torch.tensor(_IMAGENET_MEAN if colour else (0.5,) * channels).view(-1, 1, 1)
        std = torch.tensor(_IMAGENET_STD if colour else (0.25,) * channels).view(-1, 1, 1)
        self.register_buffer("factor", 1.0 / std, persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)
        self.backbone = backbone.to(self.factor.dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Features in float32."""
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise DataError(
                f"expected images of shape (n, {self.channels}, height, width), "
                f"got {tuple(x.shape)}"
            )
        learning = self.training and torch.is_grad_enabled()
        weights: dict[str, Tensor] = {}
        if learning and self.bf16 and x.device.type in _BF16_DEVICES:
            weights = self._rounded_weights()
        factor = self.factor / 255.0 if x.dtype == torch.uint8 else self.factor
        x = (x.to(self.factor.dtype) * factor + self.shift).contiguous(
            memory_format=torch.channels_last
        )
        with _rounded(x, self.bf16):
            h = functional_call(self.backbone, weights, (x,)) if weights else self.backbone(x)
        if not isinstance(h, Tensor) or h.shape[:-1] != x.shape[:1]:
            made = tuple(h.shape) if isinstance(h, Tensor) else f"a {type(h).__name__}"
            raise DataError(
                f"the backbone must map (n, c, h, w) to (n, features); of {tuple(x.shape)} it "
                f"makes {made}: end it with nn.Flatten(), or pool its maps first"
            )
        return self.dropout(h.to(self.factor.dtype))

    def _rounded_weights(self) -> dict[str, Tensor]:
        """Weights of convolutions and matrices in bfloat16, as autocast would make them one by one.

        For a ResNet on a small batch so many launches are a tenth of the time. None of a
        backbone with code of others, which may turn autocast off for a part of it, or compute with
        weights before it multiplies by them.
        """
        modules = dict(self.backbone.named_modules())
        if any(type(m).__module__.partition(".")[0] not in _KNOWN_CODE for m in modules.values()):
            return {}
        of_kind = {n for n, m in modules.items() if type(m) in (nn.Conv2d, nn.Linear)}
        weights = {
            name: p
            for name, p in self.backbone.named_parameters()
            if name.endswith("weight") and name.rpartition(".")[0] in of_kind
        }
        if not weights:
            return {}
        return dict(zip(weights, _InBfloat16.apply(*weights.values()), strict=True))


class _InBfloat16(torch.autograd.Function):
    """Tensors in bfloat16, and their gradients back: a few launches for all of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        rounded = [torch.empty_like(t, dtype=torch.bfloat16) for t in tensors]
        torch._foreach_copy_(rounded, list(tensors))
        return tuple(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        there = [g for g in gradients if g is not None]
        full = [torch.empty_like(g, dtype=torch.float32) for g in there]
        torch._foreach_copy_(full, there)
        given = iter(full)
        return tuple(None if g is None else next(given) for g in gradients)


class ImageEnergy(LabelEnergy):
    """A :class:`LabelEnergy` whose wide layers run in bfloat16 while training on CUDA.

    Labels enter in full precision and energies leave in it: only differences of energies count, and
    in bfloat16 neighbours of 100 are half a nat apart. Evaluation is in full precision throughout.
    """

    bf16 = True

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        """``E`` of shape ``(*samples, *batch)``."""
        seen = self.label_net(y)
        with _rounded(h, self.bf16 and self.training):
            hidden = self.joint[:-1](self.from_label(seen) + self.from_context(h))
        return self.joint[-1](hidden.to(h.dtype)).squeeze(-1)


class FixedGaussian(nn.Module):
    """Independent Gaussians with the labels' mean and deviation, the same for every image.

    >>> q = FixedGaussian(torch.zeros(1), torch.ones(1))
    >>> q(torch.zeros(5, 3)).stratified_sample(4).shape
    torch.Size([4, 5, 1])
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, h: Tensor) -> MixtureLabels:
        """The law, one for each row of ``h``."""
        shape = (*h.shape[:-1], 1, len(self.mean))
        weights = h.new_zeros((*h.shape[:-1], 1))
        return MixtureLabels(weights, self.mean.expand(shape), self.scale.expand(shape))


class _StratifiedUniform(UniformLabels):
    """A uniform law whose draws can be spread evenly over the first coordinate."""

    def stratified_sample(self, n_samples: int) -> Tensor:
        """``(M, *batch, d)`` draws, one from each of ``M`` slices of the first coordinate."""
        size = (n_samples, *self.batch_shape, *self.event_shape)
        u = torch.rand(size, device=self.low.device, dtype=self.low.dtype)
        index = torch.arange(n_samples, device=u.device, dtype=u.dtype)
        first = (index.view(-1, *[1] * (u.ndim - 1)) + u[..., :1]) / n_samples
        u = torch.cat([first, u[..., 1:]], dim=-1)
        return self.low + (self.high - self.low) * u

    def midpoints(self, n_samples: int) -> Tensor:
        """The middle of each of ``M`` slices of a single label, ``(M, *batch, 1)``."""
        index = torch.arange(n_samples, device=self.low.device, dtype=self.low.dtype)
        u = ((index + 0.5) / n_samples).view(-1, *[1] * (len(self.batch_shape) + 1))
        return (self.low + (self.high - self.low) * u).expand(n_samples, *self.batch_shape, 1)


class FixedUniform(LabelUniform):
    """Uniform over the range of the labels; its draws for each image are its own."""

    shared = False

    def forward(self, h: Tensor) -> _StratifiedUniform:
        """The law, one for each row of ``h``."""
        return _StratifiedUniform(self.low, self.high, h.shape[:-1])


class MeanHead(nn.Module):
    """A Gaussian with a linear mean and one deviation for all images: what L2 regression fits.

    >>> MeanHead(4, 1)(torch.zeros(3, 4)).mean.shape
    torch.Size([3, 1])
    """

    scale: Tensor

    def __init__(self, context: int, dim: int) -> None:
        super().__init__()
        self.means = nn.Linear(context, dim)
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, h: Tensor) -> MixtureLabels:
        """The law for features ``h``."""
        means = self.means(h).unsqueeze(-2)
        return MixtureLabels(means.new_zeros(means.shape[:-1]), means, self.scale.expand_as(means))


def make_proposal(
    name: str, context: int, space: LabelSpace, *, hidden: Sequence[int] = (512,)
) -> nn.Module:
    """A proposal by name: ``"mdn-K"``, ``"gaussian"`` or ``"uniform"``, in standardised units."""
    dim = space.dim
    if name == "gaussian":
        return FixedGaussian(torch.zeros(dim), torch.ones(dim))
    if name == "uniform":
        low, high = space.standardised_ends()
        slack = 1e-4 * (high - low)  # rounding must not put a label at the end outside
        return FixedUniform(low - slack, high + slack, shared=False)
    components = name.removeprefix("mdn-")
    if not name.startswith("mdn-") or not components.isdigit() or int(components) < 1:
        raise ProposalError(
            f"no proposal is called {name!r}; choose 'gaussian', 'uniform', or 'mdn-K' with K "
            "components, e.g. 'mdn-4'"
        )
    # Uniform noise of one step leaves nothing to find below an eighth of it.
    floor = max(1e-3, 0.125 * max(space.noise))
    return MDN(context, dim, int(components), hidden=hidden, min_scale=floor)


class ImageEBM(ConditionalEBM):
    r"""A :class:`~selfnorm.ConditionalEBM` whose heads can be used on features computed before.

    ``share_gradient=False`` is the paper's way: the features learn from the energy's objective
    alone, the proposal sees them detached. With ``True`` the proposal's likelihood teaches them
    too.

    With ``anchors`` ``b`` knows the energy: ``b(h) = head(h) + log (1/K) sum_k w(h, y_k)`` with the
    weights ``w = exp(-E) d / q`` at the midpoints ``y_k`` of ``K`` slices of the proposal, the same
    for the same image. SNL bounds the likelihood for every function ``b`` of the image. This one
    follows the energy at once, the head is left with what the rule misses, and the level of the
    energy, which does not matter, is no longer pushed about by the draws. For proposals whose
    slices resolve the law (uniform with one anchor in each label step, a mixture): where the rule
    is poor, its error makes the gradient noisier instead.
    """

    share_gradient = False
    anchors = 0

    def law(self, x: Tensor, h: Tensor) -> Any:  # noqa: ARG002 all that is used of x is in h
        """The proposal's law at features ``h``."""
        return self.proposal(h if self.share_gradient else h.detach())

    def b(self, h: Tensor) -> Tensor:
        """``b`` at features ``h``, anchored or not."""
        head = super().b(h)
        if self.anchors < 1:
            return head
        q = self.law(h, h)
        with torch.no_grad():
            y = q.midpoints(self.anchors)
        log_w = self.minus_energy(h, y, q)
        if not self.base_is_proposal:
            log_w = log_w + self.log_base(h, y, q) - q.log_prob(y).detach()
        return head + F.log_mean_exp(log_w)

    def heads(self) -> ImageEBM:
        """The same model for inputs that are features already; parameters are shared."""
        twin = ImageEBM(
            self.energy,
            self.proposal,
            log_norm=self.log_norm_net,
            base="proposal" if self.base_is_proposal else None,
            label_features=self.label_features,
        )
        twin.share_gradient, twin.anchors = self.share_gradient, self.anchors
        return twin.train(self.training)  # type: ignore[return-value]


class LawModel(nn.Module):
    """Features and a law of labels on top of them: a density without an energy.

    Its ``log_unnormalized`` is normalised, so it can be judged by the same code as an EBM.
    """

    def __init__(self, features: nn.Module, proposal: nn.Module) -> None:
        super().__init__()
        self.features, self.proposal = features, proposal

    def log_unnormalized(self, x: Tensor, y: Tensor) -> Tensor:
        """``log q(y|x)``."""
        return self.proposal(self.features(x)).log_prob(y)

    log_prob = log_unnormalized

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Same as :meth:`log_prob`."""
        return self.log_prob(x, y)

    def heads(self) -> LawModel:
        """The same law for inputs that are features already."""
        return LawModel(nn.Identity(), self.proposal).train(self.training)


def build(
    features: ImageFeatures,
    width: int,
    space: LabelSpace,
    *,
    objective: str,
    proposal: str,
    energy: str,
    base: str | None,
) -> ImageEBM | LawModel:
    """Heads on ``features`` with ``width`` outputs; see :class:`~selfnorm.ImageRegressor`.

    The paper's energy: label 16-32-64-128, joined with the features, one hidden layer of their
    common size; ``b`` and the three networks of the mixture with one hidden layer as wide as the
    features. Ours sees :class:`StepFeatures` of the label and starts at zero: at the proposal.
    """
    hidden = (width,) if energy == "paper" else (256,)
    if objective == "l2":
        return LawModel(features, MeanHead(width, space.dim))
    if objective == "gaussian":
        return LawModel(features, make_proposal("mdn-1", width, space, hidden=hidden))
    law = make_proposal(proposal, width, space, hidden=hidden)
    if objective == "mdn":
        if not isinstance(law, MDN):
            raise ProposalError(
                f"objective 'mdn' fits a mixture to each image: proposal={proposal!r} is the same "
                "for all; use proposal='mdn-K' with K components, e.g. 'mdn-4'"
            )
        return LawModel(features, law)
    b: nn.Module
    if energy == "paper":
        seen = None
        head = ImageEnergy(
            width,
            space.dim,
            label_hidden=(16, 32, 64, 128),
            hidden=(width + 128,),
            activation="relu",
        )
        b = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    else:
        seen = StepFeatures(space)
        head = ImageEnergy(width, seen.n_features, hidden=(256, 256), zero=True)
        last = nn.Linear(256, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        b = nn.Sequential(nn.Linear(width, 256), nn.SiLU(), last)
    head.bf16 = features.bf16
    return ImageEBM(head, law, features=features, log_norm=b, base=base, label_features=seen)
