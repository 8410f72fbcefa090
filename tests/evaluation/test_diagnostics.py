import math

import pytest
import torch
from torch import distributions as td

import selfnorm as sn
import verdicts
from selfnorm.evaluation import WeightStream, data_side_check, tail_index, verdict
from selfnorm.functional import adaptive_log_mean
from tests.analytic.models import Potential


def random_density(seed: int):
    """A random asymmetric density with exact samples: mixture, Student-t, Gumbel or Gaussian."""
    torch.manual_seed(seed)
    dim = int(torch.randint(1, 5, ()))
    return verdicts.random_density(verdicts.KINDS[seed % 4], dim, torch.float32), dim


def unnormalised(density, log_norm: float, b: float) -> sn.EBM:
    return sn.EBM(Potential(lambda x: -(density.log_prob(x) + log_norm)), log_norm=b)


def good_case(seed: int):
    density, _ = random_density(1000 + seed)
    x = density.sample((800,))
    if seed % 2:
        return density, sn.Defensive.fit_to(x, n_components=5)
    return density, sn.Defensive(sn.Gaussian.fit_to(x, inflate=1.3), weight=0.2)


def missed_mode(seed: int):
    """The proposal covers one of two modes and leaves out 3 to 60 % of the mass."""
    torch.manual_seed(seed)
    dim = 1 + seed % 4
    share = 0.03 + 0.57 * float(torch.rand(()))
    direction = torch.nn.functional.normalize(torch.randn(dim), dim=0)
    means = torch.stack([torch.zeros(dim), (9.0 + 6 * float(torch.rand(()))) * direction])
    scales = torch.stack([torch.full((dim,), 1.0), torch.full((dim,), 0.3 + float(torch.rand(())))])
    weights = torch.tensor([1 - share, share])
    density = td.MixtureSameFamily(
        td.Categorical(weights), td.Independent(td.Normal(means, scales), 1)
    )
    return density, sn.Gaussian(torch.zeros(dim), scale=1.2)


def lighter_tails(seed: int):
    """Student-t data, a Gaussian proposal fitted to their middle."""
    torch.manual_seed(seed)
    dim = 1 + seed % 4
    df = 1.5 + 1.5 * torch.rand(())
    density = td.Independent(td.StudentT(df.expand(dim), torch.randn(dim), torch.ones(dim)), 1)
    return density, sn.Gaussian(density.base_dist.loc, scale=1.0 + 0.5 * float(torch.rand(())))


def collapsed(seed: int):
    """A proposal 3 to 100 times narrower than the data."""
    torch.manual_seed(seed)
    density, _ = random_density(2000 + seed)
    x = density.sample((800,))
    narrow = float(10 ** (-0.5 - 1.5 * torch.rand(())))
    if seed % 2:
        return density, sn.Gaussian(x.mean(0), scale=narrow * x.std(0))
    return density, sn.Gaussian(x[0], scale=narrow * x.std(0))


def designed_failures():
    return [make(seed) for make in (missed_mode, lighter_tails, collapsed) for seed in range(8)]


def judged(density, q, seed, n_samples=10_000, **options):
    x = density.sample((500,))
    model = unnormalised(density, 1.7, 1.7)
    return sn.evaluate(model, x, proposal=q, n_samples=n_samples, seed=seed, **options)


def test_designed_failures_are_flagged_and_good_cases_are_not():
    failures = enumerate(designed_failures())
    flagged = [not judged(*case, seed, adapt=False).reliable for seed, case in failures]
    assert sum(flagged) >= 23, [i for i, f in enumerate(flagged) if not f]
    for adapt in (False, True):
        good = [judged(*good_case(seed), seed, adapt=adapt) for seed in range(16)]
        wrong = [b.reasons for b in good if not b.reliable]
        assert len(wrong) <= 1, wrong


def test_designed_failures_are_mended_or_flagged():
    """The rows show what the proposal misses: a law fitted to them joins it."""
    found = [judged(*case, seed) for seed, case in enumerate(designed_failures())]
    assert all(abs(b.log_norm - 1.7) < 0.1 for b in found if b.reliable)
    assert sum(b.reliable for b in found) >= 19
    assert all("joined" in b.remarks[-1] for b in found)
    assert max(b.n_samples for b in found) <= 8 * 10_000


def test_a_broad_pool_has_no_silent_failure_few_false_alarms_and_honest_errors():
    rows = [verdicts.judge("pool", seed, 10_000) for seed in range(48)]
    figures = verdicts.summary(rows)
    assert figures["silent_failures"] == 0
    assert figures["wrong"] <= 1
    assert figures["false_alarms"] <= 3, [r["reasons"] for r in rows if not r["reliable"]]
    assert figures["within_3_se"] > 1 - 1.5 / figures["reliable"]
    assert figures["interval_covers"] > 0.9


def test_mass_that_only_b_knows_of_is_a_reason():
    """Half of the mass is where neither the proposal nor the rows are; ``b`` has learned it."""
    torch.manual_seed(0)
    for dim in (1, 4):
        near = td.Independent(td.Normal(torch.zeros(dim), torch.ones(dim)), 1)
        both = verdicts.two_parts(0.5, torch.full((dim,), 60.0), 1.0)
        q, x = sn.Gaussian(torch.zeros(dim), scale=1.2), near.sample((500,))
        found = sn.evaluate(unnormalised(both, 5.0, 5.0), x, proposal=q, seed=0)
        assert not found.reliable
        assert "b = 5.00 is above log Z = 4." in " ".join(found.reasons)
        assert found.learned_error == pytest.approx(math.log(0.5), abs=0.02)
        known = unnormalised(both, 5.0, 5.0 + math.log(0.5))
        assert sn.evaluate(known, x, proposal=q, seed=0).reliable  # nobody can know


@pytest.mark.parametrize(("off", "word"), [(0.08, "above"), (-0.08, "below"), (-3.0, "below")])
def test_a_b_that_is_a_little_off_or_too_low_is_remarked_upon(off, word):
    density, q = good_case(3)
    x = density.sample((500,))
    found = sn.evaluate(unnormalised(density, 1.7, 1.7 + off), x, proposal=q, seed=0)
    assert found.reliable, found.reasons
    assert found.learned_error == pytest.approx(-off, abs=0.02)
    assert word in " ".join(found.remarks)
    assert word in str(found)


def test_one_overwhelming_row_is_enough():
    """A spike at one row, of a weight above the sum of all samples'."""
    for seed in range(5):
        torch.manual_seed(seed)
        dim = 1 + seed
        x = torch.randn(500, dim)
        spiked = verdicts.two_parts(0.1, x[7], 1e-7)
        model = unnormalised(spiked, 0.0, math.log(0.9))
        found = sn.evaluate(model, x, proposal=sn.Gaussian.fit_to(x), seed=seed)
        assert not found.reliable
        assert "1 of 500 would each move log Z" in " ".join(found.reasons)


def test_reference_rows_expose_spikes_at_what_was_trained_on():
    torch.manual_seed(0)
    train, x, q = torch.randn(300, 3), torch.randn(300, 3), sn.Gaussian(torch.zeros(3), scale=1.1)
    parts = td.Normal(
        torch.cat([torch.zeros(1, 3), train[:30]]), torch.tensor([1.0] + [1e-3] * 30)[:, None]
    )
    shares = torch.tensor([0.7] + [0.01] * 30)
    memorised = td.MixtureSameFamily(td.Categorical(shares), td.Independent(parts, 1))
    model = unnormalised(memorised, 0.0, math.log(0.7))
    blind = sn.evaluate(model, x, proposal=q, seed=0)
    assert blind.reliable
    seeing = sn.evaluate(model, x, proposal=q, seed=0, reference=train)
    assert not seeing.reliable
    assert "trained on" in " ".join(seeing.reasons)
    smooth = unnormalised(td.Independent(td.Normal(torch.zeros(3), 1.0), 1), 0.0, 0.0)
    assert sn.evaluate(smooth, x, proposal=q, seed=0, reference=train).reliable


def test_the_error_of_a_heavy_tail_is_widened():
    """Pareto weights with k = 0.6: the plain error is passed three times over in 5 % of samples."""
    generator = torch.Generator().manual_seed(0)
    plain = widened = 0
    for _ in range(300):
        u = torch.rand(20_000, generator=generator, dtype=torch.float64)
        stream = WeightStream.of(-0.6 * u.log())
        error = abs(stream.log_mean - math.log(1 / 0.4))
        plain += error > 3 * stream.log_mean_se
        widened += error > 3 * verdict(stream).log_norm_se
    assert plain >= 6
    assert widened <= 3
    light = verdict(0.1 * torch.randn(5000, generator=generator))
    assert light.log_norm_se == pytest.approx(0.1 / math.sqrt(5000), rel=0.1)


def test_sentences_name_cause_and_cure():
    torch.manual_seed(0)
    heavy = verdict(torch.distributions.Exponential(0.4).sample((5000,)))
    assert not heavy.reliable
    assert "heavier tails" in " ".join(heavy.reasons)
    few = torch.zeros(1000)
    few[:3] = 20.0
    assert any("effective" in r and "n_samples" in r for r in verdict(few).reasons)
    assert any("not finite" in r for r in verdict(torch.tensor([0.0, math.nan] * 50)).reasons)
    nothing = verdict(torch.full((50,), -math.inf))
    assert not nothing.reliable
    assert "do not overlap" in nothing.reasons[-1]


def test_constant_weights_are_fine_and_rounding_is_no_exceedance():
    log_w = torch.full((5000,), 3.0)
    noise = 1e-6 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    assert verdict(log_w, 3.0 + noise).reliable
    assert data_side_check(torch.empty(0), log_w).passed


def test_infinite_weight_at_data_counts_against():
    """A uniform proposal that stops short of the data: q = 0 there."""
    x = torch.cat([torch.rand(400, 1), 2 + torch.rand(30, 1)])
    q = sn.Uniform(torch.tensor([0.0]), torch.tensor([1.0]))
    model = sn.EBM(Potential(lambda v: v[..., 0] * 0.1))
    bounds = sn.evaluate(model, x, proposal=q, n_samples=4000, seed=0)
    assert not bounds.reliable


def test_plateau_with_a_bounded_shoulder_is_not_a_heavy_tail():
    torch.manual_seed(0)
    plateau = 0.08 - 0.5 * torch.rand(19_800).pow(4)
    shoulder = 0.08 + 0.43 * torch.rand(200)
    assert tail_index(torch.cat([plateau, shoulder])) < 0.5
    for k in (0.9, 1.5):
        heavy = torch.distributions.Exponential(1 / k).sample((20_000,))
        assert tail_index(heavy) > 0.7


def test_the_error_of_log_mean_is_the_spread_of_repetition():
    torch.manual_seed(0)
    log_w = 0.8 * torch.randn(300, 2000)
    streams = [WeightStream.of(row) for row in log_w]
    spread = torch.tensor([s.log_mean for s in streams]).std()
    claimed = torch.tensor([s.log_mean_se for s in streams]).mean()
    assert float(claimed) == pytest.approx(float(spread), rel=0.15)
    assert math.isinf(WeightStream.of(torch.full((3,), -math.inf)).log_mean_se)


def test_several_estimates_draw_until_the_worst_is_good_enough():
    torch.manual_seed(0)
    spread = torch.tensor([0.0, 0.1, 1.0])

    def draw(n):
        return spread * torch.randn(n, 3) - spread.square() / 2  # mean weight one

    log_z, error, n = adaptive_log_mean(draw, tolerance=0.01, chunk_size=1000)
    assert log_z.shape == error.shape == (3,)
    assert float((log_z / error.clamp_min(1e-12)).abs().max()) < 4
    assert float(error.max()) < 0.01
    assert n == pytest.approx(math.expm1(1.0) / 0.01**2, rel=0.25)
    assert adaptive_log_mean(lambda n: torch.zeros(n), chunk_size=1000)[2] == 1000
    assert adaptive_log_mean(torch.zeros, chunk_size=1000, min_samples=2500)[2] == 3000
    assert adaptive_log_mean(draw, tolerance=0.0, chunk_size=1000, max_samples=4500)[2] == 4000
    assert math.isnan(adaptive_log_mean(lambda n: torch.full((n,), math.nan), chunk_size=9)[0])


def test_the_interval_widens_with_its_level():
    density, q = good_case(3)
    bounds = judged(density, q, 0)
    printed = "[{:.4f}, {:.4f}] nats (95 % interval".format(*bounds.interval())
    assert printed in str(bounds)
    low, high = bounds.interval(0.99)
    assert bounds.lower - low == pytest.approx(2.5758 * bounds.lower_se, rel=1e-3)
    assert high - bounds.upper == pytest.approx(2.5758 * bounds.upper_se, rel=1e-3)
    with pytest.raises(ValueError, match="level"):
        bounds.interval(level=95)
