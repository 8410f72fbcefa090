"""SNL against torchebm's persistent contrastive divergence: same network, data and wall-clock.

Checkerboard, 7,000 points, the paper's 2-D network on a standard Gaussian base, CPU. Both train in
alternating slices of time until each has used its budget (so that a busy machine slows both), with
the same one-cycle learning rate over the budget. Between slices the clock stands still and the
exact log-likelihood is computed by quadrature. The filling of torchebm's replay buffer is not
counted. torchebm is given the bare network (``plain``) and the network on the Gaussian base
(``base``), each with several Langevin step sizes and the full budget; the best run of each counts.
SNL also runs once with a tenth of the budget (``snl_short``).

    pip install -e . --group bench
    python benchmarks/vs_torchebm.py [--seconds 40] [--out results/speed]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paper_steps
import selfnorm as sn
from measuring import peer, write
from selfnorm.datasets import toy2d
from selfnorm.density.task import DensityTask
from selfnorm.training import Stepper, TrainingOptions, lr_factor

BATCH, N_SAMPLES, LANGEVIN_STEPS, LR = 256, 1024, 40, 1e-3
GOAL = -1.90  # exact log-likelihood (nats) to reach, about the paper's result
Step = Callable[[Tensor, float], None]


def new_model(base: bool = True) -> sn.EBM:
    (model,) = paper_steps.models(1)
    return model if base else sn.EBM(model.energy)


def snl_steps(model: sn.EBM, data: Tensor) -> Step:
    task = DensityTask(model, model.base, n_samples=N_SAMPLES)
    task.start((data,))
    stepper = Stepper(task, (data,), TrainingOptions(weight_decay=1e-2))
    return lambda rows, factor: stepper.step(rows, 3 * LR * factor, 0)


class AsTorchebm(peer("torchebm.core").BaseModel):  # type: ignore[misc]
    """The very same model, as torchebm wants to see it."""

    def __init__(self, model: sn.EBM) -> None:
        super().__init__()
        self.net: nn.Module = model

    def forward(self, x: Tensor) -> Tensor:
        return -self.net.log_unnormalized(x)


def pcd_steps(model: sn.EBM, data: Tensor, step_size: float) -> Step:
    wrapped = AsTorchebm(model)
    sampler = peer("torchebm.samplers").LangevinDynamics(wrapped, step_size=step_size)
    loss_function = peer("torchebm.losses").ContrastiveDivergence(
        wrapped, sampler, k_steps=LANGEVIN_STEPS, persistent=True, buffer_size=10_000
    )
    optimizer = torch.optim.AdamW(model.energy.parameters(), lr=LR)

    def step(rows: Tensor, factor: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = LR * factor
        optimizer.zero_grad()
        loss, _ = loss_function(data[rows])
        loss.backward()
        optimizer.step()

    return step


def exact(model: sn.EBM, test: Tensor) -> float:
    # Without a base the energy is integrated over the box that holds the data several times over.
    box = None if model.base is not None else (torch.full((2,), -8.0), torch.full((2,), 8.0))
    log_z, _ = sn.exact_log_norm(model, 2, n_points=513, support=box)
    with torch.no_grad():
        return float(model.log_unnormalized(test).double().mean()) - log_z


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="budget of each run")
    parser.add_argument("--slices", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    split = toy2d.load("checkerboard", seed=0)
    test = split.draw(20_000, seed=1).float()
    models = {"snl": new_model(), "snl_short": new_model()}
    steps = {name: snl_steps(model, split.train) for name, model in models.items()}
    for kind, size in (("plain", 0.005), ("plain", 0.02), ("base", 0.005)):
        name = f"torchebm_pcd{LANGEVIN_STEPS}_{kind}_step{size}"
        models[name] = new_model(base=kind == "base")
        steps[name] = pcd_steps(models[name], split.train, size)
    budget = {n: options.seconds / (10 if n == "snl_short" else 1) for n in models}
    for step in steps.values():  # warm-up, off the clock: torchebm fills its replay buffer here
        step(torch.arange(BATCH), 0.0)
    curves: dict[str, list[tuple[float, float]]] = {
        name: [(0.0, exact(model, test))] for name, model in models.items()
    }
    used, counts = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
    early = [0.005 * 2**k for k in range(4)]  # finer slices first, where SNL rises fast
    cuts = sorted({*early, *((k + 1) / options.slices for k in range(options.slices))})
    for cut in cuts:
        for name in models:
            while used[name] < cut * budget[name]:
                began = time.perf_counter()
                rows = torch.randint(len(split.train), (BATCH,))
                done = min(used[name] / budget[name], 1.0)
                steps[name](rows, lr_factor("one_cycle", int(10_000 * done), 10_000))
                used[name] += time.perf_counter() - began
                counts[name] += 1
            curves[name].append((used[name], exact(models[name], test)))
            print(f"{name:32s} {used[name]:6.1f} s  {curves[name][-1][1]:8.3f}", flush=True)
    report(options.out, curves, counts, split.limit)


def first_time(curve: list[tuple[float, float]], goal: float) -> float | None:
    """When the curve first reaches the goal."""
    return next((t for t, value in curve if value >= goal), None)


def report(
    out: Path, curves: dict[str, list[tuple[float, float]]], counts: dict[str, int], limit: float
) -> None:
    rows: list[dict[str, Any]] = []
    for name, curve in curves.items():
        rows.append(
            {
                "method": name,
                "steps": counts[name],
                "milliseconds_per_step": 1000 * curve[-1][0] / counts[name],
                "final": curve[-1][1],
                "limit": limit,
                "seconds_to_goal": first_time(curve, GOAL),
                "curve": [[round(t, 3), round(v, 4)] for t, v in curve],
            }
        )
    for kind in ("plain", "base"):
        peer = max((n for n in curves if kind in n), key=lambda n: curves[n][-1][1])
        seconds, final = curves[peer][-1]
        ours = sorted([*curves["snl_short"], *curves["snl"]])
        reached, goal = first_time(ours, final), first_time(ours, GOAL)
        # A peer that never gets there has taken its whole budget at least.
        theirs = first_time(curves[peer], GOAL) or seconds
        row = {
            "method": f"snl against {kind}",
            "best_peer": peer,
            "snl_minus_peer": curves["snl"][-1][1] - final,
            "seconds_to_peer_final": reached,
            "times_sooner": None if reached is None else seconds / max(reached, 1e-9),
            "goal": GOAL,
            "peer_reached_goal": first_time(curves[peer], GOAL) is not None,
            "times_sooner_at_goal_at_least": None if goal is None else theirs / max(goal, 1e-9),
        }
        rows.append(row)
        print(row)
    write(out / "vs_torchebm.json", rows)


if __name__ == "__main__":
    main()
