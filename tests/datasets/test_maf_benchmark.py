"""Loaders on small files in the official formats, each rule of the preprocessing exercised."""

import numpy as np
import pytest
import torch

from selfnorm.datasets import maf_benchmark
from selfnorm.errors import DataError


def write_power(folder, n=200):
    folder.mkdir(parents=True)
    names = "Date;Time;Global_active_power;Global_reactive_power;Voltage;Global_intensity;"
    lines = [names + "Sub_metering_1;Sub_metering_2;Sub_metering_3"]
    for i in range(n):
        if i % 50 == 7:
            lines.append("16/12/2006;17:24:00;?;?;?;?;?;?;")
            continue
        values = [0.5 + 0.002 * (i % 40), 0.1, 240 + 0.01 * (i % 30), 18.4, i % 2, i % 3, 17]
        clock = f"{i // 60 % 24:02d}:{i % 60:02d}:00"
        lines.append(";".join(["16/12/2006", clock, *(f"{v:.3f}" for v in values)]))
    (folder / "household_power_consumption.txt").write_text("\n".join(lines) + "\n")


def test_power_follows_every_rule(tmp_path):
    write_power(tmp_path / "power")
    raw = maf_benchmark.read_power(tmp_path / "power" / "household_power_consumption.txt")
    assert raw.shape == (196, 8)  # rows with '?' are gone
    assert raw[65, -1] == 67  # minute of the day; two rows before it are missing
    data = maf_benchmark.load("power", tmp_path)
    assert (len(data.train), len(data.val), len(data.test)) == (160, 17, 19)
    assert data.dim == 6  # reactive power and intensity are gone
    known = torch.cat([data.train, data.val]).double()
    assert torch.allclose(known.mean(0), torch.zeros(6).double(), atol=1e-5)
    assert torch.allclose(known.std(0, correction=0), torch.ones(6).double(), atol=1e-5)
    # by hand: the same shuffle, the same noise in the same order
    rng = np.random.RandomState(42)
    mine = raw.copy()
    rng.shuffle(mine)
    mine = mine[:, [0, 2, 4, 5, 6, 7]]
    noise = [rng.rand(196, 1) * 0.01, rng.rand(196, 1) * 0.001, rng.rand(196, 3)]
    mine = mine + np.hstack([noise[1], noise[0], noise[2], np.zeros((196, 1))])
    mean, sd = mine[:177].mean(0), mine[:177].std(0)
    assert np.allclose((mine[-19:] - mean) / sd, data.test.numpy(), atol=1e-4)


def test_gas_drops_named_and_correlated_columns_and_keeps_the_order(tmp_path, rng):
    n = 300
    a, b, c = rng.normal(size=(3, n))
    sensors = np.c_[a, a + 1e-3 * b, b, -a, c]  # the first two correlate; -a does so negatively
    table = np.c_[np.arange(n), rng.random(n), rng.random(n), sensors]
    (tmp_path / "gas").mkdir()
    header = "Time (seconds), CO conc (ppm), Ethylene conc (ppm), sensor readings"
    np.savetxt(tmp_path / "gas" / "ethylene_CO.txt", table, header=header, comments="")
    data = maf_benchmark.load("gas", tmp_path)
    assert data.dim == 4  # the first of the pair goes, the negative twin stays
    everything = torch.cat([data.train, data.val, data.test]).double()
    assert torch.allclose(everything.std(0), torch.ones(4).double(), atol=1e-4)  # all rows scale
    kept = sensors[:, 1:]
    scaled = (kept - kept.mean(0)) / kept.std(0, ddof=1)
    assert np.allclose(everything.numpy(), scaled, atol=1e-4)  # order of rows kept
    assert (len(data.test), len(data.val)) == (30, 27)


def test_gas_pickle_is_read_only_when_trusted_and_gives_the_same(tmp_path, monkeypatch, rng):
    pandas = pytest.importorskip("pandas")
    table = np.c_[np.arange(100), rng.random((100, 2)), rng.normal(size=(100, 3))]
    names = ["Time", "Meth", "Eth", "R1", "R2", "R3"]
    for folder in ("a/gas", "b/gas"):
        (tmp_path / folder).mkdir(parents=True)
    pandas.DataFrame(table, columns=names).to_pickle(tmp_path / "a/gas/ethylene_CO.pickle")
    np.savetxt(tmp_path / "b/gas/ethylene_CO.txt", table, header="x", comments="")
    with pytest.raises(DataError, match=r"can run any code .* SELFNORM_TRUST_PICKLE=1"):
        maf_benchmark.load("gas", tmp_path / "a")
    monkeypatch.setenv("SELFNORM_TRUST_PICKLE", "1")
    one, other = (maf_benchmark.load("gas", tmp_path / f) for f in "ab")
    monkeypatch.delenv("SELFNORM_TRUST_PICKLE")
    np.savetxt(tmp_path / "a/gas/ethylene_CO.txt", table, header="x", comments="")
    assert torch.equal(maf_benchmark.load("gas", tmp_path / "a").train, other.train)
    assert torch.allclose(one.train, other.train, atol=1e-5)


def test_hepmass_keeps_one_class_and_drops_recurring_minima(tmp_path, rng):
    (tmp_path / "hepmass").mkdir()
    n = 200
    features = rng.normal(size=(n, 4))
    features[:12, 2] = -9.0  # its smallest value recurs: dropped
    features[:8, 3] = 9.0  # its largest value recurs: kept
    label = (np.arange(n) % 2).astype(float)
    train = np.c_[label, features]
    test = np.c_[label[:100], rng.normal(size=(100, 4)), np.full(100, 1000.0)]
    for name, table in (("train", train), ("test", test)):
        header = "# label," + ",".join(f"f{i}" for i in range(table.shape[1] - 1))
        path = tmp_path / "hepmass" / f"1000_{name}.csv"
        np.savetxt(path, table, delimiter=",", header=header, comments="")
    data = maf_benchmark.load("hepmass", tmp_path)
    # only 6 rows of class 1 hold the recurring -9: more than five
    assert data.dim == 3
    assert (len(data.train), len(data.val), len(data.test)) == (90, 10, 50)
    signal = features[label == 1]
    mean, sd = signal.mean(0), signal.std(0, ddof=1)
    expected = ((signal - mean) / sd)[:, [0, 1, 3]]
    assert np.allclose(torch.cat([data.train, data.val]).numpy(), expected, atol=1e-4)
    expected_test = ((test[label[:100] == 1][:, 1:5] - mean) / sd)[:, [0, 1, 3]]
    assert np.allclose(data.test.numpy(), expected_test, atol=1e-4)


def test_miniboone_from_the_text_and_from_the_array(tmp_path, rng):
    signal = rng.normal(size=(120, 4))
    signal[3, 0] = -999.0  # outlier
    signal[10:20, 1] = -50.0  # smallest value recurs
    background = rng.normal(size=(30, 4)) + 100
    (tmp_path / "a/miniboone").mkdir(parents=True)
    lines = ["   120   30"] + [" ".join(map(str, r)) for r in np.vstack([signal, background])]
    (tmp_path / "a/miniboone/MiniBooNE_PID.txt").write_text("\n".join(lines))
    data = maf_benchmark.load("miniboone", tmp_path / "a")
    assert data.dim == 3
    assert (len(data.train), len(data.val), len(data.test)) == (98, 10, 11)
    clean = np.delete(np.delete(signal, 3, 0), 1, 1)
    (tmp_path / "b/miniboone").mkdir(parents=True)
    np.save(tmp_path / "b/miniboone/data.npy", clean)
    other = maf_benchmark.load("miniboone", tmp_path / "b")
    assert torch.allclose(data.test, other.test, atol=1e-5)
    scaled = (clean - clean[:108].mean(0)) / clean[:108].std(0)
    assert np.allclose(other.test.numpy(), scaled[-11:], atol=1e-4)


def test_bsds300_takes_the_file_as_it_is(tmp_path, rng):
    h5py = pytest.importorskip("h5py")
    (tmp_path / "bsds300").mkdir()
    parts = {k: rng.normal(size=(n, 63)) for k, n in (("train", 8), ("validation", 3), ("test", 4))}
    path = tmp_path / "bsds300" / "BSDS300.hdf5"
    with h5py.File(path, "w") as file:
        for name, values in parts.items():
            file[name] = values
    data = maf_benchmark.load("bsds300", tmp_path)
    assert np.allclose(data.val.numpy(), parts["validation"], atol=1e-6)
    with h5py.File(path, "w") as file:
        file["train"] = parts["train"]
    with pytest.raises(DataError, match="lacks"):
        maf_benchmark.load("bsds300", tmp_path)


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "power").mkdir()
    (tmp_path / "power" / "household_power_consumption.txt").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="9 columns"):
        maf_benchmark.load("power", tmp_path)
