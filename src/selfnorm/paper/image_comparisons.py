"""SNL against the other methods of the image table, image by image."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from selfnorm.paper.image_judging import Paired, paired
from selfnorm.paper.report import Table

__all__ = ["best_by_validation", "comparisons"]

_OTHERS = ("ranking_nce", "nce", "mdn", "gaussian", "l2")
_SAME = ("ranking_nce", "nce")  # objectives that can have SNL's very proposal
Key = tuple[str, str]
Scores = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def best_by_validation(table: Table, dataset: str, objective: str) -> str | None:
    """The proposal whose runs have the highest mean log-likelihood of the validation images.

    Runs that diverged count as missing, and a proposal with fewer runs than another is left out.
    """
    scores: dict[str, list[float]] = {}
    for row in table.rows:
        if (row["dataset"], row["objective"]) == (dataset, objective) and not row.get("diverged"):
            score = row.get("val_exact", row["val_score"])
            scores.setdefault(row["proposal"], []).append(score)
    most = max((len(v) for v in scores.values()), default=0)
    full = {name: float(np.mean(v)) for name, v in scores.items() if len(v) == most}
    return max(full, key=lambda name: full[name]) if full else None


def comparisons(table: Table) -> list[dict[str, Any]]:
    """SNL with its best proposal against the best of every other method, and proposal by proposal.

    ``choice`` is ``"best"`` where each side has its best proposal by validation, ``"same"`` where
    both have the same one. Differences are of test log-densities, paired over images and averaged
    over seeds; those named ``calibrated`` are between the laws with their temperatures. From the
    per-image scores in ``scores/``; the result is kept in ``comparisons.json``, which serves where
    the scores are gone.
    """
    kept = table.directory / "comparisons.json"
    if not (table.directory / "scores").exists():
        return json.loads(kept.read_text()) if kept.exists() else []
    found = []
    for (dataset,) in table.groups("dataset"):
        best = best_by_validation(table, dataset, "snl")
        if best is not None:
            rivals = {o: best_by_validation(table, dataset, o) for o in _OTHERS}
            pairs = [("best", best, o, p) for o, p in rivals.items() if p is not None]
            found += _compared(table, dataset, pairs)
        run = {(r["objective"], r["proposal"]) for r in table.rows if r["dataset"] == dataset}
        both = [("same", p, o, p) for s, p in sorted(run) if s == "snl" for o in _SAME]
        found += _compared(table, dataset, [c for c in both if c[2:] in run])
    kept.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _compared(
    table: Table, dataset: str, pairs: list[tuple[str, str, str, str]]
) -> list[dict[str, Any]]:
    found = []
    for choice, ours, objective, theirs in pairs:
        keys = ("snl", ours), (objective, theirs)
        plain = _difference(table, dataset, *keys, "log_prob")
        if plain is None:
            continue
        one = {
            "dataset": dataset,
            "choice": choice,
            "snl_proposal": ours,
            "objective": objective,
            "proposal": theirs,
            **plain._asdict(),
            "seeds": len(plain.by_seed),
        }
        tempered = _difference(table, dataset, *keys, "log_prob_calibrated")
        if tempered is not None:
            one |= {"difference_calibrated": tempered.difference, "se_calibrated": tempered.se}
        found.append({k: list(v) if isinstance(v, tuple) else v for k, v in one.items()})
    return found


def _difference(table: Table, dataset: str, ours: Key, theirs: Key, name: str) -> Paired | None:
    pairs = _scores(table, dataset, ours, theirs, name)
    return paired(*(list(column) for column in zip(*pairs, strict=True))) if pairs else None


def _scores(table: Table, dataset: str, ours: Key, theirs: Key, name: str) -> list[Scores]:
    """Both models' values of each test image, and the images' groups, for every seed with both."""
    sound = {
        (r["objective"], r["proposal"], r["n_samples"], r["seed"])
        for r in table.rows
        if r["dataset"] == dataset and not r.get("diverged")
    }
    pairs = []
    for n_samples, seed in sorted({key[2:] for key in sound}):
        loaded, groups = [], None
        for objective, proposal in (ours, theirs):
            file = f"{dataset}-{objective}-{proposal}-{n_samples}-{seed}.npz"
            path = table.directory / "scores" / file
            if (objective, proposal, n_samples, seed) in sound and path.exists():
                with np.load(path) as content:
                    if name in content:
                        loaded.append(content[name].astype(np.float64))
                        groups = content.get("groups", None)
        if len(loaded) == 2:
            pairs.append((loaded[0], loaded[1], groups))
    return pairs
