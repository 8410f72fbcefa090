"""What a training step costs beyond the network itself.

One SNL step (proposal samples, their log-density, loss, gradient, clipping, finite-check, Adam,
counters) against one forward + backward pass of the same network on the same number of points, in
the same run. Batch 256, 1,024 proposal samples, the paper's 2-D network, CPU; with the paper's
proposal (the base itself), another Gaussian, and a defensive mixture of 21 components.

    python benchmarks/step_overhead.py [--out results/speed]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

import selfnorm as sn
from measuring import Work, in_turn, ratio, write
from paper_steps import energy, models, single_step

BATCH, N_SAMPLES = 256, 1024


def forward_backward() -> Work:
    network = energy()
    points = torch.randn(BATCH + N_SAMPLES, 2)

    def step() -> None:
        network.zero_grad()
        network(points).mean().backward()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    proposals = {
        "proposal_is_base": None,
        "another_gaussian": sn.Gaussian(torch.zeros(2), scale=1.1),
        "defensive_mixture_of_20": sn.Defensive.fit_to(torch.randn(2000, 2), n_components=20),
    }
    steps = {"forward_backward": forward_backward()}
    for name, proposal in proposals.items():
        size = (BATCH, N_SAMPLES, sn.TrainingOptions())
        steps[f"snl_{name}"] = single_step(models(1)[0], *size, proposal)
    times = in_turn(steps, given.rounds, each=10)
    rows = []
    for name, values in times.items():
        milliseconds, share = statistics.median(values), ratio(values, times["forward_backward"])
        rows.append(
            {
                "variant": name,
                "batch": BATCH,
                "n_samples": N_SAMPLES,
                "milliseconds": milliseconds,
                "ratio_to_forward_backward": share,
            }
        )
        print(f"{name:38s} {milliseconds:7.3f} ms   {share:5.2f} x")
    write(given.out / "step_overhead.json", rows)


if __name__ == "__main__":
    main()
