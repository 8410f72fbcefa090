"""The command line, in process: arguments in, exit code and files out."""

import errno
import html
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import wraps
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from safetensors.torch import load_file

import selfnorm as sn
from selfnorm import saving
from selfnorm.cli import app as cli
from selfnorm.cli import main
from selfnorm.cli.files import numeric, read_table
from selfnorm.paper import toy2d
from selfnorm.paper.runner import Settings
from selfnorm.training.loop import Stepper
from tests.folders import document, put_document


def rows(n, d, seed=0):
    X = np.random.default_rng(seed).gumbel(size=(n, d))
    X[:, -1] += 0.5 * X[:, 0]
    return X


def write_csv(path, X, names):
    lines = [",".join(names), *(",".join(f"{v:.6g}" for v in row) for row in X)]
    path.write_text("\n".join(lines) + "\n")


BUILT = typer.main.get_command(cli.app)  # once: typer builds every command at every call


class Selfnorm:
    """The command: its exit code and what it says; or what it says when done, or when refused."""

    def __init__(self, monkeypatch, capsys):
        self.patch, self.said = monkeypatch.setattr, capsys.readouterr

    def __call__(self, *arguments):
        self.patch(cli, "app", BUILT)
        self.patch(sys, "argv", ["selfnorm", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        said = self.said()
        return code, said.out, said.err

    def done(self, *arguments):
        code, out, err = self(*arguments)
        assert code == 0, err
        return out

    def refused(self, *arguments):
        code, _, err = self(*arguments)
        assert code == 2, arguments
        assert len(err.strip().splitlines()) == 1, err
        return err


@pytest.fixture
def selfnorm(monkeypatch, capsys):
    return Selfnorm(monkeypatch, capsys)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A table, a held-out table and a fitted model with three named columns."""
    folder = tmp_path_factory.mktemp("cli")
    write_csv(folder / "train.csv", rows(200, 3), ["a", "b", "c"])
    write_csv(folder / "test.csv", rows(60, 3, seed=1), ["a", "b", "c"])
    fit = ["fit", folder / "train.csv", "-o", folder / "model", "--max-steps", 60, "--no-progress"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["selfnorm", *map(str, fit)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
    return folder


def test_fit_reports_as_json(selfnorm, places, tmp_path):
    fit = ("fit", places / "train.csv", "-o", tmp_path / "m", "--max-steps", 5, "--method", "joint")
    report = json.loads(selfnorm.done(*fit, "--columns", "a,b", "--json"))
    wanted = {"rows": 200, "columns": ["a", "b"], "method": "joint", "steps": 5}
    assert wanted.items() <= report.items()


def test_evaluate(selfnorm, places):
    evaluate = ("evaluate", places / "model", places / "test.csv", "--n-samples", 500)
    out = selfnorm.done(*evaluate)
    assert "log-likelihood  -" in out
    assert "95 % interval" in out
    report = json.loads(selfnorm(*evaluate, "--json")[1])
    assert report["lower"] <= report["upper"] + 1e-9
    assert report["interval_95"][0] < report["lower"]
    assert isinstance(report["reliable"], bool)


def test_reference_rows_give_p_values_and_tell_of_drift(selfnorm, places, tmp_path):
    write_csv(tmp_path / "new.csv", rows(200, 3, seed=2)[:, ::-1] * 4, ["a", "b", "c"])
    about = (places / "model", tmp_path / "new.csv", "--reference", places / "test.csv")
    selfnorm.done("score", *about, "-o", tmp_path / "scored.csv")
    p = pd.read_csv(tmp_path / "scored.csv")["p_value"]
    assert 0 < p.min() < 0.02 < p.max() <= 1
    report = json.loads(selfnorm.done("compare", *about, "--json"))
    assert report["rows"] == 200
    assert {column["column"] for column in report["columns"]} == {"a", "b", "c"}
    assert report["alarm_at_row"] <= 200
    assert "changed" in selfnorm.done("compare", *about)
    trained = ("--reference", places / "train.csv")
    assert "were trained on" in selfnorm.refused("compare", *about[:2], *trained)


def test_score_keeps_other_columns_and_finds_its_own_in_any_order(selfnorm, places, tmp_path):
    X = rows(50, 3, seed=2)
    lines = ["id,c,a,b", *(f"r{i},{r[2]},{r[0]},{r[1]}" for i, r in enumerate(X))]
    (tmp_path / "new.csv").write_text("\n".join(lines))
    selfnorm.done("score", places / "model", tmp_path / "new.csv", "-o", tmp_path / "scored.csv")
    scored = read_table(tmp_path / "scored.csv")
    assert scored.names == ["id", "c", "a", "b", "log_density", "outlier"]
    assert scored.array("id")[7] == "r7"
    density = sn.EnergyDensity.load(places / "model")
    expected = density.score_samples(pd.DataFrame(X, columns=["a", "b", "c"]))
    assert np.allclose(scored.numbers("log_density"), expected)
    assert np.array_equal(scored.numbers("outlier"), expected < density.offset_)


def test_a_row_without_a_score_is_an_outlier(selfnorm, places, tmp_path, monkeypatch):
    def scored(self, X, **how):
        return np.full(len(X["a"]), np.nan), np.full(len(X["a"]), np.nan)

    monkeypatch.setattr(sn.EnergyDensity, "scored", scored)
    out = tmp_path / "scored.csv"
    selfnorm.done("score", places / "model", places / "test.csv", "-o", out)
    assert (read_table(out).numbers("outlier") == 1).all()


def test_a_model_is_read_once(selfnorm, places, tmp_path, monkeypatch):
    read, folders = saving.read_folder, []
    monkeypatch.setattr(saving, "read_folder", lambda path: folders.append(path) or read(path))
    selfnorm.done("sample", places / "model", "-n", 5, "-o", tmp_path / "s.csv")
    assert folders == [places / "model"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_sample(selfnorm, places, tmp_path, suffix):
    first, second = tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"
    for path in (first, second):
        selfnorm.done("sample", places / "model", "-n", 30, "-o", path, "--seed", 4)
    table = read_table(first)
    assert table.names == ["a", "b", "c"]
    assert numeric(table).shape == (30, 3)
    assert np.array_equal(numeric(table), numeric(read_table(second)))


def test_plot(selfnorm, places, tmp_path):
    selfnorm.done("plot", places / "model", places / "test.csv", "-o", tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    of_columns = {"marginals.png", "pairs.png", "dependence.png"}
    assert names == {*of_columns, "training.png", "diagnostics.png"}
    assert all(p.stat().st_size > 5000 for p in (tmp_path / "figures").iterdir())
    selfnorm.done("plot", places / "model", "-o", tmp_path / "without")


def test_report(selfnorm, places, tmp_path):
    page = tmp_path / "report.html"
    report = ("report", places / "model", places / "test.csv", "-o")
    assert "report.html" in selfnorm.done(*report, page)
    assert "test.csv" in page.read_text()
    for wrong in (tmp_path / "report.pdf", tmp_path / "nowhere" / "report.html"):
        assert str(wrong.parent) in selfnorm.refused(*report, wrong)
    (tmp_path / "other.csv").write_text("u,v\n1,2\n2,3\n")
    assert "are missing" in selfnorm.refused(
        "report", places / "model", tmp_path / "other.csv", "-o", page
    )


def test_target_makes_a_regressor(selfnorm, tmp_path, monkeypatch):
    X = rows(80, 2)
    y = X[:, 0] + 0.3 * np.random.default_rng(1).standard_normal(80)
    write_csv(tmp_path / "t.csv", np.column_stack([X, y]), ["u", "v", "price"])
    model = tmp_path / "m"
    fit = ("fit", tmp_path / "t.csv", "-o", model, "--target", "price", "--max-epochs", 3)
    selfnorm.done(*fit, "--no-progress")
    predict = ("predict", model, tmp_path / "t.csv", "-o", tmp_path / "p.csv", "--quantiles")
    selfnorm.done(*predict, "0.1,0.9")
    predicted = read_table(tmp_path / "p.csv")
    assert predicted.names == ["u", "v", "price", "price_mean", "price_q0.1", "price_q0.9"]
    assert (predicted.numbers("price_q0.1") < predicted.numbers("price_q0.9")).all()
    monkeypatch.chdir(tmp_path)
    selfnorm.done("predict", model, "t.csv", "--quantiles", "0.05", "0.5", "0.95")
    names = read_table(tmp_path / "t.predicted.csv").names
    assert names[3:] == ["price_mean", "price_q0.05", "price_q0.5", "price_q0.95"]
    for n_samples in (100, 2100):
        arguments = ("evaluate", model, tmp_path / "t.csv", "--n-samples", n_samples, "--json")
        out = selfnorm.done(*arguments)
        assert json.loads(out)["rows"] == 80
        assert json.loads(out)["n_samples"] == n_samples
    assert "EnergyRegressor" in selfnorm.refused("sample", model, "-o", tmp_path / "s.csv")
    selfnorm.refused(*predict, "low,high")
    selfnorm.done("plot", model, tmp_path / "t.csv", "-o", tmp_path / "f")
    assert (tmp_path / "f" / "calibration.png").exists()


TEXT = "a,b,c\n" + "1,x,3\n2,y,4\n" * 20
FAILURES = [
    ("fit", "", "is empty"),
    ("fit", "a,b\n" + "1,2\n1,2\n" * 20, "no column is left to model"),
    ("fit", "a,b\n1,2\n3,4\n", "at least 5 rows"),
    ("score", "a,b,c\n", "no rows"),
    ("score", "a,b,c\n" + "1,2,3\n2,3,5\n" * 20 + "inf,1,1\n", "column 'a'"),
    ("score", "a,c\n1,2\n", "column 'b' is missing"),
    ("evaluate", TEXT, "'b' holds numbers, but here text ('x' in line 2)"),
]


@pytest.mark.parametrize(("command", "text", "words"), FAILURES)
def test_bad_tables_are_told_in_one_line_and_leave_nothing(
    selfnorm, places, tmp_path, command, text, words
):
    (tmp_path / "t.csv").write_text(text)
    before = () if command == "fit" else (places / "model",)
    after = {"fit": ("-o", tmp_path / "m", "--no-progress"), "score": ("-o", tmp_path / "s.csv")}
    assert words in selfnorm.refused(command, *before, tmp_path / "t.csv", *after.get(command, ()))
    assert {p.name for p in tmp_path.iterdir()} == {"t.csv"}


def messy(path, n=120):
    """A file as a person has it: BOM, text, dates, gaps of two kinds, an identifier, a constant."""
    rng = np.random.default_rng(0)
    lines = ["id,colour,size,count,day,ok,always"]
    for i in range(n):
        colour = rng.choice(["red", "green", '"blue, dark"'])
        size = f"{rng.normal() + 3 * (colour == 'red'):.3f}" if rng.random() > 0.1 else "NA"
        day = np.datetime64("2021-01-01") + int(rng.integers(500))
        cells = [colour if rng.random() > 0.1 else "?", size, str(rng.poisson(30))]
        lines.append(",".join([f"R{i:04d}", *cells, f"{day}", rng.choice(["true", "false"]), "1"]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")


def test_a_raw_file_is_fitted_drawn_filled_and_explained(selfnorm, tmp_path):
    messy(tmp_path / "raw.csv")
    raw, model = pd.read_csv(tmp_path / "raw.csv", na_values=["?"]), tmp_path / "m"
    code, out, err = selfnorm(
        "fit", tmp_path / "raw.csv", "-o", model, "--max-steps", 10, "--no-progress"
    )
    assert code == 0, err
    assert "'id'" in err
    assert "note: 'always' is always 1" in out
    selfnorm.done("sample", model, "-n", 40, "-o", tmp_path / "s.csv")
    drawn = pd.read_csv(tmp_path / "s.csv")
    assert list(drawn) == list(raw)[1:]
    assert (drawn.dtypes == raw.dtypes.iloc[1:]).all()
    assert not drawn.isna().any().any()
    assert pd.to_datetime(drawn["day"], format="%Y-%m-%d").notna().all()
    # in Python they come as what they are, not as the file writes them
    loaded = sn.EnergyDensity.load(model)
    kinds = {name: column.dtype.kind for name, column in loaded.sample(5, random_state=0).items()}
    assert "".join(kinds[name] for name in list(raw)[1:]) == "OfiMOi"
    assert (loaded.impute(raw).dtypes == raw.dtypes).all()
    asked = {name: [None, None] for name in list(raw)[1:]} | {"ok": [True, False]}
    first = [type(cells[0]).__name__ for cells in loaded.impute(asked).values()]
    assert first == ["str", "float", "int", "datetime", "bool", "int"]
    fill = ("impute", model, tmp_path / "raw.csv", "-o")
    selfnorm.done(*fill, tmp_path / "i.csv")
    filled = pd.read_csv(tmp_path / "i.csv")
    assert not filled.isna().any().any()
    assert (filled.eq(raw) | raw.isna()).all().all()
    selfnorm.done(*fill, tmp_path / "two.csv", "--draws", 2)
    assert pd.read_csv(tmp_path / "two.csv")["draw"].tolist() == [1] * 120 + [2] * 120
    selfnorm.done("score", model, tmp_path / "raw.csv", "-o", tmp_path / "e.csv", "--explain")
    scored = pd.read_csv(tmp_path / "e.csv")
    assert set(scored["least_expected"]) <= {"colour", "size", "count", "day", "ok"}
    assert scored["p_size"].isna().equals(raw["size"].isna())
    assert scored["outlier"].mean() < 0.05  # one in a hundred, had it been trained longer


def test_columns_of_a_parquet_file_are_taken_by_place_where_the_model_knows_no_names(
    selfnorm, tmp_path
):
    x = np.random.default_rng(0).gumbel(size=(60, 2))
    sn.EnergyDensity(max_steps=2, random_state=0).fit(x).save(tmp_path / "m")
    pd.DataFrame(x, columns=list("ab")).to_parquet(tmp_path / "t.parquet")
    code, _, err = selfnorm(
        "score", tmp_path / "m", tmp_path / "t.parquet", "-o", tmp_path / "s.csv"
    )
    assert (code, err) == (0, "")


def test_all_problems_of_a_file_are_told_at_once(selfnorm, tmp_path):
    (tmp_path / "t.csv").write_text("a,a,,d\n1,2,3,4\n1,2\n5,6,7,inf\n")
    code, _, err = selfnorm("fit", tmp_path / "t.csv", "-o", tmp_path / "m")
    assert (code, "t.csv: 4 problems:" in err) == (2, True)
    for words in (
        "'a' appears twice",
        "column 3 has no name",
        "line 3 has 2 cells",
        "column 'd' holds an infinite value (inf) in line 4",
    ):
        assert words in err
    (tmp_path / "t.csv").write_text("d,e\n1,x\n\n5,y\ninf,z\n")
    code, _, err = selfnorm(
        "fit", tmp_path / "t.csv", "-o", tmp_path / "m", "--kinds", "e=date,f=cells"
    )
    assert (code, "'f', which the table does not have" in err) == (2, True)
    code, _, err = selfnorm("fit", tmp_path / "t.csv", "-o", tmp_path / "m", "--kinds", "e=date")
    assert "infinite value (inf) in line 5" in err
    assert "column 'e' is to be date" in err


def test_the_page_tells_how_to_read_the_table(selfnorm, tmp_path, monkeypatch):
    """What it says to type gives the numbers of the command line, whatever the file is like."""
    rng = np.random.default_rng(0)
    lines = [
        f"{c:03};€ {v:.2f};{v * c:.1f};{'?' if c == 4 else 'kq'[c % 2]}".replace(".", ",")
        for c, v in zip(rng.integers(0, 9, 60), rng.lognormal(3, 1, 60), strict=True)
    ]
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(
        "\n".join(["key;price;size;kind", *lines]) + "\n", encoding="utf-8-sig"
    )
    fit = ("fit", "t.csv", "--no-progress", "-o")
    assert selfnorm(*fit, "density", "--drop", "size", "--max-steps", 3)[0] == 0
    assert selfnorm(*fit, "m", "--target", "size", "--columns", "kind", "--max-epochs", 1)[0] == 0
    assert selfnorm("score", "density", "t.csv", "-o", "scored.csv")[0] == 0
    assert selfnorm("predict", "m", "t.csv", "-o", "predicted.csv")[0] == 0
    for model, file, column, call in (
        ("density", "scored.csv", "log_density", "density.score_samples(table)"),
        ("m", "predicted.csv", "size_mean", "regressor.predict(X[['kind']])"),
    ):
        code, _, err = selfnorm("report", model, "t.csv", "-o", "page.html")
        assert code == 0, err
        page = html.unescape(Path("page.html").read_text(encoding="utf-8"))
        (typed,) = re.findall(r"((?:import|from)[^<]*?)(?=density\.score|regressor\.predict)", page)
        there: dict = {}
        exec(typed, there)
        expected = pd.read_csv(file, sep=";", decimal=",")[column]
        assert eval(call, there) == pytest.approx(expected.to_numpy())


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_the_page_tells_how_to_read_arrays(suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, values = Path(f"t.{suffix}"), np.arange(6.0).reshape(3, 2)
    np.save(path, values) if suffix == "npy" else np.savez(path, X=values)
    imported, table = cli._reading(path, read_table(path), None, frame=True)
    known = {}
    exec(f"{imported}\nX = {table}", known)
    pd.testing.assert_frame_equal(known["X"], pd.DataFrame(values, columns=["x0", "x1"]))


def test_a_user_says_what_columns_are(selfnorm, tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"N{i};{v};{i % 7},5" for i, v in enumerate(rng.permutation(60))]
    (tmp_path / "t.csv").write_text("\n".join(["id;code;price", *lines]) + "\n")
    fit = ("fit", tmp_path / "t.csv", "-o", tmp_path / "m", "--max-steps", 3, "--no-progress")
    out = selfnorm.done(*fit, "--kinds", "code = cells, id=ignore", "--json")
    kinds = {"id": "ignored", "code": "cells", "price": "cells"}
    assert json.loads(out)["kinds"] == kinds
    # a file of semicolons and decimal commas begets such files
    selfnorm.done("sample", tmp_path / "m", "-n", 9, "-o", tmp_path / "s.csv")
    drawn = pd.read_csv(tmp_path / "s.csv", sep=";", decimal=",")
    assert drawn.dtypes.astype(str).to_dict() == {"code": "int64", "price": "float64"}
    impute = ("impute", tmp_path / "m", tmp_path / "t.csv", "-o", tmp_path / "i.csv")
    selfnorm.done(*impute)
    assert (tmp_path / "i.csv").read_text() == (tmp_path / "t.csv").read_text()
    score = ("score", tmp_path / "m", tmp_path / "t.csv", "--explain", "-o", tmp_path / "e.csv")
    selfnorm.done(*score)
    scored = pd.read_csv(tmp_path / "e.csv", sep=";", decimal=",")
    assert scored["log_density"].dtype == float
    (tmp_path / "w.csv").write_text((tmp_path / "t.csv").read_text().replace("6,5", "6,5x", 1))
    code, _, err = selfnorm(*score[:2], tmp_path / "w.csv", "-o", tmp_path / "w2.csv")
    assert (code, "'price' holds numbers, but here text ('6,5x' in line 8)" in err) == (0, True)
    for wrong in ("code", "code=cells,", "=cells"):
        assert "--kinds must be such as" in selfnorm.refused(*fit, "--force", "--kinds", wrong)
    wrong = (*fit[:4], "--force", "--target", "price", "--kinds", "code=cells")
    assert "--kinds is for densities" in selfnorm.refused(*wrong)


def test_other_refusals(selfnorm, places, tmp_path):
    train, model = places / "train.csv", places / "model"
    fit = ("fit", train, "-o", tmp_path / "m")
    cases = [
        (("fit", train, "-o", model), "not empty"),
        ((*fit, "--target", "z", "--no-header"), "it has 'x0', 'x1', 'x2'"),
        ((*fit, "--drop", "a,b,c"), "no column is left"),
        ((*fit, "--columns", "a,b,a"), "names 'a' twice"),
        ((*fit, "--device", "abacus"), "device 'abacus'"),
        ((*fit, "--method", "magic"), "method"),
        ((*fit, "--target", "a", "--max-steps", 3), "--max-epochs"),
        ((*fit, "--max-epochs", 3), "--max-steps"),
        ((*fit, "--target", "a", "--contamination", 0.2), "--contamination is for densities"),
        (("plot", model, train, "-o", train), "is a file"),
        (("fit", train, "-o", train / "m"), "cannot write"),
        (("score", tmp_path, train, "-o", tmp_path / "s.csv"), "model.safetensors is missing"),
        (("score", model, train, "-o", tmp_path / "s.docx"), "cannot write"),
        (("predict", model, train, "-o", tmp_path / "p.csv"), "--target"),
    ]
    for arguments, words in cases:
        assert words in selfnorm.refused(*arguments)
    assert list(tmp_path.iterdir()) == []
    sn.save(sn.EBM(sn.MLP(3)), tmp_path / "ebm")
    assert "for models of tables" in selfnorm.refused(
        "score", tmp_path / "ebm", train, "-o", tmp_path / "s.csv"
    )


def test_scored_table_is_not_scored_twice(selfnorm, places, tmp_path):
    once = tmp_path / "once.csv"
    selfnorm.done("score", places / "model", places / "test.csv", "-o", once)
    assert "already" in selfnorm.refused(
        "score", places / "model", once, "-o", tmp_path / "twice.csv"
    )


def test_strict_exit_code(selfnorm, tmp_path):
    """--strict turns an unreliable verdict into exit code 3; the report is printed all the same."""
    X = rows(200, 2)
    write_csv(tmp_path / "t.csv", X, ["a", "b"])
    density = sn.EnergyDensity(method="joint", max_steps=5, random_state=0).fit(X)
    density.model_.log_norm.data += 1  # knows of mass that no sample meets
    density.save(tmp_path / "m")
    out = selfnorm.done("evaluate", tmp_path / "m", tmp_path / "t.csv")
    assert "NOT RELIABLE" in out
    code, out, _ = selfnorm("evaluate", tmp_path / "m", tmp_path / "t.csv", "--strict")
    assert code == 3
    assert "NOT RELIABLE" in out


def test_small_tables_are_judged_by_folds_and_pass_identifiers_on(selfnorm, tmp_path):
    table = tmp_path / "t.csv"
    cells = (f"{i:05d},{v:.6g}" for i, v in enumerate(rows(60, 1)[:, 0]))
    table.write_text("\n".join(["id,a", *cells]) + "\n")
    fit = ("fit", table, "-o", tmp_path / "m", "--columns", "a", "--max-steps", 3, "--no-progress")
    out = selfnorm.done(*fit)
    assert "3 folds" in out, out
    selfnorm.done("score", tmp_path / "m", table, "-o", tmp_path / "s.csv")
    lines = (tmp_path / "s.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["id", *(f"{i:05d}" for i in range(60))]


def test_help_names_every_command_and_the_package_runs_as_a_module(selfnorm):
    out = selfnorm.done("--help")
    assert [command for command in BUILT.commands if command not in out] == []
    command = [sys.executable, "-m", "selfnorm", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("selfnorm ")


def test_datasets_says_what_is_there_and_where_it_looked(selfnorm, tmp_path):
    (tmp_path / "miniboone").mkdir()
    (tmp_path / "miniboone" / "data.npy").write_bytes(b"x")
    out = selfnorm.done("datasets", "--data-dir", tmp_path)
    assert "checkerboard" in out
    assert str(tmp_path) in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert "found" in lines["miniboone"]
    assert "missing" in lines["gas"]
    for table_needs in ("binarized_mnist", "utkface", "power"):
        assert table_needs in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("toy2d --ngf 64", "No such option: --ngf"),
        ("mnist --dataset cells", "No such option: --dataset"),
        ("all --recipe best", "No such option: --recipe"),
        ("toy2d --device abacus", "device 'abacus' cannot be used"),
        ("all --only toy3d", "no piece 'toy3d'"),
    ],
)
def test_a_table_takes_its_own_options_alone(selfnorm, arguments, words):
    code, _, err = selfnorm("reproduce", *arguments.split())
    assert (code, words in err) == (2, True)


@pytest.mark.parametrize(
    "table", ["toy2d", "toy1d", "uci", "images", "images_ablation", "mnist", "all"]
)
def test_the_options_of_a_table_are_those_it_takes(table):
    told = {p.name for p in typer.main.get_command(cli.paper).commands[table].params} - {"help"}
    module = import_module(f"selfnorm.paper.{'everything' if table == 'all' else table}")
    taken = set(inspect.signature(module.run).parameters)
    common = {each.name for each in fields(Settings)} if "settings" in taken else set()
    assert told <= taken | common


def test_plot_surface_needs_no_model(selfnorm, tmp_path):
    selfnorm.done("plot", "surface", "-o", tmp_path)
    assert (tmp_path / "snl_surface.png").stat().st_size > 5000


@pytest.mark.parametrize("arguments", ["reproduce toy2d --out", "plot surface -o"])
def test_a_file_where_a_folder_should_be_is_refused_before_the_work(selfnorm, arguments, tmp_path):
    (tmp_path / "taken").write_text("mine")
    for place in (tmp_path / "taken", tmp_path / "taken" / "below"):
        assert "taken" in selfnorm.refused(*arguments.split(), place)
    assert (tmp_path / "taken").read_text() == "mine"


def test_an_error_of_the_system_is_one_line(monkeypatch, capsys):
    def full_disk():
        raise OSError(errno.ENOSPC, "No space left on device", "out/toy2d.json")

    monkeypatch.setattr(cli, "app", full_disk)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "selfnorm: out/toy2d.json: No space left on device\n"


@pytest.mark.parametrize(
    ("table", "flags", "expected"),
    [
        (  # Twice the same was run twice, and counted as two seeds in means and deviations.
            "toy2d",
            "--dataset funnel --dataset pinwheel --dataset funnel",
            {"datasets": ("funnel", "pinwheel"), "recipe": "paper"},
        ),
        (
            "mnist",
            "--ngf 64 --energy-layers 3 --model vae --jobs 2",
            {"ngf": 64, "energy_layers": 3, "models": ("vae",), "jobs": 2},
        ),
    ],
)
def test_options_reach_the_table(selfnorm, monkeypatch, tmp_path, table, flags, expected):
    given = {}
    module = import_module(f"selfnorm.paper.{table}")
    run = wraps(module.run)(lambda **options: given.update(options))
    monkeypatch.setattr(module, "run", run)
    selfnorm.done("reproduce", table, *flags.split(), "--out", tmp_path)
    assert expected.items() <= given.items()
    assert set(given) == {*expected, "recipe", "out", "device", "progress"}


def strike(monkeypatch, number, at):
    """A signal from within a training step."""
    plain, left = Stepper.step, [at]

    def step(self, *args):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)
        return plain(self, *args)

    monkeypatch.setattr(Stepper, "step", step)


@pytest.fixture
def interruptible():
    """Interrupts arrive, although a shell that starts the tests in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SIGNALS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code", "word"), SIGNALS)
@pytest.mark.parametrize("target", [(), ("--target", "a", "--max-epochs", 9)])
def test_a_signal_ends_a_fit_with_what_was_kept(
    selfnorm, places, tmp_path, monkeypatch, number, code, word, target
):
    steps = () if target else ("--max-steps", 30)
    fit = ("fit", places / "train.csv", "-o", tmp_path / "m", "--no-progress", *target, *steps)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        strike(patched, number, 15)
        found, _, err = selfnorm(*fit)
    assert found == code
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(err.strip().splitlines()) == 1
    assert f"{word}: the best state after 14 steps is kept in {tmp_path / 'm'}" in err
    kept = tmp_path / "m"
    if target and number == signal.SIGINT:  # a model that is there stays until another is complete
        before, kept = (kept / "model.safetensors").read_bytes(), tmp_path / "m.stopped"
        with monkeypatch.context() as patched:
            strike(patched, number, 5)
            patched.chdir(tmp_path / "m")
            _, _, err = selfnorm(*fit, "--force", "-o", ".")
        assert f"is kept in {kept}; . is as it was" in err
        assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
    read = ("evaluate", kept, places / "test.csv", "--n-samples", 100)
    selfnorm.done(*read)


@pytest.mark.parametrize("target", [(), ("--target", "a", "--max-epochs", 9)])
def test_the_same_command_goes_on_from_a_checkpoint(
    selfnorm, places, tmp_path, monkeypatch, target
):
    steps = () if target else ("--max-steps", 60)
    fit = ("fit", places / "train.csv", "--no-progress", *target, *steps, "-o")
    selfnorm.done(*fit, tmp_path / "whole")
    saving = ("--checkpoint", tmp_path / "run.ckpt")
    for at in (22, 45) if target else (45, 12, 30):  # in both stages
        with monkeypatch.context() as patched:
            strike(patched, signal.SIGTERM, at)
            code, _, err = selfnorm(*fit, tmp_path / "resumed", *saving)
        assert code == 143
        assert "run.ckpt is kept; the same command goes on from it" in err
        assert not (tmp_path / "resumed").exists()
    selfnorm.done(*fit, tmp_path / "resumed", *saving)
    whole, resumed = (tmp_path / name / "model.safetensors" for name in ("whole", "resumed"))
    weights, others = (load_file(path) for path in (whole, resumed))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(tensor, others[name])


@pytest.mark.usefixtures("interruptible")
def test_a_signal_elsewhere_says_that_nothing_was_written(selfnorm, places, tmp_path, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr(cli, "read_table", interrupted)
    out = tmp_path / "s.csv"
    code, _, err = selfnorm("score", places / "model", places / "test.csv", "-o", out)
    assert code == 130
    assert err.strip() == "selfnorm: interrupted: nothing was written"
    monkeypatch.setattr(toy2d, "run", lambda **_: interrupted())
    code, _, err = selfnorm("reproduce", "toy2d", "--out", tmp_path)
    assert code == 130
    assert f"finished rows are kept in {tmp_path}; the same command goes on" in err


_STRUCK_IN_AN_IMPORT = """
import signal, sys
from selfnorm.cli import main
module, number = sys.argv.pop(1), int(sys.argv.pop(1))
class Strike:
    def find_spec(self, name, *_):
        if name == module:
            exec(f"import os; os.kill(os.getpid(), {number})\\nwhile True: pass")
sys.meta_path.insert(0, Strike())
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


@pytest.mark.parametrize(("number", "code", "word"), SIGNALS)
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_a_signal_in_an_import_is_one_line(places, tmp_path, module, number, code, word):
    struck = [sys.executable, "-c", _STRUCK_IN_AN_IMPORT, module, str(int(number))]
    fit = [*struck, "fit", str(places / "train.csv"), "-o", str(tmp_path / "m")]
    ended = subprocess.run(fit, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr == f"selfnorm: {word}: nothing was written\n"


@pytest.mark.parametrize("error", [RuntimeError, np.linalg.LinAlgError, KeyError])
def test_a_fault_is_one_line_that_says_how_to_report_it(
    selfnorm, places, tmp_path, monkeypatch, error
):
    def broken(*_, **__):
        raise error("probability tensor contains inf\nat line 7")

    fit = ("fit", places / "train.csv", "-o", tmp_path / "m")
    monkeypatch.setattr(sn.EnergyDensity, "fit", broken)
    code, out, err = selfnorm(*fit)
    assert (code, out) == (1, "")
    assert re.match(rf"selfnorm: {error.__name__}: .*report it .*SELFNORM_TRACEBACK=1\n$", err)
    monkeypatch.setenv("SELFNORM_TRACEBACK", "1")
    with pytest.raises(error):
        selfnorm(*fit)


def test_what_cannot_be_is_one_line(selfnorm, places, tmp_path, monkeypatch):
    model, train = places / "model", places / "train.csv"
    out = ("-o", tmp_path / "s.csv")
    cases = [
        (("sample", model, "-n", 10**14, *out), "GiB are free"),
        (("sample", model, "--missing", *out), "gaps fall: use fit --model-gaps"),
        (("fit", train, "-o", tmp_path / "m", "--device", "meta"), "holds no numbers"),
        (("fit", train, "-o", tmp_path / "m", "--checkpoint", tmp_path), "is a folder"),
    ]
    if not torch.cuda.is_available():
        gone = "no CUDA device is available here"
        cases.append((("fit", train, "-o", tmp_path / "m", "--device", "cuda"), gone))
    for arguments, words in cases:
        assert words in selfnorm.refused(*arguments)

    def too_much(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B")

    monkeypatch.setattr(sn.EnergyDensity, "bounds", too_much)
    assert "not enough memory" in selfnorm.refused("evaluate", model, train)


@pytest.mark.parametrize("kind", ["density", "regressor"])
def test_wrong_types_in_a_config_with_the_right_hash(selfnorm, places, tmp_path, kind):
    """Every entry of a config by turns a number, a text, a list, nothing: one line, or a result."""
    names = ["a", "b", "c"]
    X = rows(60, 3)
    write_csv(tmp_path / "t.csv", X[:20], names)
    if kind == "density":
        model = sn.EnergyDensity(max_steps=2, random_state=0).fit(X)
        commands = (("score", "-o", tmp_path / "s.csv"), ("sample", "-n", 3))
    else:
        model = sn.EnergyRegressor(max_epochs=1, n_members=1, hidden=8, random_state=0)
        model.fit(pd.DataFrame(X[:, :2], columns=names[:2]), X[:, 2])
        commands = (("predict", "-o", tmp_path / "s.csv"),)
    sn.save(model, tmp_path / "m", notes={"target": "c"})
    content = document(tmp_path / "m")
    rng = np.random.default_rng(0)
    parts = ("blueprint", "notes")
    entries = [place for part in parts for place in _entries(content[part], (part,))]
    for place in entries:
        wrong = [7, -1, "text", [1, "b"], None, {"x": 1}, 0.5, True, []][rng.integers(9)]
        inner = changed = json.loads(json.dumps(content))
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = wrong
        put_document(tmp_path / "m", changed)
        command, *options = commands[rng.integers(len(commands))]
        if command == "sample":
            options += ["-o", tmp_path / "drawn.csv"]
        else:
            options = [tmp_path / "t.csv", *options]
        code, _, err = selfnorm(command, tmp_path / "m", *options)
        assert code in (0, 2), (place, wrong)
        assert len(err.strip().splitlines()) == (code == 2), (place, wrong, err)


def _entries(inner, place=()):
    """Where every entry of nested dicts and lists is; of long lists the first ones."""
    pairs = inner.items() if isinstance(inner, dict) else enumerate(inner[:2])
    for key, value in pairs:
        yield (*place, key)
        if isinstance(value, dict | list):
            yield from _entries(value, (*place, key))


def test_files_of_any_number_of_rows_are_scored_into_a_folder(selfnorm, places, tmp_path):
    for k in range(2):
        table = pa.table(dict(zip("abc", rows(30, 3, seed=k).T, strict=True)))
        pq.write_table(table, tmp_path / f"{k}.parquet")
    files = ("score", places / "model", f"{tmp_path}/*.parquet", "-o", tmp_path / "scored")
    report = json.loads(selfnorm.done(*files, "--normalizer", "learned", "--json"))
    assert report == {"output": str(tmp_path / "scored"), "rows": 60, "files": 2, "kept": 0}
    assert json.loads(selfnorm.done(*files, "--normalizer", "learned", "--json"))["kept"] == 2
    assert "another input, model or options" in selfnorm.refused(*files)
    assert "--explain" in selfnorm.refused(*files, "--explain")
    selfnorm.done("impute", places / "model", tmp_path / "0.parquet", "-o", tmp_path / "filled")
    selfnorm.done("sample", places / "model", "-n", "1e2", "-o", tmp_path / "drawn")
    assert pq.read_table(tmp_path / "drawn").num_rows == 100
    assert "whole number" in selfnorm("sample", places / "model", "-n", "1.5", "-o", "x.csv")[2]


def test_files_are_fitted_together(selfnorm, tmp_path):
    for k in range(3):
        table = pa.table(dict(zip("abc", rows(60, 3, seed=k).T, strict=True)))
        pq.write_table(table, tmp_path / f"{k}.parquet")
    fit = ("fit", f"{tmp_path}/*.parquet", "-o", tmp_path / "m", "--max-steps", 5)
    report = json.loads(selfnorm.done(*fit, "--drop", "b", "--json"))
    assert (report["rows"], report["columns"]) == (180, ["a", "c"])
    assert "fits into memory" in selfnorm.refused(*fit, "--force", "--rule", "a < b")
    assert "no column 'z'" in selfnorm.refused(*fit, "--force", "--columns", "z")
    pq.write_table(pa.table({"a": [1.0]}), tmp_path / "1.parquet")
    assert "1.parquet: its columns differ" in selfnorm.refused(*fit, "--force")
