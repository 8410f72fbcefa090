"""What a run counts and sums on the device: good and lost steps, metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from selfnorm.training.side_stream import SideStream

__all__ = ["Counters"]

_GOOD, _SKIPPED, _STREAK, _FIRST = 0, 1, 2, 3  # places in the vector; then the metrics


class Counters:
    """Counts of steps and sums of metrics in **one** small vector, updated without a host wait.

    One vector, because on a GPU every operation on a single number is a launch by itself.

    Attributes:
        names: the metrics, in the order of their sums; known from the first step on.

    Example:
        >>> counters = Counters(torch.device("cpu"))
        >>> for loss in (2.0, float("nan"), 4.0):
        ...     bad = counters.observe(torch.tensor(loss), torch.tensor(1.0), {})
        >>> float(counters.good), float(counters.skipped), float(counters.streak)
        (2.0, 1.0, 0.0)
        >>> counters.totals
        tensor([6., 2.])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._vector = torch.zeros(_FIRST, dtype=torch.float32, device=device)
        self._allot(())

    def _allot(self, names: tuple[str, ...]) -> None:
        """Room for these metrics; what was counted is kept, sums begin at zero."""
        self.names = names
        counted = self._vector[:_FIRST]
        self._vector = torch.cat([counted, counted.new_zeros(len(names))])
        self._lead = counted.new_tensor([1.0, 0.0, 0.0])  # of a good step
        self._if_bad = torch.zeros_like(self._vector)
        self._if_bad[_SKIPPED : _STREAK + 1] = 1.0
        self._one = torch.ones_like(self._vector[0])
        self._kept = torch.ones_like(self._vector)  # a good step ends a streak
        self._kept[_STREAK] = 0.0

    def observe(
        self,
        loss: Tensor,
        norm: Tensor,
        metrics: Mapping[str, Tensor],
        beside: SideStream | None = None,
    ) -> Tensor:
        """Count a step; returns 1 if it must be skipped, loss or gradient norm not finite, else 0.

        The counting itself runs on the branch ``beside``, if there is one.
        """
        parts = [value.detach().reshape(1) for value in self._in_order(loss, norm, metrics)]
        values = torch.cat([self._lead, *parts]).to(self._vector.dtype)
        bad = torch.zeros_like(self._one)
        torch._amp_foreach_non_finite_check_and_unscale_(
            [values[_FIRST : _FIRST + 2]], bad, self._one
        )
        with nullcontext() if beside is None else beside.branch():
            counted = torch.addcmul(values, self._vector, self._kept)
            torch.where(bad > 0, self._vector + self._if_bad, counted, out=self._vector)
            self._alive = values, bad  # the branch may read them later than anybody else
        return bad

    def observe_on_host(self, loss: Tensor, norm: Tensor, metrics: Mapping[str, Tensor]) -> bool:
        """The same where reading a number is cheap (CPU): plain arithmetic, no small tensors."""
        values = [float(value.detach()) for value in self._in_order(loss, norm, metrics)]
        bad = not (math.isfinite(values[0]) and math.isfinite(values[1]))
        vector = self._vector.numpy()  # a view
        vector[_SKIPPED] += bad
        vector[_STREAK] = (vector[_STREAK] + 1) * bad
        if not bad:
            vector[_GOOD] += 1
            vector[_FIRST:] += values
        return bad

    def _in_order(self, loss: Tensor, norm: Tensor, metrics: Mapping[str, Tensor]) -> list[Tensor]:
        # Loss and norm come first and are ours, whatever an objective calls its metrics.
        own = {"loss": loss, "grad_norm": norm}
        seen = {**own, **metrics, **own}
        if not self.names:
            self._allot(tuple(seen))
        return [seen[name] for name in self.names]

    def clear(self) -> None:
        """Begin the means anew; the count of lost steps goes on."""
        self.good.zero_()
        self.totals.zero_()

    def restore(self, counts: list[Tensor], names: tuple[str, ...], totals: Tensor) -> None:
        """Go on from the saved ``[good, streak, skipped]`` and sums."""
        self._allot(names)
        for mine, saved in zip((self.good, self.streak, self.skipped), counts, strict=True):
            mine.copy_(saved)
        self.totals.copy_(totals)

    @property
    def good(self) -> Tensor:
        """Steps taken since the last :meth:`clear`."""
        return self._vector[_GOOD]

    @property
    def skipped(self) -> Tensor:
        """Steps lost in all."""
        return self._vector[_SKIPPED]

    @property
    def streak(self) -> Tensor:
        """Steps lost in a row, up to now."""
        return self._vector[_STREAK]

    @property
    def totals(self) -> Tensor:
        """Sums of the metrics over good steps since the last :meth:`clear`."""
        return self._vector[_FIRST:]
