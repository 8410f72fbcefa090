"""The paper's image regression table: ranking NCE, binary NCE and SNL, four proposals, six sets.

Recipe ``paper`` keeps the paper's networks and training: ResNet-18 features, the label through
16-32-64-128, one joint hidden layer of 640, ``b`` and the mixture density network with one hidden
layer of 512, ``M = 64``, Adam 1e-3, batches of 32, 75 epochs, the best validation state; features
learn from the energy's objective alone. What differs: no pretrained weights, standardised labels
(densities are given in the labels' own units), and uniform noise of one step on integer labels,
because a continuous likelihood is unbounded there. Recipe ``literal`` leaves the labels as they
are. Recipe ``best`` is :class:`~selfnorm.ImageRegressor` as it comes; all its rows share the
features, the augmentation and the number of steps, and every objective has the same proposals.

The paper's "NCE" is *ranking* NCE (``ranking_nce``): it gives ``b`` no gradient, so ``l_SNL`` of
those rows is loose by construction. ``nce`` is the binary form, which learns ``b``. Rows ``mdn``,
``gaussian`` and ``l2`` have no energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from selfnorm.datasets import images
from selfnorm.images import PROPOSALS
from selfnorm.paper.image_jobs import Method, run_all
from selfnorm.paper.image_report import markdown
from selfnorm.paper.image_runs import RECIPES, Config, present_sets
from selfnorm.paper.report import Table, check_choices

__all__ = ["BEST_PROPOSALS", "DATASETS", "methods_for", "run"]

DATASETS = images.DATASETS
N_SAMPLES = 64
# SNL's two best proposals by validation images, the better one first: of all four on split 0, for
# the cells once more on three splits.
BEST_PROPOSALS: dict[str, tuple[str, ...]] = {
    "utkface": ("uniform", "mdn-8"),
    "cells": ("uniform", "gaussian"),
    "driving": ("uniform", "mdn-8"),
}
_ENERGIES = ("snl", "ranking_nce", "nce")
_OBJECTIVES = (*_ENERGIES, "mdn", "gaussian", "l2")


def methods_for(dataset: str, recipe: str, proposals: Sequence[str] | None = None) -> list[Method]:
    """Objectives with their proposals, the most telling first.

    SNL and both forms of NCE have the same ones: those asked for, by default all, in recipe
    ``best`` the two that suit SNL best. A mixture alone has four components, and eight where an
    energy's proposal has.

    >>> methods_for("cells", "best")[:4]
    [('snl', 'uniform'), ('ranking_nce', 'uniform'), ('nce', 'uniform'), ('mdn', 'mdn-4')]
    """
    usual = BEST_PROPOSALS.get(dataset, PROPOSALS) if recipe == "best" else PROPOSALS
    chosen = tuple(proposals or usual)
    energies = [(objective, p) for p in chosen for objective in _ENERGIES]
    mixtures = dict.fromkeys(["mdn-4", *(p for p in chosen if p.startswith("mdn-"))])
    alone = [*(("mdn", p) for p in mixtures), ("gaussian", "none"), ("l2", "none")]
    return [*energies[:3], *alone, *energies[3:]]


def run(
    *,
    recipe: str = "best",
    seeds: int = 3,
    out: str | Path = "out",
    device: str = "cpu",
    progress: bool = True,
    data_dir: str | Path | None = None,
    datasets: Sequence[str] = DATASETS,
    methods: Sequence[Method] | None = None,
    objectives: Sequence[str] | None = None,
    proposals: Sequence[str] | None = None,
    n_samples: int = N_SAMPLES,
    figures: bool = True,
    deadline: float | None = None,
    jobs: int = 1,
    **fields: Any,
) -> Table:
    """Run the table; write ``images.json``, ``images.md`` and figures into ``out``.

    Args:
        recipe: ``"paper"``, ``"literal"`` or ``"best"``.
        seeds: repetitions; each has a split of its own, shared by all methods.
        out: directory of the result files; finished rows found there are kept.
        device: torch device.
        progress: print every run.
        data_dir: data directory.
        datasets: which sets; those without files are named with their source, and left out.
        methods: pairs of objective and proposal; by default those of :func:`methods_for`.
        objectives, proposals: only the methods with these.
        n_samples: ``M``.
        figures: draw images with their densities, and reliability diagrams.
        deadline: begin no run later than so many seconds after the call.
        jobs: rows to run side by side, in processes of one thread: on a GPU one row alone leaves
            some of it idle.
        fields: further ones of :class:`~selfnorm.paper.image_runs.Config`: ``max_epochs``,
            ``backbone``, ``n_test_samples``, ``options`` of the model.
    """
    check_choices("recipe", [recipe], RECIPES)
    check_choices("objective", objectives or (), _OBJECTIVES)
    check_choices("proposal", proposals or (), PROPOSALS)
    table = Table("images", recipe, Path(out), device=device)
    present, missing = present_sets(datasets, data_dir)
    lists = [
        [
            (name, objective, proposal)
            for objective, proposal in (methods or methods_for(name, recipe, proposals))
            if objective in (objectives or [objective])
        ]
        for name in present
    ]
    # Set by set within a method: whoever stops early has the most complete table.
    rounds = [job for job in chain.from_iterable(zip_longest(*lists)) if job is not None]
    configs = [
        Config(name, objective, proposal, n_samples, seed, recipe, device, **fields)
        for seed in range(seeds)
        for name, objective, proposal in rounds
    ]
    table.expect(len(configs))
    first = {name: own[0][1:] for name, own in zip(present, lists, strict=True) if own}
    run_all(
        table, configs, data_dir=data_dir, deadline=deadline, progress=progress,
        drawn=first if figures else None, jobs=jobs,
    )  # fmt: skip
    table.write_markdown(markdown(table, missing))
    return table
