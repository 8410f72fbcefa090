"""The MNIST table on toy digits: rows, resumption, files."""

import json

import pytest
import torch

from selfnorm.errors import SelfnormWarning
from selfnorm.paper import mnist as table_of_mnist
from selfnorm.paper.mnist import gains, rows, write_page
from selfnorm.paper.report import ResultTable
from selfnorm.training import lr_factor
from selfnorm.vae import ConvEncoder
from tests.datasets.image_files import write_digits

SMALL = {"max_steps": 2, "progress": False}
SMALL["evaluation"] = {"posterior_samples": 3, "many_samples": 4, "many_rows": 5}
SMALL["evaluation"]["n_prior_samples"] = 2000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder


def test_the_table_is_written_and_resumed(data, tmp_path):
    chosen = ("vae", "vae_ebm_post_hoc", "vae_ar_ebm_post_hoc")
    options = {**SMALL, "recipe": "best", "out": tmp_path, "data_dir": data}
    table_of_mnist.run(**options, seeds=1, models=chosen)
    content = json.loads((tmp_path / "mnist.json").read_text())
    assert [r["model"] for r in content["rows"]] == [*chosen]
    for row in content["rows"]:
        assert row["snelbo"] <= row["elbo"] + 1e-9 <= row["log_px"] + 2e-9
        assert {"seed", "seconds", "lower", "upper", "ess", "pareto_k", "diverged"} <= set(row)
        assert isinstance(row["reliable"], bool)
    assert [r.get("vae_steps") for r in content["rows"]] == [None, 2, 2]
    assert set(content["rows"][1]["log_norm"]) == {"base", "mixture", "smc"}
    assert set(content["rows"][2]["log_norm"]) == {"exact"}
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
    other = table_of_mnist.run(**options, seeds=1, models=("vae",), ngf=2).rows
    assert [row["ngf"] for row in other] == [16, 16, 16, 16, 2]  # another size, another row


def test_the_paper_recipe_is_the_papers():
    by_name = {row.model: row for row in rows("paper")}
    fit = by_name["vae_ebm"].fit
    assert (fit["max_steps"], fit["lr"], fit["posterior_samples"]) == (100_000, 1e-4, 10)
    assert fit["betas"] == (0.5, 0.999)
    assert fit["lr"] * by_name["vae_ebm"].prior["lr_scale"] == pytest.approx(2e-5)
    end = lr_factor(fit["schedule"], 100_000, 100_000)
    assert end == pytest.approx(0.998 ** (100_000 / (50_000 // 256)), abs=0.01)


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
            table_of_mnist.run(**options, seeds=1)
    assert not (tmp_path / "mnist.json").exists()
    assert not (tmp_path / "models").exists()
    assert list((tmp_path / "checkpoints").iterdir())
    table = table_of_mnist.run(**options, seeds=1)
    assert table.rows[0]["n_steps"] == 4


def test_a_finished_run_is_not_trained_again_for_its_evaluation(data, tmp_path, monkeypatch):
    options = {**SMALL, "out": tmp_path, "data_dir": data, "models": ("vae",)}

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
    row("vae_mog", 0, -88.0, max_steps=30_000, n_steps=30_000),
    row("vae_ebm_post_hoc", 0, -89.5, max_steps=5000, vae_steps=60_000),
]


def page(rows, folder):
    return write_page(
        ResultTable("mnist", "best", folder, command="command", rows=rows)
    ).read_text()


def cells(text, name):
    line = next(v for v in text.splitlines() if v.startswith(f"| {name} "))
    return dict(zip(HEADER, (c.strip() for c in line.strip("|").split("|")), strict=True))


HEADER = ("model", "seeds", "snelbo", "elbo", "px", "part", "paper", "reached", "z", "k", "verdict")


def test_the_table_says_reached_or_missed_with_errors_over_seeds(tmp_path):
    text = page(TOLD, tmp_path)
    vae = cells(text, "vae")
    assert vae["snelbo"] == "-90.50 ± 0.71"
    assert (vae["paper"], vae["reached"]) == ("-89.10", "missed by 1.40")
    chain = cells(text, "vae_ar_ebm")
    assert (chain["paper"], chain["reached"]) == ("(-87.09)", "reached")
    energy = cells(text, "vae_ebm")
    assert (energy["seeds"], energy["reached"]) == ("1", "no result")
    assert energy["verdict"] == "NOT reliable (0 of 1)"
    assert cells(text, "vae_mog")["reached"] == "reached"
    assert cells(text, "vae_ebm_post_hoc")["reached"] == "missed by 1.39"
    assert "`vae_ebm`, seed 0: Estimators disagree." in text


def test_rows_have_their_order_and_sizes_are_not_averaged_together(tmp_path):
    energies = [
        row("vae_ebm", s, -88.0, pareto_k=k, log_px_many=v, log_px_few=v - 0.5)
        for s, k, v in ((0, 0.2, -84.0), (1, 0.4, -85.0))
    ]
    text = page([*energies, *TOLD[:2], row("vae", 0, -85.0, ngf=64)], tmp_path)
    found = cells(text, "vae_ebm, ngf 16")
    assert found["part"] == "-84.50 ± 0.71 (-85.00 ± 0.71)"
    assert found["k"] == "0.30 ± 0.14"
    assert text.index("| vae, ngf 16 |") < text.index("| vae_ebm, ngf 16 |")
    assert cells(text, "vae, ngf 16")["snelbo"] == "-90.50 ± 0.71"
    assert cells(text, "vae, ngf 64")["snelbo"] == "-85.00"


def test_gains_are_paired_by_seed_and_budget():
    by_model = {line.split("`")[1]: line for line in gains(TOLD)}
    assert "3.70 ± 1.70 nats (2 paired by seed)" in by_model["vae_ar_ebm"]  # 2.5 and 4.9
    assert "no reliable pair" in by_model["vae_ebm"]
    assert "no reliable pair" in by_model["vae_mog"]  # half the steps
    assert "0.50 nats (1 paired by seed)" in by_model["vae_ebm_post_hoc"]
    other = row("vae_ebm_post_hoc", 1, -80.0, max_steps=5000, vae_steps=30_000)
    assert "(1 paired" in next(v for v in gains([*TOLD, other]) if "vae_ebm_post_hoc" in v)


def test_a_post_hoc_row_is_put_on_the_vae_it_names_or_refused(data, tmp_path):
    """After a rehearsal it took the rehearsal's VAE and said that it was the full one."""
    options = {**SMALL, "out": tmp_path, "data_dir": data, "seeds": 1}
    table_of_mnist.run(**options, models=("vae",))
    longer = {**options, "max_steps": 3, "models": ("vae_ebm_post_hoc",)}
    with pytest.raises(ValueError, match=r"none at .*vae-0-.*-3: run that row first"):
        table_of_mnist.run(**longer)
    rows = table_of_mnist.run(**{**longer, "models": ("vae", "vae_ebm_post_hoc")}).rows
    assert [(r["model"], r["max_steps"]) for r in rows][1:] == [("vae", 3), ("vae_ebm_post_hoc", 3)]
    # The shorter one is still there.
    again = table_of_mnist.run(**options, models=("vae_ebm_post_hoc",)).rows[-1]
    assert (again["max_steps"], again["vae_steps"]) == (2, 2)


def test_rows_side_by_side_come_after_their_vae_and_are_made_once(data, tmp_path):
    options = {**SMALL, "recipe": "best", "data_dir": data, "seeds": 1}
    options |= {"models": ("vae_ebm_post_hoc", "vae"), "out": tmp_path, "jobs": 2}
    made = table_of_mnist.run(**options).rows
    assert [row["model"] for row in made] == ["vae", "vae_ebm_post_hoc"]
    assert not list((tmp_path / "checkpoints").iterdir())
    # The VAE's row is there, its prior's is not: that one alone is made.
    content = json.loads((tmp_path / "mnist.json").read_text())
    (tmp_path / "mnist.json").write_text(json.dumps(content | {"rows": made[:1]}))
    again = table_of_mnist.run(**{**options, "jobs": 1}).rows
    assert again[0] == made[0]
    assert again[1]["snelbo"] == pytest.approx(made[1]["snelbo"], rel=1e-4)
