"""How a density of a table is fitted: a chain, judged on rows not seen, mixed with simple ones."""

from __future__ import annotations

import copy
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from selfnorm._context import float32_on_cpu, one_thread, seeded
from selfnorm.chain import FEWEST_IN_FOLDS, FOLDED_BELOW, TableChain, table_options
from selfnorm.columns import GAP, CodedColumns, Part, Schema
from selfnorm.density import EBM, Ensemble, Ranks, fit, fit_many, joint_density, joint_energy
from selfnorm.distributions import Defensive
from selfnorm.errors import DataError
from selfnorm.tables import members
from selfnorm.tables.chain_distribution import ChainDistribution, of_chain, shares
from selfnorm.tables.distribution import PIECE, RowDistribution
from selfnorm.tables.energy_distribution import EnergyDistribution, grid_of
from selfnorm.tables.folds import Folds
from selfnorm.tables.streamed import Streamed
from selfnorm.training import (
    Clock,
    History,
    Judgement,
    Source,
    StoredRows,
    TrainingOptions,
    split_rows,
)

JUDGED_ROWS = 1000  # of each fold, or of those held out, to weigh members by
MOST_HELD_OUT = 10_000
# to stop by on a CPU: cells of rows in folds, each of which most orders know; rows held out
VALIDATED_CELLS, VALIDATED_ROWS = 6000, 2000
# share of the rows that is counted for a chain beforehand where it is judged by folds: all orders
# and all rows make it better than the orders by which it is judged, and its tails are heavier
FOLDED_PRIOR = 0.03
JOINT_FOLDS = 3  # of a small table of one energy, each of which one network does not see
LEAST_SCORE = -1e4  # nats that a row may lose where coordinates of one energy are chosen
SCORES_COST = 0.05  # nats a column by which normal scores have to be better for one energy
# copies of a small table whose gaps are drawn, if they make up no more rows, and last runs on such
COMPLETED, COMPLETED_ROWS, ROUNDS = (2, 8), 2400, 3
JOINT = EnergyDistribution.method
T = TypeVar("T")
JOINT_FROM = 1000  # rows: of fewer, a chain mixed with simple densities knows more
SCORED_ROWS = 1000  # of the training table, for the threshold of outliers
CHECKED_ROWS = 100  # whose scores by the learned ``b`` are compared with those by quadrature
# Shares of the time that may be taken: for simple densities (half as much again to fit those kept
# to all rows), for the first of two runs, for closing figures; cells in one figure of consistency,
# and rows judged between two looks at the clock.
SIMPLE_SHARE, FIRST_SHARE, CLOSING_SHARE, CHECKED_CELLS, ROWS_PER_LOOK = 0.15, 0.65, 0.05, 1600, 64


@dataclass(frozen=True)
class Settings:
    """How to train, as the user stated it.

    Attributes:
        sizes, options: of networks and training, in place of the defaults.
        n_init: number of restarts.
        validation_fraction: of the rows, where some are held out.
        device: where to train.
        checkpoint: file from which the same run goes on.
        clock: of the fit.
        ranks: the processes that share the steps; ``None``: this one alone.
        keep_folds: whether the orders of a chain stay as they are trained, each without a fold.
    """

    sizes: dict[str, Any]
    options: dict[str, Any]
    n_init: int
    validation_fraction: float
    device: str
    checkpoint: str | os.PathLike[str] | None
    clock: Clock
    ranks: Ranks | None = None
    keep_folds: bool = False

    def agreed(self, value: T) -> T:
        """What rank 0 says: clocks of ranks differ, and with them what there is time for."""
        if self.ranks is None:
            return value
        agreed: T = self.ranks.fabric.broadcast(value)
        return agreed


@dataclass
class Trained:
    """A distribution, and how it did in training.

    Attributes:
        distribution: of coded rows, in double precision.
        history: of the run that chose its state.
        n_steps: of all runs.
        held_out: numbers of the rows that were held out.
        how: rows were judged, in words.
        places, scores: rows that were judged, and their log-likelihoods.
        gain: what the energies add to the score of each; NaN: nothing to compare with.
        sampled: rows of training that stand for all.
        consistency: see :meth:`RowDistribution.consistency`.
        learned_error: mean distance of scores by the learned ``b`` from those by quadrature.
        folds: densities that have not seen a fold each, where these are kept.
    """

    distribution: RowDistribution
    history: History
    n_steps: int
    held_out: np.ndarray
    how: str
    places: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    scores: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    gain: np.ndarray = field(default_factory=lambda: np.zeros(0))
    sampled: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    consistency: dict[str, float] = field(default_factory=dict)
    learned_error: float = 0.0
    folds: Folds | None = None

    @property
    def by_folds(self) -> bool:
        """Whether rows were judged in folds: then all of them trained it."""
        return len(self.held_out) == 0 and len(self.places) > 0

    def judgement(self, rows: Rows) -> Judgement:
        """What the fit came to, on rows not seen if there are any."""
        if len(self.places) == 0:
            return Judgement(rows.total, "not judged: too few rows to hold some out")
        weights = rows.weights[self.places].numpy()
        return Judgement.of(rows.total, self.how, self.scores.numpy(), self.gain, weights)


@dataclass(frozen=True)
class Rows:
    """Coded rows ``(n, p, 2)``, what their codes leave open ``(n, p)``, and their weights.

    They stand for ``every`` row of a table that is not in memory, if there is one.
    """

    coded: Tensor
    open_: Tensor
    weights: Tensor
    every: Streamed | None = None

    def __len__(self) -> int:
        return len(self.coded)

    @property
    def total(self) -> int:
        """How many rows the table has."""
        return len(self) if self.every is None else len(self.every)


def chosen_method(method: str, schema: Schema, coded: Tensor) -> str:
    """The method of a fit: ``"auto"`` is one energy for a few plainly continuous columns."""
    plain = bool((coded[..., 0] != GAP).all()) and all(
        part.rest and part.n_codes == part.step == 0 and part.low is part.high is None
        for part in schema.parts
    )
    if method == JOINT and not plain:
        raise DataError(
            "method='joint' is for continuous columns without gaps or limits; use 'auto' or "
            f"'autoregressive' for this table:\n{schema}"
        )
    if method != "auto":
        return method
    one_energy = plain and len(schema.parts) <= 2 and len(coded) >= JOINT_FROM
    return JOINT if one_energy else ChainDistribution.method


def train(rows: Rows, parts: Sequence[Part], method: str, settings: Settings) -> Trained:
    """The distribution of coded rows by one of the methods, judged on rows not seen."""
    ways = {JOINT: train_energy, ChainDistribution.method: train_chain}
    seed = settings.options["seed"]
    rng = np.random.default_rng(seed)
    sampled = torch.from_numpy(rng.permutation(len(rows))[:SCORED_ROWS])
    with float32_on_cpu():
        fit = ways[method](rows, parts, settings)
        checked = rows.coded[rng.permutation(fit.places) if len(fit.places) else sampled]
        if math.isfinite(settings.clock.total):
            checked = checked[: checked_rows(len(parts))]
        distribution = fit.distribution.with_gap_scores(checked)
        consistency = distribution.consistency(checked, seed)
        exact = distribution.log_prob(checked[:CHECKED_ROWS])
        learned = distribution.log_prob(checked[:CHECKED_ROWS], "learned")
    return replace(
        fit,
        distribution=distribution,
        sampled=sampled,
        consistency=consistency,
        learned_error=float((learned - exact).abs().mean()),
    )


def train_chain(rows: Rows, parts: Sequence[Part], settings: Settings) -> Trained:
    """A chain over the parts of coded rows, and the simple densities beside it.

    Small tables are judged by folds: each order of the chain is trained without one of them, all at
    once; then all orders go on with all rows. Of larger ones a part is held out.
    """
    with one_thread() if len(rows) < FOLDED_BELOW else nullcontext():
        return _train_chain(rows, parts, settings)


def _train_chain(rows: Rows, parts: Sequence[Part], settings: Settings) -> Trained:
    seed, device, clock = settings.options["seed"], settings.device, settings.clock
    with_gaps = float((rows.coded[..., 0] == GAP).any(-1).double().mean())
    folds = settings.keep_folds
    defaults = table_options(rows.total, parts, device, gaps=with_gaps, folds=folds)
    sizes, options = defaults.model | settings.sizes, defaults.fit | settings.options
    split = _Split.of(
        rows, sizes["orderings"], defaults.orders_per_fold, settings.validation_fraction, seed
    )
    began = clock.gone
    simple = settings.agreed(_scores_of_simple(rows, parts, split, with_gaps == 0, seed, clock))
    simple_seconds = clock.gone - began
    straight = _straight_columns(rows, parts, split, simple, seed)
    columns = members.columns_of(parts, rows.coded[split.train], straight=straight)
    # small tables have simple densities for such
    lines = split.n_folds == 1 and with_gaps == 0 and members.has_ridge(columns, rows.coded)
    with seeded(seed):
        models = [
            TableChain(parts, n_knots=columns.n_knots, lines=lines, **sizes).set_columns(columns)
            for _ in range(settings.n_init)
        ]
    packed = _packed(columns, rows.coded)
    if lines:
        for model in models:
            model.start_at_lines(packed[split.train], rows.weights[split.train])
    closing = settings.agreed(_closing(models[0].to(device), packed, clock, simple_seconds / 2))
    fill = None
    if with_gaps and split.n_folds > 1:
        fill = functools.partial(_completed, columns=columns, coded=rows.coded)
    runs = _Runs(packed, rows.weights, split, options, closing, settings, fill)
    every: AbstractContextManager[StoredRows | None] = nullcontext()
    if rows.every is not None:
        share = held_share(rows.total, settings.validation_fraction)
        order = np.random.default_rng(seed).permutation(len(split.train))
        shown = packed[split.train[order]]
        every = rows.every.stored(columns, share, shown, settings.checkpoint, settings.ranks)
    with every as source:
        histories = runs.first(models, defaults.task, device, source)
    chain, history = best(models, histories)
    stopped, n_steps = histories[-1].stopped, history.n_steps
    until = clock.gone + closing.judging
    log_p = _judge(chain, rows.coded, parts, split, columns, straight, lambda: clock.gone < until)
    if split.n_folds > 1 and stopped != "interrupted" and not settings.keep_folds:
        stopped, n_steps = runs.last(chain, history)
    if stopped == "interrupted":
        history = replace(history, stopped="interrupted")
    # float64 from here on, but for normalisers: a score hardly depends on the rows beside it
    chain = chain.cpu().double().eval()
    chain.columns.load_state_dict(columns.state_dict())  # every digit of the map
    distribution = ChainDistribution(chain, [], [], torch.zeros(len(parts)))
    fit = Trained(distribution, history, n_steps, _in_order(split.held_out), split.how)
    prior = FOLDED_PRIOR if split.n_folds > 1 else 0.0
    mixture = _mix(fit, simple, log_p, rows, parts, seed, prior)
    if settings.keep_folds and split.n_folds > 1:
        weights = [member.weight for member in mixture.distribution.members]
        of_orders = [torch.nonzero(split.order_fold == k).flatten() for k in range(split.n_folds)]
        chains = [chain.of_orders(orders.tolist()).eval() for orders in of_orders]
        mixture.folds = Folds.of(
            split.folds, chains, list(simple), weights, rows.coded, rows.weights, straight, seed
        )  # fmt: skip
    return mixture


@dataclass(frozen=True)
class _Split:
    """Which rows train, and which judge.

    Attributes:
        train: numbers of the rows that some order is trained on.
        held_out: of those that none is; ``None`` where there are folds, or no row can be spared.
        folds: ``(n,)`` the fold in which a row is judged, -1 where it is in none.
        judged: numbers of those that are, in random order: some of them stand for all.
        order_fold: ``(R,)`` the fold that each order does not see.
    """

    train: Tensor
    held_out: Tensor | None
    folds: Tensor
    judged: Tensor
    order_fold: Tensor

    @classmethod
    def of(
        cls, rows: Rows, orders: int, orders_per_fold: int, fraction: float, seed: int
    ) -> _Split:
        """Folds where some orders are to be trained without each, else a part held out."""
        n, n_folds = len(rows), orders // orders_per_fold if orders_per_fold else 1
        with seeded(seed):
            train, held_out = torch.arange(n), None
            if rows.every is not None:
                out = rows.every.held_out(held_share(rows.total, fraction))
                train, held_out = train[~out], train[out] if bool(out.any()) else None
            elif n_folds == 1:
                train, held_out = split_rows(train, held_share(n, fraction))
            folds = members.folds_of(n, n_folds, held_out)
            judged = torch.randperm(n)
        return cls(
            train, held_out, folds, judged[folds[judged] >= 0], torch.arange(orders) % n_folds
        )

    def judged_in(self, fold: int) -> Tensor:
        """Numbers of the rows that are judged in a fold."""
        return self.judged[self.folds[self.judged] == fold]

    @property
    def n_folds(self) -> int:
        """One where rows are held out."""
        return int(self.order_fold.max()) + 1

    @property
    def how(self) -> str:
        """In words."""
        return f"{self.n_folds} folds" if self.n_folds > 1 else f"{len(self.judged)} rows held out"


def _straight_columns(
    rows: Rows,
    parts: Sequence[Part],
    split: _Split,
    simple: dict[members.Kind, np.ndarray],
    seed: int,
) -> bool:
    """Whether columns stay as they are; their normal scores need more rows to be known."""
    if split.n_folds > 1 and not simple and any(part.rest for part in parts):
        pair = [members.Kind(1, straight) for straight in (True, False)]
        simple = members.held_out_scores(pair, parts, rows.coded, rows.weights, split.folds, seed)
    return members.coordinates(simple)


class _Runs:
    """The training runs of chains over packed rows, each with its share of the time.

    Small tables: a first run by folds, a last one of all rows. Others have the first alone. Those
    with gaps are trained on what ``fill`` makes of them, in several last runs.
    """

    def __init__(
        self, packed: Tensor, weights: Tensor, split: _Split, options: dict[str, Any],
        closing: _Closing, settings: Settings, fill: Callable[..., tuple[Tensor, ...]] | None,
    ) -> None:  # fmt: skip
        self.packed, self.split, self.fill, self.fill_seconds = packed, split, fill, 0.0
        self.options = options if len(split.judged) else options | {"patience": None}
        self.closing, self.clock, self.checkpoint = closing, settings.clock, settings.checkpoint
        self.ranks = settings.ranks
        self.counts = (weights / weights.mean()).float().unsqueeze(1)

    def first(
        self,
        models: Sequence[TableChain],
        task: dict[str, Any],
        device: str,
        source: Source | None = None,
    ) -> list[History]:
        """Train each of the models, on the rows of a source if any; none after an interrupt."""
        split, packed = self.split, self.packed
        rest = {name: value for name, value in task.items() if name != "n_samples"}
        self.common: dict[str, Any] = {"n_samples": task["n_samples"], "task_options": rest}
        self.common["fabric"] = self.ranks
        # how much a row counts for each order: in training, and where it is held out
        out = split.folds.unsqueeze(1) == split.order_fold
        counted, held = self.counts * ~out, self.counts * out
        seen = split.judged[: self.closing.validated_rows]
        if torch.device(device).type == "cpu":
            few = max(150, VALIDATED_CELLS // packed.shape[1])
            seen = seen[: VALIDATED_ROWS if split.n_folds == 1 else few]
        judged_by = (packed[seen], held[seen]) if len(seen) else None
        data: Source | tuple[Tensor, ...] | None = source
        if data is None:
            data = packed[split.train], (counted / counted[split.train].mean())[split.train]
        histories: list[History] = []
        for k, model in enumerate(models):
            share = (FIRST_SHARE if split.n_folds > 1 else 1.0) / (len(models) - k)
            spared = self.closing.seconds + self.closing.judging
            how = TrainingOptions(
                **self.options | self.clock.run_for(share, spared),
                checkpoint=_beside(self.checkpoint, k),
            )
            run = fit(model.to(device), data, val_data=judged_by, **self.common, options=how)
            histories.append(run)
            if run.stopped == "interrupted":
                break
        return histories

    def filled(self, chain: TableChain, rows: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
        """Rows as ``fill`` has them, where there are gaps and time for it; else as they are."""
        if self.fill is None or self.clock.left < self.closing.seconds + 2 * self.fill_seconds:
            return rows
        began = self.clock.gone
        shown = self.fill(chain, rows=rows, seed=self.options["seed"] + seed)
        self.fill_seconds = self.clock.gone - began
        return shown

    def last(self, chain: TableChain, history: History) -> tuple[str, int]:
        """All orders of the chain go on with all rows: why that stopped, the steps of all runs."""
        steps = max(1, (history.best_step or history.n_steps) // (2 if self.fill is None else 1))
        last = {"max_steps": steps, "lr": self.options["lr"] / 2, "schedule": "cosine"}
        last |= {"patience": None, "validate_every": None, "progress": False}
        counts = self.counts.expand(-1, chain.n_orderings).contiguous()
        rows = self.packed, counts
        stopped, n_steps = history.stopped, history.n_steps
        for left in range(1 if self.fill is None else ROUNDS, 0, -1):
            shown = self.filled(chain, rows, left)
            how = TrainingOptions(
                **self.options | last | self.clock.run_for(1 / left, self.closing.seconds),
                checkpoint=_beside(self.checkpoint, f"all{n_steps}"),  # where those steps ended
            )
            run = fit(chain, shown, val_data=None, **self.common, options=how)
            stopped, n_steps = run.stopped, n_steps + run.n_steps
            if stopped == "interrupted":
                break
        return stopped, n_steps


def go_on(
    distribution: ChainDistribution, rows: Rows, settings: Settings
) -> tuple[ChainDistribution, History]:
    """The same with its chain trained further on coded rows, from the state it has."""
    with_gaps = float((rows.coded[..., 0] == GAP).any(-1).double().mean())
    columns, device = distribution.columns, settings.device
    defaults = table_options(len(rows), columns.parts, device, gaps=with_gaps)
    options = defaults.fit | settings.options
    options |= {"max_steps": max(1, options["max_steps"] // 2), "lr": options["lr"] / 2}
    options |= {"schedule": "cosine", "patience": None, "validate_every": None}
    chain = copy.deepcopy(distribution.model).float().to(device).train()
    counts = (rows.weights / rows.weights.mean()).float().unsqueeze(1)
    history = fit(
        chain,
        (_packed(columns, rows.coded), counts.expand(-1, chain.n_orderings).contiguous()),
        n_samples=defaults.task["n_samples"],
        task_options={k: v for k, v in defaults.task.items() if k != "n_samples"},
        options=TrainingOptions(**options | settings.clock.run_for(1.0)),
    )
    chain = chain.cpu().double().eval()
    chain.columns.load_state_dict(columns.state_dict())  # every digit of the map
    return replace(distribution, model=chain), history


def train_energy(rows: Rows, parts: Sequence[Part], settings: Settings) -> Trained:
    """One energy over all numbers of coded rows, and the simple densities beside it.

    Small tables are judged by folds: one energy is trained without each of them, all at once, and
    the model is their mixture. Of larger ones a part is held out. Restarts differ in their energies
    alone: base and proposal are those of :func:`~selfnorm.density.recipes.joint_density`.
    """
    n, seed = len(rows), settings.options["seed"]
    n_folds = JOINT_FOLDS if FEWEST_IN_FOLDS <= n < FOLDED_BELOW else 1
    split = _Split.of(rows, n_folds, int(n_folds > 1), settings.validation_fraction, seed)
    simple = _scores_of_simple(rows, parts, split, True, seed, settings.clock)
    straight = _straight_energy(simple, len(parts))
    simple = {kind: scores for kind, scores in simple.items() if kind.straight == straight}
    columns = members.columns_of(parts, rows.coded, straight=straight)
    packed, slope = columns.pack(rows.coded)
    z = packed[..., 1].float()
    energies, proposal, history = _fit_energies(z, rows.weights, split, settings)
    log_p = np.full(n, np.nan)
    for k, model in enumerate(energies):
        places = split.judged_in(k)
        places = places if n_folds > 1 else places[:JUDGED_ROWS]
        with torch.no_grad():
            of_fold = model.log_prob(z[places]).double() + slope[places].sum(-1)
        if n_folds > 1 and not straight:
            others = members.columns_of(parts, rows.coded[split.folds != k], straight=False)
            of_fold += members.by_another_map(columns, others, rows.coded[places])
        log_p[places.numpy()] = of_fold.numpy()
    model = energies[0] if len(energies) == 1 else Ensemble(energies)
    model, proposal = model.double().eval(), proposal.double().eval()
    distribution = EnergyDistribution(model, [], [], proposal, columns)
    fit = Trained(distribution, history, history.n_steps, _in_order(split.held_out), split.how)
    return _mix(fit, simple, log_p, rows, parts, seed)


def _fit_energies(
    z: Tensor, weights: Tensor, split: _Split, settings: Settings
) -> tuple[list[EBM], Defensive, History]:
    """The best restart of each fold, exactly normalised where that is possible; their proposal."""

    def drawn(places: Tensor) -> Tensor:
        """The rows at some places, or as many drawn by their weights."""
        shares = weights[places]
        alike = bool((shares == shares[0]).all())
        return z[places if alike else places[torch.multinomial(shares, len(places), True)]]

    n, d = z.shape
    folds = range(split.n_folds)
    with seeded(settings.options["seed"]):
        train = [drawn(split.train[split.folds[split.train] != k]) for k in folds]
        held = [drawn(split.judged_in(k)) for k in folds] if len(split.judged) else None
        recipe = joint_density(drawn(split.train), rows=n)
        models = [
            EBM(joint_energy(d, n, settings.sizes.get("hidden")), base=recipe.model.base)
            for _ in range(settings.n_init * len(folds))
        ]
    stated = settings.options | settings.clock.run_for(0.9)
    options = recipe.options.given(**stated, checkpoint=settings.checkpoint)
    if options.validate_every is None and options.max_steps is not None:
        options = options.given(validate_every=max(25, options.max_steps // 20))
    common: dict[str, Any] = {"proposal": recipe.proposal, "n_samples": recipe.n_samples}
    models = [model.to(settings.device) for model in models]
    if len(models) == 1:
        val_data = None if held is None else held[0]
        histories = [fit(models[0], train[0], **common, val_data=val_data, options=options)]
    else:
        train, held = train * settings.n_init, None if held is None else held * settings.n_init
        histories = fit_many(models, train, **common, val_data=held, options=options)
    chosen = [best(models[k :: len(folds)], histories[k :: len(folds)]) for k in folds]
    energies, proposal = [model.cpu().eval() for model, _ in chosen], recipe.proposal.cpu()
    assert isinstance(proposal, Defensive)
    span = torch.stack([z.amin(0), z.amax(0)], 1)
    for model in energies if d <= 2 else ():
        model.log_norm.data.fill_(grid_of(model, proposal, span).log_norm)
    return energies, proposal, best(energies, [history for _, history in chosen])[1]


def _straight_energy(simple: dict[members.Kind, np.ndarray], n_columns: int) -> bool:
    """Whether an energy is over columns as they are, or over their normal scores.

    The quantiles behind normal scores are noisy: simple densities of rows not seen have to gain
    by them, as they do of heavy tails and of spikes at the end of a range. One row that is far from
    all others decides nothing.
    """
    if not simple:  # no rows tell
        return True
    gain = {kind: np.nanmean(np.maximum(score, LEAST_SCORE)) for kind, score in simple.items()}
    straight, curved = (max(gain[k] for k in gain if k.straight == s) for s in (True, False))
    return bool(straight > curved - SCORES_COST * n_columns)


def _completed(
    chain: TableChain, columns: CodedColumns, coded: Tensor, rows: tuple[Tensor, ...], seed: int
) -> tuple[Tensor, ...]:
    """Training rows, as many whose gaps the chain has drawn, and which of the cells to learn.

    A chain that has seen gaps in most rows knows little of complete ones. In rows that it completes
    itself, given what they have, cells are learned as they were seen, among cells that were drawn.
    Were these learned too, as in a step of EM, it would know its own draws by heart.
    """
    copies = int(np.clip(COMPLETED_ROWS // len(coded), *COMPLETED))
    packed, weights = (figures.repeat(copies, *[1] * (figures.dim() - 1)) for figures in rows)
    coded = coded.repeat(copies, 1, 1)
    seen = coded[..., :1] != GAP
    drawn = chain.eval().sample(len(packed), packed, seen[..., 0], within=True, seed=seed).cpu()
    drawn = columns.unpack(*drawn[..., :2].double().unbind(-1))
    filled = _packed(columns, torch.where(seen, coded, drawn))
    learned = torch.cat([torch.ones_like(seen), seen])[..., 0]
    return torch.cat([packed, filled]), weights.repeat(2, 1), learned


def best(models: Sequence[Any], histories: Sequence[History]) -> tuple[Any, History]:
    """The restart with the best score, and its record."""

    def score(history: History) -> float:
        """By held-out rows where there are any, else by the training's."""
        if history.best_score is not None:
            return history.best_score
        return history.records[-1].get("lower", -math.inf) if history.records else -math.inf

    chosen = max(range(len(histories)), key=lambda k: score(histories[k]))
    return models[chosen], histories[chosen]


def held_share(n: int, fraction: float) -> float:
    """Share of ``n`` rows that are held out."""
    return min(fraction, MOST_HELD_OUT / n)


def _in_order(rows: Tensor | None) -> np.ndarray:
    """Numbers of rows, ascending; none for ``None``."""
    return np.sort(rows.numpy()) if rows is not None else np.zeros(0, dtype=np.int64)


def _beside(checkpoint: Any, name: Any) -> str | None:
    """The file of one of several runs."""
    if checkpoint is None:
        return None
    return f"{os.fspath(checkpoint)}.{name}" if name else os.fspath(checkpoint)


def _packed(columns: CodedColumns, coded: Tensor) -> Tensor:
    """Packed rows ``(n, p, 4)``, made some at a time: their intermediates are many times as big."""
    packed = torch.empty(*coded.shape[:2], 4, dtype=torch.float32)
    for block, piece in zip(packed.split(PIECE), coded.split(PIECE), strict=True):
        block.copy_(columns.pack(piece)[0])
    return packed


@dataclass(frozen=True)
class _Closing:
    """How much a fit may do beside its steps, so that it ends in time."""

    judging: float = math.inf  # seconds for scores of rows not seen,
    seconds: float = 0.0  # and for what comes after all training
    validated_rows: int = 10**9


def checked_rows(p: int) -> int:
    """Rows of ``p`` parts in figures of consistency, where the time is limited."""
    return min(32, max(8, CHECKED_CELLS // p))


def _closing(chain: TableChain, packed: Tensor, clock: Clock, refit: float) -> _Closing:
    """Closing figures that fit into their share of the time, by the time of a few rows.

    ``refit``: seconds that simple densities will take once more.
    """
    if math.isinf(clock.total):
        return _Closing()
    few = packed[:16].to(chain.quantiles)
    shares(chain, few)
    began = time.perf_counter()
    shares(chain, few)
    per_row = (time.perf_counter() - began) / len(few)
    share = CLOSING_SHARE * max(0.0, clock.left)
    return _Closing(
        judging=min(share, JUDGED_ROWS * per_row),
        # three passes in double precision over the rows whose consistency is told
        seconds=refit + 6 * checked_rows(chain.dim) * per_row,
        validated_rows=max(100, int(share / per_row)),  # by a quarter of the nodes
    )


def _scores_of_simple(
    rows: Rows, parts: Sequence[Part], split: _Split, complete: bool, seed: int, clock: Clock
) -> dict[members.Kind, np.ndarray]:
    """Log-densities of rows not seen by simple densities; none where they are not worth trying.

    Some rows of a large table stand for all.
    """
    if len(split.judged) == 0 or any(part.gap for part in parts):
        return {}
    chosen = torch.cat([split.train[: members.MOST_ROWS], split.judged[:JUDGED_ROWS]]).unique()
    folds = split.folds[chosen]
    n_seen = len(chosen) - int((folds >= 0).sum()) // split.n_folds
    until = clock.gone + SIMPLE_SHARE * clock.left
    scores = members.held_out_scores(
        list(members.kinds_for(n_seen, parts, complete=complete)),
        parts, rows.coded[chosen], rows.weights[chosen], folds, seed, lambda: clock.gone < until,
    )  # fmt: skip
    of_all = {kind: np.full(len(rows), np.nan) for kind in scores}
    for kind, log_p in scores.items():
        of_all[kind][chosen.numpy()] = log_p
    return of_all


@torch.no_grad()
def _judge(
    chain: TableChain, x: Tensor, parts: Sequence[Part], split: _Split, columns: CodedColumns,
    straight: bool, go_on: Callable[[], bool],
) -> np.ndarray:  # fmt: skip
    """Log-densities ``(n,)`` of judged rows by the orders that have not seen them.

    Of some rows of each fold at least, and of as many as are reached while ``go_on``.
    """
    scores = np.full(len(x), np.nan)
    chain.eval()
    for fold in range(split.n_folds):
        judged = split.judged_in(fold)[:JUDGED_ROWS]
        if len(judged) == 0:  # a table of a few rows
            continue
        orders = chain.of_orders(torch.nonzero(split.order_fold == fold).flatten().tolist())
        others = columns
        if split.n_folds > 1 and not straight:
            others = members.columns_of(parts, x[split.folds != fold], straight=False)
        for places in judged.split(ROWS_PER_LOOK):
            log_p = of_chain(orders, columns, others, x[places])
            scores[places.numpy()] = log_p.numpy()
            if not go_on():
                break
    return scores


def _mix(
    fit: Trained,
    simple: dict[members.Kind, np.ndarray],
    of_model: np.ndarray,
    rows: Rows,
    parts: Sequence[Part],
    seed: int,
    prior: float = 0.0,
) -> Trained:
    """Weigh what was trained and simple densities by rows not seen.

    ``prior``: share of the rows that is counted for what was trained beforehand.
    """
    distribution = fit.distribution
    names = [distribution.trained, *(kind.name for kind in simple)]
    scored = [~np.isnan(scores) for scores in simple.values()]
    places = np.flatnonzero(np.isfinite(of_model) & np.all([np.ones(len(rows)), *scored], 0))
    if len(places) == 0:
        distribution.members = [members.Member(distribution.trained, 1.0, math.nan)]
        return fit
    log_p = np.stack([of_model, *simple.values()], 1)[places]
    counts = rows.weights.numpy()[places]
    weights = members.mixture_weights(log_p, counts, prior)
    of_mixture = members.judged(log_p, counts, prior)
    gain = np.full(len(places), np.nan)
    if simple:
        gain = of_mixture - members.judged(log_p[:, 1:], counts)
    open_ = rows.open_[places].sum(-1).numpy()
    scores = np.average(log_p + open_[:, None], axis=0, weights=counts)
    tried = zip(names, weights.tolist(), scores.tolist(), strict=True)
    kept = [kind for kind, weight in zip(simple, weights[1:], strict=True) if weight > 0]
    maps = {s: members.columns_of(parts, rows.coded, straight=s) for s in {k[1] for k in kept}}
    distribution.members = [members.Member(*figures) for figures in tried]
    chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[: members.MOST_ROWS])
    some, counts_of_some = rows.coded[chosen], rows.weights[chosen]
    distribution.simple = [
        members.simple_density(k, maps[k.straight], some, counts_of_some, seed).eval() for k in kept
    ]
    return replace(
        fit,
        places=torch.from_numpy(places),
        scores=torch.from_numpy(of_mixture + open_),
        gain=gain,
    )
