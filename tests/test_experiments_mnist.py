"""The MNIST table on toy digits: rows, resumption, files."""

import json

import pytest
import torch

from selfnorm.experiments import mnist as table_of_mnist
from selfnorm.experiments.mnist_rows import MODELS, PAPER_ROWS, RECIPES, rows

SMALL = {
    "max_steps": 2,
    "posterior_samples": 3,
    "many_samples": 4,
    "many_rows": 5,
    "n_prior_samples": 2000,
    "progress": False,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    torch.manual_seed(0)
    for part, n in (("train", 40), ("valid", 12), ("test", 10)):
        lines = [" ".join(str(int(v)) for v in row) for row in torch.rand(n, 784) < 0.2]
        (folder / f"binarized_mnist_{part}.amat").write_text("\n".join(lines) + "\n")
    return folder


def test_every_recipe_has_every_row_and_builds_on_earlier_ones():
    for recipe in RECIPES:
        given = rows(recipe)
        assert sorted(r.model for r in given) == sorted(MODELS)
        for place, row in enumerate(given):
            assert row.on is None or row.on in [r.model for r in given[:place]]
    with pytest.raises(ValueError, match="recipe"):
        rows("quick")
    assert set(PAPER_ROWS) < set(MODELS)


def test_the_table_is_written_and_resumed(data, tmp_path):
    chosen = ("vae", "vae_ebm_post_hoc", "vae_ar_ebm_post_hoc")
    options = {**SMALL, "recipe": "best", "out": tmp_path, "data_dir": data}
    table_of_mnist.run(**options, seeds=1, models=chosen)
    content = json.loads((tmp_path / "mnist.json").read_text())
    assert [r["model"] for r in content["rows"]] == ["vae", "vae_ar_ebm_post_hoc", chosen[1]]
    for row in content["rows"]:
        assert row["snelbo"] <= row["elbo"] + 1e-9 <= row["log_px"] + 2e-9
        assert {"seed", "seconds", "lower", "upper", "ess", "pareto_k", "diverged"} <= set(row)
        assert isinstance(row["reliable"], bool)
    assert set(content["rows"][2]["log_norm"]) == {"base", "mixture", "smc"}
    assert set(content["rows"][1]["log_norm"]) == {"exact"}
    text = (tmp_path / "mnist.md").read_text()
    assert "-89.10" in text
    assert "verdict" in text
    assert (tmp_path / "mnist_vae.png").exists()
    before = content["rows"]
    table_of_mnist.run(**options, seeds=1, models=(*chosen, "vae_mog"), figures=False)
    after = json.loads((tmp_path / "mnist.json").read_text())["rows"]
    assert after[:3] == before
    assert after[3]["model"] == "vae_mog"


def test_bad_requests(data, tmp_path):
    with pytest.raises(ValueError, match="unknown model"):
        table_of_mnist.run(**SMALL, out=tmp_path, data_dir=data, models=("gan",))
    with pytest.raises(ValueError, match="run that row first"):
        table_of_mnist.run(
            **SMALL, out=tmp_path, data_dir=data, models=("vae_ebm_post_hoc",), seeds=1
        )
