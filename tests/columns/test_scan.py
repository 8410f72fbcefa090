import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from selfnorm import Schema
from selfnorm.columns import Scan, Shards
from selfnorm.columns import scan as scanning

pytestmark = pytest.mark.filterwarnings("ignore:set aside as identifiers")


def rows(n=6000):
    rng = np.random.default_rng(0)
    size = rng.normal(size=n)
    return pa.table(
        {
            "size": size,
            "kind": np.array(["a", "b", "c"])[rng.choice(3, n, p=[0.6, 0.39, 0.01])],
            "count": rng.poisson(3, n),
            "paid": np.where(rng.random(n) < 0.3, 0.0, np.exp(size)),
            "text": [None if k % 50 == 0 else str(k % 40) for k in range(n)],
            "rare": ["once" if k == 3210 else "often" if k % 3 else "less" for k in range(n)],
            "row": np.arange(n),
        }
    )


@pytest.fixture
def path(tmp_path):
    pq.write_table(rows(), tmp_path / "rows.parquet", row_group_size=1000)
    return tmp_path / "rows.parquet"


def test_a_table_that_fits_has_the_schema_of_detect(path):
    assert Schema.scan(path, missing=True) == Schema.detect(rows(), missing=True)


def test_counts_of_a_larger_table_are_those_of_all_rows(path, monkeypatch):
    monkeypatch.setattr(scanning, "SAMPLED_ROWS", 500)
    monkeypatch.setattr(scanning, "COUNTED_VALUES", 100)
    scan = Scan.of(Shards.of(path))
    assert 400 < len(scan.numbers) < 750
    assert 3210 in scan.numbers
    assert sorted(scan.weights) == ["count", "kind", "rare", "text"]
    assert {name: round(w.sum()) for name, w in scan.weights.items()} == dict.fromkeys(
        scan.weights, 6000
    )
    found, all_rows = Schema.scan(scan), Schema.detect(rows())
    for one, other in zip(found.columns, all_rows.columns, strict=True):
        assert (one.kind, one.levels) == (other.kind, other.levels)
    masses = {part.name: part.unseen for part in found.parts}
    assert masses["count"] == masses["rare"] == 1 / 6002
    assert found.parts[3].values == (0.0,)
