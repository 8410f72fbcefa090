"""Columns that others determine: a total of amounts, the borough of a zone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfnorm.columns.coding import Column
from selfnorm.columns.frames import Cells

MAX_ROWS = 20_000  # of which relations are read off
MAX_COLUMNS = 100


def relations(columns: Sequence[Column], cells: Mapping[int, Cells]) -> list[str]:
    """Notes on columns that follow from others.

    Example:
        >>> cells = {
        ...     j: Cells("label", np.array(places * 20), np.zeros(60, bool), labels)
        ...     for j, (places, labels) in enumerate([([0, 1, 2], "abc"), ([0, 0, 1], "xy")])
        ... }
        >>> relations([Column("zone", "category"), Column("town", "category")], cells)
        ["'zone' determines 'town'"]
    """
    numbers = [j for j, column in cells.items() if column.kind == "number"][:MAX_COLUMNS]
    finite = [j for j in cells if columns[j].kind == "category" and not columns[j].tail]
    return [
        *_sums([columns[j] for j in numbers], [cells[j] for j in numbers]),
        *_functions([columns[j].name for j in finite], [cells[j] for j in finite][:MAX_COLUMNS]),
    ]


def _sums(columns: Sequence[Column], cells: Sequence[Cells]) -> list[str]:
    """Columns that are a sum of multiples of others, exactly or but for a few amounts."""
    if len(cells) < 2:
        return []
    table = np.stack([np.where(c.missing, np.nan, c.values) for c in cells], 1)
    table = table[~np.isnan(table).any(1)]
    table = table[:: len(table) // MAX_ROWS + 1]
    if len(table) < max(30, 5 * table.shape[1]):
        return []
    sd = table.std(0)
    sd[sd == 0] = 1.0
    z = (table - table.mean(0)) / sd
    # 1 - R^2 of each column given all others; the widest column is the sum
    left_over = 1 / np.diag(np.linalg.inv(z.T @ z / len(z) + 1e-9 * np.eye(len(cells))))
    found: dict[frozenset[int], str] = {}
    for j in sorted(np.flatnonzero(left_over < 0.05).tolist(), key=lambda j: -sd[j]):
        others = [i for i in range(len(cells)) if i != j]
        shares = np.linalg.lstsq(z[:, others], z[:, j], rcond=1e-8)[0]
        used = [i for i, share in zip(others, shares, strict=True) if abs(share) > 0.01]
        if used and frozenset([*used, j]) not in found:
            told = _sum([columns[i] for i in used], table[:, used], columns[j], table[:, j])
            if told is not None:
                found[frozenset([*used, j])] = told
    return list(found.values())


def _sum(terms: Sequence[Column], x: np.ndarray, column: Column, y: np.ndarray) -> str | None:
    """How ``y`` is made of the columns of ``x``, if it is."""
    fitted = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0][:-1]
    whole = np.round(fitted)
    unit = max(0.0 if c.decimals is None else 0.51 * 10.0**-c.decimals for c in (*terms, column))
    for weights in (whole, fitted):
        rest = y - x @ weights
        rest = rest - np.median(rest)
        slack = unit * (1 + np.abs(weights).sum())
        if slack > 0.02 * y.std():  # numbers so coarse that rounding explains anything
            slack = 0.0
        if np.abs(rest).max() <= slack + 1e-9 * np.abs(y).max():
            return f"{column.name!r} is {_written(weights, terms)}, up to a constant and rounding"
    rest = np.round(y - x @ whole, 6 if column.decimals is None else column.decimals)
    counts = np.sort(np.unique(rest, return_counts=True)[1])
    few = counts[-20:].sum() > 0.9 * len(rest) and rest.var() < 0.05 * y.var()
    if few and len(terms) > 1 and (np.abs(fitted - whole) < 0.25).all() and whole.all():
        return f"{column.name!r} is {_written(whole, terms)} but for a few amounts"
    return None


def _written(weights: np.ndarray, terms: Sequence[Column]) -> str:
    pairs = zip(weights.tolist(), terms, strict=True)
    return " + ".join((f"{w:.4g} " if w != 1 else "") + repr(c.name) for w, c in pairs)


def _functions(names: Sequence[Any], cells: Sequence[Cells]) -> list[str]:
    """Categories that others determine, where that is no accident of few rows."""
    codes = [
        np.where(column.missing, -1, np.unique(column.values, return_inverse=True)[1])
        for column in cells
    ]
    notes = []
    for i in range(len(codes)):
        for j in range(len(codes)):
            if i != j and _determines(codes[i], codes[j]):
                mutual = _determines(codes[j], codes[i])
                if mutual and i < j:
                    notes.append(f"{names[i]!r} and {names[j]!r} determine each other")
                elif not mutual:
                    notes.append(f"{names[i]!r} determines {names[j]!r}")
    return notes


def _determines(a: np.ndarray, b: np.ndarray) -> bool:
    few = slice(None, None, len(a) // 1000 + 1)  # refuses most pairs at once
    for rows in (few, slice(None, None, len(a) // MAX_ROWS + 1), slice(None)):
        both = (a[rows] >= 0) & (b[rows] >= 0)
        x, y = a[rows][both], b[rows][both]
        if len(x) == 0:
            return False
        pairs = np.unique(x * (y.max() + 1) + y)
        if len(pairs) > len(np.unique(x)):
            return False
    # how likely the rows of each group of ``a`` would agree in ``b`` by chance
    levels = pairs % (y.max() + 1)
    sizes = np.bincount(np.unique(x, return_inverse=True)[1])
    shares = np.bincount(y) / len(y)
    return bool(((sizes - 1) * np.log(shares[levels])).sum() < -20)
