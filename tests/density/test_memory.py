"""Chunks: the gradient and the verdict of the whole, in the memory of a part."""

import math
import subprocess
import sys

import pytest
import torch

import selfnorm as sn
from selfnorm import functional as F
from selfnorm.density.model import Chunked, objective_named, weigh
from selfnorm.errors import DataError, EnergyError
from selfnorm.evaluation import WeightStream, chunk_size_for, data_side_check, verdict
from selfnorm.evaluation.bounds import bounds_from_weights
from selfnorm.evaluation.memory import bytes_per_row, free_memory
from tests.fitting import fit


def setting(dropout=0.0):
    torch.manual_seed(1)
    x = torch.randn(37, 2) * torch.tensor([1.0, 2.0]) + 0.5
    model = sn.EBM(sn.MLP(2, (16, 16), dropout=dropout), base=sn.Gaussian.fit_to(x), log_norm=0.3)
    return x, model, sn.StudentT.fit_to(x)


def gradient(model, judged):
    model.zero_grad()
    loss, metrics = judged()
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return loss.detach(), torch.cat([g.flatten() for g in grads]), metrics


def in_chunks(name, size):
    objective = Chunked(name, max_memory=0.5)
    objective.chunk_size = size
    return objective


@pytest.mark.parametrize("name", ["snl", "nce", "bregman_lsif", "importance_ml", "ranking_nce"])
@pytest.mark.parametrize("size", [1000, 96])
def test_gradient_over_chunks_is_that_of_the_whole(name, size):
    x, model, q = setting()
    torch.manual_seed(5)
    samples = torch.cat([q.sample((min(size, 1000 - first),)) for first in range(0, 1000, size)])
    whole = gradient(model, lambda: objective_named(name).judge(weigh(model, q, x, samples)))
    torch.manual_seed(5)
    parts = gradient(model, lambda: in_chunks(name, size).loss(model, q, x, 1000))
    torch.testing.assert_close(parts[0], whole[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts[1], whole[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts[2], whole[2], atol=1e-5, rtol=1e-5)


def test_replay_repeats_samples_and_dropout():
    x, model, law = setting(dropout=0.3)
    model.train()
    objective = in_chunks("importance_ml", 64)
    torch.manual_seed(5)
    _, once, _ = gradient(model, lambda: objective.loss(model, law, x, 256))
    after = torch.rand(1)
    torch.manual_seed(5)
    _, again, _ = gradient(model, lambda: objective.loss(model, law, x, 256))
    assert torch.equal(once, again)
    assert torch.equal(after, torch.rand(1))
    assert float(once.abs().max()) > 0


def test_chunk_sizes_follow_the_budget():
    _, model, law = setting()
    row = bytes_per_row(model, law)
    # Two activations and two linear outputs of 16 floats each at least, and not a hundred times it.
    assert 4 * 2 * 16 < row < 100 * 4 * 4 * 16
    assert chunk_size_for(model, law, 2000 * row) == 1000
    assert chunk_size_for(model, law, 0.01) > chunk_size_for(model, law, 0.0001)
    assert free_memory() > 2**20
    with pytest.raises(DataError, match="positive"):
        chunk_size_for(model, law, 0)
    with pytest.raises(DataError, match="too small"):
        chunk_size_for(model, law, 3)
    with pytest.raises(ValueError, match="function of weights"):
        Chunked("dsm", max_memory=0.5)


@pytest.mark.parametrize("tail", [0.05, 0.45, 1.5])
def test_streamed_summary_is_that_of_all_weights(tail):
    log_w = tail * torch.distributions.Exponential(1.0).sample((30_001,)).double() + 3
    log_w[700] = -math.inf
    log_w_data = log_w[:500] * 1.1
    stream = WeightStream(len(log_w))
    for part in log_w.split(777):
        stream.update(part)
    assert len(stream.top) < 0.05 * len(log_w)
    assert stream.log_mean == pytest.approx(float(F.log_mean_exp(log_w)), abs=1e-12)
    assert stream.ess == pytest.approx(float(F.ess(log_w)), rel=1e-10)
    assert stream.pareto_k() == pytest.approx(float(F.pareto_k(log_w)), abs=1e-6)
    judged, expected = verdict(stream, log_w_data), verdict(log_w, log_w_data)
    assert judged.reasons == expected.reasons
    assert data_side_check(log_w_data, stream) == data_side_check(log_w_data, log_w)
    whole, streamed = (bounds_from_weights(log_w_data, w, log_w_data, 3.0) for w in (log_w, stream))
    for key, value in whole.to_dict().items():
        if isinstance(value, float):
            assert streamed.to_dict()[key] == pytest.approx(value, rel=1e-9), key


def test_broken_weights_are_seen_in_any_chunk():
    stream = WeightStream(3000)
    for part in (torch.zeros(1000), torch.full((1000,), math.nan), torch.zeros(1000)):
        stream.update(part)
    assert stream.broken
    bounds = bounds_from_weights(torch.zeros(5), stream, torch.zeros(5), 0.0)
    assert not bounds.reliable
    assert math.isnan(bounds.upper)


SCRIPT = """
import resource, torch, selfnorm as sn
torch.set_num_threads(1)
q = sn.Gaussian(torch.zeros(63), scale=1.0)
model = sn.EBM(sn.MLP(63, (16,), zero_init=True), base=q)
x = q.sample((100,))
sn.evaluate(model, x, n_samples=20_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
bounds = sn.evaluate(model, x, n_samples=1_000_000, max_memory=32 * 2**20, seed=0)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(after - before, bounds.log_norm, bounds.n_samples)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_a_million_samples_in_63_columns_take_little_memory():
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    grown, log_norm, n_samples = out.stdout.split()
    # All samples at once would be 252 MB.
    assert int(grown) < 120_000, grown
    assert float(log_norm) == pytest.approx(0.0, abs=1e-6)
    assert int(n_samples) == 1_000_000


def test_a_budget_for_a_model_in_double_precision():
    x = torch.randn(200, 2)
    torch.manual_seed(0)
    model = sn.EBM(sn.MLP(2, (32,)).double(), base=sn.Gaussian.fit_to(x))
    single = sn.EBM(sn.MLP(2, (32,)), base=sn.Gaussian.fit_to(x))
    budget = 2**18
    chunks = [chunk_size_for(m, m.base, budget) for m in (model, single)]
    assert chunks[0] < 0.7 * chunks[1]
    fit(model, x, n_samples=2000, max_steps=2, seed=0, progress=False, max_memory=budget)
    bounds = sn.evaluate(model, x, max_memory=budget, seed=0)
    assert bounds.log_norm == pytest.approx(float(model.log_norm.detach()), abs=0.02)


def test_batch_normalisation_is_not_computed_chunk_by_chunk():
    x = torch.randn(200, 2)
    energy = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model = sn.EBM(energy, base=sn.Gaussian.fit_to(x))
    with pytest.raises(EnergyError, match="batch normalisation depends on all rows"):
        fit(model, x, max_steps=2, progress=False, max_memory=2**16)
