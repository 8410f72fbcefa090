"""A real table in miniature: small models trained for a few steps, one row each, kept at once."""

import os
import signal
from pathlib import Path

import torch

import selfnorm as sn
from selfnorm.errors import DataError
from selfnorm.paper.report import Table


def run(*, recipe, seeds, out, fail_at=None, kill_parent_at=None, **stops):
    """Rows of ``seeds`` models; for the tests, one of them fails, kills or interrupts the call."""
    table = Table("tiny", recipe, Path(out))
    table.expect(seeds)
    table.directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    x = torch.randn(200, 2) * torch.tensor([1.0, 3.0])
    for seed in range(seeds):
        if table.has(seed=seed):
            continue
        if (recipe, seed) == fail_at:
            raise DataError("a broken file")
        if (recipe, seed) == kill_parent_at:
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()  # whoever is left behind must be ended by itself
        for name, number in (("interrupt_at", signal.SIGINT), ("terminate_at", signal.SIGTERM)):
            if (recipe, seed) == stops.get(name):
                (table.directory / "pid.txt").write_text(str(os.getpid()))
                os.kill(os.getppid(), number)
                signal.pause()
        torch.manual_seed(seed)
        model = sn.EBM(sn.MLP(2, hidden=(8,)), base=sn.Gaussian.fit_to(x))
        sn.fit(model, x, n_samples=32, batch_size=50, max_steps=5, seed=seed, progress=False)
        with (table.directory / "trained.txt").open("a") as file:
            file.write(f"{seed}\n")
        table.add({"seed": seed, "score": float(model.log_prob(x).mean().detach())})
    table.write_markdown(f"# Tiny, recipe {recipe}\n\n{len(table.rows)} rows\n")
    return table
