"""The benchmark of mixed tables: frames there and back, judges, resuming, pages."""

import json

import numpy as np
import pytest

import table_frames as frames
import table_judges as judges
import table_pages
import table_peers as peers
import tables


def some_table(rng, n=200):
    height = rng.normal(170, 10, n).round(1)
    kind = np.where(height > 170, "tall", "short").astype(object)
    kind[:3] = None
    return {
        "height": height,
        "shoes": rng.integers(1, 5, n),
        "kind": kind,
        "new": height > 175,
        "bought": np.datetime64("2024-01-01", "s") + rng.integers(0, 10**7, n).astype("m8[s]"),
    }


def test_columns_of_every_kind_come_back_from_a_file_from_pandas_and_from_numbers(tmp_path, rng):
    table = some_table(rng)
    gone = frames.random_gaps(table, 0.3, 0)
    assert 0.25 < gone.mean() < 0.35
    for frame in (table, frames.remove_cells(table, gone)):
        frames.save_frame(tmp_path / "t.npz", frame)
        assert frames.digest(frames.load_frame(tmp_path / "t.npz")) == frames.digest(frame)
        back = frames.like(frames.to_pandas(frame), frame)
        assert frames.digest(back) == frames.digest(frame)
    assert frames.digest(frames.remove_cells(table, gone)) != frames.digest(table)
    whole = frames.complete(table)
    assert frames.n_rows(whole) == 197
    coding = frames.Coding(whole, frames.categories("penguins", whole))
    assert frames.digest(coding.frame(coding.matrix(whole))) == frames.digest(whole)


def test_splits_are_nine_to_one_and_the_same_every_time(rng):
    table = some_table(rng)
    (train, test), (again, _) = frames.split(table, 1), frames.split(table, 1)
    assert (frames.n_rows(train), frames.n_rows(test)) == (180, 20)
    assert frames.digest(train) == frames.digest(again)
    assert frames.digest(train) != frames.digest(frames.split(table, 2)[0])


def test_raw_files_are_read_as_their_authors_wrote_them(tmp_path):
    (tmp_path / "mixed").mkdir()
    header = "age,workclass,income\n"
    (tmp_path / "mixed" / "adult.data").write_text(f"{header}39,State-gov,<=50K\n20,?,>50K\n")
    (tmp_path / "mixed" / "adult.test").write_text(f"{header}25,NA,<=50K.\n")
    adult = frames.read_raw("adult", tmp_path)
    assert adult["income"].tolist() == ["<=50K", ">50K", "<=50K"]
    assert adult["workclass"].tolist() == ["State-gov", "?", "NA"]
    (tmp_path / "mixed" / "german.csv").write_text("1,?\n?,38.5\n")
    german = frames.read_raw("german", tmp_path)
    assert frames.is_gap(german["c0"]).tolist() == [False, True]


def test_samples_closer_to_training_rows_than_to_others_are_seen(rng):
    # no set has these columns: `penguins` adds no codes of its own
    x = rng.normal(size=(600, 2))
    train, test = ({"a": p[:, 0], "b": p[:, 1]} for p in (x[:500], x[500:]))
    copies = judges.closest_records("penguins", train, test, train, 0)
    assert copies["nearest_ratio"] == 0
    other = rng.normal(size=(500, 2))
    fresh = judges.closest_records("penguins", train, test, {"a": other[:, 0], "b": other[:, 1]}, 0)
    assert 0.8 < fresh["nearest_ratio"] < 1.3
    assert 0.4 < fresh["closest_record"] < 0.6
    assert copies["closest_record"] > fresh["closest_record"]


def test_draws_of_the_truth_are_calibrated_and_score_better_than_a_constant(rng):
    truth, draws = rng.normal(size=4000), rng.normal(size=(19, 4000))
    assert judges.covered(truth, draws, 0).mean() == pytest.approx(0.9, abs=0.02)
    whole, ties = rng.integers(0, 3, 4000), rng.integers(0, 3, (19, 4000))
    assert judges.covered(whole, ties, 0).mean() == pytest.approx(0.9, abs=0.02)
    # E|X - y| - E|X - X'| / 2 of a standard normal is 1 / sqrt(pi)
    assert judges.crps(truth, draws).mean() == pytest.approx(np.pi**-0.5, abs=0.03)
    assert judges.crps(truth, draws).mean() < judges.crps(truth, 0 * draws).mean()
    uniform = judges.log_loss(whole, rng.integers(0, 3, (19, 4000)), 3).mean()
    assert np.log(3) < uniform < np.log(3) + 0.1
    with pytest.raises(ValueError, match="19, 39"):
        judges.covered(truth, draws[:10], 0)


@pytest.mark.parametrize("method", ["mean_mode", "iterative"])
def test_an_imputer_fills_gaps_alone_and_learns_from_the_other_columns(method, rng):
    table = frames.complete(some_table(rng, 300))
    del table["bought"]
    gone = frames.random_gaps(table, 0.2, 0)
    given = frames.remove_cells(table, gone)
    draws = peers.IMPUTERS[method]("penguins", given, 2, 0)
    for column, (name, truth) in enumerate(table.items()):
        kept = ~gone[:, column]
        assert np.array_equal(np.asarray(draws[0][name])[kept], truth[kept])
        assert not frames.is_gap(np.asarray(draws[0][name])).any()
    differ = any((draws[0][name] != draws[1][name]).any() for name in table)
    assert differ == (method == "iterative")


def test_the_replaced_cell_differs_and_is_the_only_one(rng):
    table = frames.complete(some_table(rng))
    train, rows = frames.split(table, 0)
    wrong, guilty = tables.replaced_cells(train, rows, 0)
    changed = np.column_stack([wrong[name] != rows[name] for name in rows])
    assert (changed.sum(axis=1) == 1).all()
    assert (changed.argmax(axis=1) == guilty).all()
    first, rank = judges.guilty_rank(changed.astype(float), guilty)
    assert first.mean() == rank.mean() == 1


def run(monkeypatch, tmp_path, *words):
    arguments = ["tables.py", *words, "--work", str(tmp_path / "work")]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(tmp_path / "results")])
    tables.main()


def test_parts_resume_and_make_a_page(monkeypatch, tmp_path, capsys, rng):
    table = some_table(rng)
    frames.save_frame(tmp_path / "work" / "data" / "penguins.npz", table)
    words = ("fit", "--method", "bootstrap", "--sets", "penguins", "--seeds", "0", "1")
    run(monkeypatch, tmp_path, *words)
    run(monkeypatch, tmp_path, *words)
    assert "fit: 2 runs" in capsys.readouterr().out.split("fit: 0 runs")[0]
    job = {"work": str(tmp_path / "work"), "method": "bootstrap", "dataset": "penguins", "seed": 0}
    samples = frames.load_frame(tables.sample_path(job))
    assert list(samples) == list(table)
    assert frames.n_rows(samples) == 180

    run(monkeypatch, tmp_path, "impute", "--method", "mean_mode", "--sets", "penguins")
    content = json.loads((tmp_path / "results" / "imputation.json").read_text())
    command = "python benchmarks/tables.py impute --method mean_mode --sets penguins"
    assert content["made_by"][0]["command"] == f"{command} --work work --out results"
    assert {"crps", "log_loss", "coverage", "data"} <= content["rows"][0].keys()
    page = table_pages.imputation(content, {})
    assert "| penguins | 200 | mean, mode |" in page
    run(monkeypatch, tmp_path, "impute", "--method", "mean_mode", "--sets", "penguins")
    assert len(json.loads((tmp_path / "results" / "imputation.json").read_text())["rows"]) == 1


def test_pages_pair_splits_and_weigh_sets():
    rows = [
        {"dataset": "adult", "share": 0.2, "method": m, "seed": s, "test_log_likelihood": v + s}
        for m, v in (("mean_mode", -12.0), ("selfnorm", -10.0), ("iterative", -10.5))
        for s in (0, 1)
    ]
    page = table_pages.gaps({"rows": rows}, {})
    assert "| adult | 20% | -9.500 ± 0.707 | -2.000 ± 0.000 | -0.500 ± 0.000 | 2 |" in page
    explained = [
        {"dataset": d, "method": "shap", "first": f, "n_rows": n, "n_columns": 5}
        | {"explain_seconds": 0.1}
        for d, f, n in (("adult", 0.5, 100), ("german", 0.1, 300))
    ]
    assert "| 0.500 | 0.100 | 0.200 |" in table_pages.explanation({"rows": explained}, {})
    sample = {"dataset": "magic", "method": "selfnorm", "n_train": 9, "n_given": 9, "shape": 0.9}
    for key, value in {"shape": 0.95, "trend": 0.9, "trend_same_bins": 0.9}.items():
        sample |= {f"bootstrap_{key}": value, f"bootstrap_{key}_sd": 0.001}
    published = {"rows": [{"dataset": "magic", "method": "TabPC", "xgboost": 0.86}], "source": "it"}
    page = table_pages.generation({"rows": [sample]}, published)
    assert "shape 0.9000 (0.9500 ± 0.0010)" in page
    assert "| TabPC, published | 5 | 0.860 | – |" in page
