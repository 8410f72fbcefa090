"""The tests have teeth: a typical mistake in a formula of the library makes them fail.

Each mutant of ``mutants.toml`` is a copy of the package with one mistake, on which the tests that
should notice it are run. The suite plants those marked ``quick``; all of them, or those that are
named, are planted by ``python -m tests.test_mutations``, which exits with 1 if one survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import selfnorm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(selfnorm.__file__).parent
TESTS = Path(__file__).parent
AT_ONCE = 2


class Mutant(NamedTuple):
    """``wrong`` in place of ``right`` in ``file``, to be noticed by ``tests``."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str
    quick: bool = False


class Outcome(NamedTuple):
    """``killed`` by the assertion of a test; ``told`` is what pytest said."""

    killed: bool
    told: str


MUTANTS = [
    Mutant(**entry) for entry in tomllib.loads((TESTS / "mutants.toml").read_text())["mutant"]
]


def run(mutant, folder):
    """Plant the mistake in a copy of the package within ``folder`` and run the tests on it."""
    shutil.copytree(PACKAGE, folder / "selfnorm")  # with what is compiled: that saves a second
    target = folder / "selfnorm" / mutant.file
    source = target.read_text()
    assert source.count(mutant.right) == 1, (
        f"{mutant.name}: the line to break is not once in {mutant.file}; update mutants.toml"
    )
    target.write_text(source.replace(mutant.right, mutant.wrong))
    for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
        compiled.unlink()
    path = f"{folder}{os.pathsep}{TESTS.parent}"
    # wide enough for pytest to give the cause on the line that names a failed test
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "COLUMNS": "1000"}
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
            *("-p", "no:xdist", "-o", "addopts=", f"--rootdir={folder}"),
            str(TESTS / mutant.tests),
        ],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return Outcome(result.returncode == 1 and _by_assertion(result.stdout), result.stdout)


def _by_assertion(told):
    """Whether a test failed by what it asserts: not by an error of a fixture or of the import."""
    failed = [line for line in told.splitlines() if line.startswith("FAILED ")]
    causes = [line.partition(" - ")[2] for line in failed]
    return len(causes) == 1 and causes[0].startswith(("assert ", "AssertionError"))


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.quick], ids=lambda m: m.name)
def test_a_planted_mistake_is_caught(mutant, tmp_path):
    outcome = run(mutant, tmp_path)
    assert outcome.killed, outcome.told[-2000:]


def test_every_mutant_can_be_planted_and_has_its_tests():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        source = (PACKAGE / mutant.file).read_text()
        assert source.count(mutant.right) == 1, mutant.name
        file, _, test = mutant.tests.partition("::")
        assert f"def {test.partition('[')[0]}" in (TESTS / file).read_text(), mutant.name


def main(names):
    """Plant the named mutants, or all, and print what became of each."""
    unknown = set(names) - {m.name for m in MUTANTS}
    if unknown:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTANTS if not names or m.name in names]
    width = max(len(m.name) for m in chosen)

    def plant(mutant):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(mutant, Path(folder))
        return mutant, outcome, time.monotonic() - start

    start, survivors = time.monotonic(), 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, outcome, seconds in pool.map(plant, chosen):
            mark = "killed  " if outcome.killed else "SURVIVED"
            print(f"{mark}  {mutant.name:{width}}  {seconds:5.1f} s  {mutant.tests}", flush=True)
            if not outcome.killed:
                survivors += 1
                print("\n".join(f"    {line[:100]}" for line in outcome.told.splitlines()[-5:]))
    killed = len(chosen) - survivors
    print(f"{killed} of {len(chosen)} killed in {time.monotonic() - start:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
