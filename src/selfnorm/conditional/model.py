"""Conditional energy-based models ``p(y|x)``, normalised for every ``x``, and how they train."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm import functional as F
from selfnorm._context import SeedLike, evaluating, seeded
from selfnorm._inputs import as_tensors, one_per_row
from selfnorm._saved import saved
from selfnorm.conditional.bounds import InputFigures, weight_checks
from selfnorm.distribution1d import Distribution1d
from selfnorm.distributions import LabelDistribution, refuse_nan, refuse_unreached
from selfnorm.errors import DataError, EnergyError
from selfnorm.evaluation import Bounds
from selfnorm.networks import activation_module, decay_groups, linear, perceptron
from selfnorm.training import ParameterGroup, Task

# Label samples that go through the energy at once: on the CPU what its caches hold.
_ROWS_AT_ONCE = defaultdict(lambda: 200_000, cpu=20_000)
OBJECTIVES = ("snl", "nce", "ranking_nce", "nce_plus", "importance_ml")
PROPOSAL_LOSSES = ("likelihood", "kl", "both", "none")


@saved()
class LabelEnergy(nn.Module):
    """An energy ``E(h, y)``: labels through a network of their own, joined with the features.

    The first joint layer is a sum of a map of ``h`` and a map of the label features, so ``y`` of
    shape ``(M, 1, d)``, shared by all inputs, costs no more than ``M`` passes of the label network.

    Args:
        context: size of ``h``.
        dim: size of the label (or of its features).
        label_hidden: layers of the label network (none: the label itself).
        hidden: joint layers.
        activation: "relu", "silu", "gelu" or "tanh"; never after the output.
        members: stack this many energies; inputs are then ``(*samples, members, n, ...)``.
        zero: start at ``E = 0``.

    >>> energy = LabelEnergy(10, 1, label_hidden=(16, 32), hidden=(10,))
    >>> energy(torch.randn(7, 10), torch.randn(5, 1, 1)).shape
    torch.Size([5, 7])
    """

    broadcasts = True  # labels of shape (M, 1, d) serve all inputs

    def __init__(
        self,
        context: int,
        dim: int = 1,
        *,
        label_hidden: Sequence[int] = (),
        hidden: Sequence[int] = (64, 64),
        activation: str = "silu",
        members: int | None = None,
        zero: bool = False,
    ) -> None:
        super().__init__()
        if not hidden:
            raise ValueError("LabelEnergy needs at least one joint layer")
        self.label_net = perceptron(members, dim, label_hidden, activation=activation)
        self.from_label = linear(members, (dim, *label_hidden)[-1], hidden[0])
        self.from_context = linear(members, context, hidden[0])
        rest = perceptron(members, hidden[0], hidden[1:], 1, activation=activation, zero=zero)
        self.joint = nn.Sequential(activation_module(activation), *rest)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        """``E`` of shape ``(*samples, *batch)`` for ``h (*batch, context)``, ``y (..., dim)``."""
        return self.joint(self.from_label(self.label_net(y)) + self.from_context(h)).squeeze(-1)


def with_proposal(
    kind: Callable[..., ConditionalEBM], frozen: bool, **parts: object
) -> ConditionalEBM:
    """A model whose proposal is ``frozen`` as it was when it was saved."""
    model = kind(**parts)
    if frozen:
        model.freeze_proposal()
    return model


@saved(arguments=lambda model: model.config, build=with_proposal)
class ConditionalEBM(nn.Module):
    r"""A density of labels given inputs: ``p(y|x) = exp(-E(h, y)) d(y|x) / exp(b(h))``.

    ``h = h(x)`` are features of the input.

    Args:
        energy: module on ``(h, y)``; ``y`` has shape ``(*samples, *batch, d)`` and the result
            ``(*samples, *batch)``. :class:`LabelEnergy` is one.
        proposal: module whose ``forward(h)`` returns a distribution of labels with
            ``sample(shape)`` and ``log_prob(y)``: :class:`~selfnorm.MDN`, or any proposal that
            ignores ``h``, :class:`~selfnorm.Gaussian`, ...
        features: ``h(x)``; the input itself by default. It learns from the energy alone: the
            proposal sees ``h`` detached.
        log_norm: ``b``: ``None`` for ``b = 0`` (the energy must normalise itself), a number for one
            learned scalar, a module on ``h`` for a function of ``x``.
        base: ``d``: ``None``, ``"proposal"`` (the current proposal, held fixed in the gradient), or
            a module like ``proposal``.
        label_features: optional ``phi(y, q)`` that the energy sees in place of ``y``, e.g. labels
            standardised by the proposal.
        proposal_features: a feature extractor of the proposal's own; by default it shares ``h``.

    Densities are with respect to Lebesgue measure on ``y``. A batch shape may have several
    dimensions, e.g. ``(members, n)`` for stacked ensembles.

    Example:
        >>> import selfnorm as sn
        >>> x = torch.randn(256, 1); y = x + 0.3 * torch.randn(256, 1)
        >>> model = ConditionalEBM(LabelEnergy(1), sn.Gaussian.fit_to(y), log_norm=0.0)
        >>> h = sn.fit(model, (x, y), n_samples=16, max_epochs=1, seed=0, progress=False)
        >>> model.log_prob(x, y).shape
        torch.Size([256])
    """

    def __init__(
        self,
        energy: nn.Module,
        proposal: nn.Module,
        *,
        features: nn.Module | None = None,
        log_norm: nn.Module | float | None = None,
        base: nn.Module | str | None = None,
        label_features: nn.Module | None = None,
        proposal_features: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if isinstance(base, str) and base != "proposal":
            raise ValueError(f'base must be None, "proposal" or a module, not {base!r}')
        self.energy, self.proposal = energy, proposal
        self.features = features or nn.Identity()
        self.proposal_features = proposal_features
        self.label_features = label_features
        self.base_is_proposal = base == "proposal"
        self.base = base if isinstance(base, nn.Module) else None
        self.log_norm_net: nn.Module | None = log_norm if isinstance(log_norm, nn.Module) else None
        scalar = log_norm if isinstance(log_norm, int | float) else None
        self.log_norm_scalar = None if scalar is None else nn.Parameter(torch.tensor(float(scalar)))
        self.proposal_frozen = False

    def freeze_proposal(self) -> None:
        """Keep the proposal as it is: no gradient, no dropout in it, from now on."""
        self.proposal_frozen = True
        for part in (self.proposal, self.proposal_features):
            if part is not None:
                part.requires_grad_(False).eval()

    @property
    def config(self) -> dict[str, Any]:
        """What the constructor was given, by which a saved model is built again."""
        return {
            "energy": self.energy,
            "proposal": self.proposal,
            "features": self.features,
            "log_norm": self.log_norm_net if self.log_norm_scalar is None else 0.0,
            "base": "proposal" if self.base_is_proposal else self.base,
            "label_features": self.label_features,
            "proposal_features": self.proposal_features,
            "frozen": self.proposal_frozen,
        }

    def train(self, mode: bool = True) -> ConditionalEBM:
        """Training mode for everything but a frozen proposal."""
        super().train(mode)
        if mode and self.proposal_frozen:
            self.freeze_proposal()
        return self

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def proposal_at(self, x: Tensor, h: Tensor) -> Any:
        """The proposal's density for inputs ``x`` with features ``h``, which it sees detached."""
        own = self.proposal_features
        return self.proposal(h.detach() if own is None else own(x))

    def minus_energy(self, h: Tensor, y: Tensor, q: LabelDistribution) -> Tensor:
        """``-E`` of labels ``(*samples, *batch, d)``."""
        inputs = y if self.label_features is None else self.label_features(y, q)
        energy = self.energy(h, inputs)
        if energy.shape != torch.broadcast_shapes(y.shape[:-1], h.shape[:-1]):
            raise EnergyError(
                f"the energy must return one scalar per label: for features {tuple(h.shape)} and "
                f"labels {tuple(y.shape)} it returned {tuple(energy.shape)}"
            )
        return -energy

    def b(self, h: Tensor) -> Tensor:
        """``b`` at features ``h``: shape ``h.shape[:-1]``."""
        if self.log_norm_net is not None:
            return one_per_row(self.log_norm_net(h), h.shape[:-1], "log_norm", EnergyError)
        if self.log_norm_scalar is not None:
            return self.log_norm_scalar.expand(h.shape[:-1])
        return h.new_zeros(h.shape[:-1])

    def log_base(self, h: Tensor, y: Tensor, q: LabelDistribution) -> Tensor:
        """``log d(y|x)``, zero without a base; cut from the graph where it is the proposal."""
        if self.base_is_proposal:
            return q.log_prob(y).detach()
        return self.base(h).log_prob(y) if self.base is not None else y.new_zeros(())

    def log_unnormalized(self, x: Tensor, y: Tensor) -> Tensor:
        """``-E + log d`` at pairs ``x (*batch, d_x)``, ``y (*samples, *batch, d)``."""
        h = self.features(x)
        q = self.proposal_at(x, h)
        return self.minus_energy(h, y, q) + self.log_base(h, y, q)

    def log_norm(self, x: Tensor) -> Tensor:
        """The learned ``b(x)``."""
        return self.b(self.features(x))

    def log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        """``log p(y|x)`` by the learned ``b(x)``: one forward pass."""
        h = self.features(x)
        q = self.proposal_at(x, h)
        return self.minus_energy(h, y, q) + self.log_base(h, y, q) - self.b(h)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Same as :meth:`log_prob`."""
        return self.log_prob(x, y)

    def training_task(self, **options: Any) -> ConditionalTask:
        """How :func:`selfnorm.fit` trains this model: see :class:`ConditionalTask`."""
        return ConditionalTask(self, **options)

    def shares_labels(self, proposal: nn.Module | None = None) -> bool:
        """Whether one set of labels serves all inputs: the proposal (the model's own by default)
        is ``shared``, it ignores ``x``, and the energy ``broadcasts``.
        """
        ignores_x = getattr(proposal or self.proposal, "shared", False)
        return bool(ignores_x and getattr(self.energy, "broadcasts", False))

    @torch.no_grad()
    def draw(
        self,
        h: Tensor,
        q: LabelDistribution,
        n_samples: int,
        *,
        stratified: bool = False,
        proposal: nn.Module | None = None,
    ) -> Tensor:
        """``(M, *batch, d)`` labels of ``q``, the one at features ``h``; stratified where it can.

        A proposal that ignores ``x`` gives the same labels ``(M, 1, d)`` to every input: the
        estimate for each is as good, and the energy is cheaper.
        """
        if self.shares_labels(proposal):
            return (proposal or self.proposal)(h[..., :1, :]).sample((n_samples,))
        in_slices = getattr(q, "stratified_sample", None) if stratified else None
        return q.sample((n_samples,)) if in_slices is None else in_slices(n_samples)

    def base_over_proposal(
        self, h: Tensor, y: Tensor, q: LabelDistribution, source: LabelDistribution | None = None
    ) -> Tensor:
        """``log d - log q`` of labels drawn from ``source``, the proposal's own by default.

        Cut from the proposal's graph; zero where base and proposal cancel.
        """
        if self.base_is_proposal and source is None:
            return y.new_zeros(())
        return self.log_base(h, y, q) - (q if source is None else source).log_prob(y).detach()

    @torch.no_grad()
    def log_weights(
        self, x: Tensor, n_samples: int, *, proposal: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, LabelDistribution]:
        """Log-weights ``(M, n)`` of samples for each input, ``log d - log q``, and their source.

        ``log d - log q`` is the part of the log-weights that is not the energy's: it shows whose
        fault a NaN is.
        """
        h = self.features(x)
        q = self.proposal_at(x, h)
        source = None if proposal is None else proposal(h)
        y = self.draw(h, source or q, n_samples, proposal=proposal)
        log_ratio = self.base_over_proposal(h, y, q, source)
        return self.minus_energy(h, y, q) + log_ratio, log_ratio, source or q

    @torch.no_grad()
    def bounds(
        self,
        data: tuple[Tensor, Tensor],
        *,
        n_samples: int = 20_000,
        proposal: nn.Module | None = None,
        seed: SeedLike = None,
    ) -> Bounds:
        """Bounds of the mean ``log p(y|x)``: the mean over inputs of each one's bounds.

        ``ess`` is the mean over the inputs, ``pareto_k`` the value that 95 % of them stay below
        (judged on some 200 of them, for it needs a sort), ``log_norm`` the mean of ``log Z(x)``,
        ``log_norm_se`` the error that samples cause in it, ``learned_error`` the mean of
        ``log Z(x) - b(x)``. ``proposal`` replaces the model's own.
        """
        x, y = as_tensors(data, "the data", self.device)
        check_pairs((x, y), "the data")
        twice = 2 if self.shares_labels(proposal) else 1
        rows = max(1, twice * _ROWS_AT_ONCE[self.device.type] // n_samples)
        parts: list[InputFigures] = []
        nan_proposal = False
        with evaluating(self), seeded(seed, self.device):
            for start in range(0, len(x), rows):
                xs, ys = x[start : start + rows], y[start : start + rows]
                log_w, log_ratio, source = self.log_weights(xs, n_samples, proposal=proposal)
                log_w, log_q = log_w.double(), source.log_prob(ys)
                nan_proposal |= bool(torch.isnan(log_ratio).any() | torch.isnan(log_q).any())
                log_p = self.log_unnormalized(xs, ys).double()
                log_z, b = F.log_mean_exp(log_w), self.log_norm(xs).double()
                lower = F.snl(log_p, log_z[None], b, reduction="none")
                upper = F.importance_ml(log_p, log_z[None], reduction="none")
                checks = weight_checks(log_w, log_p - log_q, len(x), start)
                parts.append(InputFigures(lower, upper, log_z, log_z - b, *checks))
        shared = self.shares_labels(proposal)
        figures = InputFigures.joined(parts)
        return figures.bounds(n_samples, shared=shared, nan_proposal=nan_proposal)

    @torch.no_grad()
    def on_grid(self, x: Tensor, grid: Tensor) -> Tensor:
        """``-E + log d`` ``(n, G)`` of one-dimensional labels ``grid (G,)`` for every input."""
        parts = []
        labels = grid.to(self.device).view(-1, 1, 1)
        with evaluating(self):
            for xs in x.split(max(1, _ROWS_AT_ONCE[x.device.type] // len(grid))):
                y = labels.to(xs) if xs.is_floating_point() else labels
                if not getattr(self.energy, "broadcasts", False):
                    y = y.expand(-1, len(xs), 1)
                parts.append(self.log_unnormalized(xs, y).T.double())
        return torch.cat(parts)

    def exact_log_norm(self, x: Tensor, grid: Tensor) -> Tensor:
        """``log Z(x)`` for one-dimensional labels by the trapezoidal rule on ``grid (G,)``."""
        edges = torch.cat([grid[:1], 0.5 * (grid[1:] + grid[:-1]), grid[-1:]])
        return Distribution1d.from_cells(self.on_grid(x, grid), edges).log_norm

    @torch.no_grad()
    def sample(
        self, x: Tensor, n: int = 1, *, n_candidates: int = 512, seed: SeedLike = None
    ) -> Tensor:
        """``(n, n_x, d)`` labels for every input by sampling-importance-resampling."""
        with evaluating(self), seeded(seed, self.device):
            h = self.features(x)
            q = self.proposal_at(x, h)
            y = q.sample((n_candidates,))
            log_w = self.minus_energy(h, y, q) + self.base_over_proposal(h, y, q)
            weights = torch.softmax(log_w, dim=0).movedim(0, -1)
            chosen = torch.multinomial(weights.reshape(-1, n_candidates), n, replacement=True)
        index = chosen.T.reshape(n, *log_w.shape[1:], 1).expand(n, *y.shape[1:])
        return y.gather(0, index)


def check_pairs(data: tuple[Tensor, ...], name: str) -> None:
    """Inputs and labels of equal length, two dimensions, without NaN."""
    if len(data) < 2:
        raise DataError(f"{name} must be a pair (x, y)")
    x, y = data[0], data[1]
    if y.ndim != 2 or len(x) != len(y):
        raise DataError(
            f"{name}: expected labels of shape (n, d) beside {len(x)} inputs, got {tuple(y.shape)}"
        )
    for part, kind in ((x, "inputs"), (y, "labels")):
        if part.is_floating_point() and not bool(torch.isfinite(part).all()):
            raise DataError(f"the {kind} of {name} hold NaN or infinite values: drop those rows")


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """``sum_i w_i v_i / sum_i w_i`` over the last dimension; the plain mean without weights.

    >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0]))
    tensor(2.)
    """
    if weight is None:
        return values.mean(-1)
    return (values * weight).sum(-1) / weight.sum(-1).clamp_min(1e-12)


class ConditionalTask(Task):
    r"""An objective for energy, features and ``b``; a loss of its own for a trainable proposal.

    For each pair the SNL term is ``-E + log d - b(x) - exp(-b(x)) mean_m w_m + 1`` with ``M``
    labels of its own from ``q(.|x)``. Data may hold a third column, the weight of every pair: it
    counts in the objective, in the proposal's loss and in the held-out score.

    Args:
        model: the model.
        objective: ``"snl"``, ``"nce"`` (binary), ``"ranking_nce"``, ``"nce_plus"``,
            or ``"importance_ml"``. Ranking NCE (the paper's
            regression "NCE"), NCE+ and IS-ML do not change when a function of ``x`` is added to
            the energy: ``b`` gets **no gradient** from them and stays where it started.
        n_samples: labels per input and step. A proposal that ignores ``x`` draws one set of labels
            for the whole batch, which costs the energy far less than a set for every input.
        proposal_loss: ``"likelihood"`` (``-log q(y|x)``), ``"kl"`` (``log Z_hat``, whose gradient
            in the proposal is that of ``KL(p||q)``), ``"both"`` (their average, the paper's), or
            ``"none"``.
        stratified: draw stratified labels where the proposal can, as validation always does.
        noise: NCE+ only: the label is moved by noise of this variance, in units of the labels' own.
        n_val_samples: labels per input when validating.
    """

    module: ConditionalEBM

    def __init__(
        self,
        model: ConditionalEBM,
        *,
        objective: str = "snl",
        n_samples: int = 32,
        proposal_loss: str = "likelihood",
        stratified: bool = True,
        noise: float = 0.025,
        n_val_samples: int = 256,
        proposal: object = None,
    ) -> None:
        if proposal is not None:
            raise TypeError(
                "a ConditionalEBM owns its proposal: give it to the model, not to fit()"
            )
        if objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {OBJECTIVES}, got {objective!r}")
        if proposal_loss not in PROPOSAL_LOSSES:
            raise ValueError(
                f"proposal_loss must be one of {PROPOSAL_LOSSES}, got {proposal_loss!r}"
            )
        self.module = model
        self.jitter = math.sqrt(noise) if objective == "nce_plus" else 0.0
        # NCE+ is ranking NCE on labels with noise.
        self.value = F.VALUES["ranking_nce" if objective == "nce_plus" else objective]
        self.is_snl = objective == "snl"
        self.n_samples, self.n_val_samples = n_samples, n_val_samples
        self.proposal_loss = "none" if model.proposal_frozen else proposal_loss
        self.stratified = stratified
        # Draws that serve a whole batch share their error: take more of them, they cost less.
        self._thrift = 8 if model.shares_labels() else 1
        self.label_scale = torch.ones(())

    def parameter_groups(self) -> list[ParameterGroup]:
        """Matrices with weight decay; biases, norms and a scalar ``b`` without."""
        return decay_groups(self.module.named_parameters())

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Check the pairs and the proposal's support; set a scalar ``b`` to the mean ``log Z``."""
        check_pairs(data, "the training data")
        self._check_weights(data)
        model = self.module
        x, y, *_ = self._typed(data)
        self.label_scale = y.std(0)
        with torch.no_grad():
            model.eval()
            head = slice(0, min(len(x), 1024))
            h = model.features(x[head])
            log_q = model.proposal_at(x[head], h).log_prob(y[head])
            refuse_unreached(log_q, "labels", "mix in a wide one with DefensiveLabels")
            if model.log_norm_scalar is not None:
                log_w, log_ratio, _ = model.log_weights(x[head], 256 * self._thrift)
                whose = "the proposal's" if model.base is None else "the proposal's (or base's)"
                refuse_nan(log_ratio, "samples of the proposal", whose)
                if bool(torch.isnan(log_w).any()):
                    raise EnergyError(
                        "the energy returns NaN at labels drawn from the proposal; it must be "
                        "defined wherever the proposal puts mass"
                    )
                model.log_norm_scalar.copy_(F.log_mean_exp(log_w).mean())

    def _typed(self, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The data in the model's floating-point type."""
        kind = next((p.dtype for p in self.module.parameters()), data[1].dtype)
        # whole numbers may be indices of an embedding: as inputs they stay what they are
        x = data[0].to(kind) if data[0].is_floating_point() else data[0]
        return x, *(t.to(kind) for t in data[1:])

    def _check_weights(self, data: tuple[Tensor, ...]) -> None:
        """Refuse weights ``(n, 1)``, which would weight every pair by every other's weight."""
        if len(data) < 3:
            return
        weight, n = data[2], len(data[0])
        if not self.is_snl:
            raise ValueError("sample weights are for the SNL objective only")
        if weight.shape != (n,):
            raise DataError(
                f"weights must have shape ({n},), one per pair, got {tuple(weight.shape)}"
            )
        if not bool(torch.isfinite(weight).all() & (weight >= 0).all()):
            raise DataError("weights must be finite and not negative")

    def terms(
        self, x: Tensor, y: Tensor, n_samples: int, stratified: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[LabelDistribution, Tensor, Tensor]]:
        """``log p~(y|x)``, ``log w`` at the label and at ``M`` samples, ``b``; then the
        distribution ``q``, its ``log q(y|x)`` and the samples.
        """
        model = self.module
        h = model.features(x)
        q = model.proposal_at(x, h)
        samples = model.draw(h, q, n_samples, stratified=stratified)
        if model.shares_labels():
            at_label, at_samples = (model.minus_energy(h, labels, q) for labels in (y, samples))
        else:  # one pass for labels and samples
            labels = torch.cat([y.expand(samples.shape[1:]).unsqueeze(0), samples])
            at_both = model.minus_energy(h, labels, q)
            at_label, at_samples = at_both[0], at_both[1:]
        log_p = at_label + model.log_base(h, y, q)
        log_w_data = at_label + model.base_over_proposal(h, y, q)
        log_w = at_samples + model.base_over_proposal(h, samples, q)
        return log_p, log_w_data, log_w, model.b(h), (q, q.log_prob(y), samples)

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Minus the objective, plus the proposal's own loss."""
        x, y, *weights = self._typed(batch)
        weight = weights[0] if weights else None
        if self.jitter:
            y = y + self.jitter * self.label_scale * torch.randn_like(y)
        log_p, log_w_data, log_w, b, (q, log_q, samples) = self.terms(
            x, y, self.n_samples, self.stratified
        )
        if weight is None:
            value = self.value(F.Weights(log_p, log_w_data, log_w, b))
        else:
            value = (F.snl(log_p, log_w, b, reduction="none") * weight).mean()
        with torch.no_grad():
            lower = value.detach() if self.is_snl else F.snl(log_p, log_w, b)
            bounds = {"lower": lower, "upper": F.importance_ml(log_p, log_w)}
        if self.proposal_loss == "none" or not log_q.requires_grad:
            return -value, bounds
        return self._proposal_term(q, log_q, log_w.detach(), samples, weight) - value, bounds

    def _proposal_term(
        self,
        q: LabelDistribution,
        log_q: Tensor,
        log_w: Tensor,
        samples: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        def mean(values: Tensor) -> Tensor:
            return values.mean() if weight is None else (values * weight).mean()

        likelihood = -mean(log_q)
        if self.proposal_loss == "likelihood":
            return likelihood
        # Gradient of KL(p||q) in q: minus the self-normalised weighted mean of grad log q. Same as
        # that of log Z_hat with the samples held fixed.
        weights = torch.softmax(log_w, dim=0)
        kl = -mean((weights * q.log_prob(samples)).sum(0))
        return kl if self.proposal_loss == "kl" else 0.5 * (likelihood + kl)

    @torch.no_grad()
    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Held-out bounds under noise that is the same every time; the score is ``l_IS``.

        With SNL and a learned ``b`` both bounds agree; the upper one does not punish ``b`` for
        lagging behind the energy. Weights of the pairs count as they do in training.
        """
        parts, data = [], self._typed(data)
        with seeded(20_231_106, data[0].device):
            for x, y in zip(data[0].split(512), data[1].split(512), strict=True):
                log_p, _, log_w, b, _ = self.terms(x, y, self.n_val_samples * self._thrift)
                lower = F.snl(log_p, log_w, b, reduction="none")
                upper = F.importance_ml(log_p, log_w, reduction="none")
                parts.append(torch.stack([lower, upper, F.ess(log_w)]))
        figures = torch.cat(parts, dim=-1).double()
        weight = data[2].expand(figures.shape[1:]).double() if len(data) > 2 else None
        means = weighted_mean(figures, weight).reshape(3, -1).mean(1).tolist()
        return {"score": means[1], **dict(zip(("lower", "upper", "ess"), means, strict=True))}

    def finish(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Set a scalar ``b`` to its best value: ``log mean Z(x)`` over the training inputs."""
        model = self.module
        if model.log_norm_scalar is None or not self.is_snl:
            return {}
        with torch.no_grad():
            m = 256 * self._thrift
            inputs = self._typed(data)[0]
            log_z = [F.log_mean_exp(model.log_weights(x, m)[0]) for x in inputs.split(512)]
            # SNL in a shared b: -b - e^{-b} mean Z(x) is largest at b = log mean Z(x).
            model.log_norm_scalar.copy_(F.log_mean_exp(torch.cat(log_z)))
        return {"log_norm": float(model.log_norm_scalar.detach())}
