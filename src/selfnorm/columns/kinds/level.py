"""Levels of a category: labels, truth values, or few distinct numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from selfnorm.columns.cells import Cells
from selfnorm.columns.kinds.base import (
    Coded,
    Column,
    Draft,
    Part,
    kept_for_unseen,
    label_text,
    register,
)
from selfnorm.columns.kinds.number import MAX_CODES, Number
from selfnorm.columns.values import PartValues, Values


@register("category")
class Level(Number):
    """One of finitely many levels, perhaps numbers; rare ones share the last code."""

    holds: ClassVar[str | None] = None

    @classmethod
    def detect(cls, draft: Draft) -> tuple[Column, list[Part]]:
        """Numbers, booleans and ordered categories in their order, other levels by frequency."""
        column, labels, counts = draft.column, draft.labels, draft.counts
        order = sorted(range(len(labels)), key=lambda i: (-counts[i], str(labels[i])))
        own, tail = order, []
        if len(order) > MAX_CODES:
            own, tail = order[: MAX_CODES - 1], order[MAX_CODES - 1 :]
        if column.numeric or column.form.get("ordered"):
            own = sorted(own)
        elif all(isinstance(label, bool) for label in labels):
            own = sorted(own, key=lambda i: bool(labels[i]))
        unseen = kept_for_unseen(int(counts.sum()))
        part = Part(draft.place, str(column.name), len(own) + (len(tail) > 0), unseen=unseen)
        summary = f"{len(order)} levels" + (f", {len(tail)} in a shared tail" if tail else "")
        if len(order) <= 4:
            summary += ": " + ", ".join(" ".join(label_text(labels[i]).split())[:20] for i in own)
        column = replace(
            column,
            kind="category",
            levels=tuple(labels[i] for i in own),
            tail=tuple(labels[i] for i in tail),
            tail_shares=tuple((counts[tail] / counts[tail].sum()).tolist()) if tail else (),
            summary=summary,
        )
        return column, [part]

    def encode(self, cells: Cells) -> list[Coded]:
        """Codes, and numbers beside them."""
        (part,) = self.parts
        if part.values:  # numbers
            return super().encode(cells)
        labels, places = cells.labels, cells.values
        if cells.kind == "number":
            distinct, places = np.unique(cells.values, return_inverse=True)
            labels = distinct.tolist()
        code_of = _lookup(self.column)
        pairs = [code_of(label) for label in labels]
        codes = np.array([*(code for code, _ in pairs), -1], dtype=np.float64)[places]
        extra = np.array([*(share for _, share in pairs), 0.0])[places]
        codes[cells.missing], extra[cells.missing] = part.gap_code, 0.0
        return [Coded(codes, np.zeros(len(codes)), extra)]

    def decode(self, coded: Sequence[Coded]) -> Cells:
        """Cells of codes and numbers."""
        column, (part,), codes = self.column, self.parts, coded[0].code
        if part.values:
            return super().decode(coded)
        labels = [*column.levels, *column.tail]
        places = np.where(codes == part.gap_code, -1, codes).astype(np.int64)
        if column.tail:
            rare = np.flatnonzero(places == len(column.levels))
            places[rare] += self.rng.choice(len(column.tail), len(rare), p=column.tail_shares)
        missing = places < 0
        if column.numeric:
            return Cells("number", np.array([*labels, np.nan])[places], missing, [], column.form)
        return Cells("label", np.where(missing, -1, places), missing, labels, column.form)

    def numbers(self, cells: Cells) -> np.ndarray:
        """Numbers, or places among the levels; the one after the last is any other label."""
        if cells.kind != "label":
            return super().numbers(cells)
        levels = [*self.column.levels, *self.column.tail]
        place_of = {_plain_text(level): place for place, level in enumerate(levels)}
        places = [place_of.get(_plain_text(label), len(levels)) for label in cells.labels]
        return np.array([*places, np.nan])[np.where(cells.missing, -1, cells.values)]

    def within(self, values: Values) -> tuple[list[PartValues], bool]:
        """Codes of the levels; that of the tail if one of its levels is there."""
        column, (part,) = self.column, self.parts
        if part.values:
            return super().within(values)
        levels = [*column.levels, *column.tail]
        held = values.hold(np.array(levels if column.numeric else range(len(levels)), float))
        codes, rare = held[: len(column.levels)], held[len(column.levels) :]
        codes = np.r_[codes, rare.any()] if column.tail else codes
        codes = np.append(codes, values.gap) if part.gap else codes
        return [PartValues(codes, ())], bool(rare.all() or not rare.any())


def _plain_text(label: object) -> str:
    """The text of a label; one of truth values however they are written."""
    text = label_text(label)
    return text.lower() if text.lower() in ("true", "false") else text


def _lookup(column: Column) -> Callable[[Hashable], tuple[int, float]]:
    """Code and log-frequency of a label: by its type and value, its value, or its text."""
    levels = [(label, code, 0.0) for code, label in enumerate(column.levels)]
    shares = np.log(column.tail_shares).tolist()
    levels += [(v, len(column.levels), s) for v, s in zip(column.tail, shares, strict=True)]
    keys: list[Callable[[Any], Any]] = [lambda v: (type(v), v), lambda v: v, _plain_text]
    tables = [{key(label): (code, s) for label, code, s in reversed(levels)} for key in keys]

    def code_of(label: Hashable) -> tuple[int, float]:
        for key, table in zip(keys, tables, strict=True):
            coded = table.get(key(label))
            if coded is not None:
                return coded
        return -2, 0.0

    return code_of
