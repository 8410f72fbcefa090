"""Normalising flows as proposals (and as peers), on top of zuko, and their training.

Three losses for a proposal ``q`` of a model ``p``:

* ``"data"``: ``-E_data[log q]``, maximum likelihood;
* ``"kl"``: ``KL(p || q)`` by self-normalised importance sampling from ``q`` itself,
  ``-sum_m w_m log q(x_m) / sum_m w_m`` with the weights held fixed;
* ``"both"``: their average.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution

from selfnorm._inputs import as_rows, check_rows
from selfnorm._saved import saved
from selfnorm.columns import Columns
from selfnorm.distributions.mixtures import check_width
from selfnorm.distributions.proposals import LabelDistribution, Proposal, UnnormalisedModel
from selfnorm.errors import DataError, SelfnormError, optional
from selfnorm.networks import decay_groups
from selfnorm.training import ParameterGroup, Task

KINDS = ("nsf", "maf")
LOSSES = ("data", "kl", "both")


@saved()
class Flow(Proposal):
    r"""An autoregressive normalising flow with the behaviour of a distribution.

    ``log_prob`` and ``sample`` as every proposal has them, a density with respect to Lebesgue
    measure. Rows are standardised inside (``loc``, ``scale``), set from the data by
    :meth:`set_scaling` or at the start of training. Train it by ``selfnorm.fit(flow, x)``; there
    ``task_options={"model": model, "loss": "both"}`` bring it closer to a model. Both are trained
    together by ``selfnorm.fit(model, x, proposal=flow, task_options={"proposal_loss": "data"})``.

    Args:
        dim: number of columns.
        kind: ``"nsf"`` (rational-quadratic splines) or ``"maf"`` (affine).
        transforms: number of autoregressive transforms, the orders of the columns alternating.
        hidden: hidden layers of each conditioner.
        bins: spline bins (``"nsf"`` only).
        condition_dim: length of a condition vector.
        residual: residual conditioners.

    Example:
        >>> flow = Flow(2, transforms=1, hidden=(8,))
        >>> flow.log_prob(flow.sample((5,))).shape
        torch.Size([5])
    """

    loc: Tensor
    scale: Tensor
    fitted: Tensor

    def __init__(
        self,
        dim: int,
        *,
        kind: str = "nsf",
        transforms: int = 5,
        hidden: Sequence[int] = (256, 256),
        bins: int = 8,
        condition_dim: int = 0,
        residual: bool = False,
    ) -> None:
        super().__init__()
        words = (
            "flows need the package zuko: install it with `pip install selfnorm[flows]`, or use "
            "another proposal (Gaussian, StudentT, Defensive)"
        )
        zuko = optional("zuko", words, SelfnormError)
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, not {kind!r}")
        self.dim, self.condition_dim, self.kind = dim, condition_dim, kind
        self.shared = condition_dim == 0
        build, options = (zuko.flows.NSF, {"bins": bins}) if kind == "nsf" else (zuko.flows.MAF, {})
        if residual:  # zuko's one-column flows have no such option
            options["residual"] = True
        self.flow = build(
            dim, condition_dim, transforms=transforms, hidden_features=tuple(hidden), **options
        )
        self.register_buffer("loc", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))
        self.register_buffer("fitted", torch.tensor(False))

    @torch.no_grad()
    def set_scaling(self, x: Tensor) -> Flow:
        """Standardise by the means and standard deviations of ``x`` ``(n, dim)``."""
        x = check_rows(x, "x", width=self.dim, minimum=1)
        sd = x.std(0) if len(x) > 1 else torch.ones_like(x[0])
        self.loc.copy_(x.mean(0))
        self.scale.copy_(torch.where(sd > 0, sd, torch.ones_like(sd)))
        self.fitted.fill_(True)
        return self

    def log_prob(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """``(*shape,)`` log-density of ``x`` ``(*shape, dim)``."""
        x = as_rows(x, dtype=self.loc.dtype)
        if x.shape[-1:] != (self.dim,):
            raise DataError(f"expected rows of {self.dim} columns, got shape {tuple(x.shape)}")
        z = (x - self.loc) / self.scale
        log_prob: Tensor = self._standardised(condition).log_prob(z)
        return log_prob - torch.log(self.scale).sum()

    @torch.no_grad()
    def sample(self, shape: Sequence[int] = (), condition: Tensor | None = None) -> Tensor:
        """``(*shape, dim)`` samples from torch's global generator."""
        z: Tensor = self._standardised(condition).sample(torch.Size(shape))
        return z * self.scale + self.loc

    def forward(self, condition: Tensor) -> LabelDistribution:
        """The density given a condition; one without ``condition_dim`` ignores it."""
        return Conditioned(self, condition) if self.condition_dim else super().forward(condition)

    def _standardised(self, condition: Tensor | None) -> Distribution:
        """Zuko's distribution of standardised rows."""
        if condition is not None:
            condition = as_rows(condition, "condition", self.loc.dtype)
        width = 0 if condition is None else condition.shape[-1]
        if width != self.condition_dim:
            raise DataError(f"the flow has condition_dim={self.condition_dim}, got {width} columns")
        with self.loc.device:  # zuko takes what its base is made of to the default device
            distribution: Distribution = self.flow(condition)
        return distribution

    def training_task(
        self,
        *,
        objective: object = "snl",  # noqa: ARG002 a flow has losses of its own
        n_samples: int = 512,
        columns: Columns | None = None,
        model: UnnormalisedModel | None = None,
        loss: str = "data",
    ) -> FlowTask:
        """Maximum likelihood, or another loss of :class:`FlowTask`."""
        return FlowTask(self, columns=columns, model=model, loss=loss, n_samples=n_samples)


class Conditioned:
    """A flow given a condition."""

    def __init__(self, flow: Flow, condition: Tensor) -> None:
        self.flow, self.condition = flow, condition
        self.batch_shape, self.event_shape = condition.shape[:-1], flow.event_shape

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Independent draws ``(*shape, *batch, d)``."""
        return self.flow.sample(shape, self.condition)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of rows ``(*samples, *batch, d)``."""
        check_width(y, self.flow.dim)
        return self.flow.log_prob(y, self.condition)


class FlowTask(Task):
    """Training of a flow by one of the three losses, for :func:`selfnorm.fit`.

    Args:
        columns: spreads discrete values out afresh at every step, where given.
        model: what the flow is a proposal of, for the losses ``"kl"`` and ``"both"``.
    """

    module: Flow
    capturable = True

    def __init__(
        self,
        flow: Flow,
        *,
        columns: Columns | None = None,
        model: UnnormalisedModel | None = None,
        loss: str = "data",
        n_samples: int = 512,
    ) -> None:
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {LOSSES}, not {loss!r}")
        if model is None and loss != "data":
            raise ValueError(f"the loss {loss!r} needs the model that the proposal serves")
        self.module = flow
        self.columns, self.model = columns, model
        self.kind, self.n_samples = loss, n_samples

    def parameter_groups(self) -> list[ParameterGroup]:
        """Matrices with the optimiser's weight decay, vectors without."""
        return decay_groups(self.module.named_parameters())

    def start(self, data: tuple[Tensor, ...]) -> None:
        """Standardise by the training data unless that was done."""
        expected = 2 if self.module.condition_dim else 1
        if len(data) != expected:
            raise DataError(
                f"the flow has condition_dim={self.module.condition_dim}: expected {expected} "
                f"tensors (x{', condition' if expected == 2 else ''}), got {len(data)}"
            )
        if not bool(self.module.fitted):
            self.module.set_scaling(data[0])

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """The chosen loss; the negative mean log-likelihood by default."""
        x = batch[0] if self.columns is None else self.columns.dequantise(batch[0])
        condition = batch[1] if self.module.condition_dim else None
        parts: list[Tensor] = []
        if self.kind != "kl":
            parts.append(-self.module.log_prob(x, condition).mean())
        if self.kind != "data":
            parts.append(self._towards_model())
        loss = parts[0] if len(parts) == 1 else 0.5 * (parts[0] + parts[1])
        return loss, {"log_prob": -loss.detach()}

    def _towards_model(self) -> Tensor:
        """The ``"kl"`` loss, whose gradients reach the flow alone."""
        assert self.model is not None
        y = self.module.sample((self.n_samples,)).detach()
        log_q = self.module.log_prob(y)
        with torch.no_grad():
            weights = torch.softmax(self.model.log_unnormalized(y) - log_q, 0)
        return -(weights * log_q).sum()

    def validate(self, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Mean held-out log-likelihood of the rows as given."""
        given = data[1:] if self.module.condition_dim else ()
        chunks = zip(*(t.split(8192) for t in (data[0], *given)), strict=True)
        parts = [self.module.log_prob(*chunk) for chunk in chunks]
        return {"score": float(torch.cat(parts).double().mean())}
