"""The MNIST table on toy digits: rows, resumption, files."""

import json

import pytest
import torch
from typer.testing import CliRunner

from selfnorm.cli.app import app
from selfnorm.errors import SelfnormWarning
from selfnorm.paper import mnist as table_of_mnist
from selfnorm.paper.mnist_report import finished, gains, markdown, rewrite
from selfnorm.paper.mnist_rows import MODELS, PAPER_ROWS, RECIPES, rows
from selfnorm.training import lr_factor
from selfnorm.vae import ConvEncoder

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
    assert [r.get("vae_steps") for r in content["rows"]] == [None, 2, 2]
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


def test_a_finished_run_is_not_trained_again_for_its_evaluation(data, tmp_path, monkeypatch):
    options = {**SMALL, "out": tmp_path, "data_dir": data, "models": ("vae",), "figures": False}

    def killed(*_args, **_options):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(table_of_mnist, "evaluate_vae", killed)
        with pytest.raises(SystemExit):
            table_of_mnist.run(**options, seeds=1)
    trained = []
    forward = ConvEncoder.forward

    def counted(encoder, x):
        trained.append(torch.is_grad_enabled())
        return forward(encoder, x)

    monkeypatch.setattr(ConvEncoder, "forward", counted)
    table = table_of_mnist.run(**options, seeds=1)
    assert not any(trained)
    assert table.rows[0]["n_steps"] == 2
    assert not list((tmp_path / "checkpoints").iterdir())


def test_an_interrupted_row_of_a_file_is_done_again(data, tmp_path):
    options = {**SMALL, "out": tmp_path, "data_dir": data, "models": ("vae",), "figures": False}
    first = table_of_mnist.run(**options, seeds=[1]).rows[0]
    content = json.loads((tmp_path / "mnist.json").read_text())
    content["rows"][0] |= {"stopped": "interrupted", "n_steps": 1, "snelbo": 0.0}
    (tmp_path / "mnist.json").write_text(json.dumps(content))
    again = table_of_mnist.run(**options, seeds=[1]).rows
    assert [(r["seed"], r["n_steps"]) for r in again] == [(1, 2)]
    assert again[0]["snelbo"] == pytest.approx(first["snelbo"])


def row(model, seed, snelbo, **more):
    exact = "ebm" not in model or "ar" in model
    found = {
        "model": model, "seed": seed, "snelbo": snelbo, "elbo": snelbo, "log_px": snelbo + 3,
        "reliable": True, "reasons": [], "ngf": 16, "energy_layers": 2, "max_steps": 60_000,
        "n_steps": 60_000, "stopped": "max_epochs", "pareto_k": 0.0,
        "log_norm": {"exact": 0.0} if exact else {"base": 0.0, "smc": 0.04},
    }  # fmt: skip
    return found | more


TOLD = [
    row("vae", 0, -90.0),
    row("vae", 1, -91.0),
    row("vae_ar_ebm", 0, -87.5),
    row("vae_ar_ebm", 1, -86.1),
    row("vae_ar_ebm", 2, -80.0),  # no VAE of this seed
    row("vae_ebm", 0, -60.0, reliable=False, reasons=["Estimators disagree."]),
    row("vae_ebm", 1, -60.0, stopped="interrupted", n_steps=900),
    row("vae_mog", 0, -88.0, max_steps=30_000, n_steps=30_000),
    row("vae_ebm_post_hoc", 0, -89.5, max_steps=5000),
]


def cells(text, name):
    line = next(v for v in text.splitlines() if v.startswith(f"| {name} "))
    return dict(zip(HEADER, (c.strip() for c in line.strip("|").split("|")), strict=True))


HEADER = ("model", "seeds", "snelbo", "elbo", "px", "part", "paper", "reached", "z", "k", "verdict")


def test_the_table_says_reached_or_missed_with_errors_over_seeds():
    text = markdown(TOLD, "best", "command", 1.0)
    vae = cells(text, "vae")
    assert vae["snelbo"] == "-90.50 ± 0.50"  # sd 0.707 over the root of two
    assert (vae["paper"], vae["reached"]) == ("-89.10", "missed by 1.40")
    chain = cells(text, "vae_ar_ebm")
    assert (chain["paper"], chain["reached"]) == ("(-87.09)", "reached")
    energy = cells(text, "vae_ebm")
    assert (energy["seeds"], energy["reached"]) == ("1", "no result")
    assert energy["verdict"] == "NOT reliable (0 of 1)"
    assert cells(text, "vae_mog")["reached"] == "reached"
    assert cells(text, "vae_ebm_post_hoc")["reached"] == "missed by 1.39"
    assert "`vae_ebm`, seed 1: interrupted at step 900 of 60,000" in text
    assert "`vae_ebm`, seed 0: Estimators disagree." in text


def test_every_error_of_the_table_is_one_of_the_mean_and_rows_have_their_order():
    energies = [
        row("vae_ebm", s, -88.0, pareto_k=k, log_px_many=v, log_px_few=v - 0.5)
        for s, k, v in ((0, 0.2, -84.0), (1, 0.4, -85.0))
    ]
    text = markdown([*energies, *TOLD[:2]], "best", "command", 1.0)
    found = cells(text, "vae_ebm")
    # sd 0.707 and 0.141 over the root of two
    assert found["part"] == "-84.50 ± 0.50 (-85.00 ± 0.50)"
    assert found["k"] == "0.30 ± 0.10"
    assert text.index("| vae |") < text.index("| vae_ebm |")


def test_gains_are_paired_by_seed_and_budget():
    by_model = {line.split("`")[1]: line for line in gains(finished(TOLD))}
    # 2.5 and 4.9: their mean, and its standard error
    assert "3.70 ± 1.20 nats (2 seeds, paired; 1.5 asked for: reached)" in by_model["vae_ar_ebm"]
    assert "no reliable pair" in by_model["vae_ebm"]
    assert "no reliable pair" in by_model["vae_mog"]  # half the steps
    assert "0.50 nats (1 seed, paired; 0.9 asked for: missed)" in by_model["vae_ebm_post_hoc"]
    other = row("vae_ebm_post_hoc", 1, -80.0, max_steps=5000, vae_steps=30_000)
    assert "(1 seed" in next(v for v in gains([*TOLD, other]) if "vae_ebm_post_hoc" in v)


def test_sizes_are_not_averaged_together():
    text = markdown([*TOLD, row("vae", 0, -85.0, ngf=64)], "best", "command", 1.0)
    assert cells(text, "vae, ngf 16")["snelbo"] == "-90.50 ± 0.50"
    assert cells(text, "vae, ngf 64")["snelbo"] == "-85.00"


def test_the_page_is_made_from_the_file_alone(data, tmp_path):
    table_of_mnist.run(
        **SMALL, out=tmp_path, data_dir=data, models=("vae",), seeds=1, figures=False
    )
    page = tmp_path / "mnist.md"
    before = page.read_text()
    page.unlink()
    assert rewrite(tmp_path).read_text() == before


def test_a_post_hoc_row_is_put_on_the_vae_it_names_or_refused(data, tmp_path):
    """After a rehearsal it took the rehearsal's VAE and said that it was the full one."""
    options = {**SMALL, "out": tmp_path, "data_dir": data, "seeds": 1, "figures": False}
    table_of_mnist.run(**options, models=("vae",))
    longer = {**options, "max_steps": 3, "models": ("vae_ebm_post_hoc",)}
    with pytest.raises(ValueError, match=r"put on a vae of 3 steps.*run that row first"):
        table_of_mnist.run(**longer)
    rows = table_of_mnist.run(**{**longer, "models": ("vae", "vae_ebm_post_hoc")}).rows
    assert [(r["model"], r["max_steps"]) for r in rows][1:] == [("vae", 3), ("vae_ebm_post_hoc", 3)]
    # The folder now holds the longer one: a row on the shorter is refused as well.
    with pytest.raises(ValueError, match=r"put on a vae of 2 steps.*run that row first"):
        table_of_mnist.run(**options, models=("vae_ebm_post_hoc",))


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


def test_rows_side_by_side_wait_for_their_vae(data, tmp_path):
    options = {**SMALL, "recipe": "best", "data_dir": data, "figures": False, "seeds": 1}
    options["models"] = ("vae", "vae_ebm_post_hoc", "vae_mog")
    found = {}
    for jobs in (1, 2):
        table_of_mnist.run(**options, out=tmp_path / str(jobs), jobs=jobs)
        rows_ = json.loads((tmp_path / str(jobs) / "mnist.json").read_text())["rows"]
        assert len(rows_) == 3
        found[jobs] = {r["model"]: r["snelbo"] for r in rows_}
        assert not list((tmp_path / str(jobs) / "checkpoints").iterdir())
    assert found[2] == pytest.approx(found[1], rel=1e-4)
    # The VAE's row is there, its prior's is not: that one alone is made.
    content = json.loads((tmp_path / "2/mnist.json").read_text())
    content["rows"] = [r for r in content["rows"] if r["model"] != "vae_ebm_post_hoc"]
    (tmp_path / "2/mnist.json").write_text(json.dumps(content))
    again = table_of_mnist.run(**options, out=tmp_path / "2", jobs=2)
    assert again.rows[:2] == content["rows"]
    assert again.rows[2]["snelbo"] == pytest.approx(found[2]["vae_ebm_post_hoc"])
