"""Tables of every kind: what comes out is as it came in, and every answer is a probability."""

import itertools
import math
import pickle

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from selfnorm import EnergyDensity, EnergyRegressor, Schema
from selfnorm.columns import GAP
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.tables import RegressorNetwork, members, training

QUICK = {"max_steps": 30, "random_state": 0, "hidden": 16}


def mixed(n=300, seed=0):
    """Text, a number with gaps, counts, a zero-inflated number, a date, a boolean."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(["a", "b", "c"], n, p=[0.5, 0.3, 0.2])
    frame = pd.DataFrame(
        {
            "kind": kind,
            "size": rng.normal(size=n) + 3 * (kind == "b"),
            "count": rng.poisson(40, n),
            "zero": np.where(rng.random(n) < 0.4, 0.0, rng.gamma(2, size=n)),
            "day": pd.Timestamp("2021-03-01") + pd.to_timedelta(rng.integers(0, 400, n), "D"),
            "flag": rng.random(n) < 0.3,
        }
    )
    frame.loc[::7, "size"] = np.nan
    frame.loc[::5, "kind"] = None
    return frame


@pytest.fixture(scope="module")
def frame():
    return mixed()


@pytest.fixture(scope="module")
def density(frame):
    return EnergyDensity(**QUICK).fit(frame)


def test_rows_one_by_one_have_the_scores_of_all_at_once(density, frame):
    frame = frame.assign(day=frame["day"].mask(frame.index % 4 == 0))
    alone = [density.score_samples(frame.iloc[[i]])[0] for i in range(8)]
    scores, errors = (of[:8] for of in density.log_prob(frame[:40], return_std=True))
    complete = frame[:8].notna().all(axis=1).to_numpy()
    assert (errors[complete] == 0).all()
    assert not complete.all()
    assert (np.abs(alone - scores) <= 1e-5 + 6 * errors).all()


def test_a_table_of_every_kind_is_fitted_scored_and_drawn(density, frame):
    assert density.method_ == "autoregressive"
    some = frame.iloc[:80]
    scores = density.score_samples(some)
    lower = density.bounds(some, n_samples=300, random_state=0).lower
    assert lower == pytest.approx(scores.mean(), abs=1e-2)
    assert density.lower_bound_ == pytest.approx(scores.mean(), abs=1.0)
    assert density.consistency_.keys() == {"conditionals", "orders"}
    drawn = density.sample(500, random_state=0)
    assert (drawn.dtypes == frame.dtypes).all()
    assert list(drawn) == list(frame)
    assert not drawn.isna().any().any()
    assert set(drawn["kind"]) == {"a", "b", "c"}
    assert (drawn["zero"] == 0).mean() == pytest.approx(0.4, abs=0.1)
    assert drawn["day"].between("2020-01-01", "2023-06-01").mean() > 0.95
    assert (drawn["count"] == drawn["count"].round()).all()


def odd_names(frame):
    return frame.set_axis(pd.Index([None, 1, b"b"], dtype=object), axis=1)


@pytest.mark.parametrize(
    "of",
    [
        pl.from_pandas,
        lambda f: pa.Table.from_pandas(f, preserve_index=False),
        lambda f: pa.RecordBatch.from_pandas(f, preserve_index=False),
        lambda f: f.to_dict("list"),
        lambda f: torch.tensor(f[["count", "zero"]].to_numpy(), requires_grad=True),
        lambda f: f.set_axis(["collect", "num_rows", "toarray"], axis=1),
        odd_names,
    ],
)
def test_frames_in_frames_out_from_a_folder_too(of, frame, tmp_path):
    table = of(frame[["kind", "count", "zero"]].head(30))
    density = EnergyDensity(max_steps=3, random_state=0, method="autoregressive").fit(table)
    density.save(tmp_path)
    again = EnergyDensity.load(tmp_path)
    scores = again.score_samples(table)
    assert scores.shape == (30,)
    assert np.array_equal(scores, density.score_samples(table))
    for answered in (again.explain(table), again.impute(table, random_state=0)):
        assert type(answered) is type(table)
    if isinstance(table, pl.DataFrame):
        assert np.array_equal(density.score_samples(table.lazy()), scores)
        odds = density.probabilities(table, "kind")
        assert type(odds) is type(density.sample(3, random_state=0)) is pl.DataFrame
        assert sum(odds[level] for level in "abc").to_numpy() == pytest.approx(1)


def test_answers_keep_the_index_of_a_frame(density, frame):
    part = frame.iloc[40:50]
    for found in (density.explain(part), density.probabilities(part, "flag")):
        assert found.index.equals(part.index)
    assert list(density.explain(part)) == list(frame)
    assert density.explain(part)["kind"].isna().equals(part["kind"].isna())
    assert density.probabilities(part, "flag")[True].between(0, 1).all()
    assert list(density.probabilities(part, "zero")) == [0.0, "other"]


def test_values_never_seen_stay_in_imputed_tables(density, frame):
    row = frame.iloc[[1]].assign(kind="new", size=np.nan)
    with pytest.warns(SelfnormWarning, match="never seen as 'new'"):
        filled = density.impute(row, random_state=0)
    assert filled["kind"].item() == "new"
    assert np.isfinite(filled["size"].item())


def test_another_unit_moves_scores_by_its_log_and_no_verdict():
    rng = np.random.default_rng(0)
    table = {
        "kind": rng.choice(["a", "b"], 120),
        "size": np.where(rng.random(120) < 0.3, 0.0, rng.gamma(3, size=120)),
        "other": np.where(rng.random(120) < 0.1, np.nan, rng.normal(size=120)),
    }
    halved = table | {"size": table["size"] * 0.5}
    a, b = (EnergyDensity(**QUICK).fit(t) for t in (table, halved))
    table, halved = ({name: of[20:30] for name, of in t.items()} for t in (table, halved))
    assert np.isnan(table["other"]).any()
    moved = b.score_samples(halved) - a.score_samples(table)
    assert np.allclose(moved, np.where(table["size"] == 0, 0.0, math.log(2)), atol=2e-3)
    assert np.allclose(b.decision_function(halved), a.decision_function(table), atol=5e-3)


def test_rows_are_completed_for_training_where_they_have_gaps_and_nowhere_else(density, frame):
    coded = torch.from_numpy(density.schema_.encode(frame)[0])
    chain, n = density.model_, len(frame)
    rows = chain.columns.pack(coded)[0].float(), torch.ones(n, chain.n_orderings)
    found, weights, learned = training._completed(chain, chain.columns, coded, rows, 0)
    as_they_are, filled = found.chunk(2)
    assert len(as_they_are) == len(filled) in range(2 * n, 8 * n + 1, n)
    assert len(weights) == 2 * len(filled)
    assert torch.equal(as_they_are[:n], rows[0])
    seen = rows[0][..., 0] != GAP
    assert not seen.all()
    assert torch.equal(learned.chunk(2)[1][:n], seen)
    assert torch.equal(filled[:n][seen], rows[0][seen])
    assert bool((filled[..., 0] != GAP).all())


def test_a_gap_makes_no_row_ordinary(density, frame):
    whole = frame.dropna()
    odd = whole.iloc[[0]].assign(count=90, zero=60.0)
    assert density.predict(odd) == -1
    assert density.predict(odd.assign(size=np.nan, kind=None, day=pd.NaT)) == -1
    some = whole[:50]
    complete, gaps = map(density.decision_function, (some, some.assign(day=pd.NaT)))
    assert np.mean(gaps) == pytest.approx(np.mean(complete), abs=np.std(complete))


# -- a finite table, where all can be added up ---------------------------------------------------


LEVELS = {"a": ["x", "y"], "b": ["p", "q", "r"], "c": [False, True]}


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(1)
    a = rng.choice(2, 400)
    b = np.where(rng.random(400) < 0.7, a, rng.choice(3, 400))
    c = rng.random(400) < 0.2 + 0.3 * b
    table = {"a": np.array(LEVELS["a"])[a], "b": np.array(LEVELS["b"])[b], "c": c}
    return EnergyDensity(max_steps=300, random_state=0).fit(table)


def every_row():
    columns = zip(*itertools.product(*LEVELS.values()), strict=True)
    return dict(zip(LEVELS, map(list, columns), strict=True))


def test_conditionals_add_to_one_and_are_near_those_of_the_joint(model):
    rows = every_row()
    joint = np.exp(model.score_samples(rows))
    own = np.exp(model.log_prob(rows, given=["a"]))
    of_a = np.array(rows["a"])
    brute = joint / np.array([joint[of_a == v].sum() for v in of_a])
    known = np.prod([1 - part.unseen for part in model.schema_.parts])
    assert joint.sum() == pytest.approx(known, abs=1e-6)
    assert model.bounds(rows).lower == model.bounds(rows).upper == pytest.approx(model.score(rows))
    reserved = (1 - 1 / 402) ** 2  # of "b" and "c"
    assert own == pytest.approx(brute * reserved, abs=1e-7)
    network = model.model_.log_prob(model.standardise(rows), [True, False, False]).exp().numpy()
    assert network[of_a == "x"].sum() == pytest.approx(reserved, abs=1e-6)
    assert np.abs(np.log(network / brute)) @ joint < 0.15
    assert model.consistency_["conditionals"] < 0.2
    marginal = np.exp(model.marginal(["a"]).score_samples({"a": ["x", "y"]}))
    assert marginal.sum() == pytest.approx(1 - 1 / 402)
    assert marginal == pytest.approx([joint[of_a == v].sum() for v in ("x", "y")], abs=0.05)
    assert set(model.marginal(["a", "c"]).sample(20, random_state=0)) == {"a", "c"}
    share = np.mean(np.array(model.sample(4000, random_state=0, given={"a": "x"})["c"]))
    assert share == pytest.approx(own[(of_a == "x") & np.array(rows["c"])].sum(), abs=0.04)


def test_a_marginal_of_categories_is_the_integral_of_the_joint():
    rng = np.random.default_rng(0)
    kind = rng.choice(list("abc"), 300, p=[0.6, 0.3, 0.1])
    size = rng.normal(size=300) + 6 * (kind == "b")
    model = EnergyDensity(random_state=0, max_steps=20, schema={"size": "continuous"})
    model.fit({"kind": kind, "size": size})
    at = np.linspace(-12, 18, 401)
    joint = [np.exp(model.score_samples({"kind": [k] * 401, "size": at})).sum() for k in "abc"]
    marginal = np.exp(model.marginal(["kind"]).score_samples({"kind": list("abc")}))
    assert marginal.sum() == pytest.approx(1 - 1 / 302, abs=2e-3)  # but for what was never seen
    assert marginal == pytest.approx(np.array(joint) * (at[1] - at[0]), abs=0.01)
    again = pickle.loads(pickle.dumps(model.marginal(["kind"])))
    assert np.array_equal(np.exp(again.score_samples({"kind": list("abc")})), marginal)
    assert again.columns == ("kind",)
    assert len(again.sample(5, random_state=0)["kind"]) == 5


def test_conditionals_of_one_category_are_sums_of_the_joint(density, frame):
    rows = frame.dropna().iloc[:30]
    others = [name for name in frame if name != "flag"]
    both = [
        density.log_prob(rows.assign(flag=v), given=others) for v in (True, False)
    ]  # of the joint: a sum over two rows
    reserved = 1 - density.schema_.parts[-1].unseen
    assert np.logaddexp(*both) == pytest.approx(math.log(reserved), abs=1e-6)
    assert density.log_prob(rows, given=["kind"]) == pytest.approx(
        density.log_prob(rows.iloc[::-1], given=["kind"])[::-1]
    )


def test_probabilities_are_those_of_the_joint(model, density, frame):
    rows = every_row()
    n = len(rows["a"])
    found = model.probabilities(rows, "b")
    joint = {v: np.exp(model.score_samples(rows | {"b": [v] * n})) for v in LEVELS["b"]}
    asked = {v: model.log_prob(rows | {"b": [v] * n}, given=["a", "c"]) for v in LEVELS["b"]}
    for level in LEVELS["b"]:
        assert found[level] == pytest.approx(joint[level] / sum(joint.values()), abs=1e-9)
        assert found[level] == pytest.approx(np.exp(asked[level]) / (1 - 1 / 402), abs=1e-6)
    some = frame.dropna().iloc[:30]  # numbers beside
    odds = np.subtract(*(density.score_samples(some.assign(flag=v)) for v in (True, False)))
    of_flag = density.probabilities(some, "flag")
    assert np.log(of_flag[True] / of_flag[False]).to_numpy() == pytest.approx(odds, abs=1e-6)


def test_explain_adds_up_the_least(model):
    rows = every_row()
    n = len(rows["a"])

    def network(table):
        log_p = model.model_.log_prob(model.standardise(table), [True, False, True])
        return log_p.exp().numpy()

    by_hand = {level: network(rows | {"b": [level] * n}) for level in LEVELS["b"]}
    own = network(rows)
    least = sum(np.where(p <= own + 1e-12, p, 0) for p in by_hand.values())
    assert model.explain(rows)["b"] == pytest.approx(least + 1 / 402, abs=1e-6)


def test_explain_names_the_cell_that_does_not_fit():
    rng = np.random.default_rng(0)
    kind = rng.choice(["a", "b"], 500)
    table = {
        "kind": kind,
        "size": rng.normal(size=500) + 6 * (kind == "b"),
        "x": rng.normal(size=500),
    }
    density = EnergyDensity(random_state=0, max_steps=150).fit(table)
    found = density.explain(
        {"kind": ["a", "a", None], "size": [0.0, 6.0, 0.1], "x": [0.1, 0.2, 9.0]}
    )
    assert min(found[name][0] for name in found) > 0.1
    assert found["size"][1] < 0.1 < found["x"][1]
    assert np.isnan(found["kind"][2])
    assert found["x"][2] < 0.01


def test_gaps_that_are_modelled_have_probabilities_and_are_drawn():
    rng = np.random.default_rng(0)
    kind = rng.choice(["x", "y"], 600)
    gone = rng.random(600) < np.where(kind == "x", 0.1, 0.6)
    table = {
        "kind": kind,
        "n": np.where(gone, np.nan, rng.choice(3, 600)),
        "told": np.where(gone, None, "yes"),
    }
    schema = Schema.detect(table, model_gaps=True)
    assert schema.fingerprint != Schema.detect(table).fingerprint
    density = EnergyDensity(max_steps=300, random_state=0, schema=schema).fit(table)
    rows = list(itertools.product(["x", "y"], [None, 0, 1, 2], [None, "yes"]))
    every = dict(zip(table, map(list, zip(*rows, strict=True)), strict=True))
    masses = np.exp(density.score_samples(every))
    reserved = np.prod([1 - part.unseen for part in schema.parts])
    assert masses.sum() == pytest.approx(reserved, abs=1e-6)
    drawn = density.sample(2000, random_state=0, missing=True)
    none = np.isnan(drawn["n"])
    for level, share in (("x", 0.1), ("y", 0.6)):
        assert none[np.array(drawn["kind"]) == level].mean() == pytest.approx(share, abs=0.08)
    assert (none == [v is None for v in drawn["told"]]).mean() > 0.95
    assert not np.isnan(density.sample(200, random_state=0)["n"]).any()
    assert not np.isnan(density.impute(table, random_state=0)["n"]).any()
    completed = density.sample(50, random_state=0, given={"kind": "y", "n": None})
    assert not np.isnan(completed["n"]).any()
    odds = density.probabilities({"kind": ["x", "y"]}, "n")
    assert sorted(odds) == [0, 1, 2]
    assert sum(odds.values()) == pytest.approx(1)
    some = {name: values[:30] for name, values in table.items()}
    assert not np.isnan(density.explain(some)["n"]).any()


def test_gaps_of_numbers_cells_and_dates_are_outcomes_too(frame):
    holes = frame.astype({"count": float})
    holes.loc[::4, ["count", "zero", "day"]] = None
    schema = Schema.detect(holes, model_gaps=True)
    assert [part.gap for part in schema.parts] == [True] * 6 + [False]
    again = schema.decode(schema.encode(holes)[0])
    pd.testing.assert_frame_equal(again, holes, check_dtype=False)
    density = EnergyDensity(**QUICK, schema=schema).fit(holes)
    bounds = density.bounds(holes[:60], n_samples=300, random_state=0)
    assert bounds.lower == pytest.approx(density.score(holes[:60]), abs=1e-2)
    drawn = density.sample(400, random_state=0, missing=True)
    assert drawn["count"].isna().mean() == pytest.approx(0.25, abs=0.1)
    assert (drawn.drop(columns="count").dtypes == holes.drop(columns="count").dtypes).all()


def test_rows_given_are_completed_in_turn(density):
    rows = {"kind": ["a", "b"], "size": [0.5, None]}
    drawn = density.sample(3, random_state=0, given=rows)
    assert drawn["kind"].tolist() == ["a"] * 3 + ["b"] * 3
    assert drawn["size"].tolist()[:3] == [0.5] * 3
    assert len(set(drawn["size"].tolist()[3:])) == 3
    with pytest.raises(DataError, match="never seen"), pytest.warns(SelfnormWarning):
        density.sample(1, given={"kind": "no such kind"})


@pytest.mark.parametrize(
    ("unit", "zone"), [("D", "Europe/Berlin"), ("h", None), ("min", "Europe/Berlin"), ("s", None)]
)
def test_dates_of_one_week_are_drawn_filled_and_scored(unit, zone, recwarn):
    rng = np.random.default_rng(0)
    first = pd.Timestamp("2024-01-01 10:00" if unit in "mins" else "2024-01-01", tz=zone)
    frame = pd.DataFrame(
        {"t": first + pd.to_timedelta(rng.integers(0, 5, 100), unit), "x": rng.normal(size=100)}
    )
    density = EnergyDensity(**{**QUICK, "max_steps": 3}).fit(frame)
    drawn = density.sample(20, random_state=0)
    assert drawn["t"].notna().all()
    assert drawn["t"].dt.isocalendar().week.eq(1).all()
    gap = frame.iloc[:3].assign(t=pd.Series(pd.NaT, range(3), dtype=frame["t"].dtype))
    assert density.impute(gap, random_state=0)["t"].notna().all()
    later = frame.iloc[[0, 0]].reset_index(drop=True)
    later.loc[1, "t"] += pd.Timedelta("7D")
    scores = density.score_samples(later)
    assert -30 < scores[1] < scores[0] - 3
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_rows_without_a_score_make_no_bounds_reliable(density, frame):
    frame = frame[:60]
    coded, open_ = density._rows(frame)
    assert not density.distribution_.bounds(coded, open_, 300, 0).reasons
    finite = EnergyDensity(**QUICK).fit(frame[["flag"]].assign(other=frame["zero"] == 0))
    for each, table in ((density, frame), (finite, finite.sample(30, random_state=0))):
        coded, open_ = each._rows(table)
        open_[3, 0] = math.nan
        bounds = each.distribution_.bounds(coded, open_, 300, 0)
        assert "no finite log-likelihood" in bounds.reasons[0]
        assert not bounds.reliable


def test_pipelines_and_searches_of_one_schema(frame):
    table = frame[:100].drop(columns="day")
    inputs, y = table.drop(columns="count"), table["count"].astype(float)
    numbers = ["zero", "size"]
    clean = ColumnTransformer(
        [("scaled", StandardScaler(), numbers)],
        remainder="passthrough",
        verbose_feature_names_out=False,
    ).set_output(transform="pandas")
    schema = Schema.detect(clean.fit_transform(table))
    steps = make_pipeline(clean, EnergyDensity(**QUICK | {"max_steps": 3}, schema=schema))
    search = GridSearchCV(steps, {"energydensity__weight_decay": [0.1]}, cv=2)
    assert np.isfinite(search.fit(table).best_score_)
    assert search.best_estimator_[-1].schema_ == schema
    schema = Schema.detect(clean.fit_transform(inputs))
    network = RegressorNetwork(energy_epochs=0, schema=schema)
    short = EnergyRegressor(n_members=1, max_epochs=1, network=network, random_state=0)
    steps = make_pipeline(clean, short)
    with pytest.warns(SelfnormWarning, match="few distinct"):
        search = GridSearchCV(steps, {"energyregressor__weight_decay": [0.1]}, cv=2).fit(inputs, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_estimator_[-1].inputs_.schema == schema


def test_comparing_log_likelihoods_of_different_measures_warns(density, frame):
    some = frame.iloc[:20]
    own = density.bounds(some, n_samples=300, random_state=0)
    low, high = own.minus(own)
    assert low <= 0 <= high
    quick = QUICK | {"max_steps": 3}
    other = EnergyDensity(**quick, schema={"count": "continuous"}).fit(frame[:100])
    assert other.schema_.columns[2].kind == "continuous"
    with pytest.warns(SelfnormWarning, match="different measures"):
        own.minus(other.bounds(some, n_samples=300, random_state=0))


def test_what_cannot_be_answered_says_why(density, frame):
    numbers = np.random.default_rng(0).normal(size=(100, 3))
    joint = EnergyDensity(method="joint", max_steps=5, random_state=0).fit(numbers)
    gaps = np.where(np.arange(3) < 2, np.nan, numbers)
    for ask in (
        lambda: joint.impute(gaps),
        lambda: joint.sample(2, given={"x0": 1.0}),
        lambda: joint.log_prob(numbers, given=["x0"]),
        lambda: joint.explain(gaps),
        lambda: joint.marginal(["x0"]).score_samples(numbers),
    ):
        with pytest.raises(DataError, match="method='autoregressive'"):
            ask()
    for ask, words in (
        (lambda: EnergyDensity(method="joint").fit(frame), "'joint' is for continuous columns"),
        (lambda: density.log_prob(frame, given=["colour"]), "no column 'colour'"),
        (lambda: density.log_prob(frame, given="kind"), r"a list of columns: \['kind'\]"),
        (lambda: density.sample(1, given={"colour": 1}), "no column 'colour'"),
        (lambda: density.sample(1, given={"kind": "z"}), r"never seen in training: \['kind'\]"),
        (lambda: density.probabilities(frame, "size"), "has no levels"),
        (lambda: density.impute(frame, n_draws=0), "at least 1"),
        (lambda: density.impute(frame, n_draws=1.5), "n_draws must be a whole number, got 1.5"),
        (lambda: density.sample(2.5), "n_samples must be a whole number, got 2.5"),
        (lambda: density.marginal([]), "names of one column"),
        (lambda: density.sample(2, missing=True), "model_gaps=True"),
        (lambda: density.score_samples(frame.drop(columns="kind")), "feature names"),
    ):
        with pytest.raises(ValueError, match=words):
            ask()


def test_rows_scored_in_pieces_are_those_scored_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    kind = rng.choice(["a", "b"], 200).astype(object)
    table = {"kind": kind, "size": rng.normal(size=200)}
    model = EnergyDensity(max_steps=5, random_state=0).fit(table)
    table["kind"][[3, 150]] = "c"
    table["kind"][::7] = None
    answers = model.score_samples, model.decision_function
    with pytest.warns(SelfnormWarning, match="never seen as 'c'"):
        whole = [answer(table) for answer in answers]
    monkeypatch.setattr("selfnorm.tables.density.PIECE", 64)
    with pytest.warns(SelfnormWarning, match="never seen as 'c'") as told:
        pieces = [answer(table) for answer in answers]
    assert len(told) == 2  # one for each call
    np.testing.assert_allclose(pieces, whole, atol=1e-6)


def test_sums_and_dates_of_samples_are_as_in_the_table():
    rng = np.random.default_rng(0)
    fare, tip = np.round(rng.gamma(3, 5, (2, 150)), 2)
    when = pd.Timestamp("2021-03-03") + pd.to_timedelta(rng.integers(0, 12, 150), "D")
    frame = pd.DataFrame({"total": np.round(fare + tip, 2), "fare": fare, "tip": tip, "on": when})
    density = EnergyDensity(**QUICK).fit(frame)
    drawn = density.sample(500, random_state=0)
    assert np.allclose(drawn["total"], drawn["fare"] + drawn["tip"])
    assert drawn["on"].between(when.min(), when.max()).all()
    gaps = frame.assign(total=np.nan)
    assert np.allclose(density.impute(gaps, random_state=0)["total"], frame["total"])
    broken = frame.head(2).assign(total=frame["total"][:2] + np.arange(2.0))
    with pytest.warns(SelfnormWarning, match="'total - fare - tip' was never seen as 1"):
        lost = density.score_samples(frame.head(2)) - density.score_samples(broken)
    assert lost[0] == 0
    assert lost[1] > math.log(150)
    earlier = pd.Timestamp("2021-03-01")  # a value that is given stays
    assert (density.sample(3, given={"on": earlier}, random_state=0)["on"] == earlier).all()
    with pytest.raises(DataError, match="'total' is counted from 'fare', 'tip'"):
        density.log_prob(frame, given=["total"])
    with pytest.raises(DataError, match="no levels"):
        density.probabilities(frame, "total")


def test_there_is_no_density_beyond_a_stated_limit():
    a, b = np.exp(np.random.default_rng(0).normal(size=(2, 200)))
    schema = Schema.detect({"a": a, "b": b}, support={"a": (0, None)})
    density = EnergyDensity(schema=schema, **QUICK).fit({"a": a, "b": b})
    rows = {"a": np.array([-1.0, 1e-3, 2.0]), "b": np.ones(3)}
    assert np.isfinite(density.score_samples(rows)).tolist() == [False, True, True]
    assert density.score_samples(rows)[0] == -np.inf
    grid = np.linspace(-5, 60, 651)
    mass = np.exp(density.log_prob({"a": grid, "b": np.full(len(grid), 1.0)}, given=["b"]))
    assert np.trapezoid(mass, grid) == pytest.approx(1, abs=0.02)
    # what is given is taken as it is, also by a mixture
    coded = density._rows({"a": a, "b": b})[0]
    kind = members.Kind(1, straight=True)
    columns = members.columns_of(schema.parts, coded, straight=True)
    simple = members.simple_density(kind, columns, coded, torch.ones(200).double(), 0)
    weighed = [members.Member("chain", 0.5, 0.0), members.Member(kind.name, 0.5, 0.0)]
    density.distribution_.members, density.distribution_.simple = weighed, [simple]
    assert np.isfinite(density.log_prob(rows, given=["a"])).all()
    assert np.isfinite(density.sample(3, 0, given={"a": -1.0})["b"]).all()


def test_numbers_at_a_stated_limit_are_a_point_mass():
    a, b = np.exp(np.random.default_rng(0).normal(size=(2, 200)))
    a[:3] = 0.0
    schema = Schema.detect({"a": a, "b": b}, support={"a": (0, None)})
    assert schema.parts[0].values == (0.0,)
    density = EnergyDensity(schema=schema, **QUICK).fit({"a": a, "b": b})
    grid = np.r_[0.0, np.geomspace(1e-6, 200, 401)]
    mass = np.exp(density.log_prob({"a": grid, "b": np.full(len(grid), 1.0)}, given=["b"]))
    assert 0 < mass[0] < 0.1
    assert mass[0] + np.trapezoid(mass[1:], grid[1:]) == pytest.approx(1, abs=0.02)


def absurd(kind):
    rng = np.random.default_rng(1)
    if kind == "a cell far out":
        return np.vstack([rng.normal(size=(200, 2)), [[1e100, 0.0]]])
    if kind == "more columns than rows":
        return rng.normal(size=(30, 20)) @ rng.normal(size=(20, 60)) + 0.5 * rng.normal(
            size=(30, 60)
        )
    number = rng.normal(size=40)
    number[:5] = 1e-305, 1e139, np.nan, np.nan, -1e139
    return pd.DataFrame(
        {"a": number, "b": rng.permutation(number), "k": rng.choice(list("xyz"), 40)}
    )


@pytest.mark.parametrize("kind", ["a cell far out", "more columns than rows", "beside a category"])
def test_absurd_tables_are_fitted_scored_drawn_and_filled(kind):
    table = absurd(kind)
    density = EnergyDensity(random_state=1, max_steps=2).fit(table)
    scores = density.score_samples(table)
    assert np.isfinite(scores).all()
    assert kind != "a cell far out" or scores[:-1].mean() > -5 > scores[-1]
    drawn, filled = density.sample(50, random_state=0), density.impute(table, random_state=0)
    assert not pd.isna(pd.DataFrame(drawn)).any(axis=None)
    assert not pd.isna(pd.DataFrame(filled)).any(axis=None)
