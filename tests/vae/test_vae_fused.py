"""Gradients written out by hand against autograd's of the plain formulas."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from selfnorm.chain.factors import FactorEnergy, _features
from selfnorm.distributions import Mixture1d
from selfnorm.functional import bound_gap, ess, log_mean_exp, snl
from selfnorm.networks import ChainLinear, masked_weights
from selfnorm.vae import AutoregressivePrior
from selfnorm.vae.fused import placed, stratified
from selfnorm.vae.posterior import GaussianPosterior


def gradients(value, inputs, seed=5):
    torch.manual_seed(seed)
    return torch.autograd.grad((value * torch.randn_like(value)).sum(), inputs, retain_graph=True)


def a_prior(dim=4, orderings=1, **options):
    """A chain prior in double precision with weights off their start values."""
    sizes = {"hidden": 16, "components": 3, "context": 5, "energy_hidden": 8, **options}
    prior = AutoregressivePrior(dim, orderings=orderings, **sizes).double()
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        # beyond the limits of scales and places
        prior.chain.mixture_head.bias[:, ::7] += 14.0
    return prior


def pieces(prior, z, u):
    """What ``placed`` gives for scaled ``z`` ``(R, N, dim)``, and its inputs."""
    chain = prior.chain
    features = torch.randn(*z.shape[:2], 16, dtype=torch.float64, requires_grad=True)
    weight = (0.3 * torch.randn_like(chain.mixture_head.weight)).requires_grad_(True)
    bias = chain.mixture_head.bias
    found = placed(
        features, weight, bias, z, u, chain.constants, chain.limits, chain.energy.frequencies
    )
    raw = torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
    proposal = Mixture1d.from_raw(raw.unflatten(-1, (z.shape[-1], -1)), 4, family="gaussian")
    return found, proposal, (features, weight, bias)


@pytest.mark.parametrize("orderings", [1, 2])
def test_the_density_of_the_proposals_and_its_gradient(orderings):
    torch.manual_seed(0)
    prior = a_prior(orderings=orderings)
    z = (3 * torch.randn(orderings, 20, 4, dtype=torch.float64)).requires_grad_(True)
    (log_q, _, _), proposal, inputs = pieces(prior, z, stratified(3, z.detach()))
    wanted = proposal.log_prob(z)
    assert torch.allclose(log_q, wanted, atol=1e-10)
    for mine, autograds in zip(
        gradients(log_q, [z, *inputs]), gradients(wanted, [z, *inputs]), strict=True
    ):
        assert torch.allclose(mine, autograds, rtol=1e-8, atol=1e-10)


def test_the_proposals_keep_their_density_far_out():
    torch.manual_seed(0)
    prior = a_prior().float()
    z = torch.full((1, 2, 4), 1e6)
    at = prior.chain.constants, prior.chain.limits, prior.chain.energy.frequencies
    head = prior.chain.mixture_head
    features = torch.randn(1, 2, 16)
    log_q, _, _ = placed(features, head.weight, head.bias, z, stratified(3, z), *at)
    raw = torch.baddbmm(head.bias.unsqueeze(1), features, head.weight.transpose(1, 2))
    proposal = Mixture1d.from_raw(raw.unflatten(-1, (4, -1)), 4, family="gaussian")
    assert torch.allclose(log_q, proposal.log_prob(z), rtol=1e-5)


def test_the_samples_and_features_are_those_of_the_plain_formulas():
    torch.manual_seed(0)
    prior = a_prior()
    z = torch.randn(1, 50, 4, dtype=torch.float64)
    u = stratified(8, z)
    (_, values, _), proposal, _ = pieces(prior, z, u)
    mean, sd = proposal.moments()
    y = torch.cat([z.unsqueeze(0), proposal.from_uniform(u.movedim(-1, 0))])
    wanted = _features(y, mean, sd, prior.chain.energy.frequencies)[0]
    assert torch.allclose(values, wanted, atol=1e-6)


def test_stratified_uniforms_have_one_number_in_every_cell():
    torch.manual_seed(0)
    u = stratified(8, torch.zeros(300, 4))
    assert torch.equal((8 * u).floor(), torch.arange(8.0).expand(300, 4, 8))
    assert abs(float(u.mean()) - 0.5) < 0.002
    assert float(u.min()) > 0


def test_the_features_of_a_value_and_their_gradient():
    torch.manual_seed(0)
    energy = FactorEnergy(1, 3, 4, 1, 8).double()
    # the last value is beyond the place where asinh is cut
    y = (4 * torch.randn(5, 1, 3, 2, dtype=torch.float64)).requires_grad_(True)
    with torch.no_grad():
        y[0, 0, 0, 0] = 5000.0
    mean = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    sd = (0.5 + torch.rand(1, 3, 2, dtype=torch.float64)).requires_grad_(True)
    found = energy.features(y, mean, sd)
    wanted = _features(y, mean, sd, energy.frequencies)[0]
    assert torch.equal(found, wanted)
    inputs = [y, mean, sd]
    for mine, autograds in zip(gradients(found, inputs), gradients(wanted, inputs), strict=True):
        assert torch.allclose(mine, autograds, rtol=1e-9, atol=1e-11)


def plain_objective(prior, z, n_samples):
    """The sum of the factors' SNL bounds by the plain formulas, as first written."""
    chain = prior.chain
    at_z, log_det = chain.columns(z)
    here = at_z.expand(chain.n_orderings, -1, -1)
    log_q, proposal, at = chain.shaped(here)
    with torch.no_grad():
        y = proposal.from_uniform(stratified(n_samples, here).movedim(-1, 0))
    f = chain.energy(torch.cat([here.unsqueeze(0), y]), at)
    b, log_w = chain.energy.log_norm(at.context), f[1:]
    value = log_mean_exp((log_q + snl(f[0], log_w, b, reduction="none")).sum(-1) + log_det)
    gap = bound_gap(log_mean_exp(log_w) - b).sum(-1).mean()
    return value, {"gap": gap, "ess": ess(log_w).mean()}


@pytest.mark.parametrize("family", ["gaussian", "logistic"])
@pytest.mark.parametrize("orderings", [1, 2])
def test_the_objective_of_a_chain_is_that_of_the_plain_formulas(orderings, family):
    torch.manual_seed(0)
    prior = a_prior(orderings=orderings, family=family)
    prior.chain.columns.scale.mul_(1.7)
    prior.chain.columns.center.add_(0.4)
    z = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    inputs = [z, *prior.parameters()]
    torch.manual_seed(1)
    value, in_training = prior.objective(z, GaussianPosterior(z, z), 1)
    found = gradients(value, inputs)
    torch.manual_seed(1)
    with torch.no_grad():
        again, metrics = prior.objective(z, GaussianPosterior(z, z), 1)
    torch.manual_seed(1)
    wanted, plain = plain_objective(prior, z, prior.n_samples)
    assert in_training == {}
    assert torch.equal(again, value)
    assert torch.allclose(value, wanted, atol=1e-7)
    for name in ("gap", "ess"):
        assert torch.allclose(metrics[name], plain[name].detach(), rtol=1e-7)
    for mine, autograds in zip(found, gradients(wanted, inputs), strict=True):
        assert torch.allclose(mine, autograds, rtol=1e-5, atol=1e-6)


def test_masked_weights_act_and_train_as_layer_by_layer():
    torch.manual_seed(0)
    layers = [ChainLinear(2, 3, 4, mask=torch.randint(2, (2, 4, 3)).float()) for _ in range(3)]
    weights = [layer.weight for layer in layers]
    found = torch.stack(masked_weights(layers))
    wanted = torch.stack([layer.effective_weight() for layer in layers])
    assert torch.equal(found, wanted)
    for mine, autograds in zip(gradients(found, weights), gradients(wanted, weights), strict=True):
        assert torch.equal(mine, autograds)
    bare = ChainLinear(2, 3, 4)
    assert masked_weights([bare])[0] is bare.weight


def test_energies_do_not_move_the_heads_of_the_proposals():
    """The proposals are fitted by likelihood alone: what the energies say must not reach them."""
    torch.manual_seed(0)
    prior = AutoregressivePrior(3, hidden=16, components=3, context=5, energy_hidden=8)
    with torch.no_grad():
        prior.chain.energy.last.weight.normal_()
    z = torch.randn(20, 3, requires_grad=True)
    chain, head = prior.chain, prior.chain.mixture_head
    here = z.unsqueeze(0)
    features = chain.trunk(chain.columns.encode(here).flatten(-2))
    log_q, values, shape = placed(
        features, head.effective_weight(), head.bias, here, stratified(4, here), chain.constants,
        chain.limits, chain.energy.frequencies,
    )  # fmt: skip
    context = chain.trunk.outputs(chain.context_head, features)
    f = chain.energy.unbounded(values, torch.cat([context, shape], -1))
    by_energy = torch.autograd.grad(f.sum(), [head.weight, head.bias, z], retain_graph=True)
    assert float(by_energy[0].abs().max()) == float(by_energy[1].abs().max()) == 0.0
    assert float(by_energy[2].abs().max()) > 0
    by_likelihood = torch.autograd.grad(log_q.sum(), [head.weight])
    assert float(by_likelihood[0].abs().max()) > 0


VIEWS = {"view", "_unsafe_view", "t", "transpose", "unsqueeze", "squeeze", "expand", "slice"}
VIEWS |= {"split", "split_with_sizes", "detach", "select", "alias", "unbind", "permute"}
VIEWS |= {"empty", "empty_like", "new_empty"}


class Counted(TorchDispatchMode):
    """Operations that do work: on a GPU each is a launch or more."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.n += func._schema.name.split("::")[1] not in VIEWS
        return func(*args, **(kwargs or {}))


def test_a_step_of_a_chain_takes_fewer_operations_than_the_plain_formulas():
    torch.manual_seed(0)
    prior = AutoregressivePrior(4, hidden=16, components=3, context=5, energy_hidden=8)
    z = torch.randn(30, 4, requires_grad=True)
    with Counted() as written_out:
        prior.objective(z, GaussianPosterior(z, z), 1)[0].sum().backward()
    with Counted() as plain:
        plain_objective(prior, z, prior.n_samples)[0].sum().backward()
    assert written_out.n < 0.6 * plain.n, (written_out.n, plain.n)


def test_a_second_backward_pass_finds_the_same():
    torch.manual_seed(0)
    prior = AutoregressivePrior(3, hidden=16, components=3, context=5, energy_hidden=8)
    z = torch.randn(20, 3, requires_grad=True)
    value, _ = prior.objective(z, GaussianPosterior(z, z), 1)
    inputs = [z, *prior.parameters()]
    for once, again in zip(gradients(value, inputs), gradients(value, inputs), strict=True):
        assert torch.equal(once, again)


def test_a_compiler_sees_the_plain_formulas_and_finds_the_same():
    torch.manual_seed(0)
    prior = AutoregressivePrior(3, hidden=16, components=3, context=5, energy_hidden=8)
    z = torch.randn(20, 3, requires_grad=True)
    inputs = [z, *prior.parameters()]

    def bound(at):
        return prior.objective(at, GaussianPosterior(at, at), 1)[0]

    compiled = torch.compile(bound, backend="aot_eager", dynamic=False)
    torch.manual_seed(1)
    wanted = bound(z)
    torch.manual_seed(1)
    found = compiled(z)
    assert torch.allclose(found, wanted, atol=1e-4)
    for mine, plain in zip(gradients(found, inputs), gradients(wanted, inputs), strict=True):
        assert torch.allclose(mine, plain, rtol=1e-3, atol=1e-4)
