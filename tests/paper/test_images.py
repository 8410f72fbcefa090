"""The image tables on tiny files: rows, comparisons, what is missing, figures, errors of means."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from selfnorm.datasets import images as datasets
from selfnorm.datasets.images import load as load_images
from selfnorm.errors import MissingDataError
from selfnorm.images import EnergyHead, dequantised
from selfnorm.paper import images, images_ablation
from selfnorm.paper.images import (
    Config,
    best_by_validation,
    comparisons,
    fit_and_judge,
    markdown,
    paired,
    standard_error,
)
from selfnorm.paper.report import ResultTable
from selfnorm.paper.runner import Settings
from tests.datasets import image_files as files


class Pooled(nn.Module):
    """A backbone that costs nothing."""

    def forward(self, x):
        return nn.functional.adaptive_avg_pool2d(x, 4).flatten(1)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    files.write_faces(root, as_zip=True)
    files.write_driving(root, n=100)
    files.write_biwi(root)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets, "_BLOCK", 10)  # two stretches to test on
        yield root


QUICK = {"max_epochs": 1, "n_test_samples": 50, "progress": False, "backbone": Pooled()}
METHODS = {"objectives": ("snl", "ranking_nce", "mdn", "l2"), "proposals": ("mdn-4", "uniform")}
KEYS = ("dataset", "objective", "proposal", "seed")
MDN = {"objectives": ("mdn",), "proposals": ("mdn-4",)}


@pytest.fixture(scope="module")
def table(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    sets = ("utkface", "driving", "cell_count")
    return images.run(seeds=2, out=out, data_dir=data_dir, datasets=sets, **METHODS, **QUICK)


@pytest.fixture
def run(data_dir, tmp_path):
    """A table of one seed and, unless told otherwise, of faces."""

    def call(**options):
        chosen = {"seeds": 1, "out": tmp_path, "data_dir": data_dir, "datasets": ("utkface",)}
        return images.run(**{**QUICK, **chosen, **options})

    return call


def test_rows_hold_what_the_result_file_promises(table):
    assert len(table.rows) == 2 * 2 * 6
    content = json.loads(table.path.read_text())
    assert content["recipe"] == "best"
    for row in content["rows"]:
        assert {"dataset", "objective", "proposal", "n_samples", "exact", "seed"} <= set(row)
        assert {"seconds", "diverged", "mae", "coverage", "val_score"} <= set(row)
        if row["objective"] in ("snl", "ranking_nce"):
            assert row["lower"] <= row["upper"] + 1e-9
            assert {"ess", "pareto_k", "gap"} <= set(row)
        else:
            assert "lower" not in row


def test_the_page_and_the_figures(table):
    text = (table.directory / "images.md").read_text()
    for said in ("ranking NCE", "independent draws", "stretches of 50 frames"):
        assert said in text
    for missing in ("Cell200_64x64.h5", "improved_CcGAN"):
        assert missing in text
    for title in ("paired over test images", "SNL minus NCE with the same", "with temperature"):
        assert title in text
    starts = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")][1:13]
    assert starts == ["| utkface"] * 6 + ["| driving"] * 6  # set by set, six methods each
    for name in ("utkface", "driving"):
        assert (table.directory / f"densities_{name}.png").stat().st_size > 5000
        assert (table.directory / f"reliability_{name}.png").stat().st_size > 5000


def mean_of(table, figure, *method):
    """Mean over seeds of a figure of the rows of ``dataset, objective, proposal``."""
    return np.mean([row[figure] for row in table.groups(*KEYS[:3])[method]])


def test_comparisons_pair_images_choose_by_validation_and_keep_proposals(table):
    found = comparisons(table)
    for one in found:
        names = one["dataset"], one["objective"], one["proposal"]
        for name, key in (("exact", "difference"), ("exact_calibrated", "difference_calibrated")):
            ours = mean_of(table, name, one["dataset"], "snl", one["snl_proposal"])
            assert one[key] == pytest.approx(ours - mean_of(table, name, *names), abs=1e-5)
        assert len(one["by_seed"]) == one["seeds"] == 2
        assert one["se"] == max(one["se_images"], one["se_seeds"])
    same = [c for c in found if c["choice"] == "same"]
    assert {(c["dataset"], c["objective"], c["proposal"]) for c in same} == {
        (name, "ranking_nce", proposal)
        for name in ("utkface", "driving")
        for proposal in METHODS["proposals"]
    }
    for one in (c for c in found if c["choice"] == "best"):
        assert one["snl_proposal"] == best_by_validation(table, one["dataset"], "snl")
        assert one["proposal"] == best_by_validation(table, one["dataset"], one["objective"])


def test_comparisons_outlive_the_scores(table, tmp_path):
    found = comparisons(table)
    for name in ("images.json", "comparisons.json"):
        (tmp_path / name).write_text((table.directory / name).read_text())
    assert comparisons(ResultTable("images", "best", tmp_path)) == found
    (tmp_path / "comparisons.json").unlink()
    assert comparisons(ResultTable("images", "best", tmp_path)) == []


def test_diverged_rows_are_named_and_not_compared(table, tmp_path):
    shutil.copytree(table.directory, tmp_path / "copy")
    rows = json.loads(table.path.read_text())
    for row in rows["rows"]:
        row["diverged"] = (row["dataset"], row["objective"], row["seed"]) == ("utkface", "mdn", 1)
    (tmp_path / "copy" / "images.json").write_text(json.dumps(rows))
    other = ResultTable("images", "best", tmp_path / "copy")
    found = {(c["dataset"], c["objective"]): c for c in comparisons(other) if c["choice"] == "best"}
    assert found["utkface", "mdn"]["seeds"] == 1
    assert found["driving", "mdn"]["seeds"] == 2
    assert "**Diverged**, and left out of the comparisons: utkface mdn mdn-4 1." in markdown(other)


@pytest.mark.parametrize("recipe", ["paper", "best"])
@pytest.mark.parametrize("dataset", ["utkface", "cells", "driving", "cell_count"])
def test_every_objective_has_the_same_proposals(recipe, dataset):
    found = images.methods_for(dataset, recipe)
    own = {o: [p for other, p in found if other == o] for o in ("snl", "ranking_nce", "nce")}
    assert own["snl"] == own["ranking_nce"] == own["nce"]
    assert len(own["snl"]) == (2 if recipe == "best" and dataset != "cell_count" else 4)
    assert {("mdn", "mdn-4"), ("gaussian", "none"), ("l2", "none")} < set(found)
    asked = images.methods_for(dataset, recipe, ("uniform",))
    assert {p for o, p in asked if o in own} == {"uniform"}


def test_settings_of_the_recipes_reach_the_model(data_dir):
    data = load_images("utkface", data_dir=data_dir)
    paper = Config("utkface", "snl", "mdn-4", 64, 0, Settings("paper")).regressor(data)
    head = EnergyHead("paper", base=None, share_gradient=False, proposal_loss="both")
    assert paper.energy == head
    assert (paper.options.optimizer, paper.options.schedule) == ("adam", "constant")
    assert (paper.batch_size, paper.max_epochs, paper.augmentation) == (32, 75, None)
    best = Config("utkface", "snl", "mdn-4", 64, 0, Settings("best")).regressor(data)
    assert (best.options.patience, best.options.ema, best.dropout) == (10, 0.998, 0.3)
    assert (best.label_step, best.augmentation) == (1.0, data.augmentation)


def test_a_row_is_of_the_model_as_trained_and_its_temperature_of_validation_images(data_dir):
    data = load_images("utkface", data_dir=data_dir)
    other = dataclasses.replace(data, test=(data.test[0], data.test[1][::-1].copy()))
    config = Config("utkface", "mdn", "mdn-4", 8, 0, Settings("best"), 3, Pooled())
    (row, arrays, model), (again, _, _) = (fit_and_judge(config, d) for d in (data, other))
    assert row["temperature"] == again["temperature"]
    assert row["exact"] != again["exact"]
    assert row["exact_calibrated"] == pytest.approx(arrays["log_prob_calibrated"].mean())
    assert len(arrays["pit"]) == row["n_test"]
    assert model.temperature_ == 1.0
    labels = dequantised(torch.as_tensor(data.test[1]), model.space_.step)
    model.temperature_ = row["temperature"]
    assert model.log_prob(data.test[0], labels).mean() == pytest.approx(row["exact_calibrated"])


@pytest.mark.parametrize("recipe", ["paper", "literal"])
def test_the_other_recipes(run, tmp_path, recipe):
    table = run(recipe=recipe, objectives=("snl", "gaussian"), proposals=("gaussian",))
    assert [r["objective"] for r in table.rows] == ["snl", "gaussian"]
    assert "-2.966 ± 0.057" in (tmp_path / "images.md").read_text()  # the paper's row


def test_other_settings_are_other_rows(run):
    for epochs in (1, 1, 2):
        table = run(**MDN, max_epochs=epochs)
    assert [r["max_epochs"] for r in table.rows] == [1, 2]
    assert {r["backbone"] for r in table.rows} == {"Pooled"}


def test_nothing_to_run_is_an_error(tmp_path):
    with pytest.raises(MissingDataError, match=r"BIWI_train\.npz.*FSA-Net"):
        images.run(seeds=1, out=tmp_path, data_dir=tmp_path, datasets=("biwi",), progress=False)


def test_ablation_over_m(data_dir, tmp_path):
    options = {**QUICK, "progress": True, "out": tmp_path, "data_dir": data_dir, "sizes": (1, 4)}
    table = images_ablation.run(
        seeds=1, datasets=("utkface", "biwi"), objectives=("snl", "nce"), **options
    )
    found = {(r["dataset"], r["objective"], r["n_samples"]) for r in table.rows}
    assert len(found) == 2 * 2 * 2
    assert len(table.rows) == len(found)
    assert all("upper" in row for row in table.rows)
    assert (tmp_path / "images_ablation.png").stat().st_size > 5000
    text = (tmp_path / "images_ablation.md").read_text()
    assert "| utkface | snl | uniform | 4 |" in text
    assert "independent draws" in text


def test_paired_error_covers_images_and_seeds():
    rng = np.random.default_rng(0)
    base = [rng.normal(size=400) for _ in range(3)]
    noisy = [b + 0.5 + rng.normal(0, 0.2, 400) for b in base]
    found = paired(noisy, base)
    assert found["difference"] == pytest.approx(0.5, abs=0.03)
    assert found["se_images"] == pytest.approx(0.2 / np.sqrt(1200), rel=0.1)
    assert found["se"] == max(found["se_images"], found["se_seeds"])
    assert found["by_seed"] == pytest.approx(
        [np.mean(a - b) for a, b in zip(noisy, base, strict=True)]
    )
    shifted = [a + s for a, s in zip(noisy, (-0.3, 0.0, 0.3), strict=True)]
    assert paired(shifted, base)["se"] == pytest.approx(0.3 / np.sqrt(3), rel=0.1)
    assert paired(noisy[:1], base[:1])["se_seeds"] is None


def test_standard_errors_are_over_groups():
    rng = np.random.default_rng(0)
    shared = np.repeat(rng.normal(size=200), 10)
    groups = np.repeat(np.arange(200), 10)
    assert standard_error(shared, groups) == pytest.approx(1 / np.sqrt(200), rel=0.15)
    assert standard_error(shared) == pytest.approx(1 / np.sqrt(2000), rel=0.15)
    free = rng.normal(size=2000)
    assert standard_error(free, groups) == pytest.approx(standard_error(free), rel=0.15)
    assert paired([shared], [np.zeros(2000)], [groups])["se"] == standard_error(shared, groups)
