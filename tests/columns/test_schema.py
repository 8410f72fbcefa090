"""Schemas of tables: what columns are, coded rows, and what is never seen."""

import json
import re
import warnings
import zoneinfo

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from scipy.integrate import trapezoid

from selfnorm.columns import Schema
from selfnorm.errors import DataError, SelfnormWarning

N = 400


def messy() -> pd.DataFrame:
    """One column of every kind."""
    rng = np.random.default_rng(1)
    year = pd.Timestamp("2020-01-01")
    seconds = rng.integers(0, 10**8, N)
    return pd.DataFrame(
        {
            "length": rng.normal(size=N),
            "age": rng.integers(18, 90, N),
            "rooms": rng.integers(1, 5, N),
            "price": np.round(rng.gamma(2, 3, N), 2),
            "weight": rng.integers(10**4, 10**6, N),
            "income": np.where(rng.random(N) < 0.3, 0.0, rng.lognormal(8, 1, N)),
            "town": rng.choice(["Bath", "Oxford", "York"], N),
            "owner": rng.random(N) < 0.4,
            "start": year + pd.to_timedelta(seconds, "s"),
            "end": year + pd.to_timedelta(seconds + rng.integers(60, 1800, N), "s"),
            "day": year + pd.to_timedelta(rng.integers(0, 900, N), "D"),
        }
    ).assign(month=lambda t: t["day"].dt.to_period("M").dt.to_timestamp())


def parts(schema, name):
    return [schema.parts[i] for i in schema.parts_of([name])]


def test_kinds_and_parts():
    schema = Schema.detect(messy())
    found = {
        column.name: (
            column.kind,
            [(p.n_codes, p.rest, p.step) for p in parts(schema, column.name)],
        )
        for column in schema.columns
    }
    weeks, hours = (0, True, 1.0), (24, False, 0.0)
    assert found == {
        "length": ("continuous", [(0, True, 0.0)]),
        "age": ("cells", [(0, True, 1.0)]),
        "rooms": ("category", [(4, False, 0.0)]),
        "price": ("cells", [(0, True, 0.01)]),
        "weight": ("continuous", [(0, True, 0.0)]),
        "income": ("continuous", [(1, True, 0.0)]),
        "town": ("category", [(3, False, 0.0)]),
        "owner": ("category", [(2, False, 0.0)]),
        "start": ("date", [weeks, (7, False, 0.0), hours, (0, True, 1.0)]),
        "end": ("date", [(0, True, 1.0)]),
        "day": ("date", [weeks, (7, False, 0.0)]),
        "month": ("date", [(0, True, 1.0)]),
    }
    assert parts(schema, "rooms")[0].unseen == 1 / (N + 2)
    assert parts(schema, "income")[0].values == (0.0,)
    assert parts(schema, "age")[0].unseen == 0
    assert [p.column for p in schema.parts] == sorted(p.column for p in schema.parts)
    assert any("'end' is counted from 'start'" in note for note in schema.notes)
    frame = messy()
    pd.testing.assert_frame_equal(schema.decode(schema.encode(frame)[0]), frame)
    lines = str(schema).splitlines()
    assert len(lines) == 1 + len(schema.columns) + len(schema.notes)


def test_coded_rows():
    table = {"a": [0.0] * 12 + [1.5, 2.25, None], "b": ["y"] * 8 + ["x"] * 6 + [None]}
    schema = Schema.detect(table)
    x, extra = schema.encode(table)
    assert x.dtype == extra.dtype == np.float64
    assert x[:, 0].tolist() == [[0, 0]] * 12 + [[1, 1.5], [1, 2.25], [-1, 0]]
    assert x[:, 1].tolist() == [[0, 0]] * 8 + [[1, 0]] * 6 + [[-1, 0]]
    assert not extra.any()


def test_repeated_values_are_not_all_point_masses():
    rng = np.random.default_rng(0)
    rounded = np.round(rng.normal(size=500), 2)
    counts = np.where(rng.random(2000) < 0.2, 0, rng.poisson(3000, 2000))
    assert parts(Schema.detect({"a": rounded}), "a")[0].values == ()
    assert parts(Schema.detect({"a": counts}), "a")[0].values == (0.0,)


def test_samples_keep_recorded_digits_and_limits():
    frame = messy()[["age", "weight", "price"]].assign(age=lambda t: t["age"].astype(np.uint8))
    schema = Schema.detect(frame, support={"age": (18, None), "price": (0, 40)})
    assert [(p.low, p.high) for p in schema.parts] == [(17.5, None), (None, None), (-0.005, 40.005)]
    x = np.zeros((2, 3, 2))
    x[..., 1] = [[17.2, 4321.7, 12.3456], [300.0, 5.2, 41.0]]
    assert schema.decode(x).to_numpy().tolist() == [[18, 4322, 12.35], [255, 5, 40.0]]


def test_rare_levels_share_a_tail_by_frequency():
    rng = np.random.default_rng(0)
    labels = np.array([f"L{i}" for i in rng.zipf(1.3, 40_000) % 10_000])
    schema = Schema.detect({"a": labels})
    (part,) = schema.parts
    (column,) = schema.columns
    assert part.n_codes == 256
    assert len(column.levels) + len(column.tail) == len(set(labels.tolist()))
    x, extra = schema.encode({"a": labels})
    tail = x[:, 0, 0] == 255
    share = {label: np.exp(e) for label, e in zip(labels[tail], extra[tail, 0], strict=True)}
    assert sum(share.values()) == pytest.approx(1)
    assert not extra[~tail].any()
    again = schema.decode(x, 1)["a"]
    assert (again[~tail] == labels[~tail]).all()
    assert set(again[tail]) <= set(column.tail)
    likely = column.tail[0]
    drawn = schema.decode(np.tile([255.0, 0.0], (50_000, 1, 1)), 2)["a"]
    assert (drawn == likely).mean() == pytest.approx(share[likely], abs=0.003)


def test_unseen_values_are_coded_with_one_warning():
    frame = pd.DataFrame({"town": ["Bath", "York"] * 30, "rooms": [1, 2, 4] * 20})
    schema = Schema.detect(frame)
    with pytest.warns(SelfnormWarning, match=r"'town'.*'Rome'.*'rooms'.* 3 ") as caught:
        x, extra = schema.encode(pd.DataFrame({"town": ["Rome", "Bath"], "rooms": [3, 1]}))
    assert len(caught) == 1
    assert x[0, :, 0].tolist() == [-2, -2]
    assert extra[0, 0] == 0
    assert extra[0, 1] == pytest.approx(-np.log(np.pi * 3) - np.log1p((1 / 3) ** 2))
    assert not extra[1].any()
    assert schema.decode(x).iloc[0].isna().all()


def test_the_remainder_of_a_finite_column_is_a_density():
    schema = Schema.detect({"a": [1.0, 2.0, 5.0] * 30})
    grid = 3 + 40 * np.sinh(np.linspace(-9, 9, 20_001))
    with pytest.warns(SelfnormWarning):
        _, extra = schema.encode({"a": grid})
    assert trapezoid(np.exp(extra[:, 0]), grid) == pytest.approx(1, abs=1e-3)


def test_other_types_of_the_same_values_are_the_same():
    frame = messy()[["age", "rooms", "price", "town", "owner", "day"]]
    schema = Schema.detect(frame)
    other = frame.assign(
        age=frame["age"].astype(str),
        rooms=frame["rooms"].astype("Int64"),
        price=frame["price"].astype(np.float32),
        town=frame["town"].astype("category"),
        owner=frame["owner"].astype(int),
        day=frame["day"].dt.strftime("%Y-%m-%d"),
    )[frame.columns[::-1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(schema.encode(other)[0], schema.encode(frame)[0])
        again = schema.decode(schema.encode(other)[0])
    pd.testing.assert_frame_equal(again, frame)


def test_set_aside_and_restored():
    rng = np.random.default_rng(0)
    value = rng.normal(size=100)
    frame = pd.DataFrame(
        {
            "row": rng.permutation(100) + 7,
            "key": [f"k{i}" for i in range(100)],
            "one": 5,
            "empty": np.full(100, np.nan),
            "value": value,
            "copy": value,
            "since": pd.Timestamp("2020-01-01", tz="Europe/Berlin"),
        }
    )
    with pytest.warns(SelfnormWarning, match="identifiers: 'row', 'key'"):
        schema = Schema.detect(frame)
    kinds = ["identifier", "identifier", "constant", "constant", "continuous", "duplicate"]
    assert [column.kind for column in schema.columns] == [*kinds, "constant"]
    assert len(schema.notes) == 6
    x, _ = schema.encode(frame)
    assert x.shape == (100, 1, 2)
    pd.testing.assert_frame_equal(schema.decode(x), frame.drop(columns=["row", "key"]))
    with pytest.warns(SelfnormWarning, match=r"'one' was always 5.*'copy' is kept as a copy"):
        schema.encode(frame.assign(one=6, copy=0.0))
    array = frame[["row", "value"]].to_numpy()
    with pytest.warns(SelfnormWarning, match="identifiers: 'x0'"):
        schema = Schema.detect(array)
    again = schema.decode(schema.encode(array)[0])
    assert np.isnan(again[:, 0]).all()
    np.testing.assert_array_equal(again[:, 1], array[:, 1])


def test_a_copy_of_an_identifier_is_one():
    names = [f"k{i}" for i in range(60)]
    table = {"a": names, "size": list(np.arange(60) ** 0.5), "b": names}
    with pytest.warns(SelfnormWarning, match="identifiers: 'a', 'b'"):
        schema = Schema.detect(table)
    assert list(schema.decode(schema.encode(table)[0])) == ["size"]


def test_small_tables_have_no_identifiers():
    schema = Schema.detect({"name": ["Ann", "Bob", "Eve"], "n": [1, 2, 3]})
    assert [column.kind for column in schema.columns] == ["category", "cells"]


def test_what_a_user_says_goes():
    frame = messy()[["age", "rooms", "town"]].assign(code=np.arange(N))
    frame["text"] = [f"{v:03d}" for v in frame["age"]]
    kinds = {"age": "continuous", "rooms": "cells", "code": "category", "text": "cells"}
    schema = Schema.detect(frame, {**kinds, "town": "ignore"})
    found = {column.name: column.kind for column in schema.columns}
    assert found == {**kinds, "town": "ignored"}
    x, _ = schema.encode(frame)
    again = schema.decode(x)
    assert "town" not in again
    pd.testing.assert_frame_equal(again[["age", "rooms"]], frame[["age", "rooms"]])
    assert again["code"].dtype == frame["code"].dtype
    assert again["text"].astype(int).tolist() == frame["age"].tolist()


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{},{}5", "decimal commas: use points"),
        ("1{},{}05", "10,005 may stand for thousands or for decimals: write 10005 or 10.005"),
        ("{}.{}", "but for 2 ('unknown' in row 20, 'see note' in row 21): empty these cells"),
    ],
)
def test_what_keeps_texts_from_being_numbers_is_named(written, words):
    price = [written.format(i, i % 7) for i in range(40)]
    price[20:22] = ["unknown", "see note"] if written == "{}.{}" else price[20:22]
    with pytest.warns(SelfnormWarning, match="price"):
        notes = Schema.detect({"price": price, "n": list(range(40))}, {"n": "cells"}).notes
    assert any(words in note for note in notes), notes
    with pytest.raises(DataError, match=rf"does not hold numbers[,;] .*{re.escape(words)}"):
        Schema.detect({"price": price}, {"price": "continuous"})


@pytest.mark.parametrize(
    ("written", "first"), [("${:,.2f}", "$1,000.25"), ("{:.2f} %", "1000.25 %")]
)
def test_amounts_are_numbers_and_keep_their_marks(written, first):
    table = {
        "price": [written.format(-7.5), *(written.format(1000.25 + 13 * i) for i in range(60))]
    }
    table["price"][0] = table["price"][0].replace("$-", "-$")
    schema = Schema.detect(table)
    x, _ = schema.encode(table)
    assert (schema.columns[0].kind, x[1, 0, 1]) == ("continuous", 1000.25)
    assert schema.decode(x) == table
    table["price"][30] = "12..50"  # a slip
    with pytest.warns(SelfnormWarning, match=r"but for 1 \('12..50' in row 30\): taken as gaps"):
        mended = Schema.detect(table)
    assert mended.columns[0].form == schema.columns[0].form
    with warnings.catch_warnings(action="error"):  # not told again
        assert mended.is_gap(mended.encode(table)[0])[:, 0].nonzero()[0].tolist() == [30]
    with pytest.warns(SelfnormWarning, match=r"text \('12..50' in row 0\): .* 2 of 4 cells"):
        mended.encode({"price": ["12..50", *table["price"][1:3], "12..50"]})
    with pytest.warns(SelfnormWarning, match=r"text \('12..50' in row 30\): taken as gaps"):
        assert schema.is_gap(schema.encode(table)[0])[:, 0].nonzero()[0].tolist() == [30]
    with pytest.warns(SelfnormWarning, match="holds numbers marked '.', but here '€'"):
        other = schema.encode({"price": ["2.50 €"]})[0]
    assert other[0, 0, 1] == 2.5
    own = table["price"][1]
    with warnings.catch_warnings(action="error"):  # a cell that forgot the mark is no other amount
        assert schema.encode({"price": [own, "2.50"]})[0][:, 0, 1].tolist() == [1000.25, 2.5]
    with pytest.warns(SelfnormWarning, match="holds numbers marked '.', but here '£', '€'"):
        mixed = schema.encode({"price": [own, "2.50 €", "£3.50", "4.50 €"]})[0]
    assert mixed[:, 0, 1].tolist() == [1000.25, 2.5, 3.5, 4.5]


def test_a_thousand_is_read_where_the_column_is_known_to_part_its_thousands():
    schema = Schema.detect({"price": [f"{v:,.2f}" for v in np.arange(900, 12_000, 36.75)]})
    assert schema.encode({"price": ["1,267"]})[0][0, 0, 1] == pytest.approx(1267, abs=1)
    other = Schema.detect({"price": [f"{v / 4}" for v in range(900, 12_000, 37)]})
    with pytest.raises(DataError, match="here text"):
        other.encode({"price": ["1,250"]})


def test_levels_of_a_frame_that_no_row_has_are_no_slips():
    frame = pd.DataFrame({"n": pd.Categorical(["2", "4"], categories=["many", "2", "4"])})
    schema = Schema.detect({"n": [0.25 * v for v in range(60)]})
    assert schema.encode(frame)[0][:, 0, 1].tolist() == [2.0, 4.0]


def test_the_fingerprint_names_the_measure():
    frame = messy()
    fingerprint = Schema.detect(frame).fingerprint
    assert len(fingerprint) == 12
    shuffled = frame.sample(frac=1, random_state=0)
    assert Schema.detect(shuffled).fingerprint == fingerprint
    assert Schema.detect(frame, support={"age": (0, None)}).fingerprint == fingerprint
    changes = [
        frame.assign(age=frame["age"] * 2),
        frame.assign(town=frame["town"].replace("York", "Rome")),
        frame.assign(income=frame["income"].replace(0.0, 1.0)),
        frame.iloc[:-1],
    ]
    assert len({fingerprint, *(Schema.detect(t).fingerprint for t in changes)}) == 5


def test_dates_of_a_zone_are_exact_through_summer_time():
    rng = np.random.default_rng(0)
    hours = pd.date_range("2020-01-01", "2021-12-31", freq="h", tz="Europe/Berlin")
    frame = pd.DataFrame({"when": rng.choice(hours, 2000)})
    schema = Schema.detect(frame)
    assert schema.columns[0].offset in (3600, 7200)
    pd.testing.assert_frame_equal(schema.decode(schema.encode(frame)[0]), frame)
    with pytest.warns(SelfnormWarning, match="no time zone here: taken as UTC"):
        schema.encode(frame.assign(when=frame["when"].dt.tz_localize(None)))


def test_midnights_of_a_zone_are_days():
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    days = pd.Series(pd.date_range("2024-01-01", periods=360))
    ends = days + pd.to_timedelta(np.arange(360) % 5, "D")
    frame = pd.DataFrame({"day": days.dt.tz_localize(zone), "end": ends.dt.tz_localize(zone)})
    objects = {name: [t.to_pydatetime() for t in frame[name]] for name in frame}
    for table in (frame, pl.from_pandas(frame), pa.Table.from_pandas(frame), objects):
        schema = Schema.detect(table)
        assert [column.resolution for column in schema.columns] == ["day", "day"]
        assert schema.columns[1].base == 0
        x, _ = schema.encode(table)
        again, (day, end) = schema.decode(x), (pd.Index(table[name]) for name in ("day", "end"))
        assert (pd.Index(again["day"]) == day).all()
        assert (pd.Index(again["end"]) == end).all()
        x[:, 0, 1] += 20  # weeks
        assert Schema.detect(schema.decode(x)).columns[0].resolution == "day"
    assert Schema.detect({"day": frame["day"].dt.tz_convert("UTC")}).columns[0].resolution == "hour"


def test_finer_dates_are_cut_and_said():
    frame = messy()[["start", "day"]]
    frame["start"] += pd.to_timedelta(np.arange(N) % 7, "ms")
    schema = Schema.detect(frame)
    assert any("'start' is kept to the second" in note for note in schema.notes)
    assert (schema.decode(schema.encode(frame)[0])["start"] == frame["start"].dt.floor("s")).all()
    with pytest.warns(SelfnormWarning, match="'day' is taken to the day"):
        schema.encode(frame.assign(day=frame["day"] + pd.Timedelta("3h")))


@pytest.mark.parametrize("repeated", [1, 3])  # an identifier, a category
def test_dates_written_in_two_ways_are_told(repeated):
    days = pd.Series(pd.date_range("2024-01-01", periods=60)).repeat(repeated)
    text = days.dt.strftime("%Y-%m-%d").where(
        np.arange(len(days)) % 3 > 0, days.dt.strftime("%d/%m/%Y")
    )
    frame = pd.DataFrame(
        {"when": [*text, "", "soon"], "kind": ["a", "2024-01-02"] * (len(days) // 2 + 1)}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfnormWarning)
        notes = Schema.detect(frame).notes
    told = [note for note in notes if "write all in one way" in note]
    assert told == [
        "'when' holds dates as DD/MM/YYYY and YYYY-MM-DD: write all in one way to have dates"
    ]


def test_dates_far_out_are_held_by_their_type():
    frame = messy()[["day"]].assign(text=lambda t: t["day"].dt.strftime("%d.%m.%Y").shift(1))
    frame["day"] = frame["day"].astype("datetime64[ns]")
    schema = Schema.detect(frame)
    x, _ = schema.encode(frame.iloc[1:3])
    weeks = [schema.parts_of(["day"])[0], schema.parts_of(["text"])[0]]
    x[:, weeks, 1] = [[-1e6], [1e6]]
    again = schema.decode(x)
    assert again["day"].dt.year.tolist() == [1677, 2262]
    assert again["text"].tolist() == ["01.01.0001", "31.12.9999"]


def test_a_date_is_a_gap_where_its_base_is():
    frame = messy()[["start", "end"]]
    frame.loc[3, "end"] = pd.NaT
    schema = Schema.detect(frame)
    pd.testing.assert_frame_equal(schema.decode(schema.encode(frame)[0]), frame)
    frame.loc[5, "start"] = pd.NaT
    with pytest.warns(SelfnormWarning, match="'end' is a gap"):
        x, _ = schema.encode(frame)
    assert (x[5, :, 0] == -1).all()
    with pytest.warns(SelfnormWarning, match="'end' is left out"):
        schema.encode(frame[["end"]].assign(start2=1), partial=True)


def test_columns_by_name_by_position_and_in_part():
    frame = messy()[["length", "town"]]
    schema = Schema.detect(frame)
    with pytest.warns(SelfnormWarning, match="never seen are left out.*'more'"):
        x, _ = schema.encode(frame.assign(more=1))
    np.testing.assert_array_equal(schema.encode(frame.to_numpy())[0], x)
    partial, _ = schema.encode(frame[["town"]], partial=True)
    assert (partial[:, 0, 0] == -1).all()
    np.testing.assert_array_equal(partial[:, 1], x[:, 1])
    with pytest.raises(DataError, match="no column 'length'"):
        schema.encode(frame[["town"]])
    with pytest.raises(DataError, match="3 columns, expected 2"):
        schema.encode(np.ones((4, 3)))


def test_all_problems_at_once():
    table = {"a": [1.0, np.inf, 1e300], "b": [1e200, -np.inf, -1e300], "c": ["x", "y", "z"]}
    words = (
        r"(?s)4 problems.*'a'.*\(inf\) in row 1 \(1 such.*'b'.*1e\+200 in row 0 \(2 such.*'c'.*'d'"
    )
    with pytest.raises(DataError, match=words):
        Schema.detect(table | {"d": [1, 2, 4]}, {"c": "date"}, support={"d": (2, None)})
    with pytest.raises(DataError, match=r"(?s)'nope'.*'strange'"):
        Schema.detect(table, {"nope": "date", "c": "strange"})
    schema = Schema.detect({"a": [1.0, 2.5, 4.0], "d": ["2020-01-01", "2020-05-01", "2021-01-01"]})
    with pytest.raises(DataError, match=r"(?s)'a' holds numbers.*'x'.*'d' holds dates.*'y'"):
        schema.encode({"a": ["x"], "d": ["y"]})
    with pytest.raises(DataError, match="no column is left"):
        Schema.detect({"a": [1, 1]})
    with pytest.raises(DataError, match=r"shape \(n, 3, 2\)"):
        schema.decode(np.zeros((2, 3)))


# Columns that others determine


def test_sums_are_named_once():
    rng = np.random.default_rng(0)
    fare, tip = np.round(rng.gamma(3, 5, (2, N)), 2)
    frame = pd.DataFrame({"fare": fare, "tip": tip, "noise": rng.normal(size=N)})
    frame["total"] = fare + tip + 3.5
    frame["inches"] = np.round(fare / 2.54, 4)
    notes = Schema.detect(frame[["fare", "tip", "noise", "total"]]).notes
    assert notes == ["'total' is 'fare' + 'tip', up to a constant and rounding: kept so"]
    (note,) = Schema.detect(frame[["fare", "inches"]]).notes
    assert note == "'fare' is 2.54 'inches', up to a constant and rounding: kept so"
    frame["total"] += rng.choice([0, 0.5, 2.5], N)
    notes = Schema.detect(frame[["fare", "tip", "noise", "total"]]).notes
    assert notes == ["'total' is 'fare' + 'tip' but for a few amounts: kept so"]
    gaps = frame.assign(tip=frame["tip"].where(frame.index > 9))  # beside them the total tells more
    for kinds, columns in (({}, gaps), ({"total": "continuous"}, frame)):
        (note,) = Schema.detect(columns[["fare", "tip", "noise", "total"]], kinds).notes
        assert note == "'total' is 'fare' + 'tip' but for a few amounts"
    near = {"x": frame["noise"], "y": 2 * frame["noise"] + 0.05 * rng.normal(size=N)}
    assert Schema.detect(near | {"z": rng.integers(0, 2, N)}).notes == []


def sums(n=N):
    rng = np.random.default_rng(0)
    fare, tip, extra = np.round(rng.gamma(3, 5, (3, n)), 2)
    total = np.round(fare + tip + rng.choice([0, 2.5], n), 2)
    frame = pd.DataFrame({"all": total + extra, "total": total, "fare": fare, "tip": tip})
    return frame.assign(extra=extra, weight=rng.normal(size=n), pounds=lambda f: f.weight / 0.4536)


def test_sums_are_counted_from_their_terms():
    frame = sums()
    schema = Schema.detect(frame)
    kinds = [column.kind for column in schema.columns]
    assert kinds == ["sum", "sum", "cells", "cells", "cells", "continuous", "sum"]
    assert [schema.parts[j].values for j in (0, 1, 6)] == [(0.0,), (0.0, 2.5), (0.0,)]
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema
    x, extra = schema.encode(frame)
    assert (extra == 0).all()
    pd.testing.assert_frame_equal(schema.decode(x), frame)
    with pytest.warns(SelfnormWarning, match="'total' is a gap where what it is counted from is"):
        assert (schema.encode(frame.assign(tip=np.nan))[0][:, 1, 0] == -1).all()
    broken = frame.assign(total=frame["total"] + np.eye(N)[0])
    with pytest.warns(SelfnormWarning, match=r"total - fare - tip' was never seen as .* \(1 row\)"):
        x, extra = schema.encode(broken)
    assert (x[0, 1, 0], x[0, 0, 0], x[1, 1, 0] >= 0) == (-2, -2, True)
    assert (extra[0, :2] < 0).all()
    with pytest.raises(DataError, match="'total' is counted from 'fare', 'tip'"):
        schema.parts_of(["fare", "total"], alone=True)


def test_a_column_of_gaps_hides_no_sum():
    frame = sums().assign(rare=np.where(np.arange(N) % 50 == 0, np.arange(N) ** 0.5, np.nan))
    assert [column.kind for column in Schema.detect(frame).columns][:2] == ["sum", "sum"]


def test_levels_written_as_zeros_and_ones_are_no_sums():
    level = np.random.default_rng(0).integers(0, 3, N)
    frame = pd.DataFrame({name: (level == k).astype(int) for k, name in enumerate("abc")})
    assert {column.kind for column in Schema.detect(frame).columns} == {"category"}


@pytest.mark.parametrize("last", ["$60.00", "NA"])
def test_mixed_marks_are_named(last):
    prices = [f"{'$€'[i % 2]}{v:.2f}" for i, v in enumerate(np.arange(1, 60, 0.37))] + [last]
    with pytest.warns(SelfnormWarning, match="'price' holds numbers marked '\\$' and '€'"):
        Schema.detect({"price": prices, "size": np.arange(len(prices)) ** 0.5})


def test_drawn_dates_are_moved_to_those_seen():
    days = pd.Timestamp("2024-01-03") + pd.to_timedelta(np.arange(100), "D")  # a Wednesday
    frame = pd.DataFrame({"when": days, "size": np.arange(100) ** 0.5})
    schema = Schema.detect(frame)
    x, _ = schema.encode(frame.iloc[[0, 50, 99]])
    x[0, 1, 0] = 0.0  # Monday before
    x[2, 1, 0] = 6.0  # Sunday after
    given = np.zeros(x.shape[:2], dtype=bool)
    drawn = schema.decode(schema.within_seen(x, given))
    assert drawn["when"].tolist() == days[[0, 50, 99]].tolist()
    assert schema.decode(schema.within_seen(x, ~given))["when"][0] == days[0] - pd.Timedelta("2D")


def test_categories_that_determine_others():
    rng = np.random.default_rng(0)
    zone = rng.integers(0, 12, N)
    frame = pd.DataFrame({"zone": zone, "town": zone // 4, "letter": zone}).astype(str)
    frame["letter"] = frame["letter"].map({str(i): chr(97 + i) for i in range(12)})
    frame["free"] = rng.choice(["x", "y"], N)
    frame.loc[::50, "town"] = None
    assert Schema.detect(frame.map("<{}>".format, na_action="ignore")).notes == [
        "'zone' determines 'town'",
        "'zone' and 'letter' determine each other",
        "'letter' determines 'town'",
    ]
    few = {"a": [f"n{i}" for i in range(15)], "b": ["x"] * 14 + ["y"]}
    assert Schema.detect(few).notes == []


def test_what_was_given_stays_and_the_missing_term_fits_it():
    rng = np.random.default_rng(0)
    fare, tip = np.round(rng.gamma(3, 4, 400), 2), np.round(rng.gamma(2, 1, 400), 2)
    begin = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 10**7, 400), "s")
    end = begin + pd.to_timedelta(rng.integers(60, 4000, 400), "s")
    table = pd.DataFrame({"fare": fare, "tip": tip, "begin": begin, "end": end})
    table["total"] = (fare + tip + rng.choice([0.5, 2.5], 400)).round(2)
    schema = Schema.detect(table)
    kinds = {column.name: column for column in schema.columns}
    assert kinds["total"].kind == "sum"
    assert kinds["end"].base is not None
    drawn = schema.encode(table)[0][::-1]  # complete rows, of others
    gaps = table.copy()
    gaps.loc[:9, "fare"] = np.nan
    gaps.loc[10:19, "begin"] = pd.NaT
    gaps.loc[20:29, ["fare", "tip"]] = np.nan
    gaps.loc[30:39, "total"] = np.nan
    was = schema.encode(gaps)[0]
    rows = np.where(schema.is_gap(was)[..., None], drawn, was)
    filled = schema.fill(gaps, rows)
    for name in table:
        kept = gaps[name].notna()
        assert (filled[name][kept] == table[name][kept]).all(), name
    assert filled.notna().all().all()
    left = (filled["total"] - filled["fare"] - filled["tip"]).round(2)
    possible = filled["fare"] > table["fare"].min()  # else the least that was seen
    assert possible[:10].sum() > 5
    assert set(left[:20][possible[:20]]) | set(left[30:40]) <= {0.5, 2.5}
    apart = (filled["end"] - filled["begin"]).dt.total_seconds()
    assert apart.between(60, 4000).all()
    assert filled["fare"].min() >= 0


def test_a_sum_whose_term_is_missing_is_unknown_not_a_gap_of_its_own():
    rng = np.random.default_rng(0)
    table = {"a": rng.gamma(3, size=300).round(2), "b": rng.gamma(2, size=300).round(2)}
    table["sum"] = np.where(rng.random(300) < 0.2, np.nan, (table["a"] + table["b"]).round(2))
    schema = Schema.detect(table, model_gaps=True)
    (place,) = schema.parts_of(["sum"])
    assert schema.parts[place].gap
    asked = {name: values[:4].copy() for name, values in table.items()}
    asked["a"][0], asked["sum"][:2] = np.nan, (3.0, np.nan)
    codes = schema.encode(asked)[0][:, place, 0]
    assert codes[0] == -1
    assert codes[1] == schema.parts[place].gap_code


def filled_by_others(frame, *missing, rows=50, kinds=None):
    """The first rows with some columns missing, filled by draws: the codes of other rows."""
    schema = Schema.detect(frame, kinds)
    gaps = frame.copy()
    gaps.loc[: rows - 1, list(missing)] = np.nan
    with warnings.catch_warnings(action="ignore"):  # sums are gaps where a term is
        was = schema.encode(gaps)[0]
    drawn = schema.encode(frame)[0][::-1]
    return schema.fill(gaps, np.where(schema.is_gap(was)[..., None], drawn, was))


@pytest.mark.parametrize(
    "missing",
    [["a"], ["a", "ab"], ["a", "ac"], ["a", "ab", "abd"], ["ab", "d"], ["ac", "c", "abd"]],
)
def test_sums_that_share_terms_all_add_up(missing):
    a, b, c, d = np.random.default_rng(0).gamma(3, 5, (4, N)).round(2)
    frame = pd.DataFrame({"abd": a + b + d, "ab": a + b, "ac": a + c, "a": a, "b": b}).round(2)
    frame = frame.assign(c=c, d=d)
    assert [column.kind for column in Schema.detect(frame).columns[:3]] == ["sum"] * 3
    filled = filled_by_others(frame, *missing)
    assert filled["ab"].to_numpy() == pytest.approx(filled["a"] + filled["b"])
    assert filled["ac"].to_numpy() == pytest.approx(filled["a"] + filled["c"])
    assert filled["abd"].to_numpy() == pytest.approx(filled["ab"] + filled["d"])


def test_a_copy_of_a_missing_term_is_the_one_that_fits():
    a, b = np.random.default_rng(0).gamma(3, size=(2, 200)).round(2)
    frame = pd.DataFrame({"a": a, "copy": a, "b": b, "sum": (a + b).round(2)})
    filled = filled_by_others(frame, "a", "copy")
    assert filled["a"].to_numpy() == pytest.approx(a)
    assert filled["copy"].to_numpy() == pytest.approx(a)


def test_dates_counted_from_one_that_is_missing_follow_it():
    rng = np.random.default_rng(0)
    begin = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 10**7, N), "s")
    later = [begin + pd.to_timedelta(rng.integers(60, 4000, N), "s") for _ in range(2)]
    frame = pd.DataFrame({"begin": begin, "middle": later[0], "end": later[1]})
    filled = filled_by_others(frame, "begin", "middle")
    for name in ("middle", "end"):
        assert (filled[name] - filled["begin"]).dt.total_seconds().between(60, 4000).all()


@pytest.mark.parametrize("model_gaps", [False, True])
def test_the_missing_term_of_an_exact_sum_may_be_larger_than_any(model_gaps):
    a, b = np.random.default_rng(0).gamma(3, 5, (2, N)).round(2)
    frame = pd.DataFrame({"a": a, "b": b, "sum": (a + b).round(2)})
    schema = Schema.detect(frame.assign(sum=frame["sum"].where(a > 2)), model_gaps=model_gaps)
    asked = frame.head(1).assign(a=np.nan, b=5.0, sum=1000.0)
    assert schema.fill(asked, schema.encode(frame.head(1))[0])["a"].tolist() == [995.0]


def test_a_missing_term_may_be_a_category_of_numbers():
    rng = np.random.default_rng(0)
    fare, toll = rng.gamma(3, 5, N).round(2), rng.choice([0, 2.5, 6.94], N)
    total = (fare + toll + rng.choice([0.0, 0.5], N)).round(2)
    frame = pd.DataFrame({"fare": fare, "toll": toll, "total": total})
    filled = filled_by_others(frame, "toll", kinds={"toll": "category"})
    assert (filled["toll"] == toll).all()


def test_a_copy_is_filled_where_text_stands_for_a_gap():
    sizes = [f"{v:.2f}" for v in np.arange(1, 60, 0.37)]
    sizes[3] = "NA"
    table = {"size": sizes, "copy": list(sizes)}
    schema = Schema.detect(table)
    filled = schema.fill(table, schema.encode(table)[0][[0, 1, 2, 4, *range(4, len(sizes))]])
    assert filled["copy"][3] == filled["size"][3] == sizes[4]
