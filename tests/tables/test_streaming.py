import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import selfnorm as sn
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.tables import streaming

pytestmark = pytest.mark.filterwarnings("ignore:'count' was never seen")


def rows(n, seed):
    rng = np.random.default_rng(seed)
    size = rng.normal(size=n)
    kind = np.array(["a", "b", "c"])[rng.choice(3, n)]
    count = rng.poisson(np.exp(1 + 0.3 * size))
    return pa.table({"kind": kind, "size": size, "count": count})


@pytest.fixture(scope="module")
def density():
    return sn.EnergyDensity(max_steps=40, random_state=0).fit(rows(400, 0))


@pytest.fixture
def files(tmp_path):
    for k in range(3):
        pq.write_table(rows(150 + k, k), tmp_path / f"{k}.parquet", row_group_size=60)
    return tmp_path


def test_scores_of_files_are_those_of_their_rows(density, files):
    seen = []
    report = density.score_batches(files, files / "scored")
    density.score_batches(files / "1.parquet", seen.append)
    assert report == {"rows": 453, "files": 3, "kept": 0}
    scored = pq.read_table(files / "scored" / "1.parquet")
    table = pq.read_table(files / "1.parquet")
    scores, ordinary = density.scored(table)
    assert np.allclose(scored["log_density"], scores, atol=1e-5)
    assert (scored["outlier"].to_numpy() == (ordinary < 0)).all()
    assert pa.concat_tables(seen).equals(scored.replace_schema_metadata())


@pytest.mark.parametrize("normalizer", ["quadrature", "learned"])
def test_a_score_does_not_depend_on_the_rows_beside_it(density, normalizer):
    table, order = rows(300, 3), np.random.default_rng(0).permutation(300)[:77]
    scores = density.score_arrow(table, normalizer=normalizer)["log_density"].to_numpy()
    others = density.score_arrow(table.take(order), normalizer=normalizer)["log_density"]
    assert (others.to_numpy() == scores[order]).all()


def test_learned_scores_are_off_by_what_the_fit_says(density):
    table = rows(400, 4)
    exact, fast = density.score_samples(table), density.score_samples(table, normalizer="learned")
    off = np.abs(exact - fast).mean()
    assert 0 < off < 3 * density.learned_error_ < 1
    with pytest.raises(ValueError, match="normalizer"):
        density.score_samples(table, normalizer="none")


def test_a_killed_run_goes_on_with_the_files_that_are_missing(density, files, monkeypatch):
    score, batches = density.score_arrow, []

    def killed(table, **how):
        batches.append(table)
        if len(batches) == 8:  # three of each file before
            raise KeyboardInterrupt
        return score(table, **how)

    monkeypatch.setattr(density, "score_arrow", killed)
    with pytest.raises(KeyboardInterrupt):
        density.score_batches(files, files / "scored")
    names = sorted(path.name for path in (files / "scored").iterdir())
    assert names == ["0.parquet", "1.parquet"]
    monkeypatch.undo()
    report = density.score_batches(files, files / "scored")
    assert report == {"rows": 453, "files": 1, "kept": 2}
    density.score_batches(files, files / "again")
    for k in range(3):
        one, other = (pq.read_table(files / to / f"{k}.parquet") for to in ("scored", "again"))
        assert one.equals(other)


def test_results_that_something_else_made_are_refused(density, files):
    density.score_batches(files, files / "scored")
    pq.write_table(rows(9, 9), files / "2.parquet")
    with pytest.raises(DataError, match=r"2.parquet is of another input"):
        density.score_batches(files, files / "scored")
    with pytest.raises(DataError, match=r"0.parquet is of another input, model or options"):
        density.score_batches(files / "0.parquet", files / "scored", normalizer="learned")


def test_a_disk_that_fills_leaves_no_file(density, files, monkeypatch):
    class Full(pq.ParquetWriter):
        def write_table(self, *rows, **how):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "ParquetWriter", Full)
    with pytest.raises(DataError, match=r"cannot write .*0.parquet: No space left"):
        density.score_batches(files, files / "scored")
    assert not list((files / "scored").iterdir())


def test_gaps_of_files_are_filled_and_nothing_else(density, tmp_path):
    table = rows(120, 5)
    size = np.where(np.arange(120) % 7 == 0, np.nan, table["size"].to_numpy())
    gappy = table.set_column(1, "size", pa.array(size, from_pandas=True))
    pq.write_table(gappy, tmp_path / "t.parquet")
    density.impute_batches(tmp_path / "t.parquet", tmp_path / "filled.parquet")
    filled = pq.read_table(tmp_path / "filled.parquet")
    assert filled["size"].null_count == 0
    there = np.isfinite(size)
    assert (filled["size"].to_numpy()[there] == size[there]).all()
    assert filled.drop("size").equals(gappy.drop("size"))


def test_samples_of_any_number_are_files_of_a_million(density, tmp_path, monkeypatch):
    monkeypatch.setattr("selfnorm.tables.density.SAMPLES_PER_FILE", 64)
    monkeypatch.setattr("selfnorm.tables.density.DRAWN_ROWS", 40)
    report = density.sample_batches(150, tmp_path / "drawn")
    assert report == {"rows": 150, "files": 3, "kept": 0}
    drawn = pq.read_table(tmp_path / "drawn")
    assert drawn.num_rows == 150
    assert drawn["kind"].to_pylist() != sorted(drawn["kind"].to_pylist())
    density.sample_batches(150, tmp_path / "again")
    assert pq.read_table(tmp_path / "again").equals(drawn)


def test_warnings_of_many_batches_come_once(density, files, monkeypatch):
    table = pq.read_table(files / "0.parquet")
    odd = table.set_column(0, "kind", [["z"] * table.num_rows])
    for k in range(7):
        pq.write_table(odd.slice(0, 10 + k), files / f"{k}.parquet")
    monkeypatch.setattr(streaming, "SHOWN", 2)
    with pytest.warns(SelfnormWarning) as seen:
        density.score_batches(files, lambda _: None)
    assert [str(w.message)[-23:] for w in seen][2:] == ["and 5 more like these"]


def test_a_file_without_rows_has_no_results(density, files):
    pq.write_table(rows(0, 0), files / "3.parquet")
    assert density.score_batches(files, files / "scored") == {"rows": 453, "files": 3, "kept": 0}


def test_one_energy_scores_files(tmp_path):
    x = np.random.default_rng(0).normal(size=(1000, 2))
    density = sn.EnergyDensity(method="joint", max_steps=2, hidden=8, random_state=0).fit(x)
    names = [column.name for column in density.schema_.columns]
    pq.write_table(pa.table(dict(zip(names, x.T, strict=True))), tmp_path / "x.parquet")
    density.score_batches(tmp_path / "x.parquet", tmp_path / "scored")
    scored = pq.read_table(tmp_path / "scored" / "x.parquet")["log_density"]
    assert np.allclose(scored, density.score_samples(x), atol=1e-4)
