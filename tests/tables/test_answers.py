"""Answers are those of the joint density, within the errors that they state."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from selfnorm import EnergyDensity, Schema
from selfnorm.chain import TableChain
from selfnorm.chain.drawing import picked
from selfnorm.columns import GAP, UNSEEN, PartValues
from selfnorm.errors import DataError
from selfnorm.tables import answers
from selfnorm.tables.answers import ChainAnswers, Draws, Effort, Estimate, Limits
from selfnorm.tables.events import Event
from selfnorm.tables.members import Member
from tests.chain.test_table_chain import coded, codes, mixed, shaken
from tests.tables.test_conditionals import KIND, mixture_of, normal_law

# sizes of parts, and options of the chains of finite tables
TABLES = [
    ((2, 3, 4), {}),
    ((5, 2, 3), {"orderings": 1}),
    ((3, 3, 2, 2), {"orderings": 3}),
    ((2, 2, 2, 2, 2), {}),
    ((4, 4, 4), {}),
    ((6, 5), {"orderings": 2}),
]
QUICK = {"method": "autoregressive", "hidden": 16, "max_steps": 10, "random_state": 0}
QUICK |= {"accuracy": 256}
LOUD = 4  # the table whose network is far from its own joint density


def finite(which: int) -> tuple[TableChain, Tensor]:
    """The chain of a finite table, and packed rows with gaps."""
    sizes, options = TABLES[which]
    parts, x = codes(sizes, 40)
    model = shaken(parts, x, **options)
    if which == LOUD:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    x[:, :, 0] = x[:, :, 0].where(torch.rand(x.shape[:2]) < 0.5, float(GAP))
    x[0, 0, 0], x[0, 1:, 0] = UNSEEN, GAP
    return model, model.columns.pack(x)[0]


def summed(model: TableChain, packed: Tensor, values: list[Tensor]) -> Tensor:
    """Log of the sum over all values ``(K, 4)`` of the gaps of packed rows, each alone."""
    found = []
    for row in packed:
        free = (row[:, 0] == GAP).nonzero()[:, 0].tolist()
        every = list(itertools.product(*(values[j] for j in free)))
        rows = row.repeat(len(every), 1, 1)
        if free:
            rows[:, free] = torch.stack([torch.stack(of_row) for of_row in every]).to(rows)
        log_seen = model.layout.log_seen[free].sum()
        found.append(torch.logsumexp(model.log_prob(rows), 0) - log_seen)
    return torch.stack(found)


def within_errors(found: Tensor, se: Tensor, truth: Tensor, sigmas: float) -> float:
    """Share of log-densities that are as near the truth as their errors say."""
    return float(((found - truth).abs() <= sigmas * se + 1e-4).double().mean())


def test_marginals_of_finite_tables_are_the_sums_over_all_completions(monkeypatch):
    drawn = []
    for which, (sizes, _) in enumerate(TABLES):
        model, packed = finite(which)
        values = [torch.nn.functional.pad(torch.arange(k).unsqueeze(1), (0, 3)) for k in sizes]
        truth, seen = summed(model, packed, values), packed[..., 0] != GAP
        engine, effort = ChainAnswers(model), Effort(total=8192)
        monkeypatch.undo()
        draws = engine.draws(packed, seen, effort, Limits())
        found, se = engine.log_marginal(draws)
        assert draws.exact.all()
        assert torch.allclose(found, truth, atol=1e-4)
        assert not se.any()
        monkeypatch.setattr(answers, "MAX_COMPLETIONS", 1)
        draws = engine.draws(packed, seen, effort, Limits())
        assert not draws.exact[~seen.all(1)].any()
        drawn.append(torch.stack([*engine.log_marginal(draws), truth]))
    found, se, truth = torch.cat(drawn, 1)
    assert se.max() < 0.5
    assert within_errors(found, se, truth, 3) >= 0.99


@pytest.fixture(scope="module")
def numbers() -> tuple[TableChain, Tensor]:
    """A chain of labels, of whole numbers with a mass in a cell, of numbers with a mass."""
    parts, x = mixed()
    model = shaken(parts, x)
    return model, model.columns.pack(x[:4])[0]


def values_of(model: TableChain) -> tuple[list[Tensor], Tensor]:
    """Packed cells of the values of the three parts, of the last one those at a grid's points,
    and the log of the widths of the last ones."""
    counts, grid = torch.arange(-60, 120), torch.sinh(torch.linspace(-4, 4, 401)).double()
    rows = coded(
        (torch.zeros(180), torch.zeros(180)), (counts != 0, counts), (torch.zeros(180),) * 2
    )
    whole = model.columns.pack(rows)[0][:, 1]
    label = torch.nn.functional.pad(torch.arange(3.0).unsqueeze(1), (0, 3)).double()
    size = torch.stack([torch.ones(401), grid, grid, grid], 1).double()
    widths = torch.zeros(402).double()
    widths[1:] = torch.gradient(grid)[0].log()
    return [label, whole, torch.cat([torch.zeros(1, 4).double(), size])], widths


def test_a_gap_among_whole_numbers_with_a_mass_is_the_sum_over_all_of_them(numbers):
    model, packed = numbers
    values, _ = values_of(model)
    packed = packed.clone()
    packed[:, 1, 0] = GAP
    truth = summed(model, packed, values)
    engine = ChainAnswers(model)
    assert torch.allclose(engine.along(packed, 1).double(), truth, atol=2e-3)
    packed[:, 0, 0] = GAP
    truth = summed(model, packed, values)
    draws = engine.draws(packed, packed[..., 0] != GAP, Effort(total=8192), Limits())
    found, se = engine.log_marginal(draws)
    assert se.max() < 0.2
    assert within_errors(found, se, truth, 4) == 1


def test_a_gap_among_numbers_with_a_mass_is_the_integral(numbers):
    model, packed = numbers
    values, widths = values_of(model)
    packed = packed.clone()
    packed[:, 2, 0] = GAP
    every = packed.repeat_interleave(402, 0)
    every[:, 2] = values[2].repeat(len(packed), 1)
    truth = torch.logsumexp(model.log_prob(every).view(-1, 402) + widths, 1)
    engine, seen = ChainAnswers(model), packed[..., 0] != GAP
    assert torch.allclose(engine.along(packed, 2).double(), truth, atol=5e-3)
    draws = engine.draws(packed, seen, Effort(total=8192), Limits())
    found, se = engine.log_marginal(draws)
    assert se.max() < 0.2
    assert within_errors(found, se, truth, 4) == 1


def test_all_that_is_unknown_has_a_mass_of_one(numbers):
    model, _ = numbers
    engine, seen = ChainAnswers(model), torch.zeros(3, 3, dtype=torch.bool)
    blank = torch.zeros(3, 3, 4).double()
    blank[..., 0] = GAP
    draws = engine.draws(blank, seen, Effort(total=8192), Limits())
    found, se = engine.log_marginal(draws)
    assert se.max() < 0.2
    assert within_errors(found, se, torch.zeros(3), 4) == 1


BOXES = [  # whether the mass at zero is allowed, and the interval of whole numbers
    (False, (2.5, 3.5)),
    (True, (-0.5, 0.5)),
    (True, (-0.5, 4.5)),
    (False, (0.5, 2.5)),
    (True, (-1e3, 2.5)),
]


@pytest.mark.parametrize(("at_zero", "ends"), BOXES)
def test_probabilities_of_cells_and_masses_are_those_of_all_their_rows(at_zero, ends):
    parts, x = mixed()
    model = shaken(parts[:2], x[:, :2])
    low, high = ends
    counts = torch.arange(-100, 150).repeat(2)
    kind = torch.tensor([0, 2]).repeat_interleave(250)
    log_p = model.log_prob(model.columns.pack(coded((kind, 0 * kind), (counts != 0, counts)))[0])
    obey = (low < counts) & (counts < high) & (at_zero | (counts != 0))
    truth = torch.logsumexp(log_p[obey], 0) - model.layout.log_seen.sum()
    kinds = PartValues(np.array([True, False, True]), ())
    limits = Limits([kinds, PartValues(np.array([at_zero]), (ends,))])
    draws = ChainAnswers(model).within(Effort(), limits, whole=False, seed=0)
    found, se, _ = draws.log_mean()
    assert se <= 0.05
    assert abs(float(found - truth)) < 4 * se + 0.01


def test_intervals_of_probabilities_cover():
    """Of all sets of values of a table of five parts, the sums over their rows."""
    sizes, options = TABLES[3]
    parts, x = codes(sizes, 40)
    model = shaken(parts, x, **options)
    rows = torch.tensor(list(itertools.product(*map(range, sizes))), dtype=torch.float64)
    p = model.log_prob(model.columns.pack(torch.stack([rows, 0 * rows], -1))[0]).exp()
    p, engine, covered = p / p.sum(), ChainAnswers(model), []
    for seed in range(60):
        chosen = torch.rand(len(sizes), max(sizes)) < 0.6
        chosen[:, 0] |= ~chosen.any(1)
        of_rows = torch.stack([chosen[j][rows[:, j].long()] for j in range(len(sizes))])
        truth = float(p[of_rows.all(0)].sum())
        allowed = [PartValues(chosen[j].numpy(), ()) for j in range(len(sizes))]
        draws = engine.within(Effort(total=512), Limits(allowed), whole=False, seed=seed)
        log_p, se, ess = (float(figure[0]) for figure in draws.log_mean())
        value = math.exp(log_p)
        estimate = Estimate.of_probability(value, se * value, ess, 0.0)
        covered.append(estimate.low - 1e-6 <= truth <= estimate.high + 1e-6)
    assert np.mean(covered) >= 0.9


# -- densities of tables ------------------------------------------------------------------------


def test_what_varies_between_orders_alone_is_no_error():
    row, stratum = torch.zeros(8, dtype=torch.long), torch.arange(2).repeat_interleave(4)
    log_w = torch.tensor([1.0, 1, 1, 1, 3, 3, 3, 3]).log()
    none = torch.zeros(1, dtype=torch.bool)
    draws = Draws(row, torch.zeros(8, 1, 4), log_w, none, log_w, stratum)
    log_mean, se, ess = draws.log_mean()
    assert log_mean.exp() == pytest.approx(2.0)
    assert se == pytest.approx(0.0, abs=1e-7)
    assert ess == pytest.approx(16**2 / 40)
    pooled = draws._replace(stratum=torch.zeros_like(stratum)).log_mean()[1]
    assert pooled == pytest.approx((40 / 16**2 - 1 / 8) ** 0.5)


def test_outcomes_are_picked_in_proportion_and_never_without_a_share():
    torch.manual_seed(0)
    drawn = picked(torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]).expand(4000, 5))
    assert set(drawn.tolist()) == {1, 3}
    assert (drawn == 3).double().mean() == pytest.approx(0.75, abs=0.03)


@pytest.fixture(scope="module")
def normal() -> EnergyDensity:
    """Of 400 rows of a normal distribution with a correlation of 0.6, seven parts in ten simple."""
    x = np.random.default_rng(0).normal(size=(400, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
    table = {"a": x[:, 0], "b": x[:, 1]}
    density = EnergyDensity(**QUICK | {"accuracy": 1024, "max_steps": 30}).fit(table)
    simple = normal_law(density, torch.from_numpy(density.schema_.encode(table)[0]))
    two = [Member("chain", 0.3, 0.0), Member(KIND.name, 0.7, 0.0)]
    density.distribution_ = mixture_of(density, two, [simple])
    return density


def test_conditionals_are_the_quotients_of_the_joint_density(normal):
    at = np.linspace(-5, 6, 221)
    joint = np.exp(normal.score_samples({"a": np.full(221, 1.5), "b": at}))
    alone = float(np.exp(normal.score_samples({"a": [1.5], "b": [np.nan]}))[0])
    assert np.trapezoid(joint, at) == pytest.approx(alone, rel=0.01)
    mean, sd = 0.9, 0.8
    truth = np.exp(-0.5 * ((at - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
    assert np.trapezoid(np.abs(joint / alone - truth), at) < 0.3
    for low in (0.0, 1.0):
        expected = np.trapezoid(joint[at >= low], at[at >= low]) / np.trapezoid(joint, at)
        found = normal.probability(f"b >= {low}", given={"a": 1.5})
        assert found.reliable
        assert abs(found.value - expected) < 4 * found.se + 0.01


@pytest.mark.parametrize("event", ["a < b", "a > 0.5 and b < 0.2", "a - b > 0.7 and a > 0"])
def test_probabilities_are_the_shares_of_the_samples_of_the_density(normal, event):
    drawn = normal.sample(20_000, random_state=1)
    share = Event.of(normal.schema_, event).holds(normal.schema_.cells(drawn)).mean()
    found = normal.probability(event)
    assert found.reliable
    assert found.se < 0.1 * found.value
    assert abs(found.value - share) < 4 * math.hypot(found.se, math.sqrt(share / 20_000))


def test_rare_events_are_as_sure_as_others(normal):
    nodes, weights = np.polynomial.legendre.leggauss(8)
    scores = normal.score_samples({"a": 5.3 + 1.5 * nodes, "b": np.full(8, np.nan)})
    expected = float(1.5 * weights @ np.exp(scores))  # from 3.8 to 6.8
    found = normal.probability("a > 3.8")
    assert found.value < 1e-3
    assert found.se < 0.1 * found.value
    assert abs(found.value - expected) < 4 * found.se


def shop(n: int = 200) -> pd.DataFrame:
    """Dates in order, an exact sum, labels and gaps."""
    rng = np.random.default_rng(0)
    start = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 200, n), "D")
    net = rng.gamma(3, 20, n).round(2)
    tax = (net * rng.choice([0.07, 0.19], n)).round(2)
    x = rng.normal(size=n)
    return pd.DataFrame(
        {
            "kind": rng.choice(["a", "b", "c"], n),
            "start": start,
            "end": start + pd.to_timedelta(rng.integers(0, 60, n), "D"),
            "net": net,
            "tax": tax,
            "total": (net + tax).round(2),
            "x": np.where(rng.random(n) < 0.3, np.nan, x),
        }
    )


RULES = ["end >= start", "tax < net", "x is missing or x < 4"]


@pytest.fixture(scope="module")
def ruled() -> EnergyDensity:
    table = shop()
    density = EnergyDensity(
        schema=Schema.detect(table, model_gaps=True),
        **QUICK,
    )
    return density.fit(table, rules=RULES)


def obeys(table: pd.DataFrame) -> np.ndarray:
    """Which rows obey the rules, and have the sum."""
    ordered = (table["end"] >= table["start"]) & (table["tax"] < table["net"])
    total = (table["total"] - table["net"] - table["tax"]).abs() < 0.006
    return (ordered & total & ~(table["x"] >= 4)).to_numpy()


@pytest.mark.parametrize("missing", [False, True])
def test_samples_obey_rules_and_what_is_asked(ruled, missing):
    where = "kind in ['a', 'b'] and total > net + 3"
    drawn = ruled.sample(100, random_state=0, where=where, missing=missing)
    assert len(drawn) == 100
    assert obeys(drawn).all()
    assert drawn["kind"].isin(["a", "b"]).all()
    assert (drawn["total"] > drawn["net"] + 3).all()
    assert drawn["x"].isna().any() == missing


def test_rules_hold_after_a_model_is_loaded(ruled, tmp_path):
    ruled.save(tmp_path / "model")
    again = EnergyDensity.load(tmp_path / "model")
    assert again.rules_ == tuple(RULES)
    drawn = again.sample(50, random_state=0, given={"kind": "c"})
    pd.testing.assert_frame_equal(drawn, ruled.sample(50, random_state=0, given={"kind": "c"}))
    assert obeys(drawn).all()
    assert (drawn["kind"] == "c").all()


def test_imputations_obey_rules_and_what_is_seen_stays(ruled):
    table = shop().head(40)
    gaps = table.assign(x=table["x"].fillna(0.0))
    gaps.loc[::2, "end"] = pd.NaT
    gaps.loc[::3, "kind"] = None
    gaps.loc[1::2, ["net", "tax", "total"]] = np.nan
    filled = ruled.impute(gaps, random_state=0)
    assert not filled.isna().any(axis=None)
    assert obeys(filled).all()
    for name in table:
        seen = gaps[name].notna()
        assert (filled.loc[seen, name] == gaps.loc[seen, name]).all()


def test_a_rule_that_a_table_breaks_is_refused_by_its_rows():
    table = shop(60)
    table.loc[3, "tax"] = np.nan  # nothing is known of this row
    table.loc[7, "tax"] = 2 * table.loc[7, "net"]
    with pytest.raises(DataError, match=r"1 row of the table, first in row 7, break"):
        EnergyDensity(max_steps=1).fit(table, rules=RULES)
    with pytest.raises(DataError, match="text or a dict"):
        EnergyDensity(max_steps=1).fit(table, rules=[lambda frame: frame["x"] > 0])


def test_events_beyond_the_rows_are_answered_by_the_density():
    rng = np.random.default_rng(0)
    table = {"k": rng.choice(["u", "v"], 300), "x": rng.normal(size=300), "y": rng.normal(size=300)}
    density = EnergyDensity(**QUICK).fit(table, rules=["x < 400"])
    far = max(table["x"].max(), table["y"].max()) + 0.5
    one, other, either, sure = density.probability(
        [f"x > {far}", f"y > {far}", f"x > {far} or y > {far}", "x < 400"]
    )
    assert max(one.low, other.low) < either.high
    assert either.low < one.high + other.high
    assert 0 < one.value < either.value
    assert (sure.low, sure.value, sure.high) == (1, 1, 1)
    beyond = density.expect("x", where=f"x > {far}")
    assert far < beyond.quantiles[0.05] < beyond.mean.value
    assert (density.sample(5, where=f"x > {far}", random_state=0)["x"] > far).all()


@pytest.fixture(scope="module")
def gappy() -> EnergyDensity:
    """Of labels, and of numbers that are missing in three rows of ten."""
    table = shop()[["kind", "x"]]
    density = EnergyDensity(schema=Schema.detect(table, model_gaps=True), **QUICK)
    return density.fit(table, rules=["x is missing or x < 4"])


def test_gaps_are_events(gappy):
    found = gappy.probability(["x is missing", "x is missing or x < 0", "not x is missing"])
    x = shop()["x"]
    for estimate, share in zip(found, [x.isna(), ~(x >= 0), x.notna()], strict=True):
        assert estimate.reliable
        assert abs(estimate.value - share.mean()) < 0.15
    assert found[0].value + found[2].value == pytest.approx(1, abs=0.1)
    drawn = gappy.sample(100, random_state=0, where="x is missing or x > 1", missing=True)
    assert (drawn["x"].isna() | (drawn["x"] > 1)).all()
    assert drawn["x"].isna().any()
    with pytest.raises(DataError, match="too few obey"):
        gappy.sample(2, random_state=0, where="x is missing")


REFUSED = {
    "knd == 'a'": "'kind'",
    "x > 'much'": "'much' is none",
    "kind > 3": "holds labels",
    "x > 1" + " and x > 1" * 1000: "characters",
    "__import__('os').system('true') == 0": "called",
}


@pytest.mark.parametrize("event", REFUSED, ids=[text[:16] for text in REFUSED])
def test_what_cannot_be_asked_is_refused(gappy, event):
    for ask in (
        lambda: gappy.probability(event),
        lambda: gappy.probability("x > 0", given=event),
        lambda: gappy.sample(2, where=event),
        lambda: gappy.expect("x", where=event),
    ):
        with pytest.raises(DataError, match=REFUSED[event]):
            ask()


@pytest.mark.parametrize("event", ["x > 1 and x < 0", "kind == 'a' and kind == 'b'", "x > 5"])
def test_what_never_happens_has_an_upper_limit(gappy, event):
    found = gappy.probability(event)
    assert found.value == found.low == 0
    assert 0 < found.high < 0.05
    assert not found.reliable


def test_what_never_happens_cannot_be_given(gappy):
    with pytest.raises(DataError, match="no probability"):
        gappy.probability("x > 0", given="x > 1 and x < 0")


# -- one energy ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def joint() -> tuple[EnergyDensity, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(300, 2)) @ np.array([[1.0, 0.9], [0.0, 0.5]])
    density = EnergyDensity(method="joint", random_state=0, max_steps=30)
    density.fit({"a": x[:, 0], "b": x[:, 1]})
    drawn = density.sample(20_000, random_state=5)
    return density, np.stack([drawn["a"], drawn["b"]], 1)


def test_one_energy_answers_as_its_samples_do(joint):
    density, drawn = joint
    a, b = drawn.T
    shares = {"a > 1": a > 1, "a < b": a < b, "a > 0 and b < 0": (a > 0) & (b < 0)}
    for event, share in shares.items():
        found = density.probability(event)
        assert found.reliable
        assert abs(found.value - share.mean()) < 0.02
    found = density.probability("a < b", given="a > 0")
    assert abs(found.value - (a < b)[a > 0].mean()) < 0.04
    at = np.linspace(-4, 6, 401)
    line = np.exp(density.score_samples({"a": np.ones(401), "b": at}))
    expected = np.trapezoid(line[at > 1], at[at > 1]) / np.trapezoid(line, at)
    assert abs(density.probability("b > 1", given={"a": 1.0}).value - expected) < 0.02


def test_one_energy_is_sampled_and_expected_under_an_event(joint):
    density, (a, b) = joint[0], joint[1].T
    drawn = density.sample(500, random_state=0, where="a > 0 and b < a")
    assert ((drawn["a"] > 0) & (drawn["b"] < drawn["a"])).all()
    expected = a[(a > 0) & (b < a)]
    assert abs(drawn["a"].mean() - expected.mean()) < 0.15
    found = density.expect("a", where="a > 0 and b < a").mean
    assert abs(found.value - expected.mean()) < 4 * found.se + 0.03
