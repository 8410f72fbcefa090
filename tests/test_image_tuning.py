"""Settings tried for every method of image regression: chosen by validation, compared on test."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import image_tuning as tuning
from selfnorm.experiments.report import Table


def row(runs, setting, objective, seed, *, val, test, diverged=False):
    folder = runs / setting
    (folder / "scores").mkdir(parents=True, exist_ok=True)
    file = folder / "images.json"
    content = json.loads(file.read_text()) if file.exists() else {"rows": []}
    figures = {"val_exact": val, "exact": test, "mae": 1.0, "coverage": 0.9, "diverged": diverged}
    keys = {"dataset": "cells", "objective": objective, "proposal": "uniform", "seed": seed}
    content["rows"].append({**keys, "n_samples": 64, "coverage_calibrated": 0.9, **figures})
    file.write_text(json.dumps(content))
    np.savez(
        folder / "scores" / f"cells-{objective}-uniform-64-{seed}.npz",
        log_prob=np.array([test - 1.0, test + 1.0]),
        groups=np.array([0, 1]),
    )


def test_validation_chooses_and_test_images_are_compared(tmp_path):
    runs = tmp_path / "runs"
    for seed in range(2):
        row(runs, "as_is", "snl", seed, val=-1.0, test=-9.0)
        row(runs, "anchors", "snl", seed, val=-2.0, test=-1.0)  # better where nobody may look
        row(runs, "as_is", "nce", seed, val=-1.0, test=-8.0 - seed)
        row(runs, "anchors", "nce", seed, val=-0.5, test=-9.5, diverged=seed == 1)
    row(runs, "dropout0.1", "snl", 0, val=0.0, test=-5.0)  # one seed of two: not a candidate
    tuning.report(Table("images_tuning", "best", tmp_path / "out"), runs, 2)
    (found,) = json.loads((tmp_path / "out" / "comparisons.json").read_text())
    assert found["snl"]["setting"] == found["against"]["setting"] == "as_is"
    assert found["difference"] == pytest.approx(-0.5)
    assert found["by_seed"] == pytest.approx([-1.0, 0.0])
    assert found["se"] == pytest.approx(0.5)
    rows = json.loads((tmp_path / "out" / "images_tuning.json").read_text())["rows"]
    assert len(rows) == 6
    text = (tmp_path / "out" / "images_tuning.md").read_text()
    assert "| cells | uniform, as in the table | nce (uniform, as in the table) |" in text
    assert text.count("(chosen)") == 2


def test_every_objective_has_the_same_settings():
    found = tuning.trials()
    assert len({trial for trial, _ in found}) == len(found)
    for trial, options in found:
        assert trial.setting == tuning.setting_of(options)
        if trial.objective == "ranking_nce":
            assert "anchors" not in options
    tried = {
        objective: sorted(
            (t.dataset, t.proposal, *sorted(k for k in o.items() if k[0] != "anchors"))
            for t, o in found
            if t.objective == objective
        )
        for objective in tuning.ENERGIES
    }
    assert tried["snl"] == tried["nce"] == tried["ranking_nce"]
