"""Scores inside other engines: one function of Arrow tables that Ray, Spark, Dask and DuckDB call.

None of them is imported here. ``docs/scale.md`` has the lines for each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from selfnorm.errors import DataError
from selfnorm.tables import EnergyDensity

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

T = TypeVar("T", "pa.Table", "pa.RecordBatch", "pd.DataFrame")


class Scorer:
    """Tables in, the same with ``log_density`` and ``outlier`` out; may be pickled.

    Every process that calls it loads the model once. A row without gaps has the same score to the
    last digit, in whatever process and beside whatever other rows.

    Args:
        model: the folder of a saved :class:`~selfnorm.EnergyDensity`, which all processes can
            read, or a fitted one, which travels with the function.
        normalizer: as of :meth:`selfnorm.EnergyDensity.score_samples`.

    Example:
        >>> import pickle
        >>> import numpy as np, pyarrow as pa
        >>> rows = pa.table({"size": np.random.default_rng(0).normal(size=300)})
        >>> density = EnergyDensity(random_state=0, max_steps=5).fit(rows)
        >>> scorer = pickle.loads(pickle.dumps(Scorer(density)))
        >>> scorer(rows.slice(0, 3)).column_names
        ['size', 'log_density', 'outlier']
    """

    def __init__(
        self, model: EnergyDensity | str | os.PathLike[str], *, normalizer: str = "quadrature"
    ) -> None:
        folder = None if isinstance(model, EnergyDensity) else Path(model).absolute()
        if folder is not None and not folder.is_dir():
            raise DataError(f"{folder} is no folder of a model; give that of density.save(folder)")
        self.folder, self.normalizer = folder, normalizer
        self._density = model if isinstance(model, EnergyDensity) else None

    def __getstate__(self) -> dict[str, Any]:
        """What was loaded from a folder is loaded again elsewhere."""
        return vars(self) | ({} if self.folder is None else {"_density": None})

    @property
    def density(self) -> EnergyDensity:
        """The model."""
        if self._density is None:
            assert self.folder is not None
            self._density = EnergyDensity.load(self.folder)
        return self._density

    def __call__(self, rows: T) -> T:
        """Score an Arrow table, a record batch or a pandas frame: Ray Data and Dask call this."""
        import pyarrow as pa

        if isinstance(rows, pa.Table):
            return self.density.score_arrow(rows, normalizer=self.normalizer)
        if isinstance(rows, pa.RecordBatch):
            table = self(pa.Table.from_batches([rows]))
            return table.combine_chunks().to_batches()[0]
        scored = self(pa.Table.from_pandas(rows, preserve_index=False)).to_pandas()
        added = {name: scored[name].to_numpy() for name in ("log_density", "outlier")}
        return rows.assign(**added)

    def map(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Score record batches one after the other: Spark calls this, and DuckDB reads from it."""
        return (self(batch) for batch in batches if batch.num_rows)

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the results, by those of the rows."""
        import pyarrow as pa

        scores = pa.field("log_density", pa.float64()), pa.field("outlier", pa.bool_())
        for score in scores:
            schema = schema.append(score)
        return schema
