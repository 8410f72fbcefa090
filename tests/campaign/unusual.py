"""Tables of types, names and holders that are seldom met, from a seed."""

from collections import OrderedDict

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset

from tests.campaign.tables import WORDS
from tests.columns.catalogue import REFUSED, TABLES

NAMES = (*WORDS, "\ud800", None, float("nan"), b"a", 7, ("a", "b"), frozenset("a"))


class Own(pd.DataFrame):
    """A table of a class of one's own."""

    @property
    def _constructor(self):
        return Own


def unusual(rng):
    """A table with a column of a rare type, at times of a rare name or holder; what it is."""
    every = [*TABLES.items(), *((why, table) for table, why in REFUSED)]
    kind, table = every[rng.integers(len(every))]
    if isinstance(table, pyarrow.dataset.Dataset):
        table = table.to_table()  # as it is, it is fitted and scored batch by batch
    rare, name = rng.random() < 0.15, "w"
    if rng.random() < 0.25:
        rare_names = NAMES if isinstance(table, pd.DataFrame | dict) else WORDS
        name = rare_names[rng.integers(len(rare_names))]
    about = f"{kind} as {name!r}{', rare holder' * rare}"
    if isinstance(table, pd.DataFrame):
        table = table.rename(columns={"w": name})
        return (Own(table) if rare else table), about
    if isinstance(table, pl.DataFrame):
        table = table.rename({"w": name}) if "w" in table.columns else table
        return (table.lazy() if rare else table), about
    if isinstance(table, pa.Table):
        table = table.rename_columns([name if old == "w" else old for old in table.column_names])
        return (table.combine_chunks().to_batches()[0] if rare else table), about
    if isinstance(table, dict):
        return (OrderedDict if rare else dict)(
            (name if old == "w" else old, cells) for old, cells in table.items()
        ), about
    return table, about
