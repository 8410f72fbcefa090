"""Networks: energies of rows, features of numbers, stacked and masked ones.

An energy is anything callable on ``(n, d)`` that returns ``(n,)`` or ``(n, 1)``; those here are to
save typing. Lower energy means higher density.

A stacked network holds the weights of ``members`` networks of the same shape in one tensor, so that
one batched matrix product trains all of them: five small networks then cost little more than one.
Inputs have shape ``(*samples, members, n, features)`` or, shared by the members, ``(n, features)``.

A masked residual network has outputs for a column that see only the columns before it: ResMADE
(Germain et al. 2015 with residual blocks, as in Nash & Durkan 2019), for one or several orderings
of the columns at once. Several orderings are *stacked*, too: every weight carries a leading
dimension ``R``. Columns keep their own places; an ordering only changes the masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from selfnorm._saved import saved

if TYPE_CHECKING:
    from selfnorm.training import ParameterGroup

__all__ = [
    "MLP",
    "ChainLinear",
    "ExponentialFamily",
    "FourierFeatures",
    "ResMADE",
    "StackedLinear",
    "StackedMLP",
    "activation_module",
    "decay_groups",
    "draw_orderings",
    "linear",
    "perceptron",
]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
}


def activation_module(name: str) -> nn.Module:
    """The activation called ``name`` as a module."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; choose one of {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]()


def decay_groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[ParameterGroup]:
    """Optimiser groups of what is trained: matrices with weight decay, all else without.

    Biases of stacked networks have several dimensions, too: they are known by their name.

    >>> [len(group["params"]) for group in decay_groups(StackedLinear(2, 3, 4).named_parameters())]
    [1, 1]
    """
    groups: list[ParameterGroup] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in named:
        if parameter.requires_grad:
            groups[parameter.ndim <= 1 or name.endswith("bias")]["params"].append(parameter)
    return groups


@saved()
class StackedLinear(nn.Module):
    """``members`` linear maps side by side: ``y_k = x_k W_k + c_k``.

    Args:
        members: number of independent maps.
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        zero: start at the zero map.
    """

    def __init__(
        self, members: int, in_features: int, out_features: int, *, zero: bool = False
    ) -> None:
        super().__init__()
        self.members = members
        bound = 0.0 if zero else 1.0 / math.sqrt(max(in_features, 1))
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features))
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*samples, members, n, in)`` or ``(n, in)`` to ``(*samples, members, n, out)``."""
        if x.ndim == 2:
            x = x.expand(self.members, *x.shape)
        if x.ndim == 3:
            return torch.baddbmm(self.bias, x, self.weight)
        # Members first and samples folded into rows: one product per member. The result keeps that
        # memory order under its outer shape, so the next layer folds without a copy.
        first = x.movedim(-3, 0)
        out = torch.baddbmm(self.bias, first.reshape(self.members, -1, x.shape[-1]), self.weight)
        return out.view(*first.shape[:-1], -1).movedim(0, -3)


def linear(members: int | None, before: int, after: int, *, zero: bool = False) -> nn.Module:
    """A linear map for each member, or a plain one for ``members=None``; ``zero``: starts at 0."""
    if members is not None:
        return StackedLinear(members, before, after, zero=zero)
    layer = nn.Linear(before, after)
    for parameter in layer.parameters() if zero else ():
        nn.init.zeros_(parameter)
    return layer


def perceptron(
    members: int | None,
    in_features: int,
    hidden: Sequence[int],
    out_features: int | None = None,
    *,
    activation: str = "silu",
    dropout: float = 0.0,
    zero: bool = False,
) -> nn.Sequential:
    """Layers of a multilayer perceptron; the activation follows every layer but the last.

    With ``out_features=None`` the network is a trunk: it ends with its last hidden activation.
    ``members=None`` is one network, without a dimension of members; ``zero`` starts it at 0.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise((in_features, *hidden)):
        layers += [linear(members, before, after), activation_module(activation)]
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
    if out_features is not None:
        layers.append(linear(members, (in_features, *hidden)[-1], out_features, zero=zero))
    return nn.Sequential(*layers)


@saved()
class StackedMLP(nn.Module):
    """The :func:`perceptron` of every member, with its options."""

    def __init__(
        self,
        members: int,
        in_features: int,
        hidden: Sequence[int],
        out_features: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.layers = perceptron(members, in_features, hidden, out_features, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Apply every member's network to its slice of ``x``."""
        return self.layers(x)


@saved("dim", "n_features", "scale")
class FourierFeatures(nn.Module):
    r"""Random waves beside the input: ``x -> [x, sin(x B), cos(x B)]`` with ``B ~ N(0, scale^2)``.

    A plain network learns slow functions first; sharp edges and thin rings need fast ones offered.
    ``scale`` is the typical angular frequency, in units of 1 over the spread of the (standardised)
    data. ``B`` is drawn once, at construction, and never trained.

    Shapes:
        ``(n, dim) -> (n, dim + 2 n_features)``

    Example:
        >>> FourierFeatures(2, n_features=64)(torch.zeros(5, 2)).shape
        torch.Size([5, 130])
    """

    frequencies: Tensor

    def __init__(self, dim: int, n_features: int = 256, scale: float = 3.0) -> None:
        super().__init__()
        if n_features < 1 or scale <= 0:
            raise ValueError(f"need n_features >= 1 and scale > 0, got {n_features} and {scale}")
        self.dim, self.n_features, self.scale = dim, n_features, scale
        self.n_out = dim + 2 * n_features
        self.register_buffer("frequencies", scale * torch.randn(dim, n_features))

    def forward(self, x: Tensor) -> Tensor:
        """Append the waves to ``x``."""
        angles = x @ self.frequencies
        return torch.cat([x, angles.sin(), angles.cos()], -1)


@saved("dim", "hidden", "activation", "dropout", "features", "saturate")
class MLP(nn.Module):
    r"""A fully connected energy ``(n, d) -> (n,)`` with a linear output layer.

    The output has no bias: a constant in the energy is the job of ``log_norm``.

    Args:
        dim: number of input columns.
        hidden: widths of the hidden layers.
        activation: ``"silu"`` (default), ``"relu"``, ``"gelu"``, ``"tanh"``, ``"leaky_relu"``.
        features: optional :class:`FourierFeatures` in front of the first layer.
        dropout: dropout probability after each hidden activation.
        zero_init: start at energy 0 everywhere, so that the model starts *at* its base density.
        saturate: bound the input's length smoothly, ``x -> x / sqrt(1 + |x|^2 / saturate^2)``. A
            bounded input makes a bounded energy, so that ``Z`` exists under **any** base density;
            a plain network's energy falls linearly far out, which only a Gaussian base can hold.
            Use 4 to 10 for standardised data.

    Example:
        >>> energy = MLP(2, hidden=(64, 64))
        >>> energy(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (128, 128, 128),
        *,
        activation: str = "silu",
        features: FourierFeatures | None = None,
        dropout: float = 0.0,
        zero_init: bool = False,
        saturate: float | None = None,
    ) -> None:
        super().__init__()
        if not hidden:
            raise ValueError("hidden must name at least one layer width, e.g. (128, 128)")
        self.dim, self.hidden, self.activation = dim, tuple(hidden), activation
        self.dropout, self.saturate, self.features = dropout, saturate, features
        seen = features.n_out if features is not None else dim
        self.layers = perceptron(None, seen, hidden, activation=activation, dropout=dropout)
        last = nn.Linear(hidden[-1], 1, bias=False)
        if zero_init:
            nn.init.zeros_(last.weight)
        self.layers.append(last)

    def forward(self, x: Tensor) -> Tensor:
        """Energy of each row."""
        if self.saturate is not None:
            x = x * torch.rsqrt(1 + x.square().sum(-1, keepdim=True) / self.saturate**2)
        if self.features is not None:
            x = self.features(x)
        out: Tensor = self.layers(x).squeeze(-1)
        return out


class ExponentialFamily(nn.Module):
    r"""Energy of a canonical exponential family, ``E(x) = -<theta, s(x)>``.

    With it SNL is jointly concave in ``(theta, b)``. The base measure is the EBM's base density,
    or the measure of the proposal (counting measure for discrete data).

    Args:
        statistics: ``(n, d) -> (n, k)`` sufficient statistics.
        n_statistics: ``k``.
        theta: initial natural parameter, zeros by default.

    Example:
        >>> energy = ExponentialFamily(lambda x: x, n_statistics=1)     # a Gaussian mean
        >>> energy(torch.ones(3, 1)).shape
        torch.Size([3])
    """

    def __init__(
        self, statistics: Callable[[Tensor], Tensor], n_statistics: int, theta: Tensor | None = None
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.theta = nn.Parameter(
            torch.zeros(n_statistics) if theta is None else theta.detach().clone()
        )
        if self.theta.shape != (n_statistics,):
            raise ValueError(
                f"theta must have shape ({n_statistics},), got {tuple(self.theta.shape)}"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Energy of each row."""
        return -(self.statistics(x) @ self.theta)


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

    @torch.no_grad()
    def freeze(self) -> None:
        """Keep the weights that act, which then cost no product with the mask: to score alone."""
        self.weight.copy_(self.effective_weight())
        self.mask = None

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
            shift = None if bias is None else bias.squeeze(0)
            return nn.functional.linear(x, weight.squeeze(0), shift)
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
        self.degrees = degrees
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
        mask = (ranks[:, :, None] > self.degrees[:, None, :]).float().to(self.ranks.device)
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
            inner = nn.functional.dropout(silu(inner), self.drop, self.training)
            h = h + self.layers[i + 1](inner)
        return silu(h)

    def course(self, n: int, condition: Tensor | None = None) -> Course:
        """The same for ``n`` rows whose columns come one by one, at the cost of one pass."""
        return Course(self, n, condition)


class Course:
    """Features of rows whose columns come one by one, in the sequence of each order.

    A unit of degree ``k`` sees the columns up to rank ``k``: it is computed once, when they are
    there. Only for a network that is not in training.

    Args:
        trunk: the network.
        n: number of rows of each order.
        condition: as in :meth:`ResMADE.forward`.
    """

    def __init__(self, trunk: ResMADE, n: int, condition: Tensor | None = None) -> None:
        self.trunk = trunk
        maps = [trunk.first, *trunk.layers]
        self._weights = [layer.effective_weight() for layer in maps]
        self._biases = [layer.bias for layer in maps]
        self._shifts = [c(condition) for c in trunk.conditioners] if condition is not None else []
        self._lowest = int(trunk.degrees.min())
        self._period = max(trunk.dim - self._lowest, 1)
        zeros = trunk.first.weight.new_zeros(len(trunk.ranks), n, trunk.hidden)
        self._hidden = [zeros.clone() for _ in maps]  # what goes into the layers, then comes out

    def features(self, rank: int, inputs: Tensor) -> Tensor:
        """``(R, N, hidden)``: what the column of the next rank sees, once ``rank`` columns of
        ``inputs (R, N, dim * per_column)`` are there; ranks are asked in turn from 0 on."""
        units = slice(rank - self._lowest, None, self._period)
        if rank < self._lowest or units.start >= self.trunk.hidden:
            return self._hidden[-1]
        h = self._layer(0, inputs, units)
        for i in range(1, len(self._weights), 2):
            self._hidden[i - 1][..., units] = silu(h)
            inner = self._layer(i, self._hidden[i - 1], units)
            self._hidden[i][..., units] = silu(inner)
            h = h + self._layer(i + 1, self._hidden[i], units, conditioned=False)
        self._hidden[-1][..., units] = silu(h)
        return self._hidden[-1]

    def _layer(self, i: int, x: Tensor, units: slice, conditioned: bool = True) -> Tensor:
        """Some units of a layer, ``(R, N, units)``."""
        bias = self._biases[i]
        h = _products(x, self._weights[i][:, units], None if bias is None else bias[:, units])
        if conditioned and self._shifts:
            h = h + self._shifts[(i + 1) // 2][..., units]
        return h
