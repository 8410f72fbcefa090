"""A training step on a GPU against its floor, the matrix products it cannot do without.

The paper's 2-D network, batch 512, 4,096 proposal samples, one model and many at once. In the same
run and in turn:

- ``matmul_floor``: the batched products of forward and backward pass, nothing else, as one graph;
- ``forward_backward``: the stacked network alone, as one graph;
- ``captured``: the library's whole step (samples, loss, gradient, clipping, finite-check, Adam,
  counters) as one graph;
- ``fit``: likewise for a single model outside a batch;
- ``eager``: the same step without a graph;
- ``plain_loop``: a loop as one would write it, for one model after another.

    python benchmarks/step_gpu.py [--members 1 20 80] [--out results/speed]
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import selfnorm as sn
from measuring import Work, captured, in_turn, need, ratio, write
from paper_steps import HIDDEN, N_ROWS, many_step, many_task, models, single_step

BATCH, N_SAMPLES = 512, 4096


def matmul_floor(members: int, device: str) -> Work:
    sizes = [2, *HIDDEN, 1]
    rows = BATCH + N_SAMPLES
    inputs = [torch.randn(members, rows, n, device=device) for n in sizes]
    weights = [torch.randn(members, a, b, device=device) for a, b in pairwise(sizes)]

    def step() -> None:
        for layer, weight in enumerate(weights):
            torch.bmm(inputs[layer], weight)
        for layer in reversed(range(len(weights))):
            torch.bmm(inputs[layer].mT, inputs[layer + 1])
            if layer:  # no gradient with respect to the points
                torch.bmm(inputs[layer + 1], weights[layer].mT)

    return captured(step, device)


def forward_backward(members: int, device: str) -> Work:
    together = many_task(members, N_SAMPLES, sn.TrainingOptions(), device).module
    points = torch.randn(members, BATCH + N_SAMPLES, 2, device=device)

    def step() -> None:
        together.table.grad = None
        together.ask(lambda m, x: m.model.negative_energy(x), points).mean().backward()

    return captured(step, device)


def plain_loop(members: int, device: str) -> Work:
    base = models(1, device)[0].base
    assert base is not None
    alone = models(members, device)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in alone]
    x = torch.randn(N_ROWS, 2, device=device)

    def train(model: sn.EBM, optimizer: torch.optim.Optimizer) -> Tensor:
        batch = x[torch.randint(len(x), (BATCH,), device=device)]
        samples = base.sample((N_SAMPLES,))
        log_w = model.log_unnormalized(samples) - base.log_prob(samples)
        loss = -sn.functional.snl(model.log_unnormalized(batch), log_w, model.log_norm)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        return loss

    def step() -> None:
        for model, optimizer in zip(alone, optimizers, strict=True):
            train(model, optimizer).item()

    return step


def variants(members: int, device: str) -> dict[str, Work]:
    size = (members, BATCH, N_SAMPLES, sn.TrainingOptions(optimizer="adam"), device)
    steps = {
        "matmul_floor": matmul_floor(members, device),
        "forward_backward": forward_backward(members, device),
        "captured": many_step(*size),
        "eager": many_step(*size, capture=False),
        "plain_loop": plain_loop(members, device),
    }
    if members == 1:
        steps["fit"] = single_step(models(1, device)[0], *size[1:4])
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 20, 80])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=50, help="steps of a variant at a time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    given = parser.parse_args()
    need(given.device)
    rows = []
    for members in given.members:
        steps = variants(members, given.device)
        times = in_turn(steps, given.rounds, given.each, given.device)
        for name, values in times.items():
            row = {
                "members": members,
                "variant": name,
                "batch": BATCH,
                "n_samples": N_SAMPLES,
                "milliseconds": statistics.median(values),
                "ratio_to_floor": ratio(values, times["matmul_floor"]),
                "times_faster_than_plain_loop": ratio(times["plain_loop"], values),
            }
            rows.append(row)
            print(
                f"{members:3d} models, {name:18s} {row['milliseconds']:8.3f} ms, "
                f"{row['ratio_to_floor']:6.2f} x floor, "
                f"{row['times_faster_than_plain_loop']:7.1f} x faster than the plain loop",
                flush=True,
            )
        write(given.out / "step_gpu.json", rows, given.device)


if __name__ == "__main__":
    main()
