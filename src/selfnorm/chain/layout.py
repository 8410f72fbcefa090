"""The layout of a table's parts: which have codes, numbers or cells, and where outputs stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from selfnorm.columns import UNSEEN, Part

# levels of numbers that fill a grid: from so many on they are modelled by a mixture as well
ORDERED_FROM = 100


class PackedRows(NamedTuple):
    """A batch of rows, ``(n, p)`` each, from the packed ``(n, p, 4)`` of ``CodedColumns``."""

    code: Tensor  # 0 .. n_codes - 1, or n_codes for a number; 0 where nothing was observed
    z: Tensor  # normal score of the number, and of the ends of its cell
    left: Tensor
    right: Tensor
    observed: Tensor
    unseen: Tensor  # a value that no training row had

    @classmethod
    def of(cls, packed: Tensor) -> PackedRows:
        """From packed rows ``(..., p, 4)``."""
        code, z, left, right = packed.unbind(-1)
        return cls(code.clamp_min(0).long(), z, left, right, code >= 0, code == UNSEEN)

    def is_number(self, layout: PartLayout) -> Tensor:
        """``(..., p)``: where a number was observed."""
        return self.observed & (self.code == layout.number_code)


class PartLayout(nn.Module):
    """What follows from the parts of a table, as tensors that move with the model.

    Of ``p`` parts ``F`` are finite (they have several outcomes), ``D`` hold numbers, and ``O`` of
    the finite ones are ordered (their levels fill a grid). An outcome is a code or "a number".

    Args:
        parts: what the parts of the table are.
        ordered: whether the order of levels is used.

    Attributes:
        finite, numbers, ordered: ``(F,)``, ``(D,)``, ``(O,)`` these parts.
        ordered_finite: ``(O,)`` the places of the ordered ones among the finite ones.
        cells, continuous: places among the numbers of those with cells, and of the others.
        at_mass: ``(p,)`` whether point masses stand in cells where numbers may be, too.
        log_seen, log_unseen: ``(p,)`` log-probability that a value is one of the training rows',
            and that it is not.
        number_code: ``(p,)`` the code that says "a number".
        column: ``(p,)`` the column of each part.
        first_token, gap_token: ``(p,)`` tokens: the codes, a number, a gap, part after part.
        logit, absent, is_gap: ``(F, widest)`` the places of the outcomes among all logits, where
            there is none, and where it is a gap.
    """

    finite: Tensor
    numbers: Tensor
    ordered: Tensor
    ordered_finite: Tensor
    cells: Tensor
    continuous: Tensor
    at_mass: Tensor
    log_seen: Tensor
    log_unseen: Tensor
    number_code: Tensor
    column: Tensor
    first_token: Tensor
    gap_token: Tensor
    logit: Tensor
    absent: Tensor
    is_gap: Tensor

    def __init__(self, parts: Sequence[Part], *, ordered: bool = False) -> None:
        super().__init__()
        n_codes = torch.tensor([part.n_codes for part in parts])
        rest = torch.tensor([part.rest for part in parts])
        has_cells = torch.tensor([part.rest and part.step > 0 for part in parts])
        n_values = n_codes - torch.tensor([part.gap for part in parts]).long()
        unseen = torch.tensor([part.unseen for part in parts])
        outcomes, sizes = n_codes + rest, n_codes + 2
        finite, numbers = torch.nonzero(outcomes > 1)[:, 0], torch.nonzero(rest)[:, 0]
        on_grid = [j for j, part in enumerate(parts) if ordered and _on_a_grid(part)]
        n_logits = outcomes.where(outcomes > 1, 0)
        self.outcomes, self.n_tokens = n_logits.tolist(), int(sizes.sum())
        self.n_columns = 1 + max(part.column for part in parts)
        self.widest = int(outcomes.max())
        absent = torch.arange(self.widest) >= outcomes[finite][:, None]
        first = (n_logits.cumsum(0) - n_logits)[finite][:, None]
        gap_code = torch.tensor([part.gap_code for part in parts])[finite][:, None]
        self._add(
            finite=finite,
            numbers=numbers,
            ordered=torch.tensor(on_grid, dtype=torch.long),
            ordered_finite=torch.searchsorted(finite, torch.tensor(on_grid, dtype=torch.long)),
            cells=torch.nonzero(has_cells[numbers])[:, 0],
            continuous=torch.nonzero(~has_cells[numbers])[:, 0],
            at_mass=has_cells & (n_values > 0),
            log_seen=torch.log1p(-unseen),
            log_unseen=unseen.log(),
            number_code=n_codes,
            column=torch.tensor([part.column for part in parts]),
            first_token=sizes.cumsum(0) - sizes,
            gap_token=sizes - 1,
            logit=(first + torch.arange(self.widest)).where(~absent, 0),
            absent=absent,
            is_gap=torch.arange(self.widest) == gap_code,
        )

    def _add(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)


def _on_a_grid(part: Part) -> bool:
    """Whether a finite part has many levels, and most of them are a step from the next."""
    if part.rest or part.gap or not ORDERED_FROM < part.n_codes == len(part.values):
        return False
    steps = np.diff(part.values)
    return bool(np.median(steps) < 1.5 * steps.min())
