import math

import pytest
import torch

from selfnorm.datasets import toy2d
from selfnorm.errors import DataError

SD = {  # of the raw coordinates
    "funnel": (math.e, 1.0),
    "pinwheel": (math.sqrt(54.625), math.sqrt(54.625)),
    "checkerboard": (8 / math.sqrt(12), 8 / math.sqrt(12)),
    "four_circles": (math.sqrt(3.01), math.sqrt(3.01)),
}


def midpoints(low, high, n):
    edges = torch.linspace(low, high, n + 1, dtype=torch.float64)
    return 0.5 * (edges[1:] + edges[:-1]), (high - low) / n


def plane_grid(name):
    """Grid points covering the raw density and the volume that belongs to each of them."""
    if name == "funnel":
        # x = sinh(v): the tails of x reach exp(5), the mass sits near exp(-5)
        v, dv = midpoints(-9.0, 9.0, 900)
        y, dy = midpoints(-5.5, 5.5, 500)
        grid = torch.cartesian_prod(v, y)
        x = torch.stack([torch.sinh(grid[:, 0]), grid[:, 1]], dim=1)
        return x, torch.cosh(grid[:, 0]) * dv * dy
    half, n = {"pinwheel": (32.0, 400), "checkerboard": (5.0, 500), "four_circles": (4.0, 400)}[
        name
    ]
    g, dg = midpoints(-half, half, n)
    x = torch.cartesian_prod(g, g)
    return x, torch.full((len(x),), dg * dg, dtype=torch.float64)


@pytest.mark.parametrize("name", toy2d.NAMES)
def test_density_integrates_to_one_and_its_entropy_and_moments_are_right(name):
    density = toy2d.DENSITIES[name]
    x, volume = plane_grid(name)
    log_p = density.log_density(x)
    mass = log_p.exp() * volume
    assert mass.sum().item() == pytest.approx(1.0, abs=1e-5)
    plogp = torch.where(mass > 0, mass * log_p.clamp(min=-1e4), torch.zeros_like(mass))
    assert -plogp.sum().item() == pytest.approx(density.entropy, abs=1e-4)
    mean = (mass[:, None] * x).sum(dim=0)
    variance = (mass[:, None] * (x - mean) ** 2).sum(dim=0)
    assert mean.tolist() == pytest.approx([0, 0], abs=1e-5)
    assert variance.sqrt().tolist() == pytest.approx(list(SD[name]), rel=1e-3)


@pytest.mark.parametrize("name", toy2d.NAMES)
def test_histogram_of_samples_matches_the_density(name):
    """Chi-square over coarse cells whose probabilities come from the density on a fine grid."""
    density = toy2d.DENSITIES[name]
    x, volume = plane_grid(name)
    mass = density.log_density(x).exp() * volume
    # cells that respect no symmetry of any of the sets, so a flip or rotation shows
    # and that run between grid points, so the grid gives their probabilities exactly
    edges = []
    for axis, sd in enumerate(SD[name]):
        coordinates = torch.unique(x[:, axis])
        between = 0.5 * (coordinates[1:] + coordinates[:-1])
        wanted = torch.tensor([-1.3, -0.55, 0.13, 0.9, 1.45], dtype=torch.float64) * sd
        edges.append(between[(between[None] - wanted[:, None]).abs().argmin(dim=1)])

    def cell(points):
        i = torch.bucketize(points[:, 0].contiguous(), edges[0])
        j = torch.bucketize(points[:, 1].contiguous(), edges[1])
        return i * 6 + j

    expected = torch.zeros(36, dtype=torch.float64).index_add(0, cell(x), mass)
    n = 20_000
    counts = torch.bincount(cell(density.sample(n, seed=2)), minlength=36).double()
    used = expected * n >= 10
    assert counts[~used].sum() < 80
    chi2 = ((counts - n * expected)[used] ** 2 / (n * expected)[used]).sum().item()
    dof = int(used.sum()) - 1
    assert chi2 < dof + 5 * math.sqrt(2 * dof)


def test_pinwheel_log_density_is_finite_everywhere_and_fivefold_symmetric():
    x = torch.randn(2_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 12
    x[0] = 0.0
    a = 2 * math.pi / 5
    rotation = torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]]).double()
    log_p = toy2d.Pinwheel().log_density(x)
    assert torch.isfinite(log_p).all()
    near = x.norm(dim=1) < 25
    turned = toy2d.Pinwheel().log_density(x @ rotation.T)
    torch.testing.assert_close(log_p[near], turned[near], rtol=1e-4, atol=1e-4)


def test_four_circles_is_stable_far_away():
    far = toy2d.FourCircles().log_density(torch.tensor([[60.0, -80.0]]))
    assert torch.isfinite(far).all()
    assert far.item() < -1e5


def test_checkerboard_edges_survive_float32():
    density = toy2d.Checkerboard()
    corners = torch.tensor([[0.0, 0.0], [4.0, 4.0], [-4.0, -4.0], [-2.0, 1.0], [2.0, 2.0]])
    assert torch.isfinite(density.log_density(corners)).all()
    off = torch.tensor([[-0.5, 0.5], [4.1, 1.0], [1.0, -1.0], [9.0, 9.0]])
    assert (density.log_density(off) == -math.inf).all()
    split = toy2d.load("checkerboard", seed=4, n_test=200_000)
    assert torch.isfinite(split.log_density(split.test)).all()


@pytest.mark.parametrize("name", toy2d.NAMES)
def test_scaled_points_and_their_density_agree(name):
    split = toy2d.load(name, seed=3, n_test=20_000)
    assert split.train.mean(0).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert split.train.std(0, correction=0).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert abs(split.test.std(0)[0].item() - 1) > 1e-4  # the training rows' units
    assert split.limit == pytest.approx(
        -split.density.entropy + math.log(math.prod(split.scale.tolist()))
    )
    log_p = split.log_density(split.test)
    # in expectation the scaled density reaches the limit of these very units
    se = log_p.std().item() / math.sqrt(len(log_p))
    assert abs(log_p.mean().item() - split.limit) <= 4 * se + 1e-5
    # and it still integrates to one over the scaled plane
    x, volume = plane_grid(name)
    mass = split.log_density((x - split.shift) / split.scale).exp() * volume
    assert (mass.sum() / split.scale.prod()).item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name", toy2d.NAMES)
def test_a_seed_fixes_the_draw_and_splits_are_independent(name):
    a, b, c = (toy2d.load(name, seed=seed) for seed in (7, 7, 8))
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(a, part), getattr(b, part))
        assert not torch.equal(getattr(a, part), getattr(c, part))
        assert getattr(a, part).dtype == torch.float32
    assert a.log_density(a.test[:6].reshape(2, 3, 2)).shape == (2, 3)
    assert (len(a.train), len(a.val), len(a.test)) == (7000, 1000, 2000)
    assert torch.equal(a.train, toy2d.load(name, seed=7, n_val=50, n_test=60).train)
    assert not torch.equal(a.train[:1000], a.val)
    assert torch.equal(a.draw(10, seed=1), b.draw(10, seed=1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: toy2d.load("moons"), "funnel, pinwheel"),
        (lambda: toy2d.load("funnel", n_val=1), "at least 2"),
        (lambda: toy2d.Funnel().log_density(torch.zeros(4, 3)), r"\(4, 3\)"),
    ],
)
def test_bad_input_names_cause_and_cure(call, message):
    with pytest.raises(DataError, match=message):
        call()
