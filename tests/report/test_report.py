"""A report is one file that says what is true of model and rows, and can be read by everybody."""

import ast
import html
import re
import shlex
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import selfnorm as sn
from selfnorm.columns import Schema
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.report import About, peers
from selfnorm.report import density as density_page
from selfnorm.report.density import _load as density_load
from selfnorm.report.page import Page
from selfnorm.report.regressor import _load as regressor_load
from selfnorm.report.sections import Comparison, fewer_rows
from selfnorm.tables import RegressorNetwork


class Reader(HTMLParser):
    """Tags that are left open, ids, and what a screen reader is told."""

    VOID = ("meta", "link")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.figures, self.headings = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag in ("h1", "h2"):
            self.headings.append(tag)
        if tag == "svg":
            self.figures.append(dict(attrs)["aria-label"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(path):
    """The text of a page that is whole, self-contained and labelled."""
    text = path.read_text(encoding="utf-8")
    page = Reader(text)
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    assert page.figures
    assert all(page.figures)
    assert page.headings.count("h1") == 1
    assert "<script" not in text
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(page.ids)
    assert path.stat().st_size < 3e6
    return text


@pytest.fixture(scope="module")
def mixed():
    rng = np.random.default_rng(0)
    kind = rng.choice(["a", "b", "<i>c</i>"], 260)
    size = np.where(rng.random(260) < 0.1, np.nan, rng.normal(size=260) + 3 * (kind == "a"))
    frame = pd.DataFrame({"kind": kind, "size": size, "count": rng.poisson(3, 260)})
    return frame, sn.EnergyDensity(random_state=0, max_steps=30).fit(frame)


def test_a_table_of_any_kind(mixed, tmp_path):
    frame, density = mixed
    density.report(frame, tmp_path / "r.html", about=About("people.csv", title="People & more"))
    text = checked(tmp_path / "r.html")
    assert "People &amp; more" in text
    assert "<i>c</i>" not in text
    assert "When it was fitted it was judged so: 260 rows" in text
    assert "a Gaussian of the numbers" in text
    assert "1 draw in" in text
    ends = re.search(r"upper bound.*?(-[\d.]+) and (-[\d.]+) nats", text, re.DOTALL)
    assert [float(end) for end in ends.groups()] == pytest.approx(
        [density.score(frame)] * 2, abs=0.02
    )


def test_names_of_files_are_no_code_to_copy():
    name, folder, page = "a\"); import os; os.system('x') #.csv", 'm"); x', Page("", "")
    page.section("Load")
    for load in (density_load, regressor_load):
        load(page, about=About(name, folder, target='y"); x'))
    python, shell, of_regressor, predict = (
        html.unescape(code) for code in re.findall(r"<code>(.*?)</code>", page.html(), re.DOTALL)
    )
    for code in (python, of_regressor):
        values = {n.value for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Constant)}
        assert {name, folder} <= values
    assert shlex.split(shell) == [
        *("selfnorm", "score", folder, name, "--explain", "-o", "scored.csv")
    ]
    assert shlex.split(predict) == ["selfnorm", "predict", folder, name, "-o", "predicted.csv"]


def test_a_table_and_the_rows_drawn_are_coded_once(mixed, tmp_path, monkeypatch):
    frame, density = mixed
    lengths, coded = [], Schema._coded

    def counted(self, cells, rows, surprises):
        lengths.append(rows.stop - rows.start)
        return coded(self, cells, rows, surprises)

    monkeypatch.setattr(Schema, "_coded", counted)
    monkeypatch.setattr(density_page, "_BOUND_FACTORS", 90)
    density.report(frame, tmp_path / "r.html")
    assert lengths == [260, 30, 1000, 10]  # the table, bounds, draws, the strangest rows


def test_levels_never_seen_are_told_and_rows_keep_their_names(mixed, tmp_path):
    frame, density = mixed
    other = (
        frame[:40].assign(kind=["new", *frame["kind"][1:40]]).set_axis([f"p{i}" for i in range(40)])
    )
    with pytest.warns(SelfnormWarning, match="new"):
        density.report(other, tmp_path / "r.html", train=frame[40:])
    text = checked(tmp_path / "r.html")
    assert re.search(r'class="warning">[^<]*new', text)
    assert '<th scope="row">p0</th>' in text


def test_held_out_rows_survive_a_folder_and_other_rows_are_told_apart(mixed, tmp_path):
    frame = pd.concat([mixed[0]] * 10, ignore_index=True)  # too many for folds
    density = sn.EnergyDensity(random_state=0, max_steps=10, hidden=16).fit(frame)
    density.save(tmp_path / "m")
    again = sn.EnergyDensity.load(tmp_path / "m")
    assert np.array_equal(again.held_out_, density.held_out_)
    assert len(again.held_out_) == 260
    assert again.fitted_to_ == density.fitted_to_
    again.report(frame, tmp_path / "r.html")
    assert "were held out: they chose the best state" in checked(tmp_path / "r.html")
    again.report(frame[:50], tmp_path / "r.html", train=frame[50:])
    assert "training table that was given" in checked(tmp_path / "r.html")


def test_a_lead_over_models_of_fewer_rows_is_hedged():
    scores = np.linspace(-1.0, 0.0, 50)
    few, many = fewer_rows(50, {"rows": 400}), fewer_rows(500, {"rows": 400})
    assert "--train" in Comparison(scores + 1, {"a Gaussian": scores}, hedge=few).verdict()
    assert "--train" not in Comparison(scores + 1, {"a Gaussian": scores}, hedge=many).verdict()


@pytest.mark.parametrize("d", [1, 2])
def test_one_energy_and_few_rows(d, tmp_path):
    X = np.random.default_rng(d).normal(size=(40, d))
    X[7] = 9.0
    density = sn.EnergyDensity(method="joint", random_state=0, max_steps=20).fit(X)
    density.report(X, tmp_path / "r.html")
    text = checked(tmp_path / "r.html")
    assert "too small to hold rows out" in text
    assert "a Gaussian" in text
    density.report(X[7:8], tmp_path / "one.html")
    checked(tmp_path / "one.html")


def test_what_cannot_be_reported_is_refused_before_the_work(mixed, tmp_path):
    frame, density = mixed
    with pytest.raises(DataError, match="no column 'size'"):
        density.report({"kind": ["a"], "count": [1]}, tmp_path / "r.html")
    with pytest.raises(DataError, match="one HTML file"):
        density.report(frame, tmp_path / "r.pdf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.filterwarnings("ignore::selfnorm.errors.SelfnormWarning")
def test_a_regressor(whole, tmp_path):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (100, 2))
    y = 10 * X[:, 0] + rng.standard_normal(100)
    y = np.round(y) if whole else y
    short = RegressorNetwork(energy_epochs=2)
    model = sn.EnergyRegressor(n_members=2, max_epochs=8, network=short, random_state=0).fit(X, y)
    model.report(X, y, tmp_path / "r.html", about=About("sales.csv", target="price"))
    text = checked(tmp_path / "r.html")
    assert "table that the model was fitted to" in text
    assert "Predictive density of row" in text
    assert ("probability of a step" in text) == whole
    model.fit(pd.DataFrame(X, columns=["height", "width"]), y).save(tmp_path / "model")
    card = (tmp_path / "model" / "model_card.md").read_text()
    assert "| inputs | height, width |" in card
    assert "| judged | 100 rows" in card
    with pytest.raises(DataError):
        model.report(X, y[:-1], tmp_path / "no.html")


def test_simple_laws_are_normalised_in_the_measure_of_the_table():
    rng = np.random.default_rng(0)
    count = rng.poisson(2, 400)
    table = {"count": count, "kind": rng.choice(["a", "b", "c"], 400, p=[0.6, 0.3, 0.1])}
    schema = Schema.detect(table)
    law = peers.independent_columns(schema.parts, schema.encode(table)[0])
    levels = np.unique(count)
    every = {"count": np.repeat(levels, 3), "kind": ["a", "b", "c"] * len(levels)}
    assert 0.97 < np.exp(law(schema.encode(every)[0])).sum() <= 1 + 1e-9
    x = rng.normal(size=(2000, 2)) @ np.array([[1.0, 0.8], [0.0, 0.6]])
    coded = np.stack([np.zeros_like(x), x], -1)
    expected = stats.multivariate_normal(x.mean(0), np.cov(x.T)).logpdf(x)
    numbers = Schema.detect({"a": x[:, 0], "b": x[:, 1]}).parts
    assert np.allclose(peers.gaussian(numbers, coded)(coded), expected, atol=0.05)
    known = np.column_stack([np.zeros((500, 1)), rng.normal(0, 3, 500)])
    cells = np.column_stack([np.zeros((81, 1)), np.arange(-40, 41)])
    assert np.exp(peers.gaussian_target(known, 1.0)(cells)).sum() == pytest.approx(1, abs=1e-6)


def test_a_notebook_and_the_card_of_a_folder_say_what_was_fitted(mixed, tmp_path):
    _, density = mixed
    shown = density._repr_mimebundle_()["text/html"]
    assert "260 rows of 3 columns" in shown
    assert sn.EnergyDensity().facts() == {}
    density.save(tmp_path)
    assert "| fitted to | 260 rows of 3 columns |" in (tmp_path / "model_card.md").read_text()


def test_columns_set_aside_are_not_missed_in_samples(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"id": [f"p{i:04}" for i in range(200)], "size": rng.normal(size=200)})
    with pytest.warns(SelfnormWarning, match="'id'"):
        density = sn.EnergyDensity(random_state=0, max_steps=10).fit(frame)
    drawn = density.sample(5, random_state=0)
    assert "id" not in drawn
    assert np.isfinite(density.score_samples(drawn)).all()
    density.report(frame, tmp_path / "r.html")
    checked(tmp_path / "r.html")
