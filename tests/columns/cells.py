"""The cells of any table, one by one, as values that tell all they hold."""

from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import torch


def columns_of(table):
    if isinstance(table, pd.DataFrame):
        return [table.iloc[:, j] for j in range(table.shape[1])]
    if isinstance(table, pl.LazyFrame | pl.DataFrame):
        return table.lazy().collect().get_columns()
    if isinstance(table, pa.Table | pa.RecordBatch):
        return table.columns
    return list(table.values()) if isinstance(table, dict) else list(table.T)


def cells_of(column):
    """Type of the column, and its cells as objects, none of them rounded."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        nanoseconds = pa.types.is_time(array.type) or pa.types.is_duration(array.type)
        whole = pa.int32() if str(array.type)[:6] == "time32" else pa.int64()
        return array.type, (array.cast(whole) if nanoseconds else array).to_pylist()
    if isinstance(column, pl.Series):
        temporal = column.dtype.is_temporal()
        return column.dtype, (column.to_physical() if temporal else column).to_list()
    if isinstance(column, pd.Series | np.ndarray | torch.Tensor):
        return column.dtype, list(column)
    return type(column), list(column)


def is_gap(value):
    if value is None or value is pd.NA or value is np.ma.masked or isinstance(value, type(pd.NaT)):
        return True
    if isinstance(value, Decimal):
        return not value.is_finite()
    return bool(np.isnat(value)) if isinstance(value, np.datetime64) else value != value


def equal(one, other):
    """Whether two cells are the same value of the same type; all gaps are."""
    if is_gap(one) or is_gap(other):
        return is_gap(one) and is_gap(other)
    return type(one) is type(other) and bool(one == other)
