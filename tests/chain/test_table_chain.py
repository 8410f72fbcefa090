"""Chains over parts of every kind: probabilities add to one, samples and conditionals agree."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from selfnorm.chain import TableChain, layout
from selfnorm.columns import UNSEEN, CodedColumns, Part

SMALL = {"hidden": 16, "components": 3, "context": 4, "energy_hidden": 8, "embedding": 4}


def shaken(parts, x=None, **options):
    """A chain with every weight moved, so that nothing is zero by construction."""
    torch.manual_seed(0)
    model = TableChain(parts, **{**SMALL, "orderings": 2, **options}).double()
    if x is not None:
        model.set_columns(CodedColumns(parts, model.columns.n_knots).double().fit(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    if model.lines is not None:
        packed, _ = model.columns.pack(x)
        model.start_at_lines(packed, torch.ones(len(x)))
    return model.eval()


def coded(*columns):
    """Rows ``(n, p, 2)`` from a pair (codes, numbers) per part."""
    return torch.stack(
        [torch.stack([torch.as_tensor(v).double() for v in c], -1) for c in columns], 1
    )


def codes(sizes, n=200):
    """Parts of some levels, and rows of which each part depends on the one before."""
    torch.manual_seed(2)
    parts = [
        Part(j, f"c{j}", k, unseen=0.01, values=tuple(map(float, range(k))))
        for j, k in enumerate(sizes)
    ]
    places = [torch.randint(sizes[0], (n,))]
    for k in sizes[1:]:
        places.append((places[-1] + (torch.rand(n) < 0.3)) % k)
    return parts, coded(*((place, 0 * place) for place in places))


@pytest.fixture(params=["", "lines", "ordered"])
def options(request, monkeypatch):
    """Options of chains: numbers relative to lines, levels by mixtures over them."""
    monkeypatch.setattr(layout, "ORDERED_FROM", 2)
    return {request.param: True} if request.param else {}


def test_masses_of_all_rows_of_a_finite_table_add_to_one(options):
    sizes = (2, 3, 4)
    model = shaken(*codes(sizes), **options)
    assert model.layout.ordered.tolist() == ([1, 2] if "ordered" in options else [])
    outcomes = [[*range(k), UNSEEN] for k in sizes]
    rows = torch.tensor(list(itertools.product(*outcomes)), dtype=torch.float64)
    packed, _ = model.columns.pack(torch.stack([rows, torch.zeros_like(rows)], -1))
    assert float(model.log_prob(packed).exp().sum()) == pytest.approx(1, abs=1e-6)


def mixed(n=400):
    """A category, whole numbers with a point mass at 0, and a number with a mass at 1.5."""
    torch.manual_seed(1)
    kind = torch.randint(3, (n,))
    count = torch.where(torch.rand(n) < 0.3, 0, torch.poisson(5.0 + 3.0 * kind))
    size = torch.where(torch.rand(n) < 0.2, 1.5, torch.randn(n) * 0.7 + kind)
    parts = [
        Part(0, "kind", 3, unseen=0.01, values=(0.0, 1.0, 2.0)),
        Part(1, "count", 1, rest=True, step=1.0, values=(0.0,), resolution=1.0),
        Part(2, "size", 1, rest=True, values=(1.5,)),
    ]
    return parts, coded((kind, 0 * kind), (count != 0, count), (size != 1.5, size * (size != 1.5)))


@pytest.mark.parametrize("lines", [False, True])
def test_conditionals_of_every_kind_add_to_one(lines):
    parts, x = mixed()
    model = shaken(parts, x, lines=lines)
    given = ~torch.eye(3, dtype=torch.bool)

    def probabilities(place, values):
        rows = x[:1].repeat(len(values), 1, 1)
        rows[:, place] = torch.tensor(values, dtype=torch.float64)
        return model.log_prob(model.columns.pack(rows)[0], given[place], n_nodes=512).exp()

    assert float(probabilities(0, [(k, 0) for k in (0, 1, 2, UNSEEN)]).sum()) == pytest.approx(1)
    counts = probabilities(1, [(0, 0), *((1, k) for k in range(-150, 151) if k != 0)])
    assert float(counts.sum()) == pytest.approx(1, abs=1e-3)
    scores = torch.sinh(torch.linspace(-6, 6, 1501)).double()  # where the density is smooth
    packed, _ = model.columns.pack(x[:1].repeat(len(scores), 1, 1))
    packed[:, 2, 0], packed[:, 2, 1] = 1, scores
    density = model.log_prob(packed, given[2], n_nodes=512).exp()
    total = torch.trapezoid(density, scores) + probabilities(2, [(0, 0)]).sum()
    assert float(total) == pytest.approx(1, abs=1e-3)


def test_samples_follow_the_masses(options):
    sizes = (2, 3)
    parts, x = codes(sizes)
    parts = [replace(part, unseen=1e-6) for part in parts]
    model = shaken(parts, x, **options)
    rows = torch.tensor(list(itertools.product(*map(range, sizes))), dtype=torch.float64)
    packed, _ = model.columns.pack(torch.stack([rows, torch.zeros_like(rows)], -1))
    expected = model.log_prob(packed).exp() * 20_000
    drawn = model.sample(20_000, seed=0)[..., 0]
    found = torch.tensor([float((drawn == row).all(-1).sum()) for row in rows])
    assert float(((found - expected) ** 2 / expected).sum()) < 20.5  # chi-squared, 5: one in 1,000


def test_samples_of_cells_follow_the_masses():
    parts, x = mixed()
    model = shaken(parts[1:2], x[:, 1:2])
    numbers = torch.arange(-5, 30)
    rows = coded((numbers != 0, numbers))
    expected = model.log_prob(model.columns.pack(rows)[0]).exp()
    packed = model.sample(20_000, seed=0, n_candidates=128)
    drawn = model.columns.unpack(packed[..., 0], packed[..., 1])[:, 0, 1]
    found = torch.tensor([float((drawn == k).sum()) for k in numbers]) / 20_000
    assert float((found - expected).abs().max()) < 0.015


def test_a_chain_begins_at_the_lines_of_its_columns():
    d, n = 4, 400
    walk = torch.randn(n, d, dtype=torch.float64).cumsum(1)
    parts = [Part(j, f"c{j}", 0, rest=True) for j in range(d)]
    x = coded(*((0 * column, column) for column in walk.T))
    sizes = SMALL | {"components": 16, "n_knots": 2, "orderings": 2}
    model = TableChain(parts, **sizes, lines=True).double()
    model.set_columns(CodedColumns(parts, 2).double().fit(x, straight=True))
    packed, slope = model.columns.pack(x)
    model.start_at_lines(packed, torch.ones(n)).eval()
    with torch.no_grad():
        model.mixture_head.weight.zero_()
    truth = -0.5 * d * (1 + math.log(2 * math.pi))
    log_p = model.log_prob(packed[:200]) + slope[:200].sum(-1)
    assert float(log_p.mean()) == pytest.approx(truth, abs=0.5)
    drawn = model.sample(2000, seed=0)
    drawn = model.columns.unpack(drawn[..., 0], drawn[..., 1])[..., 1]
    assert float(drawn.diff(dim=1).std()) == pytest.approx(1, abs=0.1)


def test_a_chain_draws_by_the_lines_that_it_scores_by():
    d, n = 3, 300
    walk = torch.randn(n, d, dtype=torch.float64).cumsum(1)
    parts = [Part(j, f"c{j}", 0, rest=True) for j in range(d)]
    model = shaken(parts, coded(*((0 * column, column) for column in walk.T)), lines=True)
    kept = model.columns.pack(coded(*((0 * column, column) for column in walk.T)))[0][:1]
    keep = torch.tensor([True, False, True])
    drawn = model.sample(20_000, kept.expand(20_000, -1, -1), keep, seed=0)[:, 1, 1]
    nodes = torch.linspace(-8, 8, 4001, dtype=kept.dtype)
    rows = kept.repeat(len(nodes), 1, 1)
    rows[:, 1, 1] = nodes
    density = model.log_prob(rows, keep).exp()
    below = (density * (nodes[1] - nodes[0])).cumsum(0)
    expected = below[torch.searchsorted(nodes, drawn.contiguous()).clamp_max(len(nodes) - 1)]
    assert float((expected.sort().values - torch.linspace(0, 1, 20_000)).abs().max()) < 0.02


def test_the_density_of_a_column_is_that_of_its_conditional(options):
    parts, x = mixed(50)
    model = shaken(parts, x, **options)
    packed, _ = model.columns.pack(x)
    for part in range(3):
        density = model.column_density(packed, part, n_nodes=256)
        log_sum, log_seen = torch.logsumexp(density.log_codes, -1), model.layout.log_seen[part]
        assert torch.allclose(log_sum, log_seen, atol=1e-6)
        given = torch.arange(3) != part
        own = model.log_prob(packed, given, n_nodes=256)
        code = packed[:, part, 0].long()
        found = density.log_codes.gather(1, code[:, None])[:, 0]
        number = code == parts[part].n_codes
        found = torch.where(number, found + (density.log_own if part else 0), found)
        plain = number | torch.tensor(part != 1)  # a point mass at a cell is both
        assert torch.allclose(own[plain], found[plain], atol=1e-3)
        if part:
            assert torch.allclose(
                torch.logsumexp(density.log_weights, 0), torch.zeros(50).double(), atol=1e-6
            )


def test_cells_that_were_drawn_are_not_learned_and_their_rows_not_masked():
    parts, x = mixed(50)
    model = shaken(parts, x, masked=1.0, drop=0.0).train()
    packed, weights = model.columns.pack(x)[0], torch.ones(50, 2)
    learned = torch.ones(50, 3, dtype=torch.bool)
    learned[:, 1] = False
    log_q = model.at_batch((packed, weights, learned), 0).log_q
    whole = model.at_rows(packed, exact=False).log_q
    assert torch.equal(log_q, whole * learned)
    masked = model.at_batch((packed, weights, torch.ones_like(learned)), 0).log_q
    assert not torch.equal(masked, whole)


def test_numbers_are_drawn_within_the_range_that_was_seen():
    parts, x = mixed()
    model = shaken(parts[2:], x[:, 2:])
    packed = model.sample(2000, seed=0, within=True)
    drawn = model.columns.unpack(packed[..., 0], packed[..., 1])[:, 0]
    numbers, seen = drawn[drawn[:, 0] == 1, 1], x[x[:, 2, 0] == 1, 2, 1]
    assert float(numbers.min()) >= float(seen.min()) - 1e-9
    assert float(numbers.max()) <= float(seen.max()) + 1e-9
    # what lies beyond comes at the ends
    free, (low, high) = model.sample(2000, seed=0), model.columns.span[0]
    assert bool(((free[:, 0, 1] < low) | (free[:, 0, 1] > high)).any())
    assert torch.equal(free[:, 0, 1].clamp(low, high), packed[:, 0, 1])


def test_orders_in_another_sequence_are_the_same_distribution():
    parts, x = mixed(50)
    model = shaken(parts, x)
    packed = model.columns.pack(x)[0]
    turned = model.of_orders([1, 0])
    assert torch.equal(turned.trunk.ranks, model.trunk.ranks.flip(0))
    torch.testing.assert_close(turned.log_prob(packed), model.log_prob(packed))
    by_order = torch.stack([turned.of_orders([r]).log_prob(packed) for r in range(2)])
    expected = torch.stack([model.of_orders([r]).log_prob(packed) for r in (1, 0)])
    torch.testing.assert_close(by_order, expected)
    torch.testing.assert_close(torch.logsumexp(by_order, 0) - math.log(2), model.log_prob(packed))


def test_a_part_of_one_value_keeps_its_code_and_leaves_room_for_others():
    parts, x = codes([1, 3])
    model = shaken(parts)
    assert set(model.sample(50, seed=0)[:, 0, 0].tolist()) == {0.0}
    outcomes = [[(a, 0), (b, 0)] for a in (0, UNSEEN) for b in (0, 1, 2, UNSEEN)]
    packed = model.columns.pack(torch.tensor(outcomes).double())[0]
    assert float(model.log_prob(packed).exp().sum()) == pytest.approx(1, abs=1e-6)
    density = model.column_density(model.columns.pack(x[:2])[0], 0)
    assert density.log_codes.exp().flatten().tolist() == pytest.approx([0.99, 0.99])
