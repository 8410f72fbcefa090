"""What each hand-written kernel saves of a job that users run: the job with it and without it.

    python benchmarks/kernels.py --device cuda --out results/speed
    python benchmarks/kernels.py --device cpu --threads 1 --out results/speed

Every job runs with all kernels, then with one of them at a time replaced by what torch offers, then
with none, in turns; medians over rounds are compared. ``saves`` is the share of the job's time that
goes without the kernel: 1 - on / off. A kernel stays where that is at least 0.15 in some job.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimiser of a process loads it

import selfnorm as sn
from selfnorm import functional as F
from selfnorm.conditional import task as conditional_task
from selfnorm.density import many_task, objectives, stacked_energies
from selfnorm.images import ImageRegressor
from selfnorm.networks import MLP
from selfnorm.paper.report import hardware, versions
from selfnorm.paper.toy2d_runs import Config, train_together
from selfnorm.training import loop, side_stream, step
from selfnorm.vae import AutoregressivePrior, ConvDecoder, ConvEncoder, EnergyVAE
from selfnorm.vae import priors as vae_priors

warnings.filterwarnings("ignore")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# ---- kernels: each a context in which torch's own means are used instead -----------------------


def torch_adam(groups: Any, decoupled: bool = True, **_: Any) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    on_cuda = groups[0]["params"][0].is_cuda
    return kind(groups, lr=groups[0].get("lr", 0.0), fused=True, capturable=on_cuda)


@contextmanager
def no_own_adam() -> Iterator[None]:
    with replaced(step, "FusedAdam", torch_adam), replaced(step, "WideAdam", torch_adam):
        yield


@contextmanager
def no_member_adam() -> Iterator[None]:
    def adam(groups: Any, module: Any, decoupled: bool) -> torch.optim.Optimizer:
        del module
        for group in groups:
            group.setdefault("lr_scale", 1.0)
            if group["params"][0].is_cuda:
                group["lr"] = torch.zeros((), device="cuda")
        return torch_adam(groups, decoupled)

    with replaced(many_task, "MemberAdam", adam):
        yield


@contextmanager
def no_overlap() -> Iterator[None]:
    with replaced(loop, "make_stepper", step.Stepper):
        yield


@contextmanager
def no_side_streams() -> Iterator[None]:
    def init(self: Any, device: Any, number: int = 0) -> None:
        del device, number
        self._stream, self._forked = None, False

    with replaced(side_stream.SideStream, "__init__", init):
        yield


@contextmanager
def no_network_gradient() -> Iterator[None]:
    with replaced(MLP, "is_as_built", lambda _: False):
        yield


@contextmanager
def no_stacked_gradient() -> Iterator[None]:
    with replaced(stacked_energies.EnergyStack, "_is_written_out", lambda *_: False):
        yield


def autograd_snl(terms: Any, n: int, log_norm: Any, constant: Any = None) -> Any:
    log_p, log_w = terms[:n], terms[n:]
    log_p = log_p if constant is None else log_p + constant
    value = F.snl(log_p, log_w, log_norm)
    return -value, F.importance_ml(log_p.detach(), log_w.detach())


def autograd_snls(terms: Any, n: int, log_norms: Any) -> Any:
    log_p, log_w = terms[:, :n].mean(1), terms[:, n:].T
    value = F.snl(log_p, log_w, log_norms, reduction="none")
    return -value, (log_p - F.log_mean_exp(log_w)).detach()


def autograd_rows(log_p: Any, log_w: Any, log_norm: Any) -> Any:
    value = F.snl(log_p, log_w, log_norm)
    return -value, F.importance_ml(log_p.detach(), log_w.detach())


@contextmanager
def no_snl_gradient() -> Iterator[None]:
    with (
        replaced(objectives, "snl_loss", autograd_snl),
        replaced(many_task, "snl_losses", autograd_snls),
        replaced(conditional_task, "row_snl_loss", autograd_rows),
    ):
        yield


@contextmanager
def no_chain_kernels() -> Iterator[None]:
    kept = vae_priors.AutoregressivePrior._plain
    chain = vae_priors.LatentChain

    class Plain:
        def __get__(self, chain_of: Any, _: Any) -> Any:
            return lambda z, n: kept(chain_of.__dict__["prior_of"][0], z, n)

    with replaced(chain, "bound", Plain()):
        yield


KERNELS: dict[str, Callable[[], Any]] = {
    "own Adam": no_own_adam,
    "Adam of members": no_member_adam,
    "average beside the next step": no_overlap,
    "side streams": no_side_streams,
    "gradient of an MLP": no_network_gradient,
    "gradient of stacked MLPs": no_stacked_gradient,
    "gradient of SNL": no_snl_gradient,
    "gradients of a latent chain": no_chain_kernels,
}


# ---- jobs: each returns seconds --------------------------------------------------------------


def clock(work: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def table_of_80(device: str) -> float:
    configs = [
        Config("paper", dataset, objective, base, seed, device, "train", False)
        for seed in range(5)
        for dataset in ("funnel", "pinwheel", "checkerboard", "four_circles")
        for base in ("standard_normal", "none")
        for objective in ("nce", "snl")
    ]
    return train_together(configs, progress=False)[1]


def one_toy(device: str) -> float:
    torch.manual_seed(0)
    x = torch.randn(6912, 2, device=device)
    q = sn.Gaussian(torch.zeros(2), scale=1.0).to(device)
    model = sn.EBM(sn.MLP(2, hidden=(200, 100, 50, 50), activation="relu"), base=q).to(device)
    options = {"n_samples": 1024, "batch_size": 128, "progress": False, "seed": 0}
    steps = 1350 if device == "cuda" else 200
    return clock(
        lambda: sn.fit(model, x, proposal=q, max_epochs=25, max_steps=steps, **options), device
    )


def density(columns: int, device: str, rows: int = 2000) -> float:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, columns)) @ generator.normal(size=(columns, columns))
    steps = 300 if device == "cuda" else 100
    estimator = sn.EnergyDensity(random_state=0, device=device, max_steps=steps)
    return clock(lambda: estimator.fit(x), device)


def regressor(device: str) -> float:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1000, 8))
    y = x[:, 0] + generator.normal(size=1000) * (1 + x[:, 1] ** 2)
    estimator = sn.EnergyRegressor(random_state=0, device=device, max_epochs=8, energy_epochs=6)
    return clock(lambda: estimator.fit(x, y), device)


def vae_steps(device: str) -> float:
    torch.manual_seed(0)
    options = {"hidden": 128, "components": 8, "context": 16, "energy_hidden": 32, "n_samples": 8}
    prior = AutoregressivePrior(16, **options)
    prior.chain.__dict__["prior_of"] = (prior,)
    vae = EnergyVAE(ConvEncoder(), ConvDecoder(), prior).to(device)
    x = (torch.rand(8192, 784, device=device) < 0.13).float()
    task = vae.training_task(n_samples=1024)
    task.start((x,))
    task.module.train()
    stepper = step.Stepper(
        task, step.make_optimizer(task, "adamw", 1e-2), (x,), clip_norm=10.0, ema=None, capture=True
    )
    return repeated(stepper, x, 256, 400 if device == "cuda" else 3)


def image_steps(device: str) -> float:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (512, 3, 64, 64), dtype=torch.uint8)
    y = torch.randint(1, 61, (512, 1)).double()
    model = ImageRegressor("snl", "mdn-4", n_samples=64, device=device, bf16=True)
    model.prepare(images, y)
    data = images.to(device), model.space_.standardise(y).float().to(device)
    task = model.task()
    task.module.train()
    stepper = loop.make_stepper(
        task, step.make_optimizer(task, "adamw", 0.05), data, clip_norm=10.0, ema=0.998,
        capture=True,
    )  # fmt: skip
    return repeated(stepper, data[0], 128, 150 if device == "cuda" else 1)


def repeated(stepper: Any, x: Any, batch: int, n: int) -> float:
    order = torch.randperm(len(x), device=x.device)

    def work(count: int) -> None:
        for i in range(count):
            start = (i * batch) % (len(order) - batch)
            stepper.step(order[start : start + batch], 1e-4, i)

    work(min(8, n))
    return clock(lambda: work(n), x.device.type) / n


JOBS: dict[str, tuple[Callable[[str], float], tuple[str, ...], tuple[str, ...]]] = {
    "2-D table, 80 runs together": (
        table_of_80,
        ("side streams", "gradient of stacked MLPs", "gradient of SNL"),
        ("cuda",),
    ),
    "one run of the 2-D table": (
        one_toy,
        ("own Adam", "side streams", "gradient of an MLP", "gradient of SNL"),
        ("cuda", "cpu"),
    ),
    "EnergyDensity, 2 columns": (
        lambda device: density(2, device),
        ("own Adam", "side streams", "gradient of an MLP", "gradient of SNL"),
        ("cuda", "cpu"),
    ),
    "EnergyDensity, 8 columns": (
        lambda device: density(8, device),
        ("own Adam", "side streams"),
        ("cuda", "cpu"),
    ),
    "EnergyRegressor": (
        regressor,
        ("own Adam", "side streams", "gradient of SNL"),
        ("cuda", "cpu"),
    ),
    "step of a VAE with a chain prior": (
        vae_steps,
        ("own Adam", "side streams", "gradients of a latent chain"),
        ("cuda", "cpu"),
    ),
    "step of an image model": (
        image_steps,
        ("own Adam", "average beside the next step", "side streams", "gradient of SNL"),
        ("cuda", "cpu"),
    ),
}


def measure(name: str, device: str, rounds: int) -> list[dict[str, Any]]:
    job, kernels, _ = JOBS[name]
    variants: dict[str, tuple[str, ...]] = {"all kernels": ()}
    variants |= {f"without {kernel}": (kernel,) for kernel in kernels} | {"no kernel": kernels}
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    job(device)  # warm
    for _ in range(rounds):
        for variant, off in variants.items():
            with ExitStack() as stack:
                for kernel in off:
                    stack.enter_context(KERNELS[kernel]())
                times[variant].append(job(device))
    on = statistics.median(times["all kernels"])
    rows = []
    for variant, values in times.items():
        off_time = statistics.median(values)
        rows.append(
            {
                "job": name,
                "device": device,
                "variant": variant,
                "seconds": off_time,
                "saves": 1 - on / off_time,
                "all_seconds": values,
            }
        )
        print(f"{name:34s} {device:5s} {variant:40s} {off_time:9.5f} s  {1 - on / off_time:+.3f}",
              flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--jobs", nargs="*", default=None)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    rows: list[dict[str, Any]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for name, (_, _, devices) in JOBS.items():
        if given.device in devices and (not given.jobs or name in given.jobs):
            try:
                rows += measure(name, given.device, given.rounds)
            except Exception as error:
                print(name, "failed:", repr(error)[:400], flush=True)
        content = {
            "command": f"python benchmarks/kernels.py --device {given.device}"
            + (f" --threads {given.threads}" if given.threads else ""),
            "commit": os.environ.get("SELFNORM_COMMIT", ""),
            "versions": versions(),
            "hardware": hardware(given.device),
            "rows": rows,
        }
        path = given.out / f"kernels_{given.device}.json"
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
