"""The walks of docs/design.md: which files of the package a piece of data enters, in order.

python docs/walks.py            # writes them into docs/design.md
python docs/walks.py --check    # fails where a walk enters other files than the page says
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import re
import sys
import tempfile
import textwrap
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import selfnorm as sn
from selfnorm.cli import main as command_line

PACKAGE = Path(sn.__file__).parent
PAGE = Path(__file__).parent / "design.md"


def files_entered(job: Callable[[], object]) -> list[str]:
    """Files of the package whose functions a job calls, in the order of the first calls."""
    for module in pkgutil.walk_packages(sn.__path__, "selfnorm."):  # imports are no part of a walk
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    files: list[str] = []
    inside = f"{PACKAGE}{os.sep}"

    def look(frame: types.FrameType, event: str, argument: object) -> None:  # noqa: ARG001
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(inside) and frame.f_code.co_name != "<module>":
            name = path.removeprefix(inside)
            if name not in files:
                files.append(name)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return files


def csv() -> None:
    """A CSV file to its bounds."""
    with tempfile.TemporaryDirectory() as folder:
        table, model = f"{folder}/t.csv", f"{folder}/m"
        x = np.random.default_rng(0).normal(size=(60, 4))
        np.savetxt(table, x, delimiter=",", header="a,b,c,d", comments="")
        before = sys.argv
        for command in (
            ["fit", table, "-o", model, "--max-steps", "3"],
            ["evaluate", model, table],
        ):
            sys.argv = ["selfnorm", *command]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                command_line()
        sys.argv = before


def batch() -> None:
    """One batch of ``sn.fit``."""
    x = torch.randn(300, 2)
    q = sn.Gaussian.fit_to(x)
    model = sn.EBM(sn.MLP(2), base=q)
    sn.fit(model, x, proposal=q, max_steps=3, max_epochs=9, progress=False, seed=0)


def regressor() -> None:
    """``EnergyRegressor`` to its quantiles."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = x[:, 0] + rng.normal(size=60)
    model = sn.EnergyRegressor(random_state=0, n_members=2, max_epochs=2)
    model.fit(x, y).predict_quantiles(x[:5], [0.1, 0.9])


def vae() -> None:
    """A step of a VAE with a chain as prior."""
    x = (torch.rand(60, 12) > 0.5).float()
    encoder, decoder = torch.nn.Linear(12, 4), torch.nn.Linear(2, 12)
    sn.add_energy_prior(encoder, decoder, x, latent=2, max_steps=3, seed=0)


def evidence() -> None:
    """The log-normaliser of a density from its draws."""
    draws = np.random.default_rng(0).normal(size=(200, 2))
    sn.evidence(lambda x: -0.5 * (x**2).sum(-1), draws, max_evaluations=300, seed=0)


JOBS = {job.__name__: job for job in (csv, batch, regressor, vae, evidence)}


def place_of(name: str) -> re.Pattern[str]:
    """Where the page has a walk."""
    return re.compile(rf"(<!-- walk: {name} -->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL)


def written(files: list[str]) -> str:
    """The files of a walk as the page has them."""
    lines = textwrap.wrap(" > ".join(files), 118, break_long_words=False)
    return f"{len(files)} files:\n\n```text\n" + "\n".join(lines) + "\n```"


def main() -> None:
    """Write the page, or compare the files of every walk with it: in what order does not matter."""
    torch.set_num_threads(1)
    page, stale = PAGE.read_text(), []
    for name, job in JOBS.items():
        torch.manual_seed(0)
        place, files = place_of(name), files_entered(job)
        if (block := place.search(page)) is None:
            raise SystemExit(f"{PAGE.name} has no place for the walk {name!r}")
        listed = set(re.findall(r"\S+\.py", block[2]))
        if listed != set(files):
            more, fewer = sorted({*files} - listed), sorted(listed - {*files})
            stale.append(f"{name}: enters {more}, and no longer {fewer}")
            page = place.sub(lambda m, files=files: m[1] + written(files) + m[3], page)
    if "--check" not in sys.argv:
        PAGE.write_text(page)
    elif stale:
        raise SystemExit(
            "\n".join(["docs/design.md is out of date: run python docs/walks.py", *stale])
        )


if __name__ == "__main__":
    main()
