"""One pass over a table of more rows than memory: rows that stand for all, and exact counts.

The rows that are kept are a random sample, chosen by a hash of the number of the row, and the first
row with every value of a column that has not too many of them. So a schema that is read off them
misses no level, no slip and no gap, and the counts of such values are those of all rows. What is
read off the sample alone: the values of columns with more of them, quantiles, and how columns
depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from selfnorm.columns.shards import Shards

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLED_ROWS = 2**18  # tables of no more rows are read as they are
COUNTED_VALUES = 2**14  # distinct values of a column that are counted


@dataclass
class _Counts:
    """How often every value of a column comes; ``None`` once there are too many of them."""

    of_value: dict[Any, int] | None = field(default_factory=dict)

    def add(self, column: pa.Array) -> np.ndarray:
        """Count the values of some rows; the first places of those that are new."""
        import pyarrow as pa
        import pyarrow.compute as pc

        none = np.zeros(0, dtype=np.int64)
        if self.of_value is None:
            return none
        try:
            column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            counted = column.value_counts()
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # lists and their like
            self.of_value = None
            return none
        values, counts = (counted.field(k) for k in range(2))
        keys = values.to_pylist()
        new = [k for k, key in enumerate(keys) if key == key and key not in self.of_value]
        for key, count in zip(keys, counts.to_pylist(), strict=True):
            if key == key:
                self.of_value[key] = self.of_value.get(key, 0) + count
        if len(self.of_value) > COUNTED_VALUES:
            self.of_value = None
            return none
        if not new:
            return none
        place = pc.index_in(column, value_set=values.take(pa.array(new))).fill_null(-1)
        distinct, first = np.unique(np.asarray(place), return_index=True)
        return first[distinct >= 0]

    def weights(self, column: pa.ChunkedArray) -> np.ndarray | None:
        """How many rows each row of a sample stands for; ``None`` where values are not counted."""
        if self.of_value is None:
            return None
        values = column.to_pylist()
        in_sample: dict[Any, int] = {}
        for value in values:
            in_sample[value] = in_sample.get(value, 0) + 1
        shares = {v: self.of_value.get(v, n) / n for v, n in in_sample.items()}
        return np.array([shares[value] for value in values])


@dataclass(frozen=True)
class Scan:
    """What one pass over shards tells.

    Attributes:
        table: rows that stand for all, as they came.
        numbers: ``(m,)`` their numbers among all rows, ascending.
        n_rows: how many there are in all.
        weights: by column, how many rows each of them stands for; none where it is not known.
    """

    table: pa.Table
    numbers: np.ndarray
    n_rows: int
    weights: dict[str, np.ndarray]

    @classmethod
    def of(cls, shards: Shards) -> Scan:
        """Read all rows once; keep few."""
        import pyarrow as pa

        counts = [_Counts() for _ in shards.names]
        share = SAMPLED_ROWS / shards.n_rows
        kept, numbers, first = [], [], 0
        for batch in shards.batches():
            own = np.arange(first, first + batch.num_rows)
            first += batch.num_rows
            chosen = [np.flatnonzero(hashed(own) < share)]
            chosen += [of.add(column) for of, column in zip(counts, batch.columns, strict=True)]
            places = np.unique(np.concatenate(chosen))
            if len(places):
                kept.append(batch.take(pa.array(places)))
                numbers.append(own[places])
        table = pa.Table.from_batches(kept)
        weights = {
            name: weight
            for name, of in zip(shards.names, counts, strict=True)
            if (weight := of.weights(table[name])) is not None
        }
        return cls(table, np.concatenate(numbers), shards.n_rows, weights)


def hashed(numbers: np.ndarray, seed: int = 0) -> np.ndarray:
    """Numbers of rows as shares, evenly spread between 0 and 1: the same wherever they are read.

    Example:
        >>> shares = hashed(np.arange(1000))
        >>> abs(shares.mean() - 0.5) < 0.03, len(np.unique(shares))
        (np.True_, 1000)
    """
    with np.errstate(over="ignore"):  # splitmix64
        z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15 * (seed + 1) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z / 2.0**64
