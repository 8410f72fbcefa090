"""One rank of the tests in test_distributed.py: `python distributed_worker.py JOB.json`."""

import json
import os
import signal
import sys
from dataclasses import fields

import torch
import torch.distributed as dist
from lightning_fabric import Fabric

import selfnorm as sn
from selfnorm.density import Ranks
from selfnorm.density.distributed import DistributedTask


def setting():
    torch.manual_seed(4)
    x = torch.randn(512, 2)
    x = torch.stack([x[:, 0].exp() - 1.5, 0.5 * x[:, 1] + 0.4 * x[:, 0] ** 2], -1)
    base = sn.StudentT.fit_to(x)
    return x, sn.EBM(sn.MLP(2, (24, 24), saturate=10.0), base=base)


def count_down(steps):
    """Interrupt the run at a step, as Ctrl-C does."""
    plain = getattr(DistributedTask.loss, "plain", DistributedTask.loss)

    def loss(self, batch):
        loss.left -= 1
        if loss.left == 0:
            raise KeyboardInterrupt
        return plain(self, batch)

    loss.left, loss.plain = steps or 10**9, plain
    DistributedTask.loss = loss


def strike(rank, own_rank, number=signal.SIGINT):
    """A real signal on one rank, inside its 20th step; the other hears of it from the group."""
    plain = getattr(DistributedTask._local_loss, "plain", DistributedTask._local_loss)

    def local_loss(self, batch):
        local_loss.left -= 1
        if local_loss.left == 0 and rank == own_rank:
            os.kill(os.getpid(), number)
        return plain(self, batch)

    local_loss.left, local_loss.plain = 20, plain
    DistributedTask._local_loss = local_loss


def rows_of_a_table():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 3, generator=generator)
    return {"a": x[:, 0].numpy(), "b": (x[:, 1] + x[:, 0] > 0).numpy(), "c": x[:, 2].numpy()}


def fit_table(ranks, **options):
    """A chain of a table, and the loss of every step."""
    plain, losses = DistributedTask.loss, []

    def loss(self, batch):
        value, metrics = plain(self, batch)
        losses.append(float(value.detach()))
        return value, metrics

    DistributedTask.loss = loss
    try:
        density = sn.EnergyDensity(hidden=8, batch_size=64, random_state=0, **options)
        density.fit(rows_of_a_table(), fabric=ranks)
    finally:
        DistributedTask.loss = plain
    scores = torch.from_numpy(density.score_samples(rows_of_a_table()))
    return {"losses": losses, "scores": scores, "stopped": density.history_.stopped}


def main():
    torch.set_num_threads(1)
    with open(sys.argv[1]) as handle:
        job = json.load(handle)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = "ddp" if world > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    for run in job["runs"]:
        if "table" in run:
            fitted = fit_table(Ranks(fabric, 1, "per_piece"), **run["table"])
            name = f"{run['name']}.{fabric.global_rank}.pt"
            torch.save(fitted, os.path.join(job["out"], name))
            continue
        x, model = setting()
        if fabric.global_rank:  # rank 0's start must win
            with torch.no_grad():
                for p in model.energy.parameters():
                    p.add_(0.1)
        count_down(run.get("die_at"))
        strike(run.get("interrupted_rank"), fabric.global_rank)
        if "killed_rank" in run:
            strike(run["killed_rank"], fabric.global_rank, signal.SIGKILL)
        direct, names = run["options"], {each.name for each in fields(sn.TrainingOptions)}
        how = {name: direct.pop(name) for name in [*direct] if name in names}
        if "checkpoint" in how:
            how["checkpoint"] = sn.Checkpoint(**how["checkpoint"])
        options = sn.TrainingOptions(progress=False, **how)
        history = sn.fit_distributed(model, x, fabric=fabric, options=options, **direct)
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        name = f"{run['name']}.{fabric.global_rank}.pt"
        torch.save(
            {"parameters": parameters, "history": history.to_dict()}, os.path.join(job["out"], name)
        )
    if dist.is_initialized():
        fabric.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of the backend that are still alive may abort an ordinary exit


if __name__ == "__main__":
    main()
