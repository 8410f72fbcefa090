"""The ablation over M for the CPU: steering from frames of 32x32 pixels, a narrow ResNet.

``python benchmarks/image_ablation.py --data-dir DIR --out results/images_ablation``. SNL and binary
NCE with the uniform proposal; 1 to 1,024 label samples per frame, one pass in batches of 32, the
same splits and starting weights for every M. Labels, noise and judging are those of
``selfnorm reproduce images_ablation``, which is the same with ResNet-18 and a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch

from selfnorm.data import images
from selfnorm.experiments.image_judging import judge
from selfnorm.experiments.images_ablation import _markdown
from selfnorm.experiments.report import Table
from selfnorm.image_regression import ImageRegressor
from selfnorm.plotting_images import plot_ablation
from selfnorm.resnet import ResNet18

SIZES = (1, 4, 16, 64, 256, 1024)
OBJECTIVES = ("snl", "nce")
EPOCHS, BATCH = 1, 32


def small(data: images.ImageData) -> images.ImageData:
    """Every second pixel."""
    halves = {
        name: (getattr(data, name)[0][:, :, ::2, ::2].copy(), getattr(data, name)[1])
        for name in ("train", "val", "test")
    }
    return dataclasses.replace(data, **halves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/images_ablation"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, nargs="+", default=SIZES)
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES)
    arguments = parser.parse_args()
    table = Table(
        "images_ablation",
        "small",
        arguments.out,
        command=f"python benchmarks/image_ablation.py --seeds {arguments.seeds}",
    )
    for seed in range(arguments.seeds):
        data = small(images.load("driving", seed=seed, data_dir=arguments.data_dir))
        for size in arguments.samples:
            for objective in arguments.objectives:
                keys = {"dataset": "driving", "objective": objective, "proposal": "uniform"}
                keys |= {"n_samples": size, "seed": seed}
                if table.has(**keys):
                    continue
                torch.manual_seed(seed)
                model = ImageRegressor(
                    objective,
                    "uniform",
                    n_samples=size,
                    backbone=ResNet18(3, width=8),
                    label_step=data.label_step,
                    label_range=data.label_range,
                    augmentation=data.augmentation,
                    batch_size=BATCH,
                    max_epochs=EPOCHS,
                    lr=2e-3,
                    validate_every=30,
                    dropout=0.3,
                    ema=0.98,
                    random_state=seed,
                )
                model.fit(*data.train, val=data.val)
                figures, _ = judge(model, data.test, n_samples=None, groups=data.test_groups)
                history = model.history_
                steps = {"n_steps": history.n_steps, "skipped_steps": history.skipped_steps}
                seconds = round(history.seconds, 1)
                table.add({**keys, **figures, **steps, "seconds": seconds})
                print(f"{objective}, M = {size}, seed {seed}: {figures['exact']:.4f}, {seconds} s")
    table.write_markdown(_markdown(table))
    plot_ablation(table.rows, arguments.out / "images_ablation.png")


if __name__ == "__main__":
    main()
