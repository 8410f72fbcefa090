import os

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from selfnorm.columns import Shards
from selfnorm.errors import DataError


@pytest.fixture
def folder(tmp_path):
    for k in range(3):
        rows = {"a": np.arange(4.0) + 4 * k, "b": ["x", "y", "x", "y"]}
        pq.write_table(pa.table(rows), tmp_path / f"{k}.parquet")
    return tmp_path


def test_a_folder_a_glob_a_list_and_a_data_set_are_the_same_rows(folder):
    (folder / "_SUCCESS").write_text("")
    files = [folder / f"{k}.parquet" for k in range(3)]
    for source in (folder, f"{folder}/*.parquet", files, ds.dataset(files, format="parquet")):
        shards = Shards.of(source)
        rows = pa.Table.from_batches(shards.batches())
        assert shards.n_rows == rows.num_rows == 12
        assert rows["a"].to_pylist() == list(range(12))


BROKEN = {
    "one column more": (lambda p: pq.write_table(pa.table({"a": [1.0], "c": [2]}), p), "differ in"),
    "another order": (lambda p: pq.write_table(pa.table({"b": ["x"], "a": [1.0]}), p), "order"),
    "another type": (lambda p: pq.write_table(pa.table({"a": [1], "b": ["x"]}), p), "is int64"),
    "empty": (lambda p: p.write_bytes(b""), "is empty"),
    "damaged": (lambda p: p.write_bytes(b"PAR1" + bytes(50)), "cannot be read"),
    "cut": (lambda p: os.truncate(p, p.stat().st_size - 9), "cannot be read"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_does_not_fit_is_named(folder, what):
    break_, words = BROKEN[what]
    break_(folder / "1.parquet")
    with pytest.raises(DataError, match=words) as error:
        Shards.of(folder)
    assert "1.parquet" in str(error.value)


def test_pages_that_are_damaged_are_named_when_they_are_read(folder):
    path = folder / "1.parquet"
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"1.parquet cannot be read"):
        list(Shards.of(folder).batches())


@pytest.mark.parametrize("source", ["none.parquet", "none*.parquet", "empty", "text.csv"])
def test_what_is_no_table_of_files_is_refused(tmp_path, source):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=source.replace("*", r"\*")):
        Shards.of(tmp_path / source)


def test_a_file_is_named_once(folder):
    path = sorted(folder.glob("*.parquet"))[0]
    with pytest.raises(DataError, match="read twice"):
        Shards.of([path, folder])
