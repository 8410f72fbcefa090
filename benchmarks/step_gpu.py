"""A training step on a GPU against its floor, the matrix products it cannot do without.

The paper's 2-D network, batch 512, 4,096 proposal samples, one model and many at once. In the same
run and in turn:

- ``matmul_floor``: the batched products of forward and backward pass, nothing else, as one graph;
- ``forward_backward``: the stacked network alone, as one graph;
- ``captured``, ``captured_compiled``: the library's whole step (samples, loss, gradient, clipping,
  finite-check, Adam, counters) as one graph, without and with ``torch.compile``;
- ``fit``, ``fit_compiled``: likewise for a single model outside a batch;
- ``eager``: the same step without a graph;
- ``plain_loop``: a loop as one would write it, for one model after another.

    python benchmarks/step_gpu.py [--members 1 20 80] [--out results/speed]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from selfnorm.density.many_task import ManyTask, MemberData

import selfnorm as sn
from cuda_graphs import captured
from selfnorm.density import objectives
from selfnorm.density.fit import DensityTask
from selfnorm.paper.report import Table
from selfnorm.training import Stepper, TrainingOptions

HIDDEN = (200, 100, 50, 50)
BATCH, N_SAMPLES = 512, 4096


def paper_models(members: int, device: str) -> list[sn.EBM]:
    torch.manual_seed(0)
    base = sn.Gaussian(torch.zeros(2), scale=1.0).to(device)
    return [
        sn.EBM(sn.MLP(2, hidden=HIDDEN, activation="relu"), base=base).to(device)
        for _ in range(members)
    ]


def matmul_floor(members: int, device: str) -> Callable[[], None]:
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

    return captured(step)


def forward_backward(members: int, device: str) -> Callable[[], None]:
    task = many_task(members, device)
    points = torch.randn(members, BATCH + N_SAMPLES, 2, device=device)

    def step() -> None:
        task.module.weights.grad = None
        task.module.energies(task.module.weights, points).mean().backward()

    return captured(step)


def many_task(members: int, device: str) -> ManyTask:
    models = paper_models(members, device)
    ones = [1.0] * members
    return ManyTask(
        models,
        [model.base for model in models if model.base is not None],
        MemberData([torch.randn(7000, 2, device=device)] * members),
        None,
        objective_list=[objectives.get("snl")] * members,
        n_samples=N_SAMPLES,
        lr_factors=ones,
        log_norm_factors=ones,
        weight_decays=[0.0] * members,
    )


def library_step(members: int, device: str, *, capture: bool, compiled: bool) -> Callable[[], None]:
    task = many_task(members, device)
    orders = torch.stack([torch.randperm(7000, device=device) for _ in range(members)], dim=1)
    options = TrainingOptions(optimizer="adam", cuda_graph=capture, compile_step=compiled)
    stepper = Stepper(task, (orders,), options)
    rows = torch.arange(BATCH, device=device)
    return lambda: stepper.step(rows, 1e-3, 0)


def single_step(device: str, *, compiled: bool) -> Callable[[], None]:
    """One model by itself, as :func:`selfnorm.fit` trains it."""
    model = paper_models(1, device)[0]
    task = DensityTask(model, model.base, n_samples=N_SAMPLES)
    data = torch.randn(7000, 2, device=device)
    stepper = Stepper(task, (data,), TrainingOptions(optimizer="adam", compile_step=compiled))
    order = torch.randperm(7000, device=device)
    return lambda: stepper.step(order[:BATCH], 1e-3, 0)


def plain_loop(members: int, device: str) -> Callable[[], None]:
    models = paper_models(members, device)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    x = torch.randn(7000, 2, device=device)

    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            batch = x[torch.randint(len(x), (BATCH,), device=device)]
            samples = model.base.sample((N_SAMPLES,))
            log_w = model.log_unnormalized(samples) - model.base.log_prob(samples)
            loss = -sn.functional.snl(model.log_unnormalized(batch), log_w, model.log_norm)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            loss.item()

    return step


def milliseconds(step: Callable[[], None], seconds: float = 0.25) -> float:
    """Time of one step, over as many calls as fit."""
    torch.cuda.synchronize()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(5):
            step()
        calls += 5
        if calls % 50 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 20, 80])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", type=int, nargs="*", default=[1, 80], help="for these sizes")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    device = "cuda"
    (options.out / "step_gpu.json").unlink(missing_ok=True)
    table = Table("step_gpu", "cuda", options.out, device=device)
    for members in options.members:
        steps = {
            "matmul_floor": matmul_floor(members, device),
            "forward_backward": forward_backward(members, device),
            "captured": library_step(members, device, capture=True, compiled=False),
            "eager": library_step(members, device, capture=False, compiled=False),
            "plain_loop": plain_loop(members, device),
        }
        if members == 1:
            for compiled in (False, True) if 1 in options.compile else (False,):
                name = "fit_compiled" if compiled else "fit"
                steps[name] = single_step(device, compiled=compiled)
        elif members in options.compile:
            steps["captured_compiled"] = library_step(members, device, capture=True, compiled=True)
        for step in steps.values():
            for _ in range(5):
                step()
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                times[name].append(milliseconds(step))
        floor, plain = times["matmul_floor"], times["plain_loop"]
        for name, values in times.items():
            row = {
                "members": members,
                "variant": name,
                "batch": BATCH,
                "n_samples": N_SAMPLES,
                "milliseconds": statistics.median(values),
                "ratio_to_floor": statistics.median(
                    v / f for v, f in zip(values, floor, strict=True)
                ),
                "times_faster_than_plain_loop": statistics.median(
                    p / v for p, v in zip(plain, values, strict=True)
                ),
            }
            table.add(row)
            print(
                f"{members:3d} models, {name:18s} {row['milliseconds']:8.3f} ms, "
                f"{row['ratio_to_floor']:6.2f} x floor, "
                f"{row['times_faster_than_plain_loop']:7.1f} x faster than the plain loop",
                flush=True,
            )


if __name__ == "__main__":
    main()
