"""Dates and numbers as text."""

import numpy as np
import pandas as pd
import pytest

from selfnorm.columns import Schema
from selfnorm.columns.kinds.date import dates_as_text, dates_from
from selfnorm.columns.text import numbers_from

FORMATS = {
    "YYYY-MM-DD": "%Y-%m-%d",
    "YYYY/MM/DD": "%Y/%m/%d",
    "DD.MM.YYYY": "%d.%m.%Y",
    "MM/DD/YYYY": "%m/%d/%Y",
    "YYYY-MM-DD hh:mm": "%Y-%m-%d %H:%M",
    "YYYY-MM-DDThh:mm:ssZ": "%Y-%m-%dT%H:%M:%SZ",
    "DD/MM/YYYY hh:mm:ss": "%d/%m/%Y %H:%M:%S",
    "YYYY-MM-DD hh:mm:ss.ff": "%Y-%m-%d %H:%M:%S.00",
    "M/D/YYYY": "%-m/%-d/%Y",
    "D.M.YYYY h:mm": "%-d.%-m.%Y %-H:%M",
    "M/D/YYYY hh:mm:ss.ff": "%-m/%-d/%Y %H:%M:%S.00",
}


@pytest.mark.parametrize("template", FORMATS)
def test_dates_keep_their_format(template):
    seconds = np.random.default_rng(0).integers(-(10**9), 2 * 10**9, 60)
    series = pd.Series(seconds.astype("datetime64[s]")).dt.strftime(FORMATS[template])
    frame = pd.DataFrame({"when": series.mask(series.index % 7 == 0, "NA")})
    schema = Schema.detect(frame)
    assert schema.columns[0].kind == "date"
    assert schema.columns[0].form["template"] == template
    x, _ = schema.encode(frame)
    assert (x[::7, :, 0] == -1).all()
    pd.testing.assert_frame_equal(schema.decode(x), frame)
    # alone, a day and a month could be taken for each other
    np.testing.assert_array_equal(schema.encode(frame.iloc[1:2])[0], x[1:2])


def test_offsets_are_read_and_written():
    texts = ["2020-06-01T01:30:00+02:00"]
    template = "YYYY-MM-DDThh:mm:ss+02:00"
    assert dates_from([], template).shape == (0,)
    (seconds,) = dates_from(texts, template)
    assert seconds == pd.Timestamp(texts[0]).timestamp()
    assert dates_as_text(np.array([seconds]), template) == texts


@pytest.mark.parametrize(
    "texts",
    [["2020-02-30"], ["2020-13-01"], ["2020-01-01x"], ["1234567890"], ["2020.1.31"], ["1/2/2020"]],
)
def test_no_dates(texts):
    frame = pd.DataFrame({"a": [*texts, "2020-01-01"] * 8, "b": np.arange(16) % 5})
    assert Schema.detect(frame).columns[0].kind == "category"


def test_numbers_as_text():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "cents": [f"{v:.2f}" for v in rng.gamma(2, 5, 60) + 0.01],
            "any": [f"{v:g}" for v in rng.gamma(2, 5, 60).round(1)],
            "zip": [f"{v:05d}" for v in rng.integers(1, 9, 60)],
        }
    )
    frame.loc[::6, "cents"] = "?"
    schema = Schema.detect(frame)
    assert [column.kind for column in schema.columns] == ["cells", "cells", "category"]
    assert schema.columns[0].gaps == pytest.approx(1 / 6)
    pd.testing.assert_frame_equal(schema.decode(schema.encode(frame)[0]), frame)


@pytest.mark.parametrize(("last", "numeric"), [("2", True), ("02", False)])
def test_a_whole_number_that_is_written_as_a_name_is_found_below_gaps(last, numeric):
    texts = [*(f"{1.2 + k % 9 / 10:.1f}" for k in range(40) if k % 9 != 8), None, None, last]
    (column,) = Schema.detect({"a": texts}).columns
    assert column.numeric == numeric


def test_texts_for_gaps_are_categories_unless_asked_otherwise():
    frame = pd.DataFrame({"a": ["?", "x", "y"] * 10, "b": ["", " na ", "x", "y", "z"] * 6})
    assert "?" in Schema.detect(frame).columns[0].levels
    for missing in (True, {"?", "NA", ""}):
        schema = Schema.detect(frame, missing=missing)
        assert [set(column.levels) for column in schema.columns] == [{"x", "y"}, {"x", "y", "z"}]
    again = schema.decode(schema.encode(frame)[0])
    assert again["a"].tolist() == frame["a"].tolist()


@pytest.mark.parametrize("text", ["1_000", "+nan", "-nan", "0x10", "1\x00", "ınf", "1 2", "1,5"])
def test_what_python_reads_as_a_number_and_people_do_not_is_none(text):
    assert numbers_from(["1", text], names=True) is None


def test_numbers_are_read_with_blanks_signs_powers_and_gaps():
    texts = [" 1.5 ", "-.5", "+2.", "1e-3", "-Infinity", "NaN", " n/a"]
    read = [1.5, -0.5, 2.0, 1e-3, -np.inf, np.nan, np.nan]
    assert np.array_equal(numbers_from(texts), read, equal_nan=True)
    assert numbers_from(["1.5", "٣"]) is None  # samples could not be written so
    assert numbers_from(["1.5", "007"]) is None
    assert numbers_from(["1.5", "-" + "9" * 16]) is None
    assert numbers_from(["1.5", "007"], names=True).tolist() == [1.5, 7.0]
