"""Events: what their text means, what is refused, and that nothing of it is ever run."""

from __future__ import annotations

import builtins
import warnings

import numpy as np
import pandas as pd
import pytest

from selfnorm import Schema
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.tables.events import MAX_LENGTH, Event


def table_of_every_kind(n: int = 2000) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    start = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 365, n), "D")
    table = pd.DataFrame(
        {
            "sex": rng.choice(["F", "M"], n),
            "age": rng.integers(17, 90, n),
            "income": np.where(rng.random(n) < 0.3, 0.0, rng.gamma(2, 100, n).round(2)),
            "cost": rng.gamma(2, 100, n).round(2),
            "hours-per-week": rng.integers(1, 60, n),
            "flag": rng.random(n) < 0.4,
            "x": rng.normal(size=n),
            "wind": rng.integers(0, 360, n).astype(float),
            "start": start,
            "end": start + pd.to_timedelta(rng.integers(0, 20, n), "D"),
            "at": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 10**7, n), "s"),
            "class": rng.choice(list("abcdefgh"), n),
            "few": rng.choice([1.0, 2.0, 3.5], n),
            "id": rng.permutation(n).astype(str),
        }
    )
    table["month"] = table["start"].dt.to_period("M").dt.to_timestamp()
    table.loc[::7, "income"] = np.nan
    table.loc[::9, "class"] = None
    return table


TABLE = table_of_every_kind()
SCHEMA = Schema.detect(TABLE, {"wind": "angle", "id": "ignore"})
CODED, _ = SCHEMA.encode(TABLE)


def same(text):
    return text, text


EVENTS = [
    same("age > 50 and sex == 'F'"),
    (
        "18 <= age < 65 or `class` not in ['a']",
        "18 <= age < 65 or `class` in ['b','c','d','e','f','g','h']",
    ),
    ("not (age > 50 or not sex == 'F')", "age <= 50 and sex == 'F'"),
    same("income - cost > 0"),
    same("2 * (income + cost) / 3 >= 100 - age"),
    same("income > cost"),
    same("income < 100.5"),
    ("not income < 100", "income >= 100"),
    same("income == 0"),
    ("income != 0", "income > 0"),
    ("income is not missing", "~income.isna()"),
    same("cost == 100.25 or cost > 700"),
    same("start >= '2024-05-31'"),
    same("'2024-05-31' < start"),
    (
        "end - start > 5 and start >= '2024-05-31'",
        "(end-start).dt.days > 5 and start>='2024-05-31'",
    ),
    ("start + 3 < end", "(end - start).dt.days > 3"),
    ("end - 10 > '2024-06-01'", "end > '2024-06-11'"),
    same("'2024-02-03 12:30:00' <= at < '2024-02-20'"),
    ("month in ['2024-03-01', '2024-05-01']", "start.dt.month in [3, 5]"),
    same("flag"),
    same("not flag and x > -0.5"),
    same("flag == True"),
    same("`hours-per-week` > 40"),
    same("few in [1, 3.5]"),
    same("few != 2"),
    same("wind > 300 or wind <= 20"),
    same("-age < -50"),
    same("age > 10 * 5"),
    ("age in [] or x > 2", "x > 2"),
    same("x > 1 or age > 80 and sex == 'F'"),
    ("age >\n 50", "age > 50"),
    ({"sex": "F", "age": (50, None), "few": [1, 2.0]}, "sex == 'F' and age >= 50 and few < 3"),
    ({"start": (pd.Timestamp("2024-03-01"), None)}, "start >= '2024-03-01'"),
    ({}, "age > 0"),
    (lambda frame: (frame["age"] > 50).to_numpy(), "age > 50"),
]


@pytest.mark.parametrize(("event", "query"), EVENTS, ids=[str(query) for _, query in EVENTS])
def test_an_event_holds_where_pandas_says_so(event, query):
    read = Event.of(SCHEMA, event)
    expected = np.zeros(len(TABLE), bool)
    expected[TABLE.query(query, engine="python").index] = True
    assert expected.any()
    assert np.array_equal(read.holds(SCHEMA.decoded(CODED)), expected)
    if not callable(event):
        assert np.array_equal(read.holds(SCHEMA.cells(TABLE)), expected)
    within, exact = rows_within(read)
    assert (within | ~expected).all()
    assert not exact or np.array_equal(within, expected)


def rows_within(event: Event) -> tuple[np.ndarray, bool]:
    """Coded rows that have the codes and numbers that an event leaves, and if it is just these."""
    parts, exact = event.coded(SCHEMA)
    within = np.ones(len(CODED), bool)
    for part, values, (code, number) in zip(
        SCHEMA.parts, parts, np.moveaxis(CODED, 0, -1), strict=True
    ):
        if values is not None:
            of_code = np.append(values.codes, False)[code.astype(int)]
            of_number = np.any([np.zeros(len(number), bool)] + [
                (low < number) & (number < high) for low, high in values.intervals
            ], 0)  # fmt: skip
            is_number = part.rest & (code == part.n_codes)
            within &= np.where(is_number, of_number, of_code & (code >= 0))
    return within, exact


def test_ranges_and_sets_of_single_columns_are_truncated_exactly():
    text = "age > 50 and sex == 'F' and income < 100.5 and x >= 1 and few in [1, 2] and not flag"
    parts, exact = Event.of(SCHEMA, text).coded(SCHEMA)
    assert exact
    assert sum(values is not None for values in parts) == 6


def test_what_either_of_two_events_needs_is_needed():
    box = Event.of(SCHEMA, "age < 20 and x > 0 or 70 < age and income > cost").box
    assert box.keys() == {"age"}
    assert [round(low) for low, _ in box["age"].intervals[1:]] == [70]


def test_cells_of_a_grid_are_taken_as_wholes():
    values = Event.of(SCHEMA, "100 < cost <= 100.25").coded(SCHEMA)[0][3]
    assert values.intervals == ((pytest.approx(100.005), pytest.approx(100.255)),)


def test_rare_levels_share_a_code_that_does_not_tell_them_apart():
    labels = [f"town {k % 300}" for k in range(3000)]
    schema = Schema.detect({"town": labels, "x": np.arange(3000.0) ** 0.5}, {"town": "category"})
    rare, common = schema.columns[0].tail[0], schema.columns[0].levels[0]
    for text, exact in ((f"town == '{rare}'", False), (f"town == '{common}'", True)):
        assert Event.of(schema, text).coded(schema)[1] is exact


def test_gaps_are_events_where_the_schema_models_them():
    schema = Schema.detect(TABLE[["income", "class", "age"]], model_gaps=True)
    cells = schema.decoded(schema.encode(TABLE[["income", "class", "age"]])[0])
    for text, expected in {
        "income is missing": TABLE["income"].isna(),
        "not `class` is missing": ~TABLE["class"].isna(),
        "income is missing or income > 200": TABLE["income"].isna() | (TABLE["income"] > 200),
        "not (income > 200)": TABLE["income"] <= 200,
    }.items():
        event = Event.of(schema, text)
        assert np.array_equal(event.holds(cells), expected)
        assert event.coded(schema)[1]


def test_values_that_are_stated_are_told_from_the_rest():
    stated, rest = Event.of(SCHEMA, "sex == 'F' and age > 50 and few == 2").evidence()
    assert stated == {"sex": ["F"], "few": [2]}
    assert rest.box.keys() == {"age"}


REFUSED = {
    "agee > 3": "'agee' (character 1 of 'agee > 3'): 'age'",
    "age > 3 and hours-per-week > 4": "'hours' (character 13",
    "hours-per-week > 4": "`hours-per-week`?",
    "id == '3'": "no part of the model",
    "age > 'old'": "'old' is none",
    "sex > 3": "holds labels",
    "sex < 'M'": "compare them by '==' or 'in'",
    "`class` < sex": "no order",
    "start > 5": "dates such as '2024-01-31'",
    "start > '2024-13-45'": "is none",
    "start * 2 > end": "cannot be reckoned with",
    "sex == age": "a label is compared with a number",
    "income is None": "goes with 'missing'",
    "sex == None": "is missing",
    "age is missing": "model_gaps=True",
    "age in sex": "list of constants",
    "age in [age]": "list of constants",
    "age = 3": "(character 5",
    "class == 'a'": "backticks",
    "age": "comparison is missing",
    "3 > 2": "two constants",
    "": "cannot be read",
    "age > 1e400": "too large",
    "age > 5 # x": "'#'",
    "age > 3 & sex == 'F'": "write 'and'",
    "age > 1 if sex == 'F' else 2": "IfExp",
    "age > 10**9": "Pow",
    "age[0] > 1": "Subscript",
    "age.real > 1": "dot",
    "(lambda: 1)() > 0": "called",
    "[a for a in 'b']": "ListComp",
    "f'{age}' == 'x'": "JoinedStr",
    "age > b'1'": "Constant",
    "'\0' == sex": "cannot be read",
    "not " * 900 + "flag": "deep",
    "-" * 3000 + "1 > age": "event",
    "(" * 300 + "age > 1" + ")" * 300: "cannot be read",
    "age > 1" + " and age > 1" * (MAX_LENGTH // 10): "characters",
    "9" * 3000 + " < age": "too large",
}


@pytest.mark.parametrize("text", REFUSED, ids=[text[:30] for text in REFUSED])
def test_what_is_no_event_is_refused_in_words(text):
    with pytest.raises(DataError) as refusal:
        Event.of(SCHEMA, text)
    assert REFUSED[text] in str(refusal.value)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch {path}')",
        "age > __import__('os').system('touch {path}')",
        "open('{path}', 'w') == 1",
        "age > ().__class__.__base__.__subclasses__()[0]",
        "sex == f\"{{open('{path}', 'w')}}\"",
        "exec('open(chr(97), chr(119))') or age > 1",
    ],
)
def test_nothing_is_executed(text, tmp_path, monkeypatch):
    def run(*_, **__):
        raise AssertionError("an event was run")

    for name in ("eval", "exec"):
        monkeypatch.setattr(builtins, name, run)
    with pytest.raises(DataError):
        Event.of(SCHEMA, text.format(path=tmp_path / "file"))
    assert not list(tmp_path.iterdir())


def test_a_level_never_seen_has_no_rows_and_a_warning_names_those_that_are_close():
    with pytest.warns(SelfnormWarning, match=r"'sex' was never 'Female'.*'F', 'M'"):
        event = Event.of(SCHEMA, "sex == 'Female'")
    assert not event.holds(SCHEMA.decoded(CODED)).any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfnormWarning)
        assert Event.of(SCHEMA, "sex != 'Female'").holds(SCHEMA.decoded(CODED)).all()


def test_a_function_must_return_a_truth_value_for_each_row():
    event = Event.of(SCHEMA, lambda frame: frame["age"] * 2)
    with pytest.raises(DataError, match="truth values"):
        event.holds(SCHEMA.decoded(CODED))
