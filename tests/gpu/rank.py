"""One rank of the test in test_device.py: ``python rank.py FOLDER OPTIONS``."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy

from tests.fitting import fit_distributed
from tests.gpu.test_device import ebm_of
from tests.gpu.test_steps import rows
from tests.gpu.tools import DEVICE, flat


def main() -> None:
    # As two machines of one device each, which may be the same device: that needs gloo.
    rank, options = int(os.environ["RANK"]), json.loads(sys.argv[2])
    place: dict[str, object] = {"accelerator": "cpu", "devices": 1}
    if DEVICE.type == "cuda":
        two = torch.cuda.device_count() > 1
        place = {"accelerator": "cuda", "devices": [rank if two else 0]}
        torch.cuda.set_device(place["devices"][0])
    strategy = DDPStrategy(process_group_backend="gloo")
    fabric = Fabric(**place, num_nodes=2, strategy=strategy)
    fabric.launch()
    model = ebm_of(0)
    fit_distributed(model, rows(), fabric=fabric, samples="same", **options)
    torch.save(flat(model), Path(sys.argv[1]) / f"{rank}.pt")
    fabric.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of the backend that are still alive may abort an ordinary exit


if __name__ == "__main__":
    main()
