"""Normalising flows as proposals (and as peers), on top of zuko."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfnorm._inputs import as_rows
from selfnorm.columns import Columns
from selfnorm.distributions.flow_training import FlowTask
from selfnorm.distributions.proposals import Proposal
from selfnorm.errors import DataError, SelfnormError

__all__ = ["Flow"]

KINDS = ("nsf", "maf")


def _zuko() -> Any:
    try:
        import zuko
    except ImportError as error:
        raise SelfnormError(
            "flows need the package zuko: install it with `pip install selfnorm[flows]`, or use "
            "another proposal (Gaussian, StudentT, Defensive)"
        ) from error
    return zuko


class Flow(Proposal):
    r"""An autoregressive normalising flow with the behaviour of a distribution.

    ``log_prob`` and ``sample`` as every proposal has them, a density with respect to Lebesgue
    measure. Rows are standardised inside (``loc``, ``scale``), set from the data by
    :meth:`set_scaling` or at the start of training. Train it by ``selfnorm.fit(flow, x)``; adapt it
    to a model, or train both together, by :mod:`selfnorm.density.flow_proposals`.

    Args:
        dim: number of columns.
        kind: ``"nsf"`` (rational-quadratic splines) or ``"maf"`` (affine).
        transforms: number of autoregressive transforms, the orders of the columns alternating.
        hidden: hidden layers of each conditioner.
        bins: spline bins (``"nsf"`` only).
        condition_dim: length of a condition vector.

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
        zuko = _zuko()
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, not {kind!r}")
        options: dict[str, Any] = {
            "transforms": transforms,
            "hidden_features": tuple(hidden),
        }
        if residual:  # zuko's one-column flows have no such option
            options["residual"] = True
        if kind == "nsf":
            options["bins"] = bins
        self.dim, self.condition_dim, self.kind = dim, condition_dim, kind
        self.config: dict[str, Any] = {
            "dim": dim,
            "kind": kind,
            "transforms": transforms,
            "hidden": list(hidden),
            "bins": bins,
            "condition_dim": condition_dim,
            "residual": residual,
        }
        self.flow = {"nsf": zuko.flows.NSF, "maf": zuko.flows.MAF}[kind](
            dim, condition_dim, **options
        )
        self.register_buffer("loc", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))
        self.register_buffer("fitted", torch.tensor(False))

    @torch.no_grad()
    def set_scaling(self, x: Tensor) -> Flow:
        """Standardise by the means and standard deviations of ``x`` ``(n, dim)``."""
        if x.dim() != 2 or x.shape[1] != self.dim:
            raise DataError(f"expected rows of shape (n, {self.dim}), got {tuple(x.shape)}")
        if not bool(torch.isfinite(x).all()):
            raise DataError("the data hold NaN or infinity: drop or impute those rows first")
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
        log_prob: Tensor = self.flow(self._given(condition)).log_prob(z)
        return log_prob - torch.log(self.scale).sum()

    @torch.no_grad()
    def sample(self, shape: Sequence[int] = (), condition: Tensor | None = None) -> Tensor:
        """``(*shape, dim)`` samples from torch's global generator."""
        z: Tensor = self.flow(self._given(condition)).sample(torch.Size(shape))
        return z * self.scale + self.loc

    def _given(self, condition: Any) -> Tensor | None:
        """The condition in the flow's floating-point type, or a :class:`DataError`."""
        if condition is not None:
            condition = as_rows(condition, "condition", self.loc.dtype)
        given = 0 if condition is None else condition.shape[-1]
        if given != self.condition_dim:
            raise DataError(f"the flow has condition_dim={self.condition_dim}, got {given} columns")
        return condition

    def training_task(
        self,
        *,
        objective: Any = "snl",  # noqa: ARG002
        n_samples: int = 0,  # noqa: ARG002
        columns: Columns | None = None,
    ) -> FlowTask:
        """Maximum likelihood (see :class:`FlowTask`), which needs no objective and no samples."""
        return FlowTask(self, columns=columns)
