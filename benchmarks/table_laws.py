"""Finite tables whose rows can all be listed: conditionals of a fitted model against sums over it.

Three are drawn from laws written down here, others are the smallest finite columns of real tables.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from table_frames import Frame, n_rows

LAWS = ("net", "classes", "parity")
LAW_ROWS = 6000
MAX_COLUMNS, MAX_LEVELS = 6, 20


def law(name: str) -> np.ndarray:
    """Probabilities of all rows of a finite table, one axis a column."""
    rng = np.random.default_rng(7)
    if name == "net":  # each column given the two before it
        joint = rng.dirichlet(np.full(3, 0.7))
        for j in range(1, 5):
            before = 3 ** min(j, 2)
            table = rng.dirichlet(np.full(3, 0.7), size=before).reshape(*[3] * min(j, 2), 3)
            joint = joint[..., None] * table
    elif name == "classes":  # a mixture of independent columns
        joint = np.zeros((4,) * 6)
        for share in rng.dirichlet(np.ones(5)):
            part = np.array(share)
            for column in rng.dirichlet(np.full(4, 0.5), size=6):
                part = np.multiply.outer(part, column)
            joint += part
    else:  # six bits, nine tenths of them with an odd sum
        odd = np.indices((2,) * 6).sum(0) % 2
        joint = np.where(odd == 1, 0.9, 0.1) / 32
    return joint / joint.sum()


def drawn(name: str, seed: int) -> Frame:
    """Rows of a law."""
    joint = law(name)
    places = np.random.default_rng([seed, 8]).choice(joint.size, LAW_ROWS, p=joint.ravel())
    letters = np.array(list("abcd"), dtype=object)
    columns = np.unravel_index(places, joint.shape)
    return {f"c{j}": letters[column] for j, column in enumerate(columns)}


def smallest_columns(frame: Frame) -> Frame:
    """The columns with the fewest values, as categories, in the table's order."""
    sizes = {name: len(set(column.tolist())) for name, column in frame.items()}
    finite = [name for name in frame if 1 < sizes[name] <= MAX_LEVELS]
    chosen = sorted(finite, key=lambda name: sizes[name])[:MAX_COLUMNS]
    return {name: frame[name].astype(str).astype(object) for name in frame if name in chosen}


def conditional_error(density: Any, test: Frame, seed: int) -> dict[str, float]:
    """``log_prob(given=)`` of rows and random sets of columns against sums over all rows.

    ``network``: the same of the masked network's own answers, which longer rows get.
    """
    levels = {column.name: list(column.levels) for column in density.schema_.modelled}
    every = list(itertools.product(*levels.values()))
    listed = {
        name: np.array([row[j] for row in every], dtype=object) for j, name in enumerate(levels)
    }
    joint = np.exp(density.score_samples(listed)).reshape([len(v) for v in levels.values()])
    codes = density.schema_.encode(test)[0][..., 0].astype(int)
    known = (codes >= 0).all(1)
    test, codes = {name: test[name][known] for name in levels}, codes[known]
    reserved = np.log1p([-part.unseen for part in density.schema_.parts])
    names, d = list(levels), len(levels)
    sets = [s for k in range(1, d) for s in itertools.combinations(range(d), k)]
    which = np.random.default_rng([seed, 9]).integers(len(sets), size=n_rows(test))
    apart, network = np.zeros(n_rows(test)), np.zeros(n_rows(test))
    for i, given in enumerate(sets):
        rows = np.flatnonzero(which == i)
        if len(rows) == 0:
            continue
        asked = tuple(j for j in range(d) if j not in given)
        part = {name: column[rows] for name, column in test.items()}
        of_given = joint.sum(axis=asked)[tuple(codes[rows][:, given].T)]
        brute = np.log(joint[tuple(codes[rows].T)] / of_given) + reserved[list(asked)].sum()
        answer = density.log_prob(part, given=[names[j] for j in given])
        mask = np.isin(np.arange(d), given)
        own = density.model_.log_prob(density.standardise(part), mask).numpy()
        apart[rows], network[rows] = np.abs(answer - brute), np.abs(own - brute)
    return {
        "mean_difference": float(apart.mean()),
        "network": float(network.mean()),
        "orders": density.consistency_["orders"],
        "total": float(joint.sum() / np.exp(reserved.sum())),
        "n_cells": int(joint.size),
        "n_rows": n_rows(test),
    }
