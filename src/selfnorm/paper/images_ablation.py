"""The paper's ablation over ``M``, from 1 to 1,024 label samples: SNL and NCE on image regression.

The paper finds that SNL saturates near ``M = 64``. Same models and training as
:mod:`~selfnorm.paper.images`, with the proposal that suits SNL best by validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from selfnorm.paper.images import BEST_PROPOSALS, DATASETS, RECIPES, Config, present_sets, run_all
from selfnorm.paper.report import ResultTable, check_choices, markdown_table, mean_sd
from selfnorm.paper.runner import Settings
from selfnorm.plotting import plot_ablation

SIZES = (1, 4, 16, 64, 256, 1024)
OBJECTIVES = ("snl", "ranking_nce", "nce")


def run(
    *,
    recipe: str = "best",
    seeds: int = 3,
    datasets: Sequence[str] = DATASETS,
    objectives: Sequence[str] = OBJECTIVES,
    sizes: Sequence[int] = SIZES,
    max_epochs: int | None = None,
    backbone: str | nn.Module = "resnet18",
    n_test_samples: int = 2000,
    **settings: Any,
) -> ResultTable:
    """Run the ablation; write ``images_ablation.json``, ``.md`` and the figure into ``out``.

    The arguments are those of :func:`selfnorm.paper.images.run`.
    """
    common = Settings(recipe, **settings)
    check_choices("objective", objectives, OBJECTIVES)
    table = common.table("images_ablation", RECIPES)
    present, _ = present_sets(datasets, common)
    own = (common, max_epochs, backbone, n_test_samples)
    configs = [
        Config(name, objective, BEST_PROPOSALS.get(name, ("mdn-4",))[0], size, seed, *own)
        for seed in range(seeds)
        for size in sizes
        for objective in objectives
        for name in present
    ]
    run_all(table, configs, common)
    table.write_page(_markdown(table))
    plot_ablation(table.rows, table.directory / "images_ablation.png")
    return table


def _markdown(table: ResultTable) -> str:
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
        f"{markdown_table(header, body)}"
    )
