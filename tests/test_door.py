"""The package's door: rooms are entered when asked for, and every name is found there."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import joblib
import pytest

import selfnorm as sn

_RUN = """
import sys
from selfnorm.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, "sklearn" in sys.modules, file=sys.stderr)
"""


def _python(code, *arguments, folder="."):
    environment = {**os.environ, "PYTHONPATH": str(Path(sn.__file__).parents[1])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--help", "Usage"),
        ("fit --help", "Usage"),
        ("--version", sn.__version__),
        ("fit none.csv -o model", "no such file"),
        ("fit table.csv -o model --columns z", "there is no column 'z'"),
        ("fit table.csv -o model --target z", "there is no column 'z'"),
        ("score none table.csv -o scored.csv", "not a model folder"),
    ],
)
def test_help_and_refusals_come_before_torch(arguments, said, tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n1,2\n3,4\n")
    ended = _python(_RUN, *arguments.split(), folder=tmp_path)
    assert said in ended.stdout + ended.stderr
    assert ended.stderr.splitlines()[-1] == "False False"


def test_stub_names_what_the_door_gives():
    stub = ast.parse(Path(sn.__file__).with_suffix(".pyi").read_text())
    names = ["__version__"]
    for line in stub.body[:-1]:
        assert isinstance(line, ast.ImportFrom)
        (alias,) = line.names
        assert alias.name == alias.asname
        assert hasattr(sn, alias.name)
        names.append(alias.name)
    assert sorted(names) == sorted(dir(sn))


def test_a_room_does_not_hide_the_function_of_its_name():
    code = "import selfnorm.evidence, selfnorm; print(selfnorm.evidence.__name__, dir(selfnorm)[0])"
    ended = _python(code)
    assert ended.stdout.split() == ["evidence", "AutoregressiveEBM"], ended.stderr


def test_functions_that_name_the_package_go_to_other_processes():
    with joblib.parallel_config("loky", n_jobs=2):
        answers = joblib.Parallel()(joblib.delayed(lambda k: (k, sn.__version__))(k) for k in "ab")
    assert answers == [("a", sn.__version__), ("b", sn.__version__)]


def test_names_that_do_not_exist_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        sn.fitt  # noqa: B018
