"""Is ``sn.evidence`` fooled? Draws and densities that do not belong together, several seeds each.

    python benchmarks/evidence_sabotage.py --seeds 0 1 2 3 4

A case is flagged if it is refused or called unreliable, whether or not its value is right after
all. Listed apart are heavy tails, whose draws are right, and a mode that no draw has seen, which
cannot be told from draws.
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
from measuring import Results, in_processes, provenance

Array = np.ndarray
Case = tuple[Callable[[Array], Array], Array, float]
LOG_2PI = math.log(2 * math.pi)
CASES: dict[str, Callable[[np.random.Generator], Case]] = {}
APART = ("heavy_tails", "mode_in_no_draw")


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


# Cases made after the checks, to see whether they hold beyond what they were made for.


@case
def burn_in_kept(rng: np.random.Generator) -> Case:
    far = 6 + np.linspace(6, 0, 400)[:, None] + rng.normal(size=(400, 3))
    return gauss, np.concatenate([far, rng.normal(size=(3600, 3))]), 1.5 * LOG_2PI


@case
def tempered(rng: np.random.Generator) -> Case:
    return two_modes, modal(4000, rng, 0.6) / math.sqrt(0.8), 1.5 * LOG_2PI


@case
def all_chains_in_wrong_proportions(rng: np.random.Generator) -> Case:
    return two_modes, modal(4000, rng, 0.8).reshape(4, 1000, 3), 1.5 * LOG_2PI


@case
def columns_shuffled_apart(rng: np.random.Generator) -> Case:
    root = np.linalg.cholesky(np.full((4, 4), 0.5) + 0.5 * np.eye(4))
    draws = rng.normal(size=(4000, 4)) @ root.T
    draws[:, 0] = rng.permutation(draws[:, 0])
    back = np.linalg.inv(root)
    return lambda x: gauss(x @ back.T), draws, 2 * LOG_2PI + np.log(np.diag(root)).sum()


@case
def student_draws_of_a_gaussian(rng: np.random.Generator) -> Case:
    return gauss, rng.standard_t(5, size=(4000, 4)), 2 * LOG_2PI


@case
def unadjusted_langevin(rng: np.random.Generator) -> Case:
    x, kept = rng.normal(size=(4, 5)), []
    for step in range(5000):
        x = x - 0.4 * x + math.sqrt(0.8) * rng.normal(size=x.shape)  # spread 1.12
        if step % 5 == 0:
            kept.append(x)
    return gauss, np.stack(kept, 1), 2.5 * LOG_2PI


@case
def one_column_cut_at_zero(rng: np.random.Generator) -> Case:
    draws = rng.normal(size=(4000, 6))
    draws[:, 2] = np.abs(draws[:, 2])
    return gauss, draws, 3 * LOG_2PI


@case
def neck_of_a_funnel_missed(rng: np.random.Generator) -> Case:
    def funnel(x: Array) -> Array:
        v = x[..., 0]
        return -0.5 * (v / 1.5) ** 2 - 0.5 * (x[..., 1:] ** 2).sum(-1) * np.exp(-v) - 1.5 * v

    v = 1.5 * rng.normal(size=(9000, 1))
    v = v[v[:, 0] > -1][:4000]
    draws = np.hstack([v, rng.normal(size=(len(v), 3)) * np.exp(v / 2)])
    return funnel, draws, math.log(1.5) + 2 * LOG_2PI


@case
def square_instead_of_root(rng: np.random.Generator) -> Case:
    variance = 1 / rng.gamma(4.0, size=(4000, 1))
    return lambda x: -5 * np.log(x[..., 0]) - 1 / x[..., 0], np.sqrt(variance), math.log(6)


# No sabotage: the draws are right, and the value must be, or be doubted.


@case
def heavy_tails(rng: np.random.Generator) -> Case:
    return cauchy, rng.standard_cauchy(size=(4000, 3)), 3 * math.log(math.pi)


@case
def mode_in_no_draw(rng: np.random.Generator) -> Case:
    return two_modes, modal(4000, rng, 1.0), 1.5 * LOG_2PI


def judged(name: str, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    log_density, draws, exact = CASES[name](np.random.default_rng(seed))
    row: dict[str, Any] = {"case": name, "seed": seed}
    try:
        estimate = sn.evidence(log_density, draws, seed=seed)
    except sn.SelfnormError as refused:
        return {**row, "flagged": True, "refused": str(refused)[:200]}
    figures = {"log_z": estimate.log_z, "error": estimate.log_z - exact, "se": estimate.se}
    return {**row, "flagged": not estimate.reliable, **figures, "reasons": list(estimate.reasons)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", nargs="*", choices=CASES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="rows at once, a process each")
    parser.add_argument("--out", type=Path, default=Path("results/evidence"))
    args = parser.parse_args()
    results = Results(args.out / "sabotage.json", provenance())
    names = args.cases or CASES
    wanted = [{"case": name, "seed": seed} for seed in args.seeds for name in names]
    calls = [(keys["case"], keys["seed"]) for keys in wanted if not results.has(keys)]
    for row in in_processes(judged, calls, args.jobs):
        results.add(row)
    for name in names:
        rows = [row for row in results.rows if row["case"] == name]
        errors = [row["error"] for row in rows if "error" in row]
        shown = f"errors {min(errors):+.3f} to {max(errors):+.3f}" if errors else "refused"
        flagged = sum(row["flagged"] for row in rows)
        print(f"{name:34s} flagged {flagged} of {len(rows)}, {shown}")
    rows = [row for row in results.rows if row["case"] not in APART]
    flagged = sum(row["flagged"] for row in rows)
    print(f"flagged {flagged} of {len(rows)}, without {' and '.join(APART)}")


if __name__ == "__main__":
    main()
