"""The benchmark of answers: queries, counts by others, q-errors, runs that are not repeated."""

import numpy as np
import pytest

import answers
import cardinality
from selfnorm import Schema
from selfnorm.tables.events import Event


@pytest.fixture
def frame(rng):
    n = 2000
    return {
        "name": rng.choice(["it's", 'a "b"', "c"], n).astype(object),
        "new": rng.random(n) < 0.5,
        "few": rng.integers(4, size=n),
        "count": rng.integers(60, size=n),
        "size": rng.normal(size=n),
        "width": rng.normal(size=n),
    }


def test_some_row_obeys_every_query_and_only_values_that_repeat_are_asked_for(frame):
    made = cardinality.queries(frame, 300)
    assert (cardinality.true_counts(frame, made) >= 1).all()
    assert made[:20] == cardinality.queries(frame, 20)
    hows = {c: {query[c][0] for query in made if c in query} for c in frame}
    assert hows["name"] == hows["new"] == hows["few"] == {"="}
    assert hows["count"] == {"=", "<=", ">="}
    assert hows["size"] == {"<=", ">="}
    assert {len(query) for query in made} == {2, 3, 4, 5, 6}


def test_an_event_holds_for_the_rows_that_obey_its_query(frame):
    schema = Schema.detect(frame)
    for query in cardinality.queries(frame, 60):
        holds = Event.of(schema, cardinality.event(query)).holds(schema.cells(frame))
        np.testing.assert_array_equal(holds, cardinality.obeying(frame, query))


def test_counts_by_a_sample_and_by_independence_are_near_where_columns_are_independent(frame):
    made = cardinality.queries(frame, 200)
    true = cardinality.true_counts(frame, made)
    errors = cardinality.q_errors(true, cardinality.by_independence(frame, made))
    assert np.median(errors[true >= 200]) < 1.05
    everything = [{"size": ("<=", np.inf)}]
    assert cardinality.by_sample(frame, everything) == [2000]


def test_text_in_a_condition_is_quoted():
    query = {"name": ("=", "it's"), "size": ("<=", 0.5)}
    assert cardinality.in_sql(query) == """"name" = 'it''s' AND "size" <= '0.5'"""


def test_q_errors_count_both_ways_and_less_than_a_row_as_one():
    errors = cardinality.q_errors(np.array([10.0, 10.0, 1.0]), np.array([5.0, 20.0, 1e-9]))
    assert errors.tolist() == [2.0, 2.0, 1.0]
    assert cardinality.quantiles(np.array([1.0, 2.0, 3.0]))["median"] == 2.0


def test_a_run_that_has_its_row_is_not_repeated(frame, tmp_path, monkeypatch, capsys):
    answers.save_frame(tmp_path / "data" / "magic.npz", frame)
    command = ["queries", "--work", tmp_path, "--out", tmp_path, "--sets", "magic"]
    command += ["--method", "sample", "independence", "--queries", 50]
    monkeypatch.setattr("sys.argv", ["answers.py", *map(str, command)])
    answers.main()
    assert capsys.readouterr().out.count("magic") == 2
    answers.main()
    assert not capsys.readouterr().out
