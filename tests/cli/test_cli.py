"""The command line: help, listing, errors as one line with exit code 2."""

import errno
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from selfnorm.cli import app as cli
from selfnorm.cli.app import app

runner = CliRunner()


def selfnorm(*arguments, env=None):
    """The real program in its own process."""
    return subprocess.run(
        [sys.executable, "-c", "from selfnorm.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )


def test_help_names_every_command():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("reproduce", "datasets", "fit", "evaluate", "score", "sample", "plot"):
        assert command in result.output


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("selfnorm ")


def test_datasets_says_what_is_there_and_where_it_looked(tmp_path):
    (tmp_path / "miniboone").mkdir()
    (tmp_path / "miniboone" / "data.npy").write_bytes(b"x")
    result = runner.invoke(app, ["datasets", "--data-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert "checkerboard" in result.output
    assert str(tmp_path) in result.output
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.startswith("  ")}
    assert "found" in lines["miniboone"]
    assert "missing" in lines["gas"]
    for table_needs in ("binarized_mnist", "utkface", "power"):
        assert table_needs in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reproduce", "nonsense"], "unknown table 'nonsense'"),
        (["reproduce", "toy2d", "--recipe", "typo"], "unknown recipe 'typo'"),
        (["reproduce", "all", "--recipe", "best"], "takes no --recipe"),
        (["reproduce", "all", "--only", "toy3d"], "no piece 'toy3d'"),
        (["reproduce", "toy2d", "--only", "toy2d/paper"], "takes no --only"),
        (["reproduce", "toy2d", "--side-by-side", "2"], "takes no --side-by-side"),
        (["reproduce", "toy2d", "--device", "abacus"], "device 'abacus' cannot be used"),
    ],
)
def test_refusals_are_one_line_and_exit_two(arguments, words, tmp_path):
    result = selfnorm(*arguments, "--out", str(tmp_path))
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_plot_surface_needs_no_model(tmp_path):
    result = runner.invoke(app, ["plot", "surface", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "snl_surface.png").stat().st_size > 5000


@pytest.mark.parametrize("arguments", [["reproduce", "toy2d"], ["plot", "surface"]])
def test_a_file_where_a_folder_should_be_is_refused_before_the_work(arguments, tmp_path):
    (tmp_path / "taken").write_text("mine")
    flag = "--out" if arguments[0] == "reproduce" else "-o"
    for place in (tmp_path / "taken", tmp_path / "taken" / "below"):
        result = selfnorm(*arguments, flag, str(place))
        assert result.returncode == 2
        assert len(result.stderr.strip().splitlines()) == 1
        assert "taken" in result.stderr
    assert (tmp_path / "taken").read_text() == "mine"


def test_an_error_of_the_system_is_one_line(monkeypatch, capsys):
    def full_disk():
        raise OSError(errno.ENOSPC, "No space left on device", "out/toy2d.json")

    monkeypatch.setattr(cli, "app", full_disk)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "selfnorm: out/toy2d.json: No space left on device\n"


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "selfnorm", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stdout.startswith("selfnorm ")


def test_a_name_given_twice_is_meant_once(monkeypatch, tmp_path):
    """Its rows were run twice, and counted as two seeds in means and deviations."""
    given = {}
    monkeypatch.setattr("selfnorm.paper.toy2d.run", lambda **options: given.update(options))
    names = ["--dataset", "funnel", "--dataset", "pinwheel", "--dataset", "funnel"]
    result = runner.invoke(app, ["reproduce", "toy2d", *names, "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert given["datasets"] == ("funnel", "pinwheel")
