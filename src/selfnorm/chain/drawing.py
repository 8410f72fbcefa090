"""Rows of a table drawn from a chain, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfnorm.chain.layout import PackedRows
from selfnorm.chain.lines import ConditionalNormal, LinePrediction
from selfnorm.columns import GAP

if TYPE_CHECKING:
    from selfnorm.chain.table import TableChain


class Drawing:
    """Fills the parts of rows one by one, in each chain's own order.

    Args:
        chain: what rows are drawn from.
        n_candidates: proposal samples of which a number is chosen.
        within: whether numbers stay in the range of the training rows.
        gaps: whether gaps are drawn that are outcomes of a part.
    """

    def __init__(self, chain: TableChain, *, n_candidates: int, within: bool, gaps: bool) -> None:
        self.chain, self.layout = chain, chain.layout
        self.n_candidates, self.within, self.gaps = n_candidates, within, gaps
        self.orders = torch.arange(chain.n_orderings, device=chain.device)
        self.place_of_finite = self._places(self.layout.finite)
        self.place_of_number = self._places(self.layout.numbers)
        is_number = (self.place_of_number >= 0).to(self.layout.number_code)
        self.only_code = self.layout.number_code - 1 + is_number  # of parts of one outcome

    def _places(self, which: Tensor) -> Tensor:
        """``(p,)``: places of parts among those listed, -1 where they are not."""
        places = which.new_full((self.chain.dim,), -1)
        places[which] = torch.arange(len(which), device=which.device)
        return places

    def fill(self, packed: Tensor, keep: Tensor) -> None:
        """Draw the parts of ``packed (R, n, p, 4)`` in place, but for those to ``keep``."""
        given = keep if bool(keep.any()) else None
        packed[..., 0] = packed[..., 0].where(keep, float(GAP))
        normal = self._normal_of_all(packed, given)
        for part in self.chain.trunk.ranks.argsort(1).T:  # (R,): that at one place of each order
            kept = keep[self.orders, :, part].unsqueeze(-1)
            if bool(kept.all()):
                continue
            rows = PackedRows.of(packed)
            prediction = self.chain.predict(rows, given, normal)
            features = self.chain.features(rows, given, prediction)
            code = self._codes(features, part, prediction)
            z = self._numbers(features, part, prediction)
            z = z.where(code == self.layout.number_code[part, None], 0.0)
            old = packed[self.orders, :, part]
            new = torch.cat([torch.stack([code.to(z), z], -1), old[..., 2:]], -1)
            packed[self.orders, :, part] = torch.where(kept, old, new)

    def _normal_of_all(self, packed: Tensor, given: Tensor | None) -> ConditionalNormal | None:
        """The normal distribution of lines where all numbers will be there: one for all rows."""
        lines, numbers = self.chain.lines, self.layout.numbers
        if lines is None or not lines.conditioned:
            return None
        if bool((self.layout.number_code[numbers] > 0).any()):  # point masses have no number
            return None
        size = lines.slopes.shape[-1]
        return lines.normal(packed.new_ones(packed.shape[1], size, dtype=torch.bool), given)

    def _codes(self, features: Tensor, part: Tensor, prediction: LinePrediction | None) -> Tensor:
        """``(R, n)``: a code of one part for each order."""
        code = self.only_code[part].unsqueeze(1).expand(features.shape[:2])
        finite = self.place_of_finite[part]
        if not bool((finite >= 0).any()):
            return code
        which = finite.clamp_min(0)
        logits = self.chain.code_logits(features, which, prediction)
        if not self.gaps:
            logits = logits.masked_fill(self.layout.is_gap[which].unsqueeze(1), -torch.inf)
        drawn = torch.multinomial(torch.softmax(logits.flatten(0, 1), -1), 1)
        return drawn.view(code.shape).where((finite >= 0).unsqueeze(1), code)

    def _numbers(self, features: Tensor, part: Tensor, prediction: LinePrediction | None) -> Tensor:
        """``(R, n)``: normal scores of a number of one part for each order."""
        place = self.place_of_number[part]
        if not bool((place >= 0).any()):
            return features.new_zeros(features.shape[:2])
        which, chain, line = place.clamp_min(0), self.chain, None
        if prediction is not None:
            line = tuple(t[self.orders, :, which] for t in prediction[:2])

        def rounded(y: Tensor) -> Tensor:
            """Scores ``(S, R, n, 1)`` to centres of cells, order ``r`` being at ``part[r]``."""
            by_order = y.squeeze(-1).movedim(1, -1)  # (S, n, R)
            moved = chain.columns.rounded(by_order, 0.0, part)
            has_cells = (chain.columns.step > 0)[part]
            return torch.where(has_cells, moved, by_order).movedim(-1, 1).unsqueeze(-1)

        drawn = chain.draw_number(
            features, which, self.n_candidates, line, rounded if chain.has_cells else None
        )
        if self.within:
            low, high = chain.columns.span[part].view(-1, 1, 2).unbind(-1)
            drawn = torch.minimum(torch.maximum(drawn, low), high)
        return drawn
