"""The paper's ablation over ``M``, from 1 to 1,024 label samples: SNL and NCE on image regression.

The paper finds that SNL saturates near ``M = 64``. Same models and training as
:mod:`~selfnorm.experiments.images`, with the proposal that suits SNL best by validation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfnorm.data import images
from selfnorm.errors import MissingDataError, SelfnormError
from selfnorm.experiments.images import (
    BEST_PROPOSAL,
    DATASETS,
    RECIPES,
    Config,
    fit_and_judge,
    missing_files,
)
from selfnorm.experiments.report import Table, markdown_table, mean_sd

__all__ = ["OBJECTIVES", "SIZES", "run"]

SIZES = (1, 4, 16, 64, 256, 1024)
OBJECTIVES = ("snl", "ranking_nce", "nce")


def run(
    *,
    recipe: str = "best",
    seeds: int = 3,
    out: str | Path = "out",
    device: str = "cpu",
    progress: bool = True,
    data_dir: str | Path | None = None,
    datasets: Sequence[str] = DATASETS,
    objectives: Sequence[str] = OBJECTIVES,
    sizes: Sequence[int] = SIZES,
    proposal: str | None = None,
    max_epochs: int | None = None,
    n_test_samples: int = 2000,
    backbone: Any = "resnet18",
    deadline: float | None = None,
    **_unused: Any,
) -> Table:
    """Run the ablation; write ``images_ablation.json``, ``.md`` and the figure into ``out``.

    The arguments are those of :func:`selfnorm.experiments.images.run`.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; choose one of {RECIPES}")
    table = Table("images_ablation", recipe, Path(out), device=device)
    missing = missing_files(datasets, data_dir)
    present = [name for name in datasets if name not in missing]
    if not present:
        raise MissingDataError(" ".join(missing.values()))
    where = None if data_dir is None else str(data_dir)
    began = time.perf_counter()
    for seed in range(seeds):
        loaded = {name: images.load(name, seed=seed, data_dir=data_dir) for name in present}
        for size in sizes:
            for objective in objectives:
                for name in present:
                    config = Config(
                        name,
                        objective,
                        proposal or BEST_PROPOSAL.get(name, "mdn-4"),
                        size,
                        seed,
                        recipe,
                        device,
                        where,
                        max_epochs,
                        backbone,
                        n_test_samples,
                    )
                    late = deadline is not None and time.perf_counter() - began > deadline
                    if late or table.has(**config.keys()):
                        continue
                    row, _, _ = fit_and_judge(config, loaded[name])
                    table.add(row)
                    if progress:
                        value = row.get("exact", row["upper"])
                        print(f"{name}, {objective}, M = {size}, seed {seed}: {value:.3f}")
    table.write_markdown(_markdown(table))
    try:
        from selfnorm.plotting_images import plot_ablation

        plot_ablation(table.rows, table.directory / "images_ablation.png")
    except SelfnormError as error:
        print(error)
    return table


def _markdown(table: Table) -> str:
    body = [
        [
            dataset,
            objective,
            proposal,
            str(size),
            mean_sd(rows, "exact"),
            mean_sd(rows, "gap", 4),
            str(len(rows)),
        ]
        for (dataset, objective, proposal, size), rows in sorted(
            table.groups("dataset", "objective", "proposal", "n_samples").items()
        )
    ]
    header = ["data set", "objective", "proposal", "M", "exact", "l_IS - l_SNL", "runs"]
    return (
        f"# Ablation over M, recipe `{table.recipe}`\n\nTest log-likelihood in nats by quadrature, "
        f"mean ± sd over seeds. All objectives use the proposal that suits SNL best; ranking NCE "
        f"trains on independent draws, the others on stratified ones.\n\n"
        f"{markdown_table(header, body)}\n\n`{table.command}`, {table.seconds:.0f} s\n"
    )
