"""Queries that count rows of a table, and what others estimate of them: for ``answers.py``.

Conjunctions: a random row, 2 to 6 random columns, and for each ``=``, ``<=`` or ``>=`` with the
row's value; ``=`` alone for text and for less than 10 values, never for values that hardly repeat.
PostgreSQL's planner is asked by ``psql``, which its own variables tell where the server is.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from table_frames import Frame, at_most, n_rows

Query = dict[str, tuple[str, Any]]
FEW_VALUES = 10
COMPARISONS = {"=": np.equal, "<=": np.less_equal, ">=": np.greater_equal}


def queries(frame: Frame, n: int) -> list[Query]:
    """Conjunctions that some row obeys: ``{column: (comparison, value)}``."""
    rng, rows = np.random.default_rng(1), n_rows(frame)
    values = {name: column.tolist() for name, column in frame.items()}
    n_values = {name: len(set(of_column)) for name, of_column in values.items()}

    def comparisons(name: str) -> list[str]:
        if frame[name].dtype.kind not in "if" or n_values[name] < FEW_VALUES:
            return ["="]
        return ["=", "<=", ">="] if n_values[name] <= rows / FEW_VALUES else ["<=", ">="]

    made = []
    for _ in range(n):
        row = rng.integers(rows)
        names = rng.choice(list(frame), size=rng.integers(2, 7), replace=False).tolist()
        made.append({c: (str(rng.choice(comparisons(c))), values[c][row]) for c in names})
    return made


def obeying(frame: Frame, query: Query) -> np.ndarray:
    """Which rows obey a query."""
    return np.all([COMPARISONS[how](frame[c], v) for c, (how, v) in query.items()], axis=0)


def true_counts(frame: Frame, made: list[Query]) -> np.ndarray:
    """How many rows obey each query."""
    return np.array([obeying(frame, query).sum() for query in made])


def by_sample(frame: Frame, made: list[Query]) -> np.ndarray:
    """One row in a hundred, counted."""
    few = at_most(frame, n_rows(frame) // 100, 0)
    return true_counts(few, made) * (n_rows(frame) / n_rows(few))


def by_independence(frame: Frame, made: list[Query]) -> np.ndarray:
    """The product of the true shares of the columns."""
    shares = [[obeying(frame, {c: how}).mean() for c, how in query.items()] for query in made]
    return n_rows(frame) * np.array([np.prod(of_query) for of_query in shares])


def event(query: Query) -> dict[str, Any]:
    """What a density is asked: a value, or a range with an open end."""
    ends = {"=": lambda v: v, "<=": lambda v: (None, v), ">=": lambda v: (v, None)}
    return {column: ends[how](value) for column, (how, value) in query.items()}


def in_sql(query: Query) -> str:
    """The condition of a query."""
    quoted = {c: str(v).replace("'", "''") for c, (_, v) in query.items()}
    return " AND ".join(f"\"{c}\" {how} '{quoted[c]}'" for c, (how, _) in query.items())


def by_postgresql(
    frame: Frame, made: list[Query], statistics: str = "", target: int = 100
) -> np.ndarray:
    """The planner's rows after ``statistics`` and ``ANALYZE``; psql's variables name the server."""
    types = {"i": "bigint", "f": "double precision", "b": "boolean", "O": "text"}
    columns = ", ".join(f'"{c}" {types[v.dtype.kind]}' for c, v in frame.items())
    rows = io.StringIO()
    csv.writer(rows, lineterminator="\n").writerows(
        zip(*(v.tolist() for v in frame.values()), strict=True)
    )
    script = f"""SET max_parallel_workers_per_gather = 0; SET default_statistics_target = {target};
CREATE TEMPORARY TABLE t ({columns}); COPY t FROM STDIN (FORMAT csv);
{rows.getvalue()}\\.
{statistics} ANALYZE t;\n"""
    script += "\n".join(f"EXPLAIN SELECT * FROM t WHERE {in_sql(query)};" for query in made)
    command = ["psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", "postgres"]
    ran = subprocess.run(command, input=script, text=True, capture_output=True, check=False)
    if ran.returncode:
        sys.exit(f"psql: {ran.stderr.strip()}; PGHOST and PGUSER say where a server is")
    return np.array([float(plan) for plan in re.findall(r"^\S.*rows=(\d+)", ran.stdout, re.M)])


def by_postgresql_statistics(frame: Frame, made: list[Query]) -> np.ndarray:
    """The same with finer ones, and with dependencies, distinct and common values of all pairs."""
    pairs = enumerate(itertools.combinations(frame, 2))
    commands = [f'CREATE STATISTICS pg_temp.s{k} ON "{a}", "{b}" FROM t;' for k, (a, b) in pairs]
    return by_postgresql(frame, made, " ".join(commands), 1_000)


RIVALS: dict[str, Callable[[Frame, list[Query]], np.ndarray]] = {
    "postgresql": by_postgresql,
    "postgresql-statistics": by_postgresql_statistics,
    "sample": by_sample,
    "independence": by_independence,
}


# Errors


def q_errors(true: np.ndarray, estimates: np.ndarray) -> np.ndarray:
    """``max(a / b, b / a)`` of numbers of rows, at least 1.

    Example:
        >>> q_errors(np.array([10.0, 1.0]), np.array([5.0, 0.0])).tolist()
        [2.0, 1.0]
    """
    ratio = np.maximum(true, 1.0) / np.maximum(estimates, 1.0)
    return np.maximum(ratio, 1 / ratio)


def quantiles(errors: np.ndarray) -> dict[str, float]:
    """Those that are published."""
    levels = {"median": 0.5, "95": 0.95, "99": 0.99, "max": 1.0}
    return {name: float(np.quantile(errors, level)) for name, level in levels.items()}
