"""The MNIST table on toy digits: rows, resumption, files."""

import json

import pytest
import torch
from typer.testing import CliRunner

from selfnorm.cli import app
from selfnorm.errors import SelfnormWarning
from selfnorm.experiments import mnist as table_of_mnist
from selfnorm.experiments.mnist_rows import MODELS, PAPER_ROWS, RECIPES, rows
from selfnorm.schedules import lr_factor
from selfnorm.vae_networks import ConvEncoder

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
    (tmp_path / "mnist_vae.png").unlink()
    table_of_mnist.run(**options, seeds=1, models=(*chosen, "vae_mog"))
    assert (tmp_path / "mnist_vae.png").exists()  # drawn again from its model folder
    after = json.loads((tmp_path / "mnist.json").read_text())["rows"]
    assert after[:3] == before
    assert after[3]["model"] == "vae_mog"


def test_the_paper_recipe_is_the_papers():
    by_name = {row.model: row for row in rows("paper")}
    fit = by_name["vae_ebm"].fit
    assert (fit["max_steps"], fit["lr"], fit["posterior_samples"]) == (100_000, 1e-4, 10)
    assert fit["betas"] == (0.5, 0.999)
    assert fit["lr"] * by_name["vae_ebm"].prior["lr_scale"] == pytest.approx(2e-5)
    end = lr_factor(fit["schedule"], 100_000, 100_000)
    assert end == pytest.approx(0.998 ** (100_000 / (50_000 // 256)), abs=0.01)


def test_other_sizes_are_other_rows(data, tmp_path):
    options = {**SMALL, "out": tmp_path, "data_dir": data, "models": ("vae",), "seeds": 1}
    options["figures"] = False
    table_of_mnist.run(**options)
    table_of_mnist.run(**options)
    table = table_of_mnist.run(**options, ngf=2)
    assert [row["ngf"] for row in table.rows] == [16, 2]


def test_an_interrupted_row_is_not_written_down_and_goes_on(data, tmp_path, monkeypatch):
    calls = [0]

    class Interrupted(ConvEncoder):
        def forward(self, x):
            calls[0] += self.training
            if calls[0] == 3:
                raise KeyboardInterrupt
            return super().forward(x)

    options = {**SMALL, "max_steps": 4, "out": tmp_path, "data_dir": data, "models": ("vae",)}
    with monkeypatch.context() as patched:
        patched.setattr(table_of_mnist, "ConvEncoder", Interrupted)
        with pytest.raises(KeyboardInterrupt), pytest.warns(SelfnormWarning, match="interrupted"):
            table_of_mnist.run(**options, seeds=1, figures=False)
    assert not (tmp_path / "mnist.json").exists()
    assert not (tmp_path / "models").exists()
    assert list((tmp_path / "checkpoints").iterdir())
    table = table_of_mnist.run(**options, seeds=1, figures=False)
    assert table.rows[0]["n_steps"] == 4


def test_bad_requests(data, tmp_path):
    with pytest.raises(ValueError, match="unknown model"):
        table_of_mnist.run(**SMALL, out=tmp_path, data_dir=data, models=("gan",))
    with pytest.raises(ValueError, match="run that row first"):
        table_of_mnist.run(
            **SMALL, out=tmp_path, data_dir=data, models=("vae_ebm_post_hoc",), seeds=1
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mnist", "--dataset", "cells"], "takes no --dataset"),
        (["mnist", "--proposal", "mdn"], "takes no --proposal"),
        (["toy2d", "--ngf", "64"], "takes no --ngf"),
        (["toy1d", "--energy-layers", "3"], "takes no --energy-layers"),
        (["mnist", "--model", "gan"], "unknown model"),
        (["all", "--dataset", "cells"], "takes no --dataset"),
        (["uci", "--objective", "snl"], "takes no --objective"),
        (["toy1d", "--scaling", "train"], "takes no --scaling"),
    ],
)
def test_options_that_a_table_does_not_take_are_refused(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(tmp_path)])
    assert message in str(result.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_said_in_one_line(tmp_path):
    result = CliRunner().invoke(
        app, ["reproduce", "mnist", "--device", "cuda", "--out", str(tmp_path)]
    )
    assert "no CUDA device" in str(result.exception)


def test_sizes_reach_the_table_from_the_command_line(data, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(table_of_mnist, "run", lambda **options: seen.update(options))
    places = f"--out {tmp_path} --data-dir {data}"
    CliRunner().invoke(app, f"reproduce mnist --ngf 64 --energy-layers 3 --model vae {places}")
    assert (seen["ngf"], seen["energy_layers"], seen["models"]) == (64, 3, ("vae",))
