"""How a :class:`~selfnorm.ConditionalEBM` is trained, its proposal beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from selfnorm import functional as F
from selfnorm._context import seeded
from selfnorm.conditional.model import ConditionalEBM, check_pairs
from selfnorm.errors import DataError, ProposalError
from selfnorm.training import Task

# Value to maximise from log p~ at the label, log w at the label, log w of the samples, and b.
_VALUES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "snl": lambda log_p, _, log_w, b: F.snl(log_p, log_w, b),
    "nce": lambda _, log_w_data, log_w, b: F.nce(log_w_data, log_w, b),
    "ranking_nce": lambda _, log_w_data, log_w, __: F.ranking_nce(log_w_data, log_w),
    "nce_plus": lambda _, log_w_data, log_w, __: F.ranking_nce(log_w_data, log_w),
    "importance_ml": lambda log_p, _, log_w, __: F.importance_ml(log_p, log_w),
}
OBJECTIVES = tuple(_VALUES)
PROPOSAL_LOSSES = ("likelihood", "kl", "both", "none")


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """``sum_i w_i v_i / sum_i w_i`` over the last dimension; the plain mean without weights.

    >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0]))
    tensor(2.)
    """
    if weight is None:
        return values.mean(-1)
    return (values * weight).sum(-1) / weight.sum(-1).clamp_min(1e-12)


def decay_groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Optimiser groups: matrices with weight decay, biases and a scalar ``b`` without."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in named:
        groups[name.endswith(("bias", "log_norm_scalar"))]["params"].append(parameter)
    return groups


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
        stratified: draw stratified labels where the proposal can.
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
        proposal: Any = None,
    ) -> None:
        if proposal is not None:
            raise TypeError(
                "a ConditionalEBM owns its proposal: give it to the model, not to fit()"
            )
        if objective not in _VALUES:
            raise ValueError(f"objective must be one of {OBJECTIVES}, got {objective!r}")
        if proposal_loss not in PROPOSAL_LOSSES:
            raise ValueError(
                f"proposal_loss must be one of {PROPOSAL_LOSSES}, got {proposal_loss!r}"
            )
        self.module = model
        self.jitter = math.sqrt(noise) if objective == "nce_plus" else 0.0
        self.value, self.is_snl = _VALUES[objective], objective == "snl"
        self.n_samples, self.n_val_samples = n_samples, n_val_samples
        self.proposal_loss = "none" if model.proposal_frozen else proposal_loss
        self.stratified = stratified
        # Draws that serve a whole batch share their error: take more of them, they cost less.
        self._thrift = 8 if model.shares_labels() else 1
        self.label_scale = torch.ones(())

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All trainable parameters; biases and a scalar ``b`` are not decayed."""
        return decay_groups((n, p) for n, p in self.module.named_parameters() if p.requires_grad)

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
            missed = ~torch.isfinite(model.law(x[head], h).log_prob(y[head]))
            if bool(missed.any()):
                raise ProposalError(
                    f"the proposal has zero density at {int(missed.sum())} labels: what it cannot "
                    "reach it cannot normalise; widen it, or mix in a wide law with DefensiveLabels"
                )
            if model.log_norm_scalar is not None:
                log_w, _ = model.log_weights(x[head], 256 * self._thrift)
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
        self, x: Tensor, y: Tensor, n_samples: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
        """``log p~(y|x)``, ``log w`` at the label and at ``M`` samples, ``b``; then the law,
        its ``log q(y|x)`` and the samples.
        """
        model = self.module
        h = model.features(x)
        q = model.law(x, h)
        samples = model.draw(h, q, n_samples, stratified=self.stratified)
        if model.shares_labels():
            at_label, at_samples = (model.minus_energy(h, each, q) for each in (y, samples))
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
        log_p, log_w_data, log_w, b, (q, log_q, samples) = self.terms(x, y, self.n_samples)
        if weight is None:
            value = self.value(log_p, log_w_data, log_w, b)
        else:
            value = (F.snl(log_p, log_w, b, reduction="none") * weight).mean()
        with torch.no_grad():
            lower = value.detach() if self.is_snl else F.snl(log_p, log_w, b)
            bounds = {"lower": lower, "upper": F.importance_ml(log_p, log_w)}
        if self.proposal_loss == "none" or not log_q.requires_grad:
            return -value, bounds
        return self._proposal_term(q, log_q, log_w.detach(), samples, weight) - value, bounds

    def _proposal_term(
        self, q: Any, log_q: Tensor, log_w: Tensor, samples: Tensor, weight: Tensor | None
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
        found, data = [], self._typed(data)
        with seeded(20_231_106, data[0].device):
            for x, y in zip(data[0].split(512), data[1].split(512), strict=True):
                log_p, _, log_w, b, _ = self.terms(x, y, self.n_val_samples * self._thrift)
                lower = F.snl(log_p, log_w, b, reduction="none")
                upper = F.importance_ml(log_p, log_w, reduction="none")
                found.append(torch.stack([lower, upper, F.ess(log_w)]))
        figures = torch.cat(found, dim=-1).double()
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
