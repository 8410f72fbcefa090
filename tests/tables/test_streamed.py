import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import selfnorm as sn
from selfnorm.columns import scan
from selfnorm.errors import DataError
from selfnorm.tables import streamed
from selfnorm.training.loop import Stepper

FIT = {"max_steps": 110, "hidden": 16, "batch_size": 64, "random_state": 0}


def rows(n, seed):
    rng = np.random.default_rng(seed)
    size = rng.normal(size=n)
    kind = np.array(["a", "b"])[(size + rng.normal(size=n) > 0).astype(int)]
    return pa.table({"size": size, "kind": kind, "other": size**2 + rng.normal(size=n)})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for k in range(3):
        pq.write_table(rows(1200, k), folder / f"{k}.parquet")
    return folder


@pytest.fixture(autouse=True)
def few_fit_into_memory(monkeypatch):
    monkeypatch.setattr(scan, "SAMPLED_ROWS", 1000)
    monkeypatch.setattr("selfnorm.tables.density.SAMPLED_ROWS", 1000)


@pytest.fixture(scope="module")
def density(files):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SAMPLED_ROWS", 1000)
        patch.setattr("selfnorm.tables.density.SAMPLED_ROWS", 1000)
        return sn.EnergyDensity(**FIT).fit(f"{files}/*.parquet")


def test_a_fit_to_files_is_one_of_all_their_rows(density, files):
    table = pq.read_table(files)
    in_memory = sn.EnergyDensity(**FIT).fit(table)
    assert density.schema_.fingerprint == in_memory.schema_.fingerprint
    assert density.judgement_.rows == density.fitted_to_["rows"] == 3600
    assert 0 < len(density.held_out_) < 500
    assert density.held_out_.max() > 1200
    test = rows(500, 9)
    off = density.score_samples(test) - in_memory.score_samples(test)
    assert abs(off.mean()) < 0.1


def test_few_rows_in_files_are_fitted_as_they_are(files, tmp_path):
    pq.write_table(rows(300, 5), tmp_path / "few.parquet")
    one, other = (sn.EnergyDensity(max_steps=5, random_state=0) for _ in range(2))
    one.fit(tmp_path / "few.parquet")
    other.fit(rows(300, 5))
    assert (one.score_samples(rows(9, 6)) == other.score_samples(rows(9, 6))).all()


def test_a_killed_fit_goes_on_from_its_checkpoint_to_the_same_bits(
    density, files, tmp_path, monkeypatch
):
    step, n_steps = Stepper.step, []

    def killed(self, *how):
        n_steps.append(1)
        if len(n_steps) == 106:
            raise MemoryError  # not one that ends a run well
        step(self, *how)

    monkeypatch.setattr(Stepper, "step", killed)
    again = sn.EnergyDensity(**FIT)
    with pytest.raises(MemoryError):
        again.fit(files, checkpoint=tmp_path / "run")
    assert len(list(tmp_path.glob("run.*.rows"))) == 1
    packed = []
    monkeypatch.setattr(streamed.Streamed, "_write", lambda *_: packed.append(1))
    again.fit(files, checkpoint=tmp_path / "run")
    assert len(n_steps) == 106 + 10
    assert packed == []
    assert not list(tmp_path.glob("run.*.rows"))
    test = rows(50, 9)
    assert (again.score_samples(test) == density.score_samples(test)).all()


def test_what_needs_memory_is_refused(files, monkeypatch):
    density = sn.EnergyDensity(**FIT)
    with pytest.raises(DataError, match="fit into memory"):
        density.fit(files, sample_weight=np.ones(3600))
    with pytest.raises(DataError, match="fit into memory"):
        sn.EnergyDensity(method="joint").fit(files)
    monkeypatch.setattr(streamed, "BYTES_PER_PART", 10**12)
    with pytest.raises(DataError, match=r"GiB of disk.*set TMPDIR"):
        density.fit(files)
    assert not hasattr(density, "schema_")
