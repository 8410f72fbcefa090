"""Is this version as quick as an earlier one? Jobs people run, in two source trees, in turns.

    git worktree add ../earlier COMMIT
    python benchmarks/versus.py --earlier ../earlier/src --device cpu --out results/speed

Each run is a process of its own, on one thread where it runs on a CPU; medians over rounds and
their ratio are written. Jobs use names that both trees know.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import commit, need, write

START = """
import time, warnings, numpy as np, torch, torch._dynamo, selfnorm as sn
warnings.filterwarnings("ignore")
device = {device!r}
if device == "cpu": torch.set_num_threads(1)
r = np.random.default_rng(0)
def clock(work):
    if device == "cuda": torch.cuda.synchronize()
    began = time.perf_counter(); work()
    if device == "cuda": torch.cuda.synchronize()
    print("SECONDS", time.perf_counter() - began)
"""
DENSITY = """
x = r.normal(size=({rows}, {columns})) @ r.normal(size=({columns}, {columns}))
model = sn.EnergyDensity(random_state=0, device=device, max_steps={steps})
clock(lambda: model.fit(x))
"""
REGRESSOR = """
x = r.normal(size=(1000, 8)); y = x[:, 0] + r.normal(size=1000) * (1 + x[:, 1] ** 2)
model = sn.EnergyRegressor(random_state=0, device=device)
clock(lambda: model.fit(x, y))
"""
TABLE = """
import json, tempfile
try: from selfnorm.paper import toy2d
except ImportError: from selfnorm.experiments import toy2d  # modules without folders
folder = tempfile.mkdtemp()
toy2d.run(recipe="paper", device=device, out=folder, progress=False)
print("SECONDS", json.load(open(folder + "/toy2d.json"))["rows"][0]["seconds_together"])
"""
VAE = """
try: from selfnorm.vae import AutoregressivePrior, ConvDecoder, ConvEncoder
except ImportError:  # modules without folders
    from selfnorm.vae_networks import ConvDecoder, ConvEncoder
    from selfnorm.vae_priors import AutoregressivePrior
torch.manual_seed(0)
x = (torch.rand(50_000, 784, device=device) < 0.13).float()
prior = AutoregressivePrior(16, hidden=128, components=8, context=16, energy_hidden=32, n_samples=8)
prior.polish_steps = 1
vae = sn.EnergyVAE(ConvEncoder(), ConvDecoder(), prior).to(device)
seen = sn.fit(vae, x, batch_size=256, max_epochs={epochs}, seed=0, progress=False).records
first, last = seen[0], seen[-1]   # from the end of the first epoch: warm-up and closing left out
print("SECONDS", (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))
"""
JOBS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "cpu": {
        "EnergyDensity, 2 columns": (DENSITY, {"rows": 2000, "columns": 2, "steps": 100}),
        "EnergyDensity, 8 columns": (DENSITY, {"rows": 1000, "columns": 8, "steps": 60}),
        "EnergyRegressor": (REGRESSOR, {}),
    },
    "cuda": {
        "2-D table, 80 runs": (TABLE, {}),
        "step of a VAE with a chain prior": (VAE, {"epochs": 8}),
        "EnergyDensity, 8 columns": (DENSITY, {"rows": 2000, "columns": 8, "steps": 300}),
        "EnergyRegressor": (REGRESSOR, {}),
    },
}


def seconds(code: str, source: Path, device: str) -> float:
    """One run of a job in one tree."""
    # The tree is put first: packages on the present path are found behind it.
    path = os.pathsep.join(filter(None, [str(source.resolve()), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    times = [line.split()[1] for line in found.stdout.splitlines() if line.startswith("SECONDS")]
    if not times:
        raise RuntimeError(f"a job failed in {source}:\n{found.stderr[-2000:]}")
    return float(times[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--earlier", type=Path, required=True, help="the other tree's src folder")
    parser.add_argument("--now", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--device", choices=JOBS, default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", nargs="*", help="names of some of the jobs")
    parser.add_argument("--commits", nargs=2, help="of both, where the trees have no history")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    given = parser.parse_args()
    need(given.device)
    known = JOBS[given.device]
    if unknown := set(given.jobs or ()) - set(known):
        parser.error(f"unknown jobs {sorted(unknown)}; there are {list(known)}")
    trees = {"earlier": given.earlier, "now": given.now}
    for tree in trees.values():
        if not (tree / "selfnorm").is_dir():
            parser.error(f"{tree} holds no package selfnorm: name the src folder of a tree")
    told = given.commits or [commit(tree) for tree in trees.values()]
    commits = dict(zip(trees, told, strict=True))
    rows = []
    for name in given.jobs or known:
        text, options = known[name]
        code = (START + text).format(device=given.device, **options)
        times: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(given.rounds):
            for tree, source in trees.items():
                times[tree].append(seconds(code, source, given.device))
        before, now = (statistics.median(values) for values in times.values())
        row: dict[str, Any] = {"job": name, "earlier": before, "now": now, "ratio": now / before}
        rows.append(row | {f"all_{tree}": values for tree, values in times.items()})
        print(f"{name:34s} {before:9.4f} {now:9.4f} s  x{now / before:.2f}", flush=True)
        write(given.out / f"versus_{given.device}.json", rows, given.device, commits=commits)


if __name__ == "__main__":
    main()
