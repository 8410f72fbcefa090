"""A masked residual network whose outputs for a column see only the columns before it.

ResMADE (Germain et al. 2015 with residual blocks, as in Nash & Durkan 2019), for one or several
orderings of the columns at once. Several orderings are *stacked*: every weight carries a leading
dimension ``R``, one independent network per ordering, and one batched product serves them all.
Columns keep their own places; an ordering only changes the masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, linear, silu

__all__ = ["ChainLinear", "ResMADE", "draw_orderings", "masked_weights"]


def draw_orderings(dim: int, count: int) -> Tensor:
    """Ranks ``(count, dim)``: ``ranks[r, j]`` is the place, from 1, of column ``j``.

    The first ordering is the natural one, the second its reverse, the others are random. They come
    from torch's global generator.

    Example:
        >>> draw_orderings(3, 2)
        tensor([[1, 2, 3],
                [3, 2, 1]])
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

    Example:
        >>> ChainLinear(2, 3, 4)(torch.ones(2, 5, 3)).shape
        torch.Size([2, 5, 4])
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

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Apply map ``r`` to ``x[r]``; by weights masked already, where they are given."""
        weight = self.effective_weight() if weight is None else weight
        if len(weight) == 1:  # squeezed, not indexed: the gradient of an index is a copy
            bias = None if self.bias is None else self.bias.squeeze(0)
            return linear(x, weight.squeeze(0), bias)
        if x.dim() == 4 and x.device.type == "cpu":  # long products are as good as many there
            return self._product(x.flatten(1, 2), weight).unflatten(1, x.shape[1:3])
        if x.dim() == 4:
            chunks = x.shape[1]
            weight = weight.repeat_interleave(chunks, 0)
            return self._product(x.flatten(0, 1), weight, chunks).unflatten(0, (-1, chunks))
        return self._product(x, weight)

    def _product(self, x: Tensor, weight: Tensor, repeats: int = 1) -> Tensor:
        """One batched product; the bias serves ``repeats`` neighbours of the batch each."""
        if self.bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        bias = self.bias.repeat_interleave(repeats, 0) if repeats > 1 else self.bias
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


class _Masked(torch.autograd.Function):
    """Products of pairs of tensors, the second of each pair without gradient."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors[n:])
        return tuple(torch._foreach_mul(tensors[:n], tensors[n:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        masks = ctx.saved_tensors
        return None, *torch._foreach_mul(upstream, masks), *[None] * len(masks)


def masked_weights(layers: Sequence[ChainLinear]) -> list[Tensor]:
    """The weights that act in masked layers: on a GPU one launch for all of them.

    Example:
        >>> layer = ChainLinear(1, 2, 1, mask=torch.tensor([[[1.0, 0.0]]]))
        >>> masked_weights([layer])[0][0, 0, 1]
        tensor(0., grad_fn=<SelectBackward0>)
    """
    masks = [layer.mask for layer in layers if layer.mask is not None]
    if len(masks) < len(layers) or torch.compiler.is_compiling():
        return [layer.effective_weight() for layer in layers]
    return list(_Masked.apply(len(layers), *(layer.weight for layer in layers), *masks))


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

    Example:
        >>> net = ResMADE(draw_orderings(3, 1), hidden=8, blocks=1)
        >>> head = net.head(2)
        >>> x = torch.randn(1, 5, 3, requires_grad=True)
        >>> net.outputs(head, net(x))[0, :, 1].sum().backward()
        >>> x.grad[0, 0, 1:]                       # column 1 sees column 0 alone
        tensor([0., 0.])
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

    def head(self, n: int, *, zero: bool = False) -> ChainLinear:
        """A masked output layer with ``n`` numbers per column (see :meth:`outputs`)."""
        stack = self.ranks.shape[0]
        mask = (self.ranks[:, :, None] > self._degrees.to(self.ranks.device)[:, None, :]).float()
        mask = mask.repeat_interleave(n, 1)
        return ChainLinear(stack, self.hidden, self.dim * n, mask=mask, zero=zero)

    def outputs(self, head: ChainLinear, features: Tensor, weight: Tensor | None = None) -> Tensor:
        """``(R, N, dim, n)`` from features ``(R, N, hidden)``."""
        flat: Tensor = head(features, weight)
        return flat.unflatten(-1, (self.dim, -1))

    def forward(
        self,
        inputs: Tensor,
        condition: Tensor | None = None,
        weights: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Hidden features ``(R, N, hidden)`` of ``inputs`` ``(R, N, dim * per_column)``.

        ``weights`` are those of ``first`` and ``layers``, masked already.
        """
        given = [None] * (1 + len(self.layers)) if weights is None else weights
        h = self.first(inputs, given[0])
        if condition is not None and len(self.conditioners):
            h = h + self.conditioners[0](condition)
        for i in range(0, len(self.layers), 2):
            inner = self.layers[i](silu(h), given[i + 1])
            if condition is not None and len(self.conditioners):
                inner = inner + self.conditioners[i // 2 + 1](condition)
            inner = dropout(silu(inner), self.drop, self.training)
            h = h + self.layers[i + 1](inner, given[i + 2])
        return silu(h)
