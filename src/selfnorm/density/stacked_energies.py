"""Energies of one shape side by side: all trained weights in one ``(K, P)`` table.

Row ``k`` of the table is the network of member ``k``, flattened. One table makes the optimiser, the
clipping and the moving average a handful of operations, however many tensors a network has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from selfnorm._context import seeded
from selfnorm.errors import EnergyError
from selfnorm.networks import MLP, FourierFeatures

__all__ = ["EnergyStack", "check_training_keeps_buffers"]

_CACHED_FLOATS = 2**19  # of the widest layer: two megabytes, about a core's second-level cache


class EnergyStack(nn.Module):
    """The energies of ``K`` members as one function of their weights.

    :class:`~selfnorm.MLP` runs as batched matrix products, any other module under
    ``torch.func.vmap``; the code of the first member is used for all of them.

    Example:
        >>> energies = [MLP(2, (8,)) for _ in range(3)]
        >>> stack = EnergyStack(energies)
        >>> x = torch.randn(3, 5, 2)
        >>> torch.allclose(stack(stack.flatten(energies), x)[1], energies[1](x[1]), atol=1e-6)
        True
    """

    def __init__(self, energies: Sequence[nn.Module]) -> None:
        super().__init__()
        _check_alike(energies)
        first = energies[0]
        trained = [(n, p) for n, p in first.named_parameters() if p.requires_grad]
        if not trained:
            raise EnergyError("nothing to train: no parameter of the energies asks for a gradient")
        self.names = [n for n, _ in trained]
        self.shapes = [p.shape for _, p in trained]
        self.sizes = [p.numel() for _, p in trained]
        fixed = [n for n, _ in _tensors(first) if n not in set(self.names)]
        self.fixed_names = fixed
        for position, name in enumerate(fixed):
            values = torch.stack([dict(_tensors(e))[name].detach() for e in energies])
            self.register_buffer(f"fixed_{position}", values, persistent=False)
        # A parameter in several places has one name here, and must be handed to all of them.
        places: dict[int, str] = {}
        self._also: dict[str, str] = {}
        for name, tensor in first.named_parameters(remove_duplicate=False):
            known = places.setdefault(id(tensor), name)
            if known != name:
                self._also[name] = known
        # Code only, outside the module tree: its own parameters are neither trained nor saved.
        self._template = [copy.deepcopy(first).to("meta")]
        self._is_mlp = _is_plain_mlp(self._template[0])

    def flatten(self, energies: Sequence[nn.Module]) -> Tensor:
        """The ``(K, P)`` table of the trained weights."""
        rows = []
        for energy in energies:
            named = dict(energy.named_parameters())
            rows.append(torch.cat([named[n].detach().flatten() for n in self.names]))
        return torch.stack(rows)

    @torch.no_grad()
    def unflatten(self, weights: Tensor, energies: Sequence[nn.Module]) -> None:
        """Write the rows of the table back into the members' own networks."""
        for row, energy in zip(weights, energies, strict=True):
            named = dict(energy.named_parameters())
            for name, shape, part in zip(
                self.names, self.shapes, row.split(self.sizes), strict=True
            ):
                named[name].copy_(part.view(shape))

    def train(self, mode: bool = True) -> EnergyStack:
        """Dropout on or off."""
        super().train(mode)
        self._template[0].train(mode)
        return self

    def forward(self, weights: Tensor, x: Tensor) -> Tensor:
        """Energies ``(K, n)`` of rows ``(K, n, d)``."""
        size = self._members_at_once(x)
        if size < len(x):
            fixed = [self.get_buffer(f"fixed_{k}") for k in range(len(self.fixed_names))]
            groups = zip(
                weights.split(size), x.split(size), *(f.split(size) for f in fixed), strict=True
            )
            return torch.cat([self._forward(w, rows, kept) for w, rows, *kept in groups])
        return self._forward(
            weights, x, [self.get_buffer(f"fixed_{k}") for k in range(len(self.fixed_names))]
        )

    def _members_at_once(self, x: Tensor) -> int:
        """All of them, except on a CPU where their activations would fall out of its cache."""
        if x.device.type != "cpu":
            return len(x)
        widest = max(shape[0] if shape else 1 for shape in self.shapes)
        fitting = max(1, _CACHED_FLOATS // (x.shape[1] * widest))
        if fitting >= len(x):
            return len(x)
        threads = torch.get_num_threads()  # each takes members of its own: let none wait
        return fitting - fitting % threads if fitting > threads else fitting

    def _forward(self, weights: Tensor, x: Tensor, fixed: Sequence[Tensor]) -> Tensor:
        # One split, not one slice per tensor: its gradient is one concatenation.
        parts = weights.split(self.sizes, dim=1)
        named = {
            name: part.view(-1, *shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }
        named.update(zip(self.fixed_names, fixed, strict=True))
        named.update({name: named[known] for name, known in self._also.items()})
        template = self._template[0]
        if self._is_mlp:
            return _mlp(template, named, x)

        def one(tensors: dict[str, Tensor], rows: Tensor) -> Tensor:
            energy: Tensor = functional_call(template, tensors, (rows,))
            return energy.squeeze(-1) if energy.dim() == rows.dim() else energy

        out: Tensor = vmap(one, randomness="different")(named, x)
        if out.shape != x.shape[:-1]:
            raise EnergyError(
                f"the energy must return one scalar per row: for {tuple(x.shape[1:])} expected "
                f"{tuple(x.shape[1:-1])}, got {tuple(out.shape[1:])}; sum or reduce its output"
            )
        return out


@torch.no_grad()
def check_training_keeps_buffers(energy: nn.Module, x: Tensor) -> None:
    """Refuse an energy that changes its own buffers in a forward pass of training.

    Batch normalisation and spectral normalisation do: members trained together would end with the
    buffers they began with, and their densities would be those of other networks.
    """
    if _is_plain_mlp(energy):
        return
    trial = copy.deepcopy(energy).train()
    before = {name: buffer.clone() for name, buffer in trial.named_buffers()}
    with seeded(0, x.device):
        trial(x[:8])
    changed = [n for n, b in trial.named_buffers() if not torch.equal(before[n], b)]
    if changed:
        raise EnergyError(
            f"training changes the buffer {changed[0]!r} of the energy (batch or spectral "
            "normalisation?), which models trained together cannot follow: train each by fit, or "
            "normalise by a layer without such buffers (nn.LayerNorm)"
        )


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _is_plain_mlp(energy: nn.Module) -> bool:
    return type(energy) is MLP and type(energy.features) in (type(None), FourierFeatures)


def _inputs(mlp: MLP, named: dict[str, Tensor], x: Tensor) -> Tensor:
    if mlp.saturate is not None:
        x = x * torch.rsqrt(1 + x.square().sum(-1, keepdim=True) / mlp.saturate**2)
    if mlp.features is not None:
        angles = x @ named["features.frequencies"]
        x = torch.cat([x, angles.sin(), angles.cos()], -1)
    return x


def _mlp(mlp: nn.Module, named: dict[str, Tensor], x: Tensor) -> Tensor:
    assert isinstance(mlp, MLP)
    x = _inputs(mlp, named, x)
    for position, layer in enumerate(mlp.layers):
        if isinstance(layer, nn.Linear):
            weight = named[f"layers.{position}.weight"].mT
            bias = named.get(f"layers.{position}.bias")
            x = x @ weight if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
        elif isinstance(layer, nn.ReLU):
            x = x.relu_()  # the product before it is used nowhere else
        else:
            x = layer(x)
    return x.squeeze(-1)


def _check_alike(energies: Sequence[nn.Module]) -> None:
    first = energies[0]
    for number, energy in enumerate(energies):
        if not isinstance(energy, nn.Module):
            raise EnergyError(f"the energy of member {number} is no nn.Module: wrap it in one")
        same = type(energy) is type(first) and str(energy) == str(first)
        same = same and getattr(energy, "saturate", None) == getattr(first, "saturate", None)
        shapes = [(n, t.shape, t.requires_grad) for n, t in _tensors(energy)]
        if not same or shapes != [(n, t.shape, t.requires_grad) for n, t in _tensors(first)]:
            raise EnergyError(
                f"members 0 and {number} have energies of different shape or kind; networks that "
                "train together must be built alike (group them by architecture)"
            )
