"""An installation without extras works, and says which extra what is missing needs.

python tests/smoke.py
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

EXTRAS = {
    "matplotlib": "plot",
    "zuko": "flows",
    "pyarrow": "frames",
    "lightning_fabric": "distributed",
}


def shell(*arguments: str, refused: bool = False) -> str:
    """What a command says; on stderr where it refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "selfnorm", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != (2 if refused else 0):
        raise SystemExit(f"selfnorm {' '.join(arguments)}: {done.returncode}\n{done.stderr}")
    return done.stderr if refused else done.stdout


def refusal(call: Callable[[], object]) -> str:
    """What the library says when it cannot."""
    from selfnorm import SelfnormError

    try:
        call()
    except SelfnormError as error:
        return str(error)
    return "nothing"


def main() -> None:
    """Fit, save, load, the command line, and what an extra is needed for."""
    there = [name for name in EXTRAS if importlib.util.find_spec(name)]
    if there:
        raise SystemExit(f"an environment without extras is wanted, {', '.join(there)} are there")
    import numpy as np
    import torch

    import selfnorm as sn

    rng = np.random.default_rng(0)
    table = {"kind": rng.choice(["a", "b"], 200), "size": rng.normal(size=200)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        density = sn.EnergyDensity(max_steps=20, random_state=0).fit(table)
        density.save(folder / "density")
        again = sn.load(folder / "density")
        assert np.array_equal(again.score_samples(table), density.score_samples(table))

        x = torch.randn(300, 2)
        proposal = sn.Defensive.fit_to(x)
        ebm = sn.EBM(sn.MLP(2, saturate=4.0), base=sn.StudentT.fit_to(x))
        sn.fit(ebm, x, proposal=proposal, max_epochs=1, seed=0, progress=False)
        sn.save(ebm, folder / "ebm")
        assert torch.equal(sn.load(folder / "ebm").log_prob(x), ebm.log_prob(x))
        assert sn.evaluate(ebm, x, proposal=proposal, seed=0).upper < 0

        csv, model = str(folder / "table.csv"), str(folder / "model")
        np.savetxt(csv, x.numpy(), delimiter=",", header="a,b", comments="")
        assert "report" in shell("--help")
        shell("fit", csv, "-o", model, "--max-steps", "20", "--no-progress")
        shell("score", model, csv, "-o", str(folder / "scored.csv"))

        found = {
            "plot": shell("report", model, csv, "-o", str(folder / "r.html"), refused=True),
            "frames": shell("score", model, csv, "-o", str(folder / "s.parquet"), refused=True),
        }
        found["flows"] = refusal(lambda: sn.Flow(2))
        found["distributed"] = refusal(lambda: sn.fit_distributed(ebm, x, proposal=proposal))
        for extra in EXTRAS.values():
            assert f"selfnorm[{extra}]" in found[extra], found[extra]
    print(f"selfnorm {sn.__version__} works without extras, and names those it misses")


if __name__ == "__main__":
    main()
