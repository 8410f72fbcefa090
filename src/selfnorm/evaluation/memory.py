"""How many rows fit into a budget of memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from selfnorm._context import alone
from selfnorm.distributions import Proposal, UnnormalisedModel
from selfnorm.errors import DataError

_SMALLEST, _LARGEST = 64, 2**20


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can still be allocated on a device (within the container's limit on CPU)."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    return free


def bytes_per_row(model: UnnormalisedModel, proposal: Proposal) -> int:
    """What one sample takes in a step: its numbers and all that is kept for the gradient.

    Measured by a forward pass on a few rows; without gradient less is needed.
    """
    counts = []
    for rows in (32, 96):
        seen: dict[int, int] = {}

        def keep(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        dtype = getattr(model, "dtype", None)
        x = torch.zeros(rows, proposal.dim, device=model.device, dtype=dtype).requires_grad_()
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
            alone(),
            torch.random.fork_rng(),
        ):
            out = model.log_unnormalized(x) - proposal.log_prob(x)
        counts.append(sum(seen.values()) + out.nbytes + x.nbytes)
    return max(1, (counts[1] - counts[0]) // 64)


def chunk_size_for(model: UnnormalisedModel, proposal: Proposal, max_memory: float) -> int:
    """Rows per pass within ``max_memory`` bytes, or that share of the free memory if below 1.

    Half of the budget is left to what a pass allocates and does not keep.
    """
    if not max_memory > 0:
        raise DataError(
            f"max_memory must be positive (bytes, or a share below 1), got {max_memory}"
        )
    budget = max_memory if max_memory >= 1 else max_memory * free_memory(model.device)
    rows = int(budget / 2 / bytes_per_row(model, proposal))
    if rows < 1:
        raise DataError(
            f"max_memory of {budget:.0f} bytes is too small for one row of this model; raise it"
        )
    return min(max(rows, _SMALLEST), _LARGEST)
