"""A network's gradient written out is autograd's; whatever is not plain goes through autograd."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import selfnorm as sn
from selfnorm.density.stacked_energies import EnergyStack
from selfnorm.errors import EnergyError
from selfnorm.networks import WRITTEN_OUT, FourierFeatures, mlp_gradient


def network(**options):
    torch.manual_seed(0)
    return sn.MLP(3, hidden=(16, 8, 12), **options)


def slopes(energy, x, way):
    weight = torch.linspace(-1, 2, len(x), dtype=x.dtype)
    value = way(x)
    return value.detach(), torch.autograd.grad((value * weight).sum(), list(energy.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{"activation": name} for name in WRITTEN_OUT]
    + [{"saturate": 2.0}, {"activation": "leaky_relu"}],
    ids=str,
)
def test_value_and_gradient_are_those_of_autograd(options, dtype):
    energy = network(**options).to(dtype)
    x = torch.randn(37, 3, dtype=dtype)
    expected, by_autograd = slopes(energy, x, lambda rows: -energy(rows))
    value, written = slopes(energy, x, energy.negative_energy_in_step)
    torch.testing.assert_close(value, expected)
    for mine, theirs in zip(written, by_autograd, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert float(theirs.abs().max()) > 0


@pytest.mark.parametrize("activation", WRITTEN_OUT)
def test_side_by_side_is_one_by_one(activation, monkeypatch):
    """Of the way a GPU takes, all but the streams runs here."""
    energy = network(activation=activation)
    x = torch.randn(37, 3)
    _, expected = slopes(energy, x, energy.negative_energy_in_step)
    monkeypatch.setattr(mlp_gradient, "_one_by_one", mlp_gradient._side_by_side)
    _, found = slopes(energy, x, energy.negative_energy_in_step)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 17])
def test_narrow_and_wide_inputs(width):
    energies = [sn.MLP(width, hidden=(6, 12)) for _ in range(2)]
    x = torch.randn(2, 31, width)
    stack = EnergyStack(energies)
    table = stack.flatten(energies).requires_grad_()
    (side_by_side,) = torch.autograd.grad(-stack(table, x).sum(), table)
    for energy, rows, mine in zip(energies, x, side_by_side, strict=True):
        params = list(energy.parameters())
        expected = torch.autograd.grad(-energy(rows).sum(), params)
        found = torch.autograd.grad(energy.negative_energy_in_step(rows).sum(), params)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        flat = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(mine, flat, rtol=1e-4, atol=1e-5)


def test_features_come_first():
    energy = network(features=FourierFeatures(3, 5))
    x = torch.randn(20, 3)
    torch.testing.assert_close(energy.negative_energy_in_step(x), -energy(x))


def is_written_out(value):
    return "NegativeEnergy" in type(value.grad_fn).__name__


def replace(position, layer):
    return lambda energy: energy.layers.__setitem__(position, layer)


def move_bias(energy):
    """As many weights as before, in other places."""
    energy.layers[0].bias = None
    energy.layers[-1].bias = nn.Parameter(torch.ones(1))


def doubled(*given):
    return tuple(2 * value for value in given[-1]) if len(given) == 2 else 2 * given[-1]


CHANGES = {
    "hook of a layer": lambda energy: energy.layers[0].register_forward_hook(doubled),
    "hook of all layers": lambda energy: energy.layers.register_forward_hook(doubled),
    "hook of the network": lambda energy: energy.register_forward_hook(doubled),
    "hook before it": lambda energy: energy.register_forward_pre_hook(doubled),
    "hook before the layers": lambda energy: energy.layers.register_forward_pre_hook(doubled),
    "a forward of its own": lambda energy: setattr(energy.layers[0], "forward", torch.zeros_like),
    "another activation": replace(1, nn.Tanh()),
    "another kind of layer": replace(0, nn.Bilinear(3, 3, 16)),
    "one layer more": lambda energy: energy.layers.append(nn.Tanh()),
    "biases elsewhere": move_bias,
    "normalised weights": lambda energy: nn.utils.parametrizations.weight_norm(energy.layers[2]),
    "pruned": lambda energy: prune.l1_unstructured(energy.layers[2], "weight", 5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_network_somebody_changed_is_called(change):
    energy = network()
    assert energy.is_as_built()
    change(energy)
    assert not energy.is_as_built()


NO_ENERGY = ("a forward of its own", "another kind of layer")
NO_COPY = ("pruned",)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in NO_ENERGY + NO_COPY])
def test_a_training_step_of_a_changed_network_is_that_of_a_call(name):
    energy = network()
    CHANGES[name](energy)
    x = torch.randn(5, 3)
    expected, by_autograd = slopes(energy, x, lambda rows: -energy(rows))
    model = sn.EBM(energy)
    value, found = slopes(energy, x, lambda rows: model.negative_energy(rows, in_step=True))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(found, by_autograd)
    members = [energy, copy.deepcopy(energy)]
    stack = EnergyStack(members)
    side_by_side = stack(stack.flatten(members).requires_grad_(), x.expand(2, -1, -1))
    torch.testing.assert_close(-side_by_side[1], expected)


def test_an_energy_of_two_numbers_is_refused_in_a_step():
    energy = network()
    energy.layers[-1] = nn.Linear(12, 2, bias=False)
    with pytest.raises(EnergyError, match="one scalar per row"):
        sn.EBM(energy).negative_energy(torch.randn(5, 3), in_step=True)


def test_frozen_weights_go_through_autograd():
    x = torch.randn(5, 3)
    energy = network()
    assert is_written_out(energy.negative_energy_in_step(x))
    energy.layers[0].weight.requires_grad_(False)
    assert not is_written_out(energy.negative_energy_in_step(x))


def test_gradients_with_respect_to_rows_dropout_and_autocast_are_autograds():
    x = torch.randn(5, 3)
    energy = network()
    assert not is_written_out(energy.negative_energy_in_step(x.clone().requires_grad_()))
    assert not is_written_out(network(dropout=0.5).negative_energy_in_step(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_written_out(energy.negative_energy_in_step(x))
    with torch.no_grad():
        assert energy.negative_energy_in_step(x).grad_fn is None


def test_second_derivatives():
    energy = network(activation="tanh").double()
    x = torch.randn(6, 3, dtype=torch.float64)
    params = list(energy.parameters())

    def curvature(way):
        first = torch.autograd.grad(way(x).square().sum(), params, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), params)

    expected = curvature(lambda rows: -energy(rows))
    for mine, theirs in zip(curvature(energy.negative_energy_in_step), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_training_step_takes_this_way(monkeypatch):
    asked = []
    plain = sn.MLP.negative_energy_in_step
    monkeypatch.setattr(
        sn.MLP, "negative_energy_in_step", lambda self, x: (asked.append(len(x)), plain(self, x))[1]
    )
    x = torch.randn(100, 2)
    for proposal in (None, sn.StudentT.fit_to(x)):
        model = sn.EBM(sn.MLP(2, hidden=(16,)), base=sn.Gaussian.fit_to(x))
        sn.fit(
            model,
            x,
            proposal=proposal,
            n_samples=64,
            batch_size=20,
            max_steps=2,
            seed=0,
            progress=False,
        )
    assert asked == [84] * 4


@pytest.mark.parametrize(
    "options",
    [{"activation": name} for name in WRITTEN_OUT] + [{"saturate": 2.0}],
    ids=str,
)
def test_networks_side_by_side_have_the_gradients_of_each(options):
    torch.manual_seed(0)
    energies = [sn.MLP(3, hidden=(16, 8, 12), **options) for _ in range(4)]
    stack = EnergyStack(energies)
    table = stack.flatten(energies).requires_grad_()
    x, weight = torch.randn(4, 37, 3), torch.randn(4, 37)
    value = stack(table, x)
    assert "StackedEnergy" in type(value.grad_fn).__name__
    (value * weight).sum().backward()
    for k, energy in enumerate(energies):
        expected = energy(x[k])
        torch.testing.assert_close(value[k], expected, rtol=1e-4, atol=1e-6)
        grads = torch.autograd.grad((expected * weight[k]).sum(), list(energy.parameters()))
        flat = torch.cat([g.flatten() for g in grads])
        torch.testing.assert_close(table.grad[k], flat, rtol=1e-4, atol=1e-5)


def test_second_derivatives_side_by_side():
    torch.manual_seed(0)
    energies = [sn.MLP(2, hidden=(5,), activation="tanh").double() for _ in range(2)]
    stack = EnergyStack(energies)
    table = stack.flatten(energies).requires_grad_()
    x = torch.randn(2, 6, 2, dtype=torch.float64)

    def curvature(way):
        (first,) = torch.autograd.grad(way().square().sum(), table, create_graph=True)
        return torch.autograd.grad(first.square().sum(), table)[0]

    expected = curvature(lambda: stack._by_autograd(table, x, []))
    torch.testing.assert_close(curvature(lambda: stack(table, x)), expected)
