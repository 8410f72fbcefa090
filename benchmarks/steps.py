"""What a training step costs beyond the network itself, and how much many models gain as one.

``overhead``: one SNL step (proposal samples, their log-density, loss, gradient, clipping,
finite-check, Adam, counters) against one forward and backward pass of the same network on the same
number of points; with the paper's proposal (the base itself), another Gaussian, and a defensive
mixture. ``many``: eight models trained as one batch against one after another. The paper's 2-D
network on a CPU; variants take turns, so that a busy machine slows all alike. ``gpu``, batch 512,
4,096 samples, one model and many at once:

- ``matmul_floor``: the batched products of forward and backward pass, nothing else, as one graph;
- ``forward_backward``: the stacked network alone, as one graph;
- ``captured``: the library's step of many models as one graph; ``eager``: without a graph;
- ``fit``: the step of a single model outside a batch;
- ``plain_loop``: a loop as one would write it, for one model after another.

    python benchmarks/steps.py overhead
    OMP_WAIT_POLICY=PASSIVE python benchmarks/steps.py many [--threads 2]
    python benchmarks/steps.py gpu [--members 1 20 80]

(PASSIVE because on a busy machine threads that spin at barriers only get in their own way.)
"""

from __future__ import annotations

import argparse
import os
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import selfnorm as sn
from measuring import Row, Work, captured, in_turn, need, ratio, write
from selfnorm.density.many import ManyTask, MemberTables
from selfnorm.density.model import DensityTask
from selfnorm.training import Stepper, TensorSource, TrainingOptions

HIDDEN = (200, 100, 50, 50)
N_ROWS = 7000
OVERHEAD = (256, 1024)  # batch, proposal samples
GPU = (512, 4096)
SIZES = ((128, 1024), (256, 256), (128, 128))  # the same for many; the first is the recipe's


def energy() -> sn.MLP:
    return sn.MLP(2, hidden=HIDDEN, activation="relu")


def models(members: int, device: str = "cpu") -> list[sn.EBM]:
    """Models that differ in their initial weights alone."""
    torch.manual_seed(0)
    base = sn.Gaussian(torch.zeros(2), scale=1.0).to(device)
    return [sn.EBM(energy(), base=base).to(device) for _ in range(members)]


def single_step(
    model: sn.EBM, batch: int, n_samples: int, options: TrainingOptions, proposal: Any = None
) -> Work:
    """A step as :func:`selfnorm.fit` takes it."""
    data = torch.randn(N_ROWS, 2, device=model.device)
    task = DensityTask(model, proposal, n_samples=n_samples)
    return _steps(Stepper(task, TensorSource((data,)), options), data.device, batch)


def many_task(members: int, n_samples: int, options: TrainingOptions, device: str) -> ManyTask:
    runs = [DensityTask(model, None, n_samples=n_samples) for model in models(members, device)]
    rates, decays = [1e-3] * members, [0.0] * members
    return ManyTask(runs, rates=rates, weight_decays=decays, options=options)


def many_step(
    members: int,
    batch: int,
    n_samples: int,
    options: TrainingOptions,
    device: str = "cpu",
    *,
    capture: bool = True,
) -> Work:
    """A step as :func:`selfnorm.fit_many` takes it, on CUDA as a graph."""
    task = many_task(members, n_samples, options, device)
    task.capturable = capture
    orders = torch.stack([torch.randperm(N_ROWS, device=device) for _ in range(members)], dim=1)
    source = MemberTables([torch.randn(N_ROWS, 2, device=device)] * members, orders)
    return _steps(Stepper(task, source, options), orders.device, batch)


def _steps(stepper: Stepper, device: torch.device, batch: int) -> Work:
    order: Tensor = torch.randperm(N_ROWS, device=device)
    count = 0

    def step() -> None:
        nonlocal count
        start = count % (N_ROWS // batch) * batch
        stepper.step(order[start : start + batch], 1e-3, count)
        count += 1

    return step


def overhead(rounds: int) -> list[Row]:
    """Steps with three proposals beside the bare network."""
    network, points = energy(), torch.randn(sum(OVERHEAD), 2)

    def forward_backward() -> None:
        network.zero_grad()
        network(points).mean().backward()

    works: dict[str, Work] = {"forward_backward": forward_backward}
    proposals = {
        "proposal_is_base": None,
        "another_gaussian": sn.Gaussian(torch.zeros(2), scale=1.1),
        "defensive_mixture_of_20": sn.Defensive.fit_to(torch.randn(2000, 2), n_components=20),
    }
    for name, proposal in proposals.items():
        works[f"snl_{name}"] = single_step(models(1)[0], *OVERHEAD, TrainingOptions(), proposal)
    times = in_turn(works, rounds, calls=10)
    return [
        {
            "variant": name,
            "batch": OVERHEAD[0],
            "n_samples": OVERHEAD[1],
            "milliseconds": statistics.median(values),
            "ratio_to_forward_backward": ratio(values, times["forward_backward"]),
        }
        for name, values in times.items()
    ]


def many(rounds: int, members: int) -> list[Row]:
    """The same models one after another and as one batch."""
    rows = []
    for size in SIZES:
        alone = [single_step(model, *size, TrainingOptions()) for model in models(members)]
        works: dict[str, Work] = {
            "one_after_another": lambda steps=alone: [step() for step in steps],
            "batched": many_step(members, *size, TrainingOptions()),
        }
        times = in_turn(works, rounds, calls=2)
        row: Row = {"members": members, "threads": torch.get_num_threads()}
        row |= {"batch": size[0], "n_samples": size[1], "load_average": os.getloadavg()[0]}
        for variant, values in times.items():
            row[f"milliseconds_{variant}"] = statistics.median(values)
            row[f"fastest_{variant}"] = min(values)
            row[f"times_faster_{variant}"] = ratio(times["one_after_another"], values)
        rows.append(row)
    return rows


def matmul_floor(members: int, device: str) -> Work:
    sizes = [2, *HIDDEN, 1]
    rows = GPU[0] + GPU[1]
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


def stacked_forward_backward(members: int, device: str) -> Work:
    together = many_task(members, GPU[1], sn.TrainingOptions(), device).module
    points = torch.randn(members, GPU[0] + GPU[1], 2, device=device)

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
        batch = x[torch.randint(len(x), (GPU[0],), device=device)]
        samples = base.sample((GPU[1],))
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
    size = (members, *GPU, sn.TrainingOptions(optimizer="adam"), device)
    steps = {
        "matmul_floor": matmul_floor(members, device),
        "forward_backward": stacked_forward_backward(members, device),
        "captured": many_step(*size),
        "eager": many_step(*size, capture=False),
        "plain_loop": plain_loop(members, device),
    }
    if members == 1:
        steps["fit"] = single_step(models(1, device)[0], *size[1:4])
    return steps


def gpu(rounds: int, members: list[int], device: str) -> list[Row]:
    """Steps on a GPU against their floor, of one model and of many at once."""
    rows = []
    for number in members:
        times = in_turn(variants(number, device), rounds, 50, device)
        for name, values in times.items():
            rows.append(
                {
                    "members": number,
                    "variant": name,
                    "batch": GPU[0],
                    "n_samples": GPU[1],
                    "milliseconds": statistics.median(values),
                    "ratio_to_floor": ratio(values, times["matmul_floor"]),
                    "times_faster_than_plain_loop": ratio(times["plain_loop"], values),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["overhead", "many", "gpu"])
    parser.add_argument("--members", type=int, nargs="+", help="8 of many; 1 20 80 on a GPU")
    parser.add_argument("--threads", type=int, default=2, help="of many")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--device", default="cuda", help="of gpu")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    args = parser.parse_args()
    device = "cpu"
    if args.what == "overhead":
        rows, name = overhead(args.rounds or 60), "step_overhead"
    elif args.what == "many":
        torch.set_num_threads(args.threads)
        (members,) = args.members or [8]
        rows, name = many(args.rounds or 30, members), f"many_{args.threads}threads"
    else:
        need(args.device)
        device = args.device
        rows, name = gpu(args.rounds or 5, args.members or [1, 20, 80], device), "step_gpu"
    for row in rows:
        print(row)
    write(args.out / f"{name}.json", rows, device)


if __name__ == "__main__":
    main()
