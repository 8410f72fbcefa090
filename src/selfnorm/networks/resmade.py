"""A masked residual network whose outputs for a column see only the columns before it.

ResMADE (Germain et al. 2015 with residual blocks, as in Nash & Durkan 2019), for one or several
orderings of the columns at once. Several orderings are *stacked*: every weight carries a leading
dimension ``R``, one independent network per ordering, and one batched product serves them all.
Columns keep their own places; an ordering only changes the masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, silu


def draw_orderings(dim: int, count: int) -> Tensor:
    """Ranks ``(count, dim)``: ``ranks[r, j]`` is the place, from 1, of column ``j``.

    The first ordering is the natural one, the second its reverse, the others are random. They come
    from torch's global generator.
    """
    natural = torch.arange(1, dim + 1)
    rows = [natural, natural.flip(0)][:count]
    rows += [torch.randperm(dim) + 1 for _ in range(count - len(rows))]
    return torch.stack(rows)


class ChainLinear(nn.Module):
    """``R`` linear maps side by side: ``(R, N, in) -> (R, N, out)``, with an optional fixed mask.

    Inputs may also come in chunks, ``(R, C, N, in)``: the gradient of the weights is then a sum of
    ``R C`` short products, which fill a GPU where ``R`` very long ones leave it idle.

    Args:
        stack: number of maps ``R``.
        mask: ``(R, out, in)`` of zeros and ones; weights at zeros never act and never train.
        zero: start at the zero map (weights and bias).
    """

    mask: Tensor | None

    def __init__(
        self,
        stack: int,
        n_in: int,
        n_out: int,
        *,
        bias: bool = True,
        mask: Tensor | None = None,
        zero: bool = False,
    ) -> None:
        super().__init__()
        bound = 0.0 if zero else 1 / math.sqrt(max(n_in, 1))
        self.weight = nn.Parameter(torch.empty(stack, n_out, n_in).uniform_(-bound, bound))
        start = torch.empty(stack, n_out).uniform_(-bound, bound) if bias else None
        self.bias = None if start is None else nn.Parameter(start)
        self.register_buffer("mask", mask, persistent=False)

    def effective_weight(self) -> Tensor:
        """The weights that act: ``weight * mask``."""
        return self.weight if self.mask is None else self.weight * self.mask

    def forward(self, x: Tensor, *, fixed: bool = False) -> Tensor:
        """Apply map ``r`` to ``x[r]``, in its precision; ``fixed`` weights take no gradient."""
        weight: Tensor = self.effective_weight().to(x.dtype)
        bias: Tensor | None = None if self.bias is None else self.bias.to(x.dtype)
        if fixed:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        if len(weight) == 1:  # squeezed, not indexed: the gradient of an index is a copy
            return linear(x, weight.squeeze(0), None if bias is None else bias.squeeze(0))
        if x.dim() == 3:
            return _products(x, weight, bias)
        if x.device.type == "cpu":  # long products are as good as many there
            return _products(x.flatten(1, 2), weight, bias).unflatten(1, x.shape[1:3])
        chunks = x.shape[1]
        weight = weight.repeat_interleave(chunks, 0)
        bias = None if bias is None else bias.repeat_interleave(chunks, 0)
        return _products(x.flatten(0, 1), weight, bias).unflatten(0, (-1, chunks))


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x[r] weight[r]^T + bias[r]`` for every ``r``."""
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


class ResMADE(nn.Module):
    r"""Features for each column from the columns ranked before it (and a condition vector).

    ``forward(inputs, condition)`` maps ``(R, N, dim * per_column)`` to hidden features
    ``(R, N, hidden)``; :meth:`head` makes the masked output layer that turns them into
    ``(R, N, dim, n)`` numbers, those of column ``j`` being functions of ``x_k`` with
    ``rank(k) < rank(j)`` only. All shapes carry the stack dimension ``R`` of the orderings.

    Args:
        ranks: ``(R, dim)`` from :func:`draw_orderings`.
        per_column: number of input features a column brings.
        hidden: width.
        blocks: residual blocks, two masked layers each.
        condition_dim: length of the condition vector, which every output sees.
        drop: dropout probability inside the blocks.
    """

    ranks: Tensor

    def __init__(
        self,
        ranks: Tensor,
        *,
        per_column: int = 1,
        hidden: int = 256,
        blocks: int = 2,
        condition_dim: int = 0,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0.0 <= drop < 1.0:  # at once, not in the first pass
            raise ValueError(f"drop must be a probability below 1, not {drop}")
        stack, dim = ranks.shape
        # Degree 0 units see nothing of x: useful only where a condition feeds them.
        lowest = 0 if condition_dim or dim == 1 else 1
        degrees = (torch.arange(hidden) % max(dim - lowest, 1) + lowest).expand(stack, hidden)
        self.register_buffer("ranks", ranks, persistent=True)
        self.dim, self.hidden, self.drop = dim, hidden, drop
        self._degrees = degrees
        to_hidden = (
            degrees[:, :, None] >= ranks.repeat_interleave(per_column, 1)[:, None, :]
        ).float()
        within = (degrees[:, :, None] >= degrees[:, None, :]).float()
        self.first = ChainLinear(stack, dim * per_column, hidden, mask=to_hidden)
        layers = [ChainLinear(stack, hidden, hidden, mask=within) for _ in range(2 * blocks)]
        self.layers = nn.ModuleList(layers)
        with torch.no_grad():
            for second in layers[1::2]:
                second.weight.mul_(0.1)  # near-identity blocks train faster
        self.conditioners = nn.ModuleList(
            ChainLinear(stack, condition_dim, hidden, bias=False)
            for _ in range(blocks + 1 if condition_dim else 0)
        )

    def head(self, n: int | Sequence[int], *, zero: bool = False) -> ChainLinear:
        """A masked output layer with ``n`` numbers per column, or ``n[j]`` for column ``j``."""
        sizes = torch.tensor([n] * self.dim if isinstance(n, int) else n)
        stack = self.ranks.shape[0]
        ranks = self.ranks.cpu().repeat_interleave(sizes, 1)
        mask = (ranks[:, :, None] > self._degrees[:, None, :]).float().to(self.ranks.device)
        return ChainLinear(stack, self.hidden, int(sizes.sum()), mask=mask, zero=zero)

    def outputs(
        self, head: ChainLinear, features: Tensor, n: int, *, fixed: bool = False
    ) -> Tensor:
        """``(R, N, columns, n)`` from features ``(R, N, hidden)``, of a head with ``n`` numbers for
        each of its columns; see :class:`ChainLinear`.
        """
        flat: Tensor = head(features, fixed=fixed)
        return flat.unflatten(-1, (flat.shape[-1] // n, n))

    def forward(self, inputs: Tensor, condition: Tensor | None = None) -> Tensor:
        """Hidden features ``(R, N, hidden)`` of ``inputs`` ``(R, N, dim * per_column)``.

        A ``condition`` ``(R, k, condition_dim)`` is that of the first ``k`` rows; the others have
        none, as if theirs were zero.
        """

        def conditioned(h: Tensor, i: int) -> Tensor:
            """Hidden numbers plus those of the condition."""
            if condition is None or not len(self.conditioners):
                return h
            shift = self.conditioners[i](condition)
            k = shift.shape[-2]
            if k == h.shape[-2]:
                return h + shift
            return torch.cat([h[..., :k, :] + shift, h[..., k:, :]], -2)

        h = conditioned(self.first(inputs), 0)
        for i in range(0, len(self.layers), 2):
            inner = conditioned(self.layers[i](silu(h)), i // 2 + 1)
            inner = dropout(silu(inner), self.drop, self.training)
            h = h + self.layers[i + 1](inner)
        return silu(h)
