"""The joined table of the density benchmark: what is shown, by which rule, paired over rows."""

import json
import sys

import numpy as np
import pytest

import density_table


def run(method, config, seed, val, test, **extra):
    row = {"dataset": "power", "method": method, "config": config, "seed": seed, "val": val}
    sizes = {"n_train": 100, "n_test": 4, "seconds": 2.0, "n_steps": 10, "best_step": 8}
    return row | {"test": test} | sizes | extra


BOUNDS = {"lower": 1.0, "upper": 1.3, "ess": 0.9, "ess_worst_column": 0.8}
BOUNDS |= {"is_minus_quadrature": 0.5, "is_minus_quadrature_se": 0.1}
ROWS = [
    run("selfnorm", "default", 0, 2.0, 2.0, **BOUNDS),  # an older one: learned b only
    run("selfnorm", "default", 1, 2.2, 2.2, **BOUNDS, learned_lower=0.9),
    run("selfnorm", "tuned", 0, 9.0, 9.0),
    run("nsf", "10x256", 0, 0.5, 1.9),  # better on test rows, worse on validation
    run("nsf", "asinh", 0, 1.0, 1.0),
]
ROWS[1] |= {"is_minus_quadrature": 0.1}


@pytest.fixture
def files(tmp_path):
    content = {"versions": {}, "hardware": {}, "command": "bench", "rows": ROWS}
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(content))
    arrays = {density_table.name_of(r): np.full(12, r["test"]) + np.arange(12) for r in ROWS}
    arrays["power/nsf/asinh/0"] += np.tile([1.0, -1.0], 6)
    np.savez(path.with_suffix(".npz"), **arrays)
    return path


def test_flows_are_chosen_on_validation_rows_and_selfnorm_by_its_defaults():
    shown = density_table.chosen(ROWS, "power", "nsf")
    assert [r["config"] for r in shown] == ["asinh"]
    assert [r["seed"] for r in density_table.chosen(ROWS, "power", "selfnorm")] == [0, 1]
    listed = density_table.flow_configurations(ROWS, "power")
    assert [line[2] for line in listed] == ["asinh", "10x256"]


def test_a_later_file_replaces_runs_of_the_same_name(tmp_path, files):
    newer = tmp_path / "newer.json"
    again = {"versions": {}, "hardware": {}, "command": "again"}
    again["rows"] = [run("nsf", "asinh", 0, 1.5, 1.4), run("maf", "asinh", 0, 0, 0) | {"error": ""}]
    newer.write_text(json.dumps(again))
    rows, _, head = density_table.read([files, newer])
    assert len(rows) == len(ROWS)  # what failed does not count
    assert next(r for r in rows if r["config"] == "asinh")["test"] == 1.4
    assert head["command"] == ["bench", "again"]


def test_table_pairs_rows_and_keeps_biased_comparisons_out(tmp_path, files, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table", "--out", str(tmp_path / "out"), str(files)])
    density_table.main()
    (compared,) = json.loads((tmp_path / "out" / "density.json").read_text())["comparisons"]
    assert compared["difference"] == pytest.approx(2.1 - 1.0)
    assert compared["se"] == pytest.approx(np.std(np.tile([1, -1], 6), ddof=1) / 12**0.5)
    text = (tmp_path / "out" / "density.md").read_text()
    assert "| power | 6 | 100 | 2.100 ± 0.141 (2) | 1.000 (1) |" in text
    # gap and agreement of the newer run, the learned gap of both
    assert "| power | 0.3000 (1) | 0.3500 ± 0.0707 (2) | 0.900" in text
    assert "| 0.1000 | 1.0 |" in text


def test_samples_are_counted_that_are_as_near_as_the_learned_normaliser():
    ours = [{"log_prob_by": [{"normalizer": "learned", "rms": 0.03, "us_a_row": 2.0}]}]
    way = {"stratified": False, "us_a_row": 10.0, "rms": 0.2, "mean": 0.1, "n_samples": 20}
    ways = [way, way | {"n_samples": 2000, "rms": 0.02, "us_a_row": 1000.0}]
    ways.append(way | {"stratified": True, "rms": 1e-9})
    ((_, *cells),) = density_table.normalisers("power", ours, [{"log_prob_by": ways}])
    assert cells == ["0.030", "2", "0.200", "0.020", "+0.100", "2,000", "1,000", "500"]
    ways[1]["rms"] = 0.1
    ((*_, n, _, ratio),) = density_table.normalisers("power", ours, [{"log_prob_by": ways}])
    assert (n, ratio) == ("more than 2,000", "more than 500")
    assert density_table.normalisers("power", ours, []) == []
