"""Is ``sn.evidence`` fooled? Draws and densities that do not belong together, several seeds each.

    python benchmarks/evidence_sabotage.py --seeds 0 1 2 3 4

A case is caught if it is refused or called unreliable, or if its value is right after all. The last
case, a mode that no draw has seen, cannot be caught from draws and is listed apart.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import selfnorm as sn
from table_frames import Results, provenance

Array = np.ndarray
Case = tuple[Callable[[Array], Array], Array, float]
LOG_2PI = math.log(2 * math.pi)
CASES: dict[str, Callable[[np.random.Generator], Case]] = {}
UNSEEN = "mode_in_no_draw"


def case(make: Callable[[np.random.Generator], Case]) -> Callable[[np.random.Generator], Case]:
    CASES[make.__name__] = make
    return make


def gauss(x: Array) -> Array:
    return -0.5 * (x**2).sum(-1)


def cauchy(x: Array) -> Array:
    return -np.log1p(x**2).sum(-1)


def two_modes(x: Array) -> Array:
    parts = (math.log(0.6) + gauss(x - 2.0), math.log(0.4) + gauss(x + 2.0))
    return np.logaddexp(*parts)


def modal(n: int, rng: np.random.Generator, share: float) -> Array:
    return rng.normal(size=(n, 3)) + np.where(rng.random((n, 1)) < share, 2.0, -2.0)


@case
def mode_in_second_half(rng: np.random.Generator) -> Case:
    draws = np.concatenate([modal(2000, rng, 1.0), modal(2000, rng, 0.2)])
    return two_modes, draws, 1.5 * LOG_2PI


@case
def mode_in_one_chain(rng: np.random.Generator) -> Case:
    draws = np.stack([modal(1000, rng, share) for share in (1.0, 1.0, 1.0, 0.0)])
    return two_modes, draws, 1.5 * LOG_2PI


@case
def chains_in_different_proportions(rng: np.random.Generator) -> Case:
    draws = np.stack([modal(1000, rng, share) for share in (0.9, 0.8, 0.9, 0.95)])
    return two_modes, draws, 1.5 * LOG_2PI


@case
def unconverged_chains(rng: np.random.Generator) -> Case:
    x, kept = 3 * rng.normal(size=(4, 3)), []
    for _ in range(1000):
        proposed = x + 0.05 * rng.normal(size=x.shape)
        accepted = np.log(rng.random(4)) < gauss(proposed) - gauss(x)
        x = np.where(accepted[:, None], proposed, x)
        kept.append(x)
    return gauss, np.stack(kept, 1), 1.5 * LOG_2PI


@case
def heavy_tails(rng: np.random.Generator) -> Case:
    return cauchy, rng.standard_cauchy(size=(4000, 3)), 3 * math.log(math.pi)


@case
def tails_cut_off(rng: np.random.Generator) -> Case:
    draws = rng.standard_cauchy(size=(12_000, 3))
    return cauchy, draws[(np.abs(draws) < 5).all(1)][:4000], 3 * math.log(math.pi)


@case
def gaussian_draws_of_a_cauchy(rng: np.random.Generator) -> Case:
    return cauchy, rng.normal(size=(4000, 3)), 3 * math.log(math.pi)


@case
def draws_of_half_the_support(rng: np.random.Generator) -> Case:
    return gauss, np.abs(rng.normal(size=(4000, 2))), LOG_2PI


@case
def draws_in_a_box(rng: np.random.Generator) -> Case:
    draws = rng.normal(size=(20_000, 2))
    return gauss, draws[(np.abs(draws) < 1).all(1)][:4000], LOG_2PI


@case
def density_of_half_the_support(rng: np.random.Generator) -> Case:
    def half(x: Array) -> Array:
        return np.where(x[..., 0] > 0, gauss(x), -np.inf)

    return half, rng.normal(size=(4000, 2)), LOG_2PI - math.log(2)


@case
def too_narrow(rng: np.random.Generator) -> Case:
    return gauss, 0.8 * rng.normal(size=(4000, 3)), 1.5 * LOG_2PI


@case
def too_wide(rng: np.random.Generator) -> Case:
    return gauss, 1.2 * rng.normal(size=(4000, 3)), 1.5 * LOG_2PI


@case
def forgotten_jacobian(rng: np.random.Generator) -> Case:
    log_x = np.log(rng.gamma(3.0, size=(4000, 1)))
    return lambda y: 2 * y[:, 0] - np.exp(y[:, 0]), log_x, 0.0


@case
def columns_in_another_order(rng: np.random.Generator) -> Case:
    scale = np.array([1.0, 1.5, 0.7])
    draws = rng.normal(size=(4000, 3)) * scale[::-1]
    return lambda x: gauss(x / scale), draws, 1.5 * LOG_2PI + np.log(scale).sum()


@case
def mode_in_no_draw(rng: np.random.Generator) -> Case:
    return two_modes, modal(4000, rng, 1.0), 1.5 * LOG_2PI


def judged(log_density: Callable[[Array], Array], draws: Array, exact: float, seed: int) -> Any:
    try:
        found = sn.evidence(log_density, draws, seed=seed)
    except sn.SelfnormError as refused:
        return {"caught": True, "refused": str(refused)[:200]}
    error = found.log_z - exact
    return {
        "caught": not found.reliable or abs(error) < max(0.02, 3 * found.se),
        "flagged": not found.reliable,
        "error": error,
        "se": found.se,
        "reasons": list(found.reasons),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", nargs="*", choices=CASES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results/evidence"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.out / "sabotage.json", provenance())
    for name in args.cases or CASES:
        for seed in args.seeds:
            keys = {"case": name, "seed": seed}
            if not results.has(keys):
                results.add({**keys, **judged(*CASES[name](np.random.default_rng(seed)), seed)})
        rows = [row for row in results.rows if row["case"] == name]
        errors = [row["error"] for row in rows if "error" in row]
        shown = f"errors {min(errors):+.3f} to {max(errors):+.3f}" if errors else "refused"
        print(f"{name:34s} caught {sum(r['caught'] for r in rows)} of {len(rows)}, {shown}")
    rows = [row for row in results.rows if row["case"] != UNSEEN]
    print(f"caught {sum(row['caught'] for row in rows)} of {len(rows)}, without {UNSEEN}")


if __name__ == "__main__":
    main()
