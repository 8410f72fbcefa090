"""Without a GPU: ``EnergyDensity()`` as it comes, against zuko's NSF for the same CPU time.

    python benchmarks/density_cpu.py --data DIR --out results/density --threads 2

The flow (5 transforms, 2 x 256, 8 bins) gets as many CPU seconds as the estimator took, on the same
threads (on an idle machine: the same wall-clock; other work on the machine does not favour either),
a one-cycle schedule that ends with them, and its best state on validation rows.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

import tabular
from measuring import write
from selfnorm import EnergyDensity
from selfnorm.distributions import Flow
from selfnorm.training import TrainingOptions, run


def flow_in(seconds: float, table: Any, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """NSF trained for about ``seconds`` of CPU time; test log-densities and the record."""
    torch.distributions.Distribution.set_default_validate_args(False)
    options: dict[str, Any] = {
        "batch_size": 512,
        "max_epochs": 10**6,
        "lr": 1e-3,
        "weight_decay": 1e-2,
        "clip_norm": 5.0,
        "ema": 0.99,
        "progress": False,
        "seed": seed,
    }
    torch.manual_seed(seed)
    data, val = (table.train_values,), (table.val,)

    def train(steps: int) -> tuple[Flow, Any, float]:
        torch.manual_seed(seed)
        flow = Flow(table.dim)
        began = time.process_time()
        history = run(
            flow.training_task(columns=table.columns),
            data,
            val_data=val,
            options=TrainingOptions(
                max_steps=steps, validate_every=max(20, steps // 25), **options
            ),
        )
        return flow.eval(), history, time.process_time() - began

    *_, trial = train(40)
    steps = max(40, int(seconds / (trial / 40)))
    flow, history, taken = train(steps)
    with torch.no_grad():
        log_prob = torch.cat([flow.log_prob(part) for part in table.test.split(4096)])
    return log_prob, {
        "seconds": history.seconds,
        "cpu_seconds": taken,
        "n_steps": history.n_steps,
        "best_step": history.best_step,
        "val": history.best_score,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("results/density"))
    parser.add_argument("--sets", nargs="+", default=["california", "magic.gamma"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name in args.sets:
        table = tabular.load(name, args.data)
        known = torch.cat([table.train_values, table.val_values]).numpy()
        load = os.getloadavg()[0]
        cpu, began = time.process_time(), time.perf_counter()
        model = EnergyDensity(random_state=args.seed).fit(known)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        loaded = os.getloadavg()[0]
        ours = torch.as_tensor(model.score_samples(table.test.numpy())).double()
        flow, record = flow_in(cpu, table, args.seed)
        difference = ours - flow.double()
        row = {
            "dataset": name,
            "seed": args.seed,
            "threads": args.threads,
            "load_before": load,  # of the machine, last minute: other work slows the clock
            "load_after": loaded,
            "test": float(ours.mean()),
            "seconds": seconds,
            "cpu_seconds": cpu,
            "nsf_test": float(flow.double().mean()),
            "difference": float(difference.mean()),
            "difference_se": float(difference.std() / len(difference) ** 0.5),
            **{f"nsf_{k}": v for k, v in record.items()},
            "n_steps": model.n_iter_,
        }
        rows.append(row)
        print(row, flush=True)
        write(args.out / "density_cpu.json", rows)


if __name__ == "__main__":
    main()
