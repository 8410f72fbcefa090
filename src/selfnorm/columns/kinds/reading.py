"""Cells of any table as those of a column; text as what it says, and as text again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from selfnorm.columns.cells import Cells
from selfnorm.columns.kinds.base import Column
from selfnorm.columns.kinds.date import as_dates
from selfnorm.columns.kinds.date_text import date_template, dates_as_text, dates_from
from selfnorm.columns.kinds.number import check_numbers, numbers_in, read_numbers, snap
from selfnorm.columns.text import is_gap, marked, numbers_as_text
from selfnorm.errors import DataError


def interpreted(cells: Cells, missing: Collection[str], stated: str | None = None) -> Cells:
    """Text as what it says: gaps, numbers, dates; cells of other kinds as they are.

    What the table itself declares a category, or a user ``stated`` to be one, stays text.
    """
    if cells.texts is None and (cells.kind != "label" or {*map(type, cells.labels)} != {str}):
        return cells
    if stated == "category" or cells.declared:
        return cells.without_gaps(missing)
    numbers = numbers_in(cells, names=stated is not None and stated != "date")
    if numbers is not None:
        return numbers
    template = date_template([t for t in cells.labels if not is_gap(t)])
    return cells.without_gaps(missing) if template is None else as_dates(cells, template)


def as_column(
    column: Column, cells: Cells, missing: Collection[str], surprises: list[str]
) -> Cells:
    """Cells as the column has them, whatever type they came in; gaps where that is a surprise."""
    if column.holds == "number":
        cells = read_numbers(column, cells, surprises)
        check_numbers(column.name, cells)
        return replace(cells, values=snap(cells.values, column.decimals))
    if column.holds == "date":
        return _as_dates(column, cells, missing)
    if cells.kind == "label":
        return cells.without_gaps(missing)
    distinct, places = np.unique(cells.values, return_inverse=True)
    labels = distinct.tolist()
    if cells.kind == "date":
        labels = [str(v).replace("T", " ") for v in distinct.astype("datetime64[s]")]
    return Cells("label", np.where(cells.missing, -1, places), cells.missing, labels, cells.form)


def _as_dates(column: Column, cells: Cells, missing: Collection[str]) -> Cells:
    if "template" in column.form and cells.kind == "label":
        cells = as_dates(cells, column.form["template"])  # 01/02/2020 alone could be either
    cells = interpreted(cells, missing)
    if cells.kind == "date" or cells.missing.all():
        return replace(cells, kind="date")
    wrong: Any = cells.seen[0]
    if cells.kind == "label":
        seen = list(dict.fromkeys(cells.seen.tolist()))
        template = column.form.get("template", "")
        odd = (k for k in seen if dates_from([cells.labels[k]], template) is None)
        wrong = next(odd, seen[0])
    row = int((~cells.missing & (cells.values == wrong)).argmax())
    shown = cells.labels[wrong] if cells.kind == "label" else wrong
    raise DataError(f"column {column.name!r} holds dates, but here {shown!r} in row {row}")


def as_read(cells: Cells) -> Cells:
    """Numbers and dates that the table keeps as text, of the types that they are."""
    form = cells.form
    if cells.kind == "number" and "text" in form:
        return replace(cells, form={"dtype": "int64" if form["text_decimals"] == 0 else "float64"})
    if cells.kind == "date" and "template" in form:
        return replace(cells, form={"dtype": "datetime64[s]"})
    return cells


def as_written(cells: Cells) -> Cells:
    """Numbers and dates that the table keeps as text, as text again; gaps as it writes them."""
    form = cells.form
    if cells.kind != "label" and ("text" in form or "template" in form):
        distinct, places = np.unique(cells.values, return_inverse=True)
        if "text" in form:
            labels = numbers_as_text(np.nan_to_num(distinct), form["text_decimals"])
            labels = [marked(label, form) for label in labels]
        else:
            labels = dates_as_text(distinct, form["template"])
        cells = Cells("label", np.where(cells.missing, -1, places), cells.missing, labels, form)
    if cells.kind == "label" and "gap" in form and cells.missing.any():
        places = np.where(cells.missing, len(cells.labels), cells.values)
        none = np.zeros(len(cells), dtype=bool)
        return Cells("label", places, none, [*cells.labels, form["gap"]], form)
    return cells
