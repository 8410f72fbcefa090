"""Totals: columns that are a sum of multiples of others, but for a few amounts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from selfnorm.columns.cells import Cells
from selfnorm.columns.kinds.base import Coded, Column, Kind, register
from selfnorm.columns.kinds.number import Number, decode_numbers
from selfnorm.columns.values import PartValues, Values

MAX_ROWS = 20_000  # of which relations between columns are read off


@register("sum")
class Sum(Number):
    """What a column leaves of a sum of others, which takes few values."""

    stateable: ClassVar[bool] = False

    def encode(self, cells: Cells) -> list[Coded]:
        """Codes, and numbers beside them."""
        assert self.base is not None
        return super().encode(left_over(cells, self.base, self.parts[0].resolution))

    def decode(self, coded: Sequence[Coded]) -> Cells:
        """Cells of codes and numbers."""
        assert self.base is not None
        decimals, total = self.column.decimals, decode_numbers(self.parts[0], coded[0])
        missing, total = np.isnan(total) | self.base.missing, total + self.base.values
        total = total if decimals is None else np.round(total, decimals)
        return Cells("number", total, missing, [], self.column.form)

    def within(self, values: Values) -> tuple[list[PartValues], bool]:
        """All of what is left: it depends on the terms which of it makes these sums."""
        return Kind.within(self, values)


def base_of(column: Column, cells: Mapping[int, Cells]) -> Cells | None:
    """What a column is counted from: another date, or the sum of its terms."""
    if not column.terms:
        return None if column.base is None else cells[column.base]
    missing = np.any([cells[j].missing for j in column.counted_from], axis=0)
    total = np.where(missing, 0.0, sum(factor * cells[j].values for j, factor in column.terms))
    # rounded beforehand, or what is left would depend on how halves are rounded
    total = total if column.decimals is None else np.round(total, column.decimals)
    return Cells("number", total, missing, [], column.form)


def left_over(cells: Cells, base: Cells, resolution: float) -> Cells:
    """What numbers are beyond a sum, by the digits that were recorded."""
    rest = np.round(cells.values - base.values, -round(np.log10(resolution))) + 0.0  # no -0
    return replace(cells, values=rest, missing=cells.missing | base.missing)


# Detection


Total = tuple[int, list[tuple[int, float]], str]


def sums_among(columns: Sequence[Column], cells: Sequence[Cells]) -> list[Total]:
    """Columns that are a sum of multiples of others, exactly or but for a few amounts.

    Each with its terms and their factors, and words for it.
    """
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
    sums: list[Total] = []
    for j in sorted(np.flatnonzero(left_over < 0.05).tolist(), key=lambda j: -sd[j]):
        others = [i for i in range(len(cells)) if i not in (j, *(earlier[0] for earlier in sums))]
        shares = np.linalg.lstsq(z[:, others], z[:, j], rcond=1e-8)[0]
        used = [i for i, share in zip(others, shares, strict=True) if abs(share) > 0.01]
        if used:
            made = _sum([columns[i] for i in used], table[:, used], columns[j], table[:, j])
            if made is not None:
                terms = [(i, factor) for i, factor in zip(used, made[0], strict=True) if factor]
                sums.append((j, terms, made[1]))
    return sums


def _sum(
    terms: Sequence[Column], x: np.ndarray, column: Column, y: np.ndarray
) -> tuple[list[float], str] | None:
    """Factors of the columns of ``x`` that make ``y``, and words for it, if they do."""
    fitted = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0][:-1]
    fitted = np.array([float(f"{factor:.12g}") for factor in fitted])
    rounded = np.round(fitted)
    unit = max(0.0 if c.decimals is None else 0.51 * 10.0**-c.decimals for c in (*terms, column))
    for weights in (rounded, fitted):
        rest = y - x @ weights
        rest = rest - np.median(rest)
        slack = unit * (1 + np.abs(weights).sum())
        if slack > 0.02 * y.std():  # numbers so coarse that rounding explains anything
            slack = 0.0
        if np.abs(rest).max() <= slack + 1e-9 * np.abs(y).max():
            words = f"{column.name!r} is {_written(weights, terms)}, up to a constant and rounding"
            return weights.tolist(), words
    rest = np.round(y - x @ rounded, 6 if column.decimals is None else column.decimals)
    counts = np.sort(np.unique(rest, return_counts=True)[1])
    few = counts[-20:].sum() > 0.9 * len(rest) and rest.var() < 0.05 * y.var()
    if few and len(terms) > 1 and (np.abs(fitted - rounded) < 0.25).all() and rounded.all():
        words = f"{column.name!r} is {_written(rounded, terms)} but for a few amounts"
        return rounded.tolist(), words
    return None


def _written(weights: np.ndarray, terms: Sequence[Column]) -> str:
    pairs = [(w, c) for w, c in zip(weights.tolist(), terms, strict=True) if w]
    return " + ".join((f"{w:.4g} " if w != 1 else "") + repr(c.name) for w, c in pairs)
