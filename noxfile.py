#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.2"]
# ///
"""What continuous integration runs, on any system: ``nox``, or one of them, ``nox -s tests``."""

import shutil
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv|virtualenv"
CONSTRAINTS = ("-c", "constraints.txt")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, and the arrows between the rooms."""
    session.install(*CONSTRAINTS, "-e.", "--group", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Types."""
    session.install(*CONSTRAINTS, "-e.[all]", "--group", "lint")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests and the examples of all docstrings and pages."""
    session.install(*CONSTRAINTS, "-e.[all]", "--group", "test")
    session.run("pytest", "-n", "2", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The site, its notebooks run."""
    session.install(*CONSTRAINTS, "-e.[all]", "--group", "docs")
    shutil.rmtree("docs/reference/generated", ignore_errors=True)
    build = ["sphinx-build", "--fail-on-warning", "--keep-going", "--quiet"]
    session.run(*build, "-d", "out/doctrees", "docs", "site", env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def web(session: nox.Session) -> None:
    """The site of ``docs`` in Chromium."""
    session.install(*CONSTRAINTS, "-e.[all]", "--group", "web")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        session.run("playwright", "install", "chromium")
    session.run("python", "-m", "tests.web", "site", "out/web")


@nox.session(default=False)
def wheel(session: nox.Session) -> None:
    """Wheel and source distribution; both, without extras, pass a smoke test."""
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    built = sorted(Path("dist").resolve().iterdir())
    session.run("twine", "check", "--strict", *map(str, built))
    script = Path("tests/smoke.py").resolve()
    for each in built:
        with tempfile.TemporaryDirectory() as folder:
            session.run("python", "-m", "venv", f"{folder}/venv")
            bin_ = Path(folder) / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
            python = str(bin_ / "python")
            pinned = ("-c", str(Path("constraints.txt").resolve()))
            session.run(python, "-m", "pip", "install", "-q", *pinned, str(each), external=True)
            with session.chdir(folder):  # not where the sources are
                one = {"OMP_NUM_THREADS": "1"}  # small models are quickest on one thread
                session.run(python, str(script), env=one, external=True)


if __name__ == "__main__":
    nox.main()
