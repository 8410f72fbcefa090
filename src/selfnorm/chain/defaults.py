"""Default sizes and training options of chains, as tables: when, what, why, and the figures behind.

The rows of a table are read from the first to the last; those that hold set their values in place
of those before. A value may be a function of the table of data and of what is set so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from selfnorm.columns import Part

FEWEST_IN_FOLDS, FOLDED_BELOW = 15, 2500  # rows of tables that are judged by folds
N_FOLDS = 3
MASKED = 0.4, 0.9  # share of the rows trained with columns given: without gaps, with gaps in all
# rows x columns x orders of all steps on a small table (of fewer than 500 rows, of more), in units
# of its cells, which count as so many at least
PLACES, FEWEST_CELLS = (42, 27), 24_000


@dataclass(frozen=True)
class Defaults:
    """Recommended sizes: ``model`` for the constructor, ``task`` and ``fit`` for training.

    ``orders_per_fold`` orders are trained without the same fold of a small table; 0: no folds.
    """

    model: dict[str, Any]
    task: dict[str, Any]
    fit: dict[str, Any]
    orders_per_fold: int = 0


@dataclass(frozen=True)
class DataShape:
    """What defaults depend on.

    Attributes:
        n, p: rows, and columns (parts that are not certain).
        on_gpu: where it is trained.
        gaps: share of the rows that have some.
        numbers: share of the parts that hold numbers.
        most_codes: of any part.
        of_numbers: whether all parts hold numbers, and no row has gaps.
        plain: whether hardly any of these repeats, either.
    """

    n: int
    p: int
    on_gpu: bool
    gaps: float = 0.0
    numbers: float = 1.0
    most_codes: int = 0
    of_numbers: bool = True
    plain: bool = True

    @classmethod
    def of(cls, n: int, parts: Sequence[Part], on_gpu: bool, gaps: float) -> DataShape:
        """That of ``n`` rows of these parts, but for those in which nothing is to be learned."""
        parts = [part for part in parts if not part.certain] or list(parts)
        of_numbers = gaps == 0 and all(part.rest or len(part.values) > 2 for part in parts)
        return cls(
            n,
            len(parts),
            on_gpu,
            gaps,
            numbers=sum(part.rest for part in parts) / len(parts),
            most_codes=max(part.n_codes for part in parts),
            of_numbers=of_numbers,
            plain=of_numbers and all(part.rest and part.n_codes <= 2 for part in parts),
        )

    @property
    def small(self) -> bool:
        """Whether a chain over numbers alone overfits at once."""
        return self.n < 2000

    @property
    def few(self) -> bool:
        """Whether levels of few rows are learned by heart."""
        return self.n < 30_000

    @property
    def wide(self) -> bool:
        """Whether there are many columns."""
        return self.p > 20

    @property
    def folded(self) -> bool:
        """Whether the table is judged by folds."""
        return FEWEST_IN_FOLDS <= self.n < FOLDED_BELOW

    @property
    def large(self) -> bool:
        """Whether there are many rows, mostly of numbers."""
        return not self.few and self.numbers > 0.5

    @property
    def passes(self) -> float:
        """Passes over the rows before they are overfitted: some 20 for categories, 170 for numbers.

        With gaps more columns are given at random, which takes longer to learn.
        """
        return (20 + 150 * self.numbers**2) * (1 + 2 * self.gaps)


class Rule(NamedTuple):
    """A row of a table of defaults: ``figures`` names the result files that chose its values."""

    when: Callable[[DataShape], bool]
    values: dict[str, Any]
    why: str
    figures: str = ""


_MODEL = (
    "encoding", "blocks", "orderings", "hidden", "components", "context", "energy_hidden",
    "energy_blocks", "drop", "drop_context", "masked", "ordered", "embedding",
)  # fmt: skip
_TASK = ("n_samples", "validation_samples", "polish_steps")
_FIT = (
    "batch_size", "max_epochs", "max_steps", "lr", "weight_decay", "clip_norm", "ema",
    "validate_every", "patience",
)  # fmt: skip


def _defaults(rules: Sequence[Rule], shape: DataShape) -> Defaults:
    settings = SimpleNamespace(**asdict(shape), passes=shape.passes, wide=shape.wide)
    for rule in rules:
        if rule.when(shape):
            for name, value in rule.values.items():
                setattr(settings, name, value(settings) if callable(value) else value)
    settings.max_steps = int(settings.max_steps)

    def chosen(names: Sequence[str]) -> dict[str, Any]:
        return {name: of_run[name] for name in names if name in of_run}

    of_run = vars(settings)
    return Defaults(chosen(_MODEL), chosen(_TASK), chosen(_FIT), of_run.get("orders_per_fold", 0))


def _always(shape: DataShape) -> bool:  # noqa: ARG001
    return True


def _looks(per_run: int) -> Callable[[Any], int]:
    return lambda t: max(20, int(t.max_steps) // per_run)


_NUMBERS = (
    Rule(
        lambda t: not t.on_gpu,
        {
            "encoding": "quantiles", "blocks": 2, "orderings": 4, "hidden": 256, "components": 8,
            "context": 32, "energy_hidden": 32, "energy_blocks": 1, "drop": 0.1,
            "drop_context": False, "batch_size": 128, "n_samples": 4, "lr": 2e-3, "ema": 0.995,
            "max_steps": lambda t: int(min(4000, max(8 * t.n**0.6, 1.2 * t.n**0.81))),
        },
        "four chains of moderate width train in minutes; twice as many steps of half the batch "
        "take as long and reach a little further; from some 8,000 rows on a longer run pays, too",
        "results/density/table_options.json",
    ),
    Rule(lambda t: not t.on_gpu and t.wide, {"orderings": 2}, "wide chains take longer"),
    Rule(lambda t: not t.on_gpu and t.p > 40, {"orderings": 1}, "wide chains take longer"),
    Rule(
        lambda t: not t.on_gpu and t.small,
        {
            "orderings": 1, "hidden": 64, "components": 5, "context": 16, "drop_context": True,
            "batch_size": lambda t: min(256, max(16, t.n // 8)), "n_samples": 8, "lr": 3e-3,
            "max_steps": lambda t: int(max(60, 4 * t.n**0.6)),
        },
        "small tables are overfitted by wide networks and long runs",
        "results/density/table_options.json",
    ),
    Rule(
        lambda t: t.on_gpu,
        {
            "encoding": "quantiles", "blocks": 2, "orderings": 8, "hidden": 512, "components": 10,
            "context": 64, "energy_hidden": 64, "energy_blocks": 2, "drop": 0.2,
            "drop_context": False, "batch_size": 512, "n_samples": 16, "lr": 1e-3,
            "max_steps": 2000,
        },
        "a GPU has room for wider networks and more orders to average",
        "results/density/table_options.json",
    ),
    Rule(
        lambda t: t.on_gpu and t.wide,
        {"orderings": 4, "hidden": 1024, "drop": 0.3, "n_samples": 12, "max_steps": 2500},
        "wide tables need wide networks, which overfit",
    ),
    Rule(lambda t: t.on_gpu and not t.few, {"orderings": 4}, "many rows are not overfitted"),
    Rule(
        lambda t: t.on_gpu and not t.few and not t.wide,
        {"blocks": 3, "components": 20, "drop": 0.1, "max_steps": 5000},
        "many rows carry a larger network and a longer run",
    ),
    Rule(
        _always,
        {
            "max_epochs": 10**6, "weight_decay": 1e-2, "clip_norm": 5.0, "validation_samples": 16,
            "polish_steps": lambda t: min(60, t.max_steps // 8), "validate_every": _looks(8),
        },
        "b is polished at the end: scores use it",
    ),
    Rule(lambda t: t.small, {"validate_every": _looks(12)}, "short runs"),
    Rule(
        lambda t: t.on_gpu,
        {
            "validate_every": _looks(25), "ema": 0.998,
            "polish_steps": lambda t: min(200, t.max_steps // 8),
        },
        "validations are quick on a GPU",
    ),
    Rule(lambda t: t.on_gpu and t.wide, {"polish_steps": 600}, "the gap is a sum over the columns"),
)  # fmt: skip
_AVERAGE = (
    Rule(_always, {"ema": lambda t: 0.998 if t.max_steps > 2000 else t.ema}, "long runs"),
    Rule(_always, {"ema": lambda t: 0.99 if t.max_steps <= 1000 else t.ema}, "short runs"),
)


def default_options(n: int, d: int, device: str | torch.device = "cpu") -> Defaults:
    """Sizes and training options for ``n`` rows of ``d`` columns of numbers.

    Example:
        >>> default_options(20_000, 8).model["orderings"]
        4
    """
    on_gpu = torch.device(device).type == "cuda"
    return _defaults((*_NUMBERS, *_AVERAGE), DataShape(n, d, on_gpu))


_MASKS = (
    Rule(
        _always,
        {"masked": lambda t: MASKED[0] + t.gaps * (MASKED[1] - MASKED[0]), "ordered": True},
        "the more rows have gaps, the more are trained with random columns given",
        "results/tables/imputation.json",
    ),
    Rule(
        lambda t: not t.on_gpu and (t.most_codes == 0 or t.n >= FOLDED_BELOW),
        {"embedding": lambda t: min(16, t.most_codes + 2)},
        "as many tokens as there are: the codes, a number, a gap",
    ),
)
_FOLDED = (
    Rule(
        _always,
        {
            "orders_per_fold": lambda t: 2 if t.n * t.p <= 6000 else 1,
            "orderings": lambda t: t.orders_per_fold * N_FOLDS,
            "hidden": 64, "components": 4, "context": 8, "energy_hidden": 16, "drop": 0.2,
            "batch_size": 128, "ema": 0.98, "slower": lambda t: 1 + t.gaps, "places": PLACES[1],
            "looks": 12,
        },
        "orders are trained without one fold each, all at once",
        "results/defaults/small.json",
    ),
    Rule(
        lambda t: t.n < 1000,
        {"batch_size": lambda t: min(64, max(16, t.n // 8))},
        "few rows make few steps an epoch",
    ),
    Rule(
        lambda t: t.n < 500,
        {"hidden": 32, "ema": 0.95, "slower": 1, "places": PLACES[0], "looks": 20},
        "tiny tables: narrow networks, more looks; conditionals of more rows take longer to learn",
        "results/defaults/small.json",
    ),
    Rule(
        _always,
        {
            "max_steps": lambda t: int(
                max(40, min(
                    8 * t.n**0.65,
                    t.places * max(t.n * t.p, FEWEST_CELLS) * (2 * t.slower - 1)
                    / (t.batch_size * t.p * t.orderings),
                ))
            ),
            "lr": lambda t: 8e-3 / t.slower, "max_epochs": 10**6, "clip_norm": 5.0,
            "weight_decay": lambda t: 1e-2 + 0.3 * t.gaps,
            "validate_every": lambda t: max(5, t.max_steps // t.looks), "patience": 4,
            "n_samples": 4, "validation_samples": 6, "polish_steps": 0,
        },
        "800 rows of 30 columns take some ten seconds on one core; rows with gaps are drawn anew, "
        "and seen the longest",
        "results/defaults/small.json",
    ),
)  # fmt: skip
_ON_GPU = (
    Rule(
        _always,
        {
            "orderings": 4, "hidden": 512, "blocks": 2, "components": 10, "energy_hidden": 64,
            "drop": 0.2, "batch_size": 512, "n_samples": 8, "lr": 1e-3, "ema": 0.998,
            "weight_decay": 1e-2, "validation_samples": 16,
            "max_steps": lambda t: min(
                3000 if t.wide else 6000, max(500 * (1 + 2 * t.gaps), t.passes * t.n / 512)
            ),
        },
        "a GPU has room for wider networks",
        "results/tables",
    ),
    Rule(
        lambda t: t.numbers > 0.5 and t.few and not t.wide,
        {"orderings": 8},
        "few rows of numbers gain by the average of more orders",
    ),
    Rule(lambda t: t.wide and t.numbers > 0.5, {"hidden": 1024}, "wide tables, wide networks"),
    Rule(lambda t: t.wide or t.numbers < 0.5, {"drop": 0.3}, "they overfit"),
    Rule(
        lambda t: t.large and not t.wide,
        {"blocks": 3, "components": 20, "drop": 0.1},
        "many rows carry a larger network",
    ),
    Rule(
        lambda t: t.of_numbers and t.few and t.plain,
        {"weight_decay": 0.2},
        "levels of few rows are learned by heart, which decay prevents, and dropout alone does not",
    ),
    Rule(
        lambda t: t.of_numbers and t.few and not t.plain,
        {"weight_decay": 1.0, "drop": 0.3},
        "the same, where numbers repeat",
    ),
    Rule(
        lambda t: not (t.of_numbers and t.few) and t.plain and not t.wide,
        {"masked": 0.25},
        "a plain table of numbers",
    ),
)  # fmt: skip
_ON_CPU = (
    Rule(
        _always,
        {
            "orderings": 2, "hidden": 320, "components": 8, "context": 32, "energy_hidden": 32,
            "drop": 0.1, "batch_size": 128, "n_samples": 4, "lr": 1.5e-3, "ema": 0.998,
            "weight_decay": 1e-2, "validation_samples": 8,
        },
        "two orders train in minutes",
        "results/tables",
    ),
    Rule(lambda t: t.on_gpu, {"validation_samples": 16}, "validations are quick"),
    Rule(lambda t: t.p > 40, {"orderings": 1}, "wide chains take longer"),
    Rule(lambda t: t.numbers < 0.5, {"drop": 0.2}, "categories are overfitted early"),
    Rule(lambda t: t.numbers > 0.5, {"batch_size": 256, "lr": 2e-3}, "numbers are not"),
    Rule(
        _always,
        {"max_steps": lambda t: min(8000, max(500, t.passes * t.n / t.batch_size))},
        "the length of the run follows from the share of numbers",
    ),
    Rule(
        lambda t: t.numbers > 0.5,
        {"max_steps": lambda t: min(t.max_steps, 4500, 34 * t.n**0.5)},
        "a longer run gains little, and takes as long as it is",
    ),
    Rule(
        lambda t: t.numbers > 0.5 and t.gaps == 0 and not t.of_numbers and not t.wide,
        {
            "orderings": 6, "hidden": 208, "components": 10, "lr": 4e-3, "masked": 0.25,
            "max_steps": lambda t: min(t.max_steps, 2700, 20 * t.n**0.5),
        },
        "categories beside numbers are overfitted early: more orders, of which each errs otherwise",
        "results/tables",
    ),
    Rule(
        lambda t: t.of_numbers,
        {
            "max_steps": lambda t: min(
                t.max_steps, t.p**0.25 * min(0.6 * t.n**0.7, 4.0 * t.n**0.5)
            ),
            "lr": lambda t: min(6e-3, 12 / t.max_steps),
            "ema": lambda t: 0.998 if t.max_steps > 2000 else 0.995,
        },
        "a table of numbers has a short run, which takes longer strides",
        "results/defaults",
    ),
    Rule(
        lambda t: t.of_numbers and t.n < 100_000,
        {
            "batch_size": 128, "max_steps": lambda t: 2 * t.max_steps,
            "lr": lambda t: min(4e-3, 12 / t.max_steps), "masked": 0.25,
        },
        "twice as many steps of half the batch reach further",
        "results/defaults",
    ),
    Rule(
        lambda t: t.of_numbers and not t.plain and t.few,
        {
            "weight_decay": 0.5,
            "max_steps": lambda t: t.max_steps * max(0.6, t.numbers * 1.7),
        },
        "the run may be longer with decay",
    ),
    Rule(
        lambda t: t.of_numbers and not t.plain and not t.few,
        {"max_steps": lambda t: t.max_steps * max(0.6, t.numbers)},
        "finite parts make a step slower",
    ),
    Rule(
        lambda t: t.n < FEWEST_IN_FOLDS,
        {
            "orderings": 1, "hidden": 16, "components": 2, "context": 4,
            "batch_size": lambda t: t.n, "max_steps": 20, "lr": 2e-3, "ema": 0.9,
        },
        "nothing can be learned of so few rows but where they are",
    ),
)  # fmt: skip
_CLOSING = (
    Rule(
        _always,
        {
            "max_epochs": 10**6, "clip_norm": 5.0, "patience": 4, "polish_steps": 0,
            "validate_every": _looks(12),
        },
        "b is hardly asked for: every factor is normalised by a quadrature",
    ),
    Rule(lambda t: t.gaps > 0.5, {"validate_every": _looks(20)}, "overfitted soon"),
)  # fmt: skip


def table_options(
    n: int,
    parts: Sequence[Part],
    device: str | torch.device = "cpu",
    *,
    gaps: float = 0.0,
    folds: bool = False,
) -> Defaults:
    """Sizes and training options of a :class:`~selfnorm.chain.TableChain`.

    The best state by held-out rows is kept, and a run that no longer gains ends early.

    Args:
        n: rows of the table.
        parts: its parts.
        device: where it is trained.
        gaps: share of the rows that have some.
        folds: whether every order is trained without a fold, however many rows there are.

    Example:
        >>> table_options(20_000, [Part(0, "size", 0, rest=True)]).model["orderings"]
        2
    """
    shape = DataShape.of(n, parts, torch.device(device).type == "cuda", gaps)
    if shape.folded or (folds and n >= FEWEST_IN_FOLDS):
        return _defaults((*_MASKS, *_FOLDED), shape)
    of_device = _ON_GPU if shape.on_gpu and n >= FOLDED_BELOW else _ON_CPU
    return _defaults((*_MASKS, *of_device, *_CLOSING), shape)
