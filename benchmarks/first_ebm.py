"""How good is a newcomer's first EBM? ``sn.fit`` with its defaults on the four 2-D sets.

    python benchmarks/first_ebm.py --out results/defaults
    python benchmarks/first_ebm.py --out out/first --sets pinwheel --energies readme

``readme``: the lines of the README. ``plain``: an ``nn.Sequential`` of three layers on a Gaussian
base, and no proposal. 7,000 training points; the gap is the mean of the true log-density
less that of the model, exactly normalised on a grid, at fresh points. Needs nothing but the
library; runs that the file has are not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import selfnorm as sn
from measuring import Stopwatch, rows_in, write
from selfnorm.datasets import toy2d

FRESH = 20_000  # points on which a model is judged


def readme(x: Tensor) -> tuple[sn.EBM, Any]:
    """The energy of the README, and its proposal."""
    q = sn.Defensive.fit_to(x)
    energy = sn.MLP(2, saturate=4.0, features=sn.FourierFeatures(2))
    return sn.EBM(energy, base=sn.StudentT.fit_to(x)), q


def plain(x: Tensor) -> tuple[sn.EBM, Any]:
    """A network as it comes, on a Gaussian base."""
    layers: list[nn.Module] = [nn.Linear(2, 128), nn.SiLU()]
    layers += [nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1)]
    return sn.EBM(nn.Sequential(*layers), base=sn.Gaussian.fit_to(x)), None


ENERGIES = {"readme": readme, "plain": plain}


def measure(name: str, energy: str, seed: int) -> dict[str, Any]:
    """One fit with the defaults, and its distance from the truth."""
    split = toy2d.load(name, seed=100 + seed)
    torch.manual_seed(seed)
    ebm, q = ENERGIES[energy](split.train)
    clock = Stopwatch()
    history = sn.fit(ebm, split.train, proposal=q, seed=seed, progress=False)
    took = clock()
    log_z, error = sn.exact_log_norm(ebm, 2)
    x = split.draw(FRESH, seed=10_000 + seed)
    with torch.no_grad():
        gap = split.log_density(x) - (ebm.log_unnormalized(x).double() - log_z)
    return {
        "set": name, "energy": energy, "seed": seed, "limit": split.limit,
        "gap": float(gap.mean()), "gap_se": float(gap.std() / FRESH**0.5), "grid_error": error,
        **took, "steps": history.n_steps, "best_step": history.best_step,
        "stopped": history.stopped, "threads": torch.get_num_threads(),
    }  # fmt: skip


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/defaults"))
    parser.add_argument("--sets", nargs="*", default=list(toy2d.NAMES))
    parser.add_argument("--energies", nargs="*", default=list(ENERGIES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = args.out / "first_ebm.json"
    rows = rows_in(path)
    done = {(row["set"], row["energy"], row["seed"]) for row in rows}
    for seed in range(args.seeds):
        for energy in args.energies:
            for name in args.sets:
                if (name, energy, seed) not in done:
                    rows.append(measure(name, energy, seed))
                    print(json.dumps(rows[-1]), flush=True)
                    write(path, rows)


if __name__ == "__main__":
    main()
