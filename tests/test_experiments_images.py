"""The image tables on tiny files: rows, comparisons, what is missing, figures."""

import json

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

from selfnorm.cli import app
from selfnorm.data.images import load as load_images
from selfnorm.errors import MissingDataError
from selfnorm.experiments import images, images_ablation
from selfnorm.experiments.image_judging import paired, standard_error
from selfnorm.experiments.image_report import best_by_validation, comparisons
from selfnorm.experiments.report import Table
from selfnorm.history import History
from selfnorm.image_regression import ImageRegressor
from tests import image_files as files


class Pooled(nn.Module):
    """A backbone that costs nothing."""

    def forward(self, x):
        return nn.functional.adaptive_avg_pool2d(x, 4).flatten(1)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    files.write_faces(root, as_zip=True)
    files.write_driving(root, n=500)  # two stretches to test on
    files.write_biwi(root)
    return root


QUICK = {"max_epochs": 1, "n_test_samples": 50, "progress": False}


@pytest.fixture(scope="module")
def table(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return images.run(
        recipe="best",
        seeds=2,
        out=out,
        data_dir=data_dir,
        datasets=("utkface", "driving", "cell_count"),
        methods=(
            ("snl", "mdn-4"),
            ("snl", "uniform"),
            ("ranking_nce", "mdn-4"),
            ("mdn", "mdn-4"),
            ("l2", "none"),
        ),
        backbone=Pooled(),
        **QUICK,
    )


def test_rows_hold_what_the_result_file_promises(table):
    assert len(table.rows) == 2 * 2 * 5
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


def test_the_table_names_missing_files_with_their_source(table):
    text = (table.directory / "images.md").read_text()
    assert "Cell200_64x64.h5" in text
    assert "improved_CcGAN" in text
    assert "ranking NCE" in text
    assert "independent draws" in text
    assert "stretches of 50 frames" in text
    assert "paired over test images" in text


def test_figures_are_drawn(table):
    for name in ("utkface", "driving"):
        assert (table.directory / f"densities_{name}.png").stat().st_size > 5000
        assert (table.directory / f"reliability_{name}.png").stat().st_size > 5000


def test_finished_rows_are_kept(table, data_dir, monkeypatch):
    monkeypatch.setattr(images, "fit_and_judge", None)  # nothing may be trained
    again = images.run(
        recipe="best",
        seeds=1,
        out=table.directory,
        data_dir=data_dir,
        datasets=("utkface",),
        methods=(("snl", "mdn-4"),),
        backbone=Pooled(),
        **QUICK,
    )
    assert len(again.rows) == len(table.rows)


def test_comparisons_pair_images_and_choose_by_validation(table):
    found = {(c["dataset"], c["objective"]): c for c in comparisons(table)}
    one = found["utkface", "mdn"]
    assert one["seeds"] == 2
    assert one["snl_proposal"] == best_by_validation(table, "utkface", "snl")
    snl = [
        r["exact"]
        for r in table.rows
        if (r["dataset"], r["objective"], r["proposal"]) == ("utkface", "snl", one["snl_proposal"])
    ]
    mdn = [r["exact"] for r in table.rows if (r["dataset"], r["objective"]) == ("utkface", "mdn")]
    assert one["difference"] == pytest.approx(np.mean(snl) - np.mean(mdn), abs=1e-5)


def test_comparisons_outlive_the_scores(table, tmp_path):
    found = comparisons(table)
    for name in ("images.json", "comparisons.json"):
        (tmp_path / name).write_text((table.directory / name).read_text())
    assert comparisons(Table("images", "best", tmp_path)) == found
    (tmp_path / "comparisons.json").unlink()
    assert comparisons(Table("images", "best", tmp_path)) == []


def test_paired_error_covers_images_and_seeds():
    rng = np.random.default_rng(0)
    base = [rng.normal(size=400) for _ in range(3)]
    noisy = [b + 0.5 + rng.normal(0, 0.2, 400) for b in base]
    difference, error = paired(noisy, base)
    assert difference == pytest.approx(0.5, abs=0.03)
    assert 0.95 < error / (0.2 / np.sqrt(1200)) < 3  # three seeds say little of their spread
    shifted = [a + s for a, s in zip(noisy, (-0.3, 0.0, 0.3), strict=True)]
    assert paired(shifted, base)[1] == pytest.approx(0.3 / np.sqrt(3), rel=0.1)


@pytest.mark.parametrize("recipe", ["paper", "literal"])
def test_the_other_recipes(data_dir, tmp_path, recipe):
    table = images.run(
        recipe=recipe,
        seeds=1,
        out=tmp_path,
        data_dir=data_dir,
        datasets=("utkface",),
        methods=(("snl", "gaussian"), ("nce", "uniform"), ("gaussian", "none")),
        backbone=Pooled(),
        figures=False,
        **QUICK,
    )
    assert [r["objective"] for r in table.rows] == ["snl", "nce", "gaussian"]
    assert "-2.966 ± 0.057" in (tmp_path / "images.md").read_text()  # the paper's row


def test_three_labels_have_bounds_but_no_quadrature(data_dir, tmp_path):
    table = images.run(
        seeds=1,
        out=tmp_path,
        data_dir=data_dir,
        datasets=("biwi",),
        methods=(("snl", "mdn-4"), ("mdn", "mdn-4")),
        backbone=Pooled(),
        **QUICK,
    )
    snl, mdn = table.rows
    assert "exact" not in snl
    assert "upper" in snl
    assert "exact" in mdn


def test_an_interrupted_run_leaves_no_row(data_dir, tmp_path, monkeypatch):
    def cut_short(*_):
        history = History()
        history.stopped = "interrupted"
        return history

    monkeypatch.setattr(ImageRegressor, "_train", cut_short)
    with pytest.raises(KeyboardInterrupt):
        images.run(
            seeds=1,
            out=tmp_path,
            data_dir=data_dir,
            datasets=("utkface",),
            methods=(("snl", "mdn-4"),),
            backbone=Pooled(),
            **QUICK,
        )
    assert not (tmp_path / "images.json").exists()


def test_other_settings_are_other_rows(data_dir, tmp_path):
    for epochs in (1, 1, 2):
        table = images.run(
            seeds=1,
            out=tmp_path,
            data_dir=data_dir,
            datasets=("utkface",),
            methods=(("mdn", "mdn-4"),),
            backbone=Pooled(),
            figures=False,
            **{**QUICK, "max_epochs": epochs},
        )
    assert [r["max_epochs"] for r in table.rows] == [1, 2]
    assert {r["backbone"] for r in table.rows} == {"Pooled"}


def test_the_judged_model_is_the_model_as_trained(data_dir):
    config = images.Config(
        "utkface", "snl", "mdn-4", 8, 0, "best", "cpu", None, 1, Pooled(), n_test_samples=50
    )
    row, arrays, model = images.fit_and_judge(config, load_images("utkface", data_dir=data_dir))
    assert model.temperature_ == 1.0
    assert row["temperature"] > 0
    assert "coverage_calibrated" in row
    assert len(arrays["pit"]) == row["n_test"]


def test_standard_errors_are_over_groups():
    rng = np.random.default_rng(0)
    shared = np.repeat(rng.normal(size=200), 10)
    groups = np.repeat(np.arange(200), 10)
    assert standard_error(shared, groups) == pytest.approx(1 / np.sqrt(200), rel=0.15)
    assert standard_error(shared) == pytest.approx(1 / np.sqrt(2000), rel=0.15)
    free = rng.normal(size=2000)
    assert standard_error(free, groups) == pytest.approx(standard_error(free), rel=0.15)
    assert paired([shared], [np.zeros(2000)], [groups])[1] == standard_error(shared, groups)


def test_ablation_of_three_labels(data_dir, tmp_path):
    table = images_ablation.run(
        seeds=1,
        out=tmp_path,
        data_dir=data_dir,
        datasets=("biwi",),
        objectives=("snl",),
        sizes=(2,),
        backbone=Pooled(),
        **{**QUICK, "progress": True},
    )
    assert "upper" in table.rows[0]
    assert (tmp_path / "images_ablation.png").exists()
    assert "independent draws" in (tmp_path / "images_ablation.md").read_text()


def test_nothing_to_run_is_an_error(tmp_path):
    with pytest.raises(MissingDataError, match=r"BIWI_train\.npz.*FSA-Net"):
        images.run(seeds=1, out=tmp_path, data_dir=tmp_path, datasets=("biwi",), progress=False)
    with pytest.raises(ValueError, match="unknown recipe"):
        images.run(recipe="ours", out=tmp_path)


def test_a_deadline_begins_no_run(data_dir, tmp_path):
    table = images.run(
        seeds=1, out=tmp_path, data_dir=data_dir, datasets=("utkface",), deadline=-1.0, **QUICK
    )
    assert table.rows == []


def test_ablation_over_m(data_dir, tmp_path):
    table = images_ablation.run(
        seeds=2,
        out=tmp_path,
        data_dir=data_dir,
        datasets=("utkface",),
        objectives=("snl", "nce"),
        sizes=(1, 4),
        backbone=Pooled(),
        **QUICK,
    )
    assert isinstance(table, Table)
    assert {(r["objective"], r["n_samples"]) for r in table.rows} == {
        ("snl", 1),
        ("snl", 4),
        ("nce", 1),
        ("nce", 4),
    }
    assert (tmp_path / "images_ablation.png").stat().st_size > 5000
    assert "| utkface | snl | uniform | 4 |" in (tmp_path / "images_ablation.md").read_text()


def test_the_command_says_what_is_missing(tmp_path):
    result = CliRunner().invoke(
        app,
        [
            "reproduce",
            "images",
            "--dataset",
            "cells",
            "--data-dir",
            str(tmp_path),
            "--out",
            str(tmp_path),
        ],
    )
    assert isinstance(result.exception, MissingDataError)
    assert "vgg_cells.zip" in str(result.exception)
