"""``EnergyDensity``: the distribution of a table of any kind, behind the scikit-learn contract.

A :class:`~selfnorm.Schema` says what the columns are. Models see rows in units of their own:

- *joint* (one or two columns of numbers, 1,000 rows or more): one energy over all columns on a
  heavy-tailed base, trained with a sharp proposal; its normaliser is a quadrature.
- *autoregressive* (every other table): a chain with a factor for each column.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, DensityMixin, OutlierMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from selfnorm import saving
from selfnorm._context import on_cpu, seed_of, whole_or_not_at_all
from selfnorm._inputs import (
    Number,
    RandomState,
    check_device,
    check_parameters,
    checked_weights,
    digest,
    own_errors,
)
from selfnorm._saved import saved
from selfnorm.columns import (
    FORMATS,
    GAP,
    SAMPLED_ROWS,
    UNSEEN,
    Part,
    Scan,
    Schema,
    Shards,
    SourceLike,
    Table,
    TableLike,
    is_source,
    numbers_like,
)
from selfnorm.density import Ranks
from selfnorm.errors import DataError, ModelFileError, shortened
from selfnorm.evaluation import Bounds
from selfnorm.report import About, DensityReport, Facts, write_report
from selfnorm.tables import streaming, training
from selfnorm.tables.answers import Effort
from selfnorm.tables.chain_distribution import ChainDistribution
from selfnorm.tables.distribution import PIECE, RowDistribution, stream
from selfnorm.tables.drift import Drift, drift_of
from selfnorm.tables.events import Asked, Event
from selfnorm.tables.folds import Folds
from selfnorm.tables.inputs import only_lacks_asides
from selfnorm.tables.marginal import Marginal, mask_of
from selfnorm.tables.members import Member
from selfnorm.tables.promises import conformal
from selfnorm.tables.questions import Questions, checked_rules
from selfnorm.tables.reasons import Reason, reasons_of
from selfnorm.tables.streamed import Streamed
from selfnorm.tables.streaming import (
    DRAWN_ROWS,
    SAMPLES_PER_FILE,
    Piece,
    Sink,
    arrow_table,
    pieces_of,
    with_columns,
)
from selfnorm.training import Clock, History, Judgement, fingerprint, whole_number

if TYPE_CHECKING:
    import pyarrow as pa
    from lightning_fabric import Fabric

MINIMUM_ROWS = 5
_SMALLEST_SPREAD = 1e-36  # of numbers, some of which float32 has to tell apart
REPLAYED = 50_000  # draws that stand for rows of before
RARE = 0.01  # share of rows not seen that are called outliers
_PARAMETERS: dict[str, list[Any]] = {
    "method": ["auto", "joint", "autoregressive"],
    "schema": [Schema, dict, None],
    "max_steps": [Number(1, whole=True), None],
    "max_time": [Number(0, open_low=True), str, None],
    "batch_size": [Number(1, whole=True), None],
    "learning_rate": [Number(0, open_low=True), None],
    "weight_decay": [Number(0), None],
    "hidden": [Number(1, whole=True), None],
    "n_init": [Number(1, whole=True)],
    "validation_fraction": [Number(0, 1, open_high=True)],
    "contamination": ["auto", Number(0, 0.5, open_low=True)],
    "accuracy": ["joint", "fast", Number(2, whole=True)],
    "device": [str, None],
    "verbose": [bool, np.bool_],
}


@saved(
    fitted={
        "schema_": Schema,
        "n_features_in_": int,
        "feature_names_in_": np.ndarray,
        "offset_": float,
        "lower_bound_": float,
        "consistency_": dict[str, float],
        "learned_error_": float,
        "fitted_to_": dict[str, int | str],
        "rules_": tuple[str, ...],
        "held_out_": np.ndarray,
        "n_iter_": int,
        "history_": History,
        "judgement_": Judgement,
        "distribution_": RowDistribution,
        "_measure": str,
    }
)
class EnergyDensity(saving.Saved, Facts, OutlierMixin, DensityMixin, BaseEstimator):
    r"""The normalised distribution of the rows of any table, with bounds on every log-likelihood.

    Columns may hold numbers, text, booleans, categories, dates and gaps; a table may be a pandas or
    polars DataFrame, an Arrow table, an array or a dict of columns. ``score_samples`` is
    ``log p(x)``: a probability in columns of categories, whole numbers and point masses, a density
    in the units of the table in continuous ones, where multiplying a column by ``c`` lowers it by
    ``log c``. Cells that are missing are left out.

    Parameters
    ----------
    method : {"auto", "joint", "autoregressive"}
        ``"joint"``: one energy over all columns with a defensive proposal; ``"autoregressive"``: a
        chain with a factor for each column. ``"auto"`` takes the first for one or two continuous
        columns without gaps of 1,000 rows or more.
    schema : Schema or dict, default None
        What the columns are: a :class:`~selfnorm.Schema`, the same one for all folds and models
        that are to be compared, or a dict of kinds where the rules would say otherwise. ``None``
        reads it off the table.
    max_steps, batch_size, learning_rate, weight_decay, hidden : int or float, default None
        Size of the training run and of the network; ``None`` chooses by the size of the table.
    max_time : float or str, default None
        Seconds that a fit may take, or a text such as ``"90s"`` or ``"5min"``; the learning rate
        falls with the time. The numbers then depend on the machine.
    n_init : int, default 1
        Number of restarts; the one with the best held-out lower bound is kept. The joint method
        trains them as one batched model, chains one after another.
    validation_fraction : float, default 0.1
        Share of the rows held out to choose the best state, of more than 2,500 rows; smaller
        tables are judged by folds, and all of their rows are used.
    contamination : float or "auto", default "auto"
        Share of the training rows that ``predict`` calls outliers. ``"auto"``: the threshold is
        the score that one row in a hundred falls below among rows that were not trained on (among
        those of training where none are spared).
    accuracy : {"joint", "fast"} or int, default "joint"
        Answers about rows of which not all is given (scores of rows with gaps, ``impute``,
        ``log_prob(given=)``, ``sample(given=)``, ``marginal``, ``probabilities``, events) are those
        of the joint density, by weighted draws: some dozens of each row, up to 4,096 where the
        error is large and rows are few. A number of draws goes as far as that for all rows.
        ``"fast"``: predictions of the network, in one pass; ``consistency_`` says how far these are
        from the joint.
    device : str, default None
        Where to train, ``"cpu"`` if ``None``. The fitted model always scores on the CPU, in float64
        but for the normalisers of factors, which are right to some 1e-5.
    random_state : int, RandomState, Generator or None
        Same value, same bits on the CPU.
    verbose : bool, default False
        Show what the columns are, and a progress bar with both bounds.

    Attributes
    ----------
    n_features_in_, feature_names_in_ : as in scikit-learn.
    schema_ : Schema
        What the columns are; ``schema_.notes`` says what was found, ``schema_.fingerprint`` names
        the measure: log-likelihoods of different measures cannot be compared.
    history_ : History
        Record of the training run.
    judgement_ : Judgement
        What the fit came to: rows used, how it was judged, log-likelihood of rows not seen with its
        standard error, what the energies add to simple densities, seconds. The trained state is
        chosen by such rows too, so it is a little optimistic; the score of a test table is not.
        Its text closes a ``verbose`` fit.
    members_ : list of Member
        The densities that were tried, chain or energy first: ``name``, ``weight`` in the mixture
        that ``score_samples``, ``log_prob``, ``sample``, ``impute`` and ``bounds`` are of,
        ``score`` on rows not seen. ``explain`` is the chain's.
    lower_bound_ : float
        Log-likelihood of rows not seen (nats per row), in the units of the table; of training rows
        where none are spared.
    consistency_ : dict
        How far answers in one pass (``accuracy="fast"``) are from those of the joint density, in
        nats per row of held-out rows: ``conditionals``, the median of ``|log p(x) - log p(x_S) -
        log p(x_T | x_S)|`` for random halves ``S`` of the columns, and ``orders``, the median
        standard deviation of ``log p`` over the saved orders. Empty for the joint method.
    learned_error_ : float
        Mean distance, in nats per row of held-out rows, of scores by the learned ``b`` from those
        by quadrature (``score_samples(X, normalizer="learned")``).
    n_iter_ : int
        Number of optimiser steps.
    rules_ : tuple of str
        What all rows obey, samples and imputations as well.
    fitted_to_ : dict
        Number of ``rows`` of the training table and a ``digest``, by which it is known again.
    held_out_ : array of int
        Which of its rows were held out to choose the best state.
    offset_ : float
        Score below which a row is called an outlier.
    unseen_decision_ : array (n,)
        :meth:`decision_function` of those training rows that were judged, by models that had not
        seen them (tables of up to 2,500 rows: all); NaN for others, and not saved.
    folds_ : Folds or None
        With ``keep_folds``: the densities that have not seen a fold each; not saved.
    method_ : str
        The method that was used.
    model_, proposal_ : EBM or TableChain, and the proposal of the former
        The distribution of rows as the model sees them (:meth:`standardise`).

    Examples
    --------
    >>> import numpy as np
    >>> from selfnorm import EnergyDensity
    >>> rng = np.random.default_rng(0)
    >>> table = {"kind": rng.choice(["a", "b"], 300), "size": rng.normal(size=300)}
    >>> density = EnergyDensity(random_state=0, max_steps=50).fit(table)
    >>> density.score_samples(table).shape
    (300,)
    >>> sorted(density.sample(2, random_state=0))
    ['kind', 'size']
    """

    distribution_: RowDistribution
    folds_: Folds | None
    _unseen: tuple[Tensor, Tensor]  # coded rows that were held out, and what codes leave open
    held_out_: np.ndarray
    fitted_to_: dict[str, int | str]
    n_iter_: int
    learned_error_: float

    def __init__(
        self,
        *,
        method: str = "auto",
        schema: Schema | dict[Any, str] | None = None,
        max_steps: int | None = None,
        max_time: float | str | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        hidden: int | None = None,
        n_init: int = 1,
        validation_fraction: float = 0.1,
        contamination: float | str = "auto",
        accuracy: str | int = "joint",
        device: str | None = None,
        random_state: RandomState = None,
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.schema = schema
        self.max_steps = max_steps
        self.max_time = max_time
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.hidden = hidden
        self.n_init = n_init
        self.validation_fraction = validation_fraction
        self.contamination = contamination
        self.accuracy = accuracy
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Tags:
        """Gaps and categories are welcome."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags

    @whole_or_not_at_all
    def fit(
        self,
        X: TableLike | SourceLike | Shards,
        y: object = None,  # noqa: ARG002 sklearn's signature
        sample_weight: ArrayLike | None = None,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        rules: Sequence[str | Mapping[Any, Any]] = (),
        keep_folds: bool = False,
        fabric: Fabric | Ranks | None = None,
    ) -> EnergyDensity:
        """Fit the distribution of the rows of the table ``X``; ``y`` is ignored.

        ``X`` may be in files of any number of rows, as :meth:`score_batches` takes them. Of more
        than 262,144 rows so many are kept, from which the schema (:meth:`Schema.scan`), the maps of
        the columns and the simple densities are read; all are packed into a file in the folder for
        temporary files, or beside the ``checkpoint``, and trained on from there.

        ``rules``: events that all rows obey, as :meth:`probability` takes them; a table with rows
        that break one is refused (but for gaps). Samples, imputations and answers then obey them;
        ``score_samples`` is of the density without them.

        A row counts by its ``sample_weight (n,)``: two as much as two such rows, 0 not at all (one
        energy over all columns is fitted to rows drawn by their weights). Progress is saved to the
        file ``checkpoint``, from which the same fit goes on after a kill; ``random_state=None`` is
        0 then.

        ``keep_folds``: leave every order of a chain as it was trained, without one of three folds
        of the rows, however many there are. Then :attr:`folds_` scores every training row as it
        scores rows to come; :class:`~selfnorm.tables.OutlierDetector` makes p-values of that.

        ``fabric``: a launched ``lightning_fabric.Fabric``, whose ranks all call ``fit`` with the
        same arguments and end with the same chain; each takes its share of every batch. Or a
        :class:`selfnorm.density.Ranks` of one: the numbers depend on ranks times its
        ``n_accumulate`` alone. ``random_state=None`` is 0 then, too.
        """
        check_parameters(self, _PARAMETERS)
        check_device(self.device)
        clock = Clock(self.max_time)
        ranks = fabric if isinstance(fabric, Ranks | None) else Ranks(fabric, 1, "per_piece")
        seed = seed_of(self.random_state, checkpoint or ranks)
        settings = self._settings(seed, clock, checkpoint)
        settings = dataclasses.replace(settings, keep_folds=keep_folds, ranks=ranks)
        shards = Shards.of(X) if is_source(X) else None
        if shards is not None and shards.n_rows <= SAMPLED_ROWS:
            X, shards = shards.table(), None
        if shards is not None:
            if sample_weight is not None or len(rules) or keep_folds:
                words = "sample_weight, rules and keep_folds are for tables that fit into memory"
                raise DataError(words)
            return self._fit_streamed(shards, settings)
        X, n = self._check(X, reset=True)
        if n < MINIMUM_ROWS:
            raise DataError(
                f"X has {n} sample(s); a density needs at least {MINIMUM_ROWS} rows "
                "(and some hundreds to be of use)"
            )
        X = Table.of(X)
        schema = self.schema if isinstance(self.schema, Schema) else Schema.detect(X, self.schema)
        if self.verbose:
            print(schema)
        x, open_ = schema.encode(X)
        _refuse_tiny(schema.parts, x)
        kept_rules = checked_rules(schema, X, rules)
        weights = np.ones(n) if sample_weight is None else checked_weights(sample_weight, n)
        counted = np.flatnonzero(weights > 0)
        if len(counted) < MINIMUM_ROWS:
            raise DataError(f"sample_weight is zero but for fewer than {MINIMUM_ROWS} rows")
        method = training.chosen_method(self.method, schema, torch.from_numpy(x))
        if ranks is not None and method == training.JOINT:
            raise DataError("fabric= is for chains: give method='autoregressive'")
        if keep_folds:
            method = ChainDistribution.method
        self.rules_ = kept_rules
        self.fitted_to_ = {"rows": n, "digest": digest(x)}
        if len(counted) < n:
            x, open_ = x[counted], open_[counted]
        coded, left_open, counts = map(torch.from_numpy, (x, open_, weights[counted]))
        rows = training.Rows(coded, left_open, counts)
        fit = self._fit_rows(rows, schema, method, settings)
        self.held_out_ = counted[fit.held_out]
        self.unseen_decision_ = np.full(n, np.nan)
        self.unseen_decision_[counted[fit.places.numpy()]] = self._ordinary(rows, fit)
        return self

    @whole_or_not_at_all
    def partial_fit(self, X: TableLike, y: object = None) -> EnergyDensity:  # noqa: ARG002 sklearn's signature
        """Go on training a chain on new rows; the first call is :meth:`fit`.

        The schema stays, and so do the maps of columns, the weights of :attr:`members_` and
        :attr:`offset_`. Rows of before, which the density does not keep, are stood for by as many
        draws from it (50,000 at most), so that new rows count by their number. Cells with levels
        that no row of the first fit had are counted in ``unseen_``, by column, and not learned.
        """
        if "distribution_" not in vars(self):
            return self.fit(X)
        if not isinstance(self.distribution_, ChainDistribution):
            raise DataError("partial_fit is for chains: fit with method='autoregressive'")
        n_before = int(self.fitted_to_["rows"])
        checked_rules(self.schema_, X, self.rules_)
        new, open_ = self._rows(X)
        never = (new[..., 0] == UNSEEN).sum(0).tolist()
        names = [part.name for part in self.schema_.parts]
        before = vars(self).get("unseen_", {})
        counts = dict(zip(names, never, strict=True))
        self.unseen_ = before | {k: n + before.get(k, 0) for k, n in counts.items() if n}
        settings = self._settings(seed_of(self.random_state), Clock(self.max_time), None)
        seed = stream(int(settings.options["seed"]), n_before)  # another one at every call
        drawn = torch.from_numpy(self.distribution_.sample(min(n_before, REPLAYED), seed))
        coded = torch.cat([drawn, new])
        weights = torch.ones(len(coded), dtype=torch.float64)
        weights[: len(drawn)] = n_before / len(drawn)
        rows = training.Rows(coded, torch.cat([torch.zeros_like(drawn[..., 0]), open_]), weights)
        self.distribution_, self.history_ = training.go_on(self.distribution_, rows, settings)
        self.n_iter_ += self.history_.n_steps
        self.fitted_to_ = {"rows": n_before + len(new), "digest": digest(new.numpy())}
        self.held_out_, self.folds_ = np.zeros(0, dtype=np.int64), None
        self._unseen, self.unseen_decision_ = (drawn[:0], open_[:0]), np.zeros(0)
        return self

    def _fit_streamed(self, shards: Shards, settings: training.Settings) -> EnergyDensity:
        """:meth:`fit` to more rows than memory holds: some of them are read off, all are trained
        on, from a file of packed rows.
        """
        if self.method == training.JOINT:
            raise DataError("method='joint' is for tables that fit into memory; use 'auto'")
        scan = Scan.of(shards)
        schema = self.schema
        if not isinstance(schema, Schema):
            schema = Schema.scan(scan, schema)
        if self.verbose:
            print(schema)
        coded, open_ = map(torch.from_numpy, schema.encode(scan.table))
        _refuse_tiny(schema.parts, coded.numpy())
        every = Streamed(shards, schema, scan, bool(self.verbose))
        rows = training.Rows(coded, open_, torch.ones(len(coded), dtype=torch.float64), every)
        self.rules_ = ()
        self.fitted_to_ = {"rows": len(every), "digest": every.fingerprint}
        fit = self._fit_rows(rows, schema, ChainDistribution.method, settings)
        self.held_out_ = scan.numbers[fit.held_out]
        self.unseen_decision_ = np.zeros(0)
        return self

    def _fit_rows(
        self, rows: training.Rows, schema: Schema, method: str, settings: training.Settings
    ) -> training.Trained:
        """Train on coded rows, and keep what came of it."""
        self.schema_, self.n_features_in_ = schema, len(schema.columns)
        self._measure, clock = schema.fingerprint, settings.clock
        fit = training.train(rows, schema.parts, method, settings)
        self.distribution_, self.folds_ = fit.distribution, fit.folds
        self.history_, self.n_iter_ = fit.history, fit.n_steps
        self.consistency_, self.learned_error_ = fit.consistency, fit.learned_error
        self._unseen = rows.coded[fit.held_out], rows.open_[fit.held_out]
        judgement = fit.judgement(rows)
        self.lower_bound_, self.offset_ = self._threshold(rows, fit, judgement, clock)
        self.judgement_ = dataclasses.replace(judgement, seconds=clock.gone)
        if self.verbose:
            print(self.judgement_)
        return fit

    def _ordinary(self, rows: training.Rows, fit: training.Trained) -> np.ndarray:
        """:meth:`decision_function` of the rows that were judged."""
        ordinary = fit.scores + fit.distribution.comparable(rows.coded[fit.places])
        return ordinary.numpy() - self.offset_

    @property
    def method_(self) -> str:
        """The method that was used."""
        return self.distribution_.method

    @property
    def members_(self) -> list[Member]:
        """The densities that were tried, chain or energy first."""
        return self.distribution_.members

    @property
    def model_(self) -> nn.Module:
        """The trained density of rows as it sees them: :meth:`standardise`."""
        return self.distribution_.model

    @property
    def proposal_(self) -> nn.Module | None:
        """The proposal of one energy over all columns."""
        return self.distribution_.proposal

    @on_cpu()
    def score_samples(self, X: TableLike, *, normalizer: str = "quadrature") -> np.ndarray:
        """Normalised log-likelihood ``(n,)`` of the rows of the table ``X``, in its units.

        The log of the mean over the saved orders of a chain. Missing cells are integrated out: the
        score is that of the row's other columns, with an error that :meth:`log_prob` tells. A value
        that was never seen has the probability that the schema reserves for such, and a warning
        names it. In batches of other sizes scores differ by less than 1e-5: normalisers of factors
        are in single precision.

        ``normalizer="learned"``: by the learned ``b`` of each factor, in one pass without
        quadrature; ``learned_error_`` says how far such scores are off.
        """
        pieces = self._pieces(X, PIECE)
        return np.concatenate([self._log_prob(*piece, normalizer).numpy() for piece in pieces])

    @on_cpu()
    def score_arrow(self, table: pa.Table, *, normalizer: str = "quadrature") -> pa.Table:
        """An Arrow table with ``log_density`` and ``outlier`` added: :meth:`score_batches` of one.

        The scores of a row without gaps are the same to the last digit, whatever other rows the
        table has.
        """
        ((coded, open_),) = self._pieces(table, None)
        scores, ordinary = self._scored(coded, open_, normalizer, steady=True)
        return with_columns(table, {"log_density": scores, "outlier": ~(ordinary >= 0)})

    def score_batches(
        self,
        source: SourceLike,
        sink: Sink,
        *,
        normalizer: str = "quadrature",
        progress: bool = True,
    ) -> dict[str, Any]:
        """Score a table of any number of rows: ``log_density`` and ``outlier`` beside its columns.

        Parameters
        ----------
        source : path, list of paths or pyarrow.dataset.Dataset
            Parquet or Arrow files: one, a folder of them, or a glob such as ``"data/*.parquet"``.
        sink : path or function
            A folder, which gets one Parquet file for each of the source; a file, where the source
            is one; or what takes one Arrow table after the other. A file appears when it is whole.
            The same call goes on after a kill with those that are missing.
        normalizer : {"quadrature", "learned"}
            As in :meth:`score_samples`.
        progress : bool, default True
            Show a progress bar, in terminals.

        Returns
        -------
        dict
            Numbers of ``rows``, of ``files`` that were written and of those ``kept``.

        Examples
        --------
        >>> import tempfile
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> rows = pa.table({"size": np.random.default_rng(0).normal(size=300)})
        >>> density = EnergyDensity(random_state=0, max_steps=5).fit(rows)
        >>> folder = Path(tempfile.mkdtemp())
        >>> pq.write_table(rows, folder / "rows.parquet")
        >>> density.score_batches(folder, folder / "scored")
        {'rows': 300, 'files': 1, 'kept': 0}
        >>> pq.read_table(folder / "scored").column_names
        ['size', 'log_density', 'outlier']
        """
        _check_normalizer(normalizer)

        def scored(table: pa.Table, _: int) -> pa.Table:
            return self.score_arrow(table, normalizer=normalizer)

        key = self._made_by("score", normalizer=normalizer)
        return streaming.write(pieces_of(source, key, scored), sink, progress)

    def impute_batches(
        self,
        source: SourceLike,
        sink: Sink,
        *,
        random_state: RandomState = 0,
        progress: bool = True,
    ) -> dict[str, Any]:
        """:meth:`impute` a table of any number of rows; arguments as of :meth:`score_batches`."""
        seed = seed_of(random_state)

        def imputed(table: pa.Table, first: int) -> pa.Table:
            return self.impute(table, random_state=stream(seed, first))

        key = self._made_by("impute", seed=seed, accuracy=self.accuracy)
        return streaming.write(pieces_of(source, key, imputed), sink, progress)

    def sample_batches(
        self,
        n_samples: int,
        sink: Sink,
        *,
        random_state: RandomState = 0,
        progress: bool = True,
        **how: Any,
    ) -> dict[str, Any]:
        """:meth:`sample` any number of rows, a million a file; ``sink`` as of
        :meth:`score_batches`, and the rest as of :meth:`sample`.
        """
        seed, n_rows = seed_of(random_state), whole_number("n_samples", n_samples)

        def drawn(first: int, n: int) -> Iterator[pa.Table]:
            for start in range(first, first + n, DRAWN_ROWS):
                size = min(DRAWN_ROWS, first + n - start)
                yield arrow_table(self.sample(size, random_state=stream(seed, start), **how))

        key = self._made_by("sample", seed=seed, **how)
        one_file = isinstance(sink, str | Path) and Path(sink).suffix.lower() in FORMATS
        in_file = n_rows if one_file else SAMPLES_PER_FILE
        pieces = []
        for k, first in enumerate(range(0, n_rows, in_file)):
            n = min(in_file, n_rows - first)
            own = key | {"first": first, "rows": n}
            pieces.append(Piece(f"part-{k:05}.parquet", n, own, partial(drawn, first, n)))
        return streaming.write(pieces, sink, progress)

    def _made_by(self, task: str, **options: Any) -> dict[str, Any]:
        """What files of results are known by: model, task and options, as JSON holds them."""
        state = [*self.model_.state_dict().values(), torch.tensor(self.distribution_.weights)]
        key = {"task": task, "model": fingerprint(state), "schema": self.schema_.fingerprint}
        made_by: dict[str, Any] = json.loads(json.dumps(key | options, default=repr))
        return made_by

    def log_mass(self, X: TableLike) -> np.ndarray:
        """The same as :meth:`score_samples`, where whole numbers have probabilities already."""
        return self.score_samples(X)

    def score(self, X: TableLike, y: object = None) -> float:  # noqa: ARG002 sklearn's signature
        """Mean log-likelihood of the rows of ``X`` (nats per row)."""
        return float(np.mean(self.score_samples(X)))

    def decision_function(self, X: TableLike) -> np.ndarray:
        r"""How ordinary rows are ``(n,)``: negative for outliers, whatever the units.

        ``score_samples(X) - offset_`` for a row of continuous numbers. Densities and probabilities
        in one column (a number, a point mass) are made comparable by taking a number as recorded to
        a thousandth of the distance between its quartiles; a gap counts as much as its column does
        on average, so that a row is not called ordinary for having few cells.
        """
        return self.scored(X)[1]

    @on_cpu()
    def scored(
        self, X: TableLike, *, normalizer: str = "quadrature"
    ) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`score_samples` and :meth:`decision_function` of rows, in the time of one."""
        pieces = [self._scored(*piece, normalizer) for piece in self._pieces(X, PIECE)]
        scores, ordinary = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        return scores, ordinary

    def _scored(
        self,
        coded: Tensor,
        open_: Tensor,
        normalizer: str = "quadrature",
        *,
        steady: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same of coded rows."""
        scores = self._log_prob(coded, open_, normalizer, steady=steady)
        ordinary = scores + self.distribution_.comparable(coded)
        return scores.numpy(), ordinary.numpy() - self.offset_

    def predict(self, X: TableLike) -> np.ndarray:
        """``1`` for inliers, ``-1`` for rows whose :meth:`decision_function` is negative."""
        return np.where(self.decision_function(X) >= 0, 1, -1)

    @on_cpu()
    def log_prob(
        self, X: TableLike, given: Sequence[Hashable] = (), *, return_std: bool = False
    ) -> Any:
        """``log p(x | x_given)`` ``(n,)`` of rows, given the columns that are named.

        That of the joint density: what ``X`` does not have, gaps included, is integrated out by
        weighted draws (see ``accuracy``). With ``return_std`` a second array has the standard
        errors, of drawing alone: zero where all cells are there, and where few values or one line
        are summed.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> table = {"kind": rng.choice(["a", "b"], 300), "size": rng.normal(size=300)}
        >>> density = EnergyDensity(random_state=0, max_steps=50).fit(table)
        >>> density.log_prob(table, given=["size"]).max() < 0     # of "kind": a probability
        np.True_
        """
        coded, open_ = self._rows(X, partial=True)
        if len(given):
            mask = mask_of(self.schema_, given)
            log_p, se = self.distribution_.conditional(coded, mask, self._effort)
            open_ = open_.where((coded[..., 0] != GAP) & ~mask, 0.0)
        else:
            log_p, se = self.distribution_.marginal(coded, self._effort)
        scores = (log_p + open_.sum(-1)).numpy()
        return (scores, se.numpy()) if return_std else scores

    @on_cpu()
    def sample(
        self,
        n_samples: int = 1,
        random_state: RandomState = None,
        given: TableLike | None = None,
        *,
        where: Asked = None,
        missing: bool = False,
    ) -> Any:
        """Draw rows: a table of the kind that was fitted, complete, with its names and types.

        Numbers come within the range that the training rows have: those beyond it, at its ends.
        One or two continuous numbers follow the density beyond it, as far as their limits.

        Parameters
        ----------
        n_samples : int
            Number of rows, for each row of ``given``.
        random_state : int, RandomState, Generator or None
        given : dict or table, default None
            Values that the rows are to have, by column: ``{"sex": "F"}``; or a table with some of
            the columns, each of whose rows is completed ``n_samples`` times, one after the other.
            Its gaps are drawn.
        where : str, dict or function, default None
            An event that every row obeys, as :meth:`probability` takes it: ``"age > 50"``. With
            ``given`` a dict.
        missing : bool, default False
            Whether rows have gaps as the training rows do; the schema must model them:
            ``schema=Schema.detect(table, model_gaps=True)``.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> size = np.where(rng.random(300) < 0.3, np.nan, rng.normal(size=300))
        >>> table = {"kind": rng.choice(["a", "b"], 300), "size": size}
        >>> schema = Schema.detect(table, model_gaps=True)
        >>> density = EnergyDensity(schema=schema, random_state=0, max_steps=50).fit(table)
        >>> share = np.isnan(density.sample(1000, random_state=0, missing=True)["size"]).mean()
        >>> 0.2 < share < 0.4
        np.True_
        """
        check_is_fitted(self)
        whole_number("n_samples", n_samples)
        if missing and not any(part.gap for part in self.schema_.parts):
            raise DataError(
                "this model does not know where gaps fall: fit it with "
                "schema=Schema.detect(table, model_gaps=True), of a table that has some"
            )
        seed = seed_of(random_state)
        if where is not None or (self.rules_ and given is None):
            if not isinstance(given, Mapping | None):
                raise DataError("with where=, given= is a dict of columns and their values")
            event = Event.every([Event.of(self.schema_, asked) for asked in (given, where)])
            return self._questions.sample(int(n_samples), seed, event, missing)
        if given is not None:
            return self._complete(given, int(n_samples), seed, missing)
        drawn = self.distribution_.sample(int(n_samples), seed, missing)
        return self.schema_.decode(self.schema_.within_seen(drawn), seed)

    @on_cpu()
    def probability(
        self, event: Asked | list[Any], given: Asked = None, *, random_state: RandomState = 0
    ) -> Any:
        """The probability of an event, given another: an :class:`~selfnorm.tables.Estimate`.

        An event is text, ``"age > 50 and sex == 'F'"``: comparisons (chains of them, too) of
        columns with constants, other columns or arithmetic of these, ``in [...]``, ``is missing``,
        ``and``, ``or``, ``not``; a name with other signs goes in backticks, a date in quotes. Or a
        dict of values, lists and ranges ``(low, high)``; or a function of tables that returns truth
        values. A comparison with a gap is false. A list of events has a list of answers.

        Limits of single columns are exact within the factor of each column, so that rare events
        cost no more than others; the rest is counted. The interval is of the error of drawing, not
        of that of the model.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> table = {"kind": rng.choice(["a", "b"], 300), "size": rng.normal(size=300)}
        >>> density = EnergyDensity(random_state=0, max_steps=50).fit(table)
        >>> density.probability("size > 0", given={"kind": "a"}).reliable
        True
        """
        check_is_fitted(self)
        given, questions = Event.of(self.schema_, given), self._questions
        seed = seed_of(random_state)
        many = event if isinstance(event, list | tuple) else [event]
        estimates = [
            questions.probability(Event.of(self.schema_, one), given, seed) for one in many
        ]
        return estimates if isinstance(event, list | tuple) else estimates[0]

    @on_cpu()
    def expect(
        self,
        column: Hashable,
        where: Asked = None,
        by: Hashable | None = None,
        given: Asked = None,
        *,
        quantiles: Sequence[float] = (0.05, 0.5, 0.95),
        random_state: RandomState = 0,
    ) -> Any:
        """Mean and quantiles of a column of numbers, where an event holds.

        A tuple ``(mean, quantiles, probability)``: two :class:`~selfnorm.tables.Estimate` and a
        dict; ``probability`` is that of having the level of ``by`` among the rows that are asked
        of. With ``by``, a column of labels, a dict of these.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> table = {"kind": rng.choice(["a", "b"], 300), "size": rng.normal(size=300)}
        >>> density = EnergyDensity(random_state=0, max_steps=50).fit(table)
        >>> sorted(density.expect("size", where="size > 0", by="kind"))
        ['a', 'b']
        """
        check_is_fitted(self)
        event = Event.every([Event.of(self.schema_, asked) for asked in (where, given)])
        return self._questions.expect(column, event, by, quantiles, seed_of(random_state))

    @on_cpu()
    def impute(self, X: TableLike, n_draws: int = 1, random_state: RandomState = None) -> Any:
        """The table with its gaps filled by draws, given all that is seen in the row.

        Returns a table of the kind that came in, or a list of ``n_draws`` of them where there is to
        be more than one. What was there stays as it is.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> table = {"kind": rng.choice(["a", "b"], 300), "size": rng.normal(size=300)}
        >>> density = EnergyDensity(random_state=0, max_steps=50).fit(table)
        >>> filled = density.impute({"kind": ["a", None], "size": [0.25, 1.5]}, random_state=0)
        >>> filled["kind"][0], filled["kind"][1] in ("a", "b"), filled["size"]
        ('a', True, [0.25, 1.5])
        """
        coded, _ = self._rows(X)
        whole_number("n_draws", n_draws)
        seed = seed_of(random_state)
        drawn = self._drawn(coded.repeat(n_draws, 1, 1), seed)
        rng = np.random.default_rng(seed)
        tables = [self.schema_.fill(X, rows, rng) for rows in np.split(drawn, n_draws)]
        return tables[0] if n_draws == 1 else tables

    def marginal(self, columns: Sequence[Hashable]) -> Marginal:
        """The distribution of some of the columns, the others unknown: its scores and samples."""
        check_is_fitted(self)
        return Marginal(self.schema_, self.distribution_, columns, self._effort)

    @on_cpu()
    def probabilities(self, X: TableLike, column: Hashable) -> Any:
        """Probabilities of the levels of a column, given the others: a classifier.

        A table of the kind that came in with a column for each level; they add to one. Of numbers
        with point masses, each of these, and ``"other"`` for the numbers between. The levels are
        those of the schema: ``schema_.columns``. That there is a value is given.

        Those of the joint density; with ``accuracy="fast"`` predicted by the network, as in
        :meth:`log_prob`.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> table = {"kind": rng.choice(["a", "b"], 300), "size": rng.normal(size=300)}
        >>> density = EnergyDensity(random_state=0, max_steps=50).fit(table)
        >>> found = density.probabilities({"size": [0.5, 1.5]}, "kind")
        >>> sorted(found), np.allclose(found["a"] + found["b"], 1)
        (['a', 'b'], True)
        """
        coded, _ = self._rows(X, partial=True)
        places = self.schema_.parts_of([column])
        described = next(c for c in self.schema_.modelled if c.name == column)
        part = self.schema_.parts[places[0]]
        n_levels = part.n_codes - part.gap
        if len(places) > 1 or (part.rest and not n_levels) or described.counted_from:
            raise DataError(
                f"column {column!r} is {described.kind}: it has no levels to give probabilities of;"
                " draw from it with sample(given=...)"
            )
        coded[:, places, 0] = GAP
        log_codes = self.distribution_.log_codes(coded, places[0], self._effort, 0)
        if part.gap:
            log_codes[:, n_levels] = -torch.inf
        codes = torch.softmax(log_codes, -1).numpy()
        levels = part.values or described.levels
        integers = described.numeric and described.decimals == 0
        names = [int(level) if integers else level for level in levels]
        shares = dict(zip(names, codes.T, strict=False))
        if part.rest:
            shares["other"] = codes[:, -1]
        rare = codes[:, len(described.levels) :]
        tail = zip(described.tail, described.tail_shares, strict=True)
        return numbers_like(X, shares | {level: rare[:, 0] * share for level, share in tail})

    @on_cpu()
    def explain(self, X: TableLike) -> Any:
        r"""How ordinary each cell is, given the rest of its row: a table of the kind that came in.

        The probability that a draw from ``p(x_j | rest)`` is at most as probable as what was seen:
        0.001 says that one draw in a thousand is as unusual. NaN at gaps, where the schema does not
        model them. It does not depend on units, and compares numbers with point masses as
        :meth:`decision_function` does. Of a date, whose week, day and hour are looked at one by
        one, the least one, made up for their number. Columns that are set aside are left out; those
        of an array are NaN.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> table = {"kind": rng.choice(["a", "b"], 300), "size": rng.normal(size=300)}
        >>> density = EnergyDensity(random_state=0, max_steps=50).fit(table)
        >>> found = density.explain({"kind": ["a", "b"], "size": [0.1, 50.0]})
        >>> found["size"][1] < 0.01 < found["size"][0]
        np.True_
        """
        coded, _ = self._rows(X)
        of_parts, tails = self.distribution_.explain(coded), {}
        for column in self.schema_.columns:
            if column.modelled:
                places = self.schema_.parts_of([column.name])
                tails[column.name] = 1 - (1 - of_parts[:, places].min(1)) ** len(places)
            elif isinstance(X, np.ndarray | list | Tensor):  # by position
                tails[column.name] = np.full(len(coded), np.nan)
        return numbers_like(X, tails)

    @on_cpu()
    def reasons(self, X: TableLike, *, random_state: RandomState = 0) -> list[Reason]:
        """Why rows are strange: for each the columns to blame, by :meth:`explain`, and the most
        probable values of these given all others, among some draws. Columns are added, three at
        most, until the row is ordinary; ``str(reason)`` says "would be ordinary with fare = 26".
        """

        def decision(coded: Tensor) -> np.ndarray:
            return self._scored(coded, torch.zeros(coded.shape[:2], dtype=torch.float64))[1]

        coded, seed = self._rows(X)[0], seed_of(random_state)
        return reasons_of(self.schema_, self.distribution_, coded, decision, seed)

    @on_cpu()
    def compare(
        self,
        X: TableLike,
        reference: TableLike | None = None,
        *,
        random_state: RandomState = 0,
    ) -> Drift:
        """Has the distribution changed? New rows against reference rows, as they come.

        A :class:`~selfnorm.tables.Drift`: an e-value after every row, which may be watched for as
        long as one likes (as rows are added, what was said of those before stays), the change of
        the mean log-density, and the columns to blame, each given all others.

        ``reference``: rows as they were, which were not trained on; of the training table, which is
        known again, the rows that were held out. By default these, until the density is saved.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> a, b = rng.normal(size=(2, 400))
        >>> density = EnergyDensity(random_state=0, max_steps=50).fit({"a": a, "b": a + b / 9})
        >>> b = rng.normal(size=200)
        >>> density.compare({"a": b[::-1], "b": b}, {"a": b, "b": b + a[:200] / 9}).alarm() < 50
        True
        """
        new, before = self._rows(X)[0], self._reference(reference)[0]
        seed = seed_of(random_state)
        return drift_of(self.schema_, self.distribution_, new, before, seed)

    @on_cpu()
    def p_values(
        self,
        X: TableLike,
        reference: TableLike | None = None,
        *,
        random_state: RandomState = 0,
    ) -> np.ndarray:
        """``(n,)``: how often a normal row has as low a :meth:`decision_function` as each of these.

        ``reference``: normal rows, as :meth:`compare` takes them. For a row that could be one of
        them ``P(p <= a) = a``, whatever the density; ties are broken at random.
        """
        of_rows, usual = (
            -np.round(self._scored(*rows)[1], 3)
            for rows in (self._rows(X), self._reference(reference))
        )
        ties = np.random.default_rng(seed_of(random_state)).random((len(of_rows),))
        return conformal(usual, of_rows, ties)

    def _reference(self, reference: TableLike | None) -> tuple[Tensor, Tensor]:
        """Coded rows that were not trained on, and what their codes leave open."""
        coded, open_ = self._unseen
        if reference is not None:
            coded, open_ = self._rows(reference)
            if self.fitted_to_.get("digest") == digest(coded.numpy()):
                coded, open_ = coded[self.held_out_], open_[self.held_out_]
        if len(coded) == 0:
            raise DataError(
                "all training rows were trained on: give others as reference= (--reference), such "
                "as those of last month"
            )
        return coded, open_

    @on_cpu()
    def bounds(
        self, X: TableLike, n_samples: int = 20_000, random_state: RandomState = None
    ) -> Bounds:
        """Lower and upper bound of the mean log-likelihood of ``X``, and whether to trust them.

        Tables of finite columns have an exact normaliser: both are the score. ``a.minus(b)``
        compares two models, and warns where their schemas have different measures.
        """
        coded, open_ = self._rows(X)
        bounds = self.distribution_.bounds(coded, open_, n_samples, seed_of(random_state))
        return dataclasses.replace(bounds, measure=self.schema_.fingerprint)

    @on_cpu()
    def report(
        self,
        X: TableLike,
        path: str | os.PathLike[str],
        *,
        train: TableLike | None = None,
        about: About | None = None,
        random_state: RandomState = 0,
    ) -> Path:
        """Write a report on the model and the rows of ``X``: one HTML file that needs no network.

        A verdict, what was fitted, the likelihood against simple models of the same measure,
        columns and pairs, the strangest rows with the columns to blame, training. Needs matplotlib.

        Parameters
        ----------
        X : table
            Rows that were not trained on judge fairly. Of the training table, which is known
            again, the rows that were held out are judged.
        path : str or path
            File to write, ``.html``.
        train : table, default None
            What the simple models are fitted to; by default the rest of ``X``, fold by fold.
        about : About, default None
            Names for the reader: ``selfnorm.report.About(source=, folder=, title=)``.
        random_state : int, RandomState, Generator or None
            For samples and folds.

        Examples
        --------
        >>> import tempfile
        >>> X = np.random.default_rng(0).normal(size=(100, 1))
        >>> density = EnergyDensity(random_state=0, max_steps=5).fit(X)
        >>> density.report(X, f"{tempfile.mkdtemp()}/report.html").name
        'report.html'
        """

        def page(rows: tuple[Tensor, Tensor], unseen: list[str]) -> str:
            again = self.fitted_to_.get("digest") == digest(rows[0].numpy())
            return DensityReport(
                estimator=self,
                table=Table.of(X),
                coded=rows,
                scored=self._scored,
                train=train,
                held_out=self.held_out_ if again else None,
                unseen=unseen,
                about=about or About(),
                seed=seed_of(random_state),
            ).html()

        return write_report(path, lambda: self._rows(X), page)

    def facts(self) -> dict[str, str]:
        """What was fitted, in words; empty before the fit."""
        if "judgement_" not in vars(self):
            return {}
        kinds = [f"{column.name} ({column.kind})" for column in self.schema_.columns]
        rows = f"{self.fitted_to_['rows']:,} rows"
        answers_ = {}
        if self.consistency_:
            off = self.consistency_["conditionals"]
            answers_ = {"answers in one pass": f"{off:.2g} nats from the joint (median row)"}
            off = self.learned_error_
            answers_["scores by the learned b"] = f"{off:.2g} nats from those by quadrature"
        return {
            "fitted to": f"{rows} of {self.n_features_in_} columns",
            "method": f"{self.method_}: {self.distribution_.words}",
            "judged": str(self.judgement_),
            **answers_,
            "columns": shortened(kinds),
            "measure": self.schema_.fingerprint,
        }

    @on_cpu()
    def standardise(self, X: TableLike) -> Tensor:
        """The rows of ``X`` as ``model_`` sees them: ``(n, d)``, of a chain ``(n, p, 4)``."""
        coded, _ = self._rows(X)
        return self.distribution_.pack(coded)

    def _loaded(self) -> None:
        """Refuse what no fit gives, and complete what is not saved."""
        check_parameters(self, _PARAMETERS)
        weights = [member.weight for member in self.members_]
        if (
            min(weights, default=-1) < 0
            or not math.isclose(sum(weights), 1.0, abs_tol=1e-6)
            or sum(weight > 0 for weight in weights)
            != len(self.distribution_.simple) + (weights[0] > 0)
        ):
            raise ValueError("the weights of the members are no shares of its densities")
        if self.schema_.fingerprint != self._measure:
            raise ModelFileError("the schema is not the one that was fitted; fit it again")
        with suppress(ImportError):  # what writes such tables is perhaps not installed
            row = np.zeros((1, len(self.schema_.parts), 2))
            self.schema_.decode(row, 0)  # or a form that is none fails in sample()
        self.unseen_decision_, self.folds_ = np.zeros(0), None
        self._unseen = torch.zeros(0), torch.zeros(0)
        for rule in self.rules_:
            Event.of(self.schema_, rule)
        self.__dict__.setdefault("n_iter_", self.history_.n_steps)  # of a folder that has none
        self.__dict__.setdefault("learned_error_", math.nan)

    # -- training -------------------------------------------------------------------------------

    def _settings(self, seed: int, clock: Clock, checkpoint: Any) -> training.Settings:
        """How to train, by what the user stated."""
        options = {
            "max_steps": self.max_steps,
            "batch_size": self.batch_size,
            "lr": self.learning_rate,
            "weight_decay": self.weight_decay,
            "seed": seed,
            "progress": self.verbose,
        }
        return training.Settings(
            sizes={} if self.hidden is None else {"hidden": self.hidden},
            options={name: value for name, value in options.items() if value is not None},
            n_init=int(self.n_init),
            validation_fraction=self.validation_fraction,
            device=self.device or "cpu",
            checkpoint=checkpoint,
            clock=clock,
        )

    def _threshold(
        self, rows: training.Rows, fit: training.Trained, judgement: Judgement, clock: Clock
    ) -> tuple[float, float]:
        """Log-likelihood, and the threshold of outliers, by rows not seen if there are any."""
        places, scores = fit.places, fit.scores
        if self.contamination != "auto" or len(places) == 0:
            places = fit.sampled
            # one pass by the learned b, if rows are many or time is short: it tells a threshold
            many = len(rows) > training.SCORED_ROWS and not fit.by_folds
            quick = many or math.isfinite(clock.total)
            normalizer = "learned" if quick else "quadrature"
            log_p = fit.distribution.log_prob(rows.coded[places], normalizer)
            scores = log_p + rows.open_[places].sum(-1)
        score = judgement.score if math.isfinite(judgement.score) else float(scores.mean())
        comparable = (scores + fit.distribution.comparable(rows.coded[places])).numpy()
        rare = RARE if self.contamination == "auto" else float(self.contamination)
        return score, float(np.percentile(comparable, 100.0 * rare))

    # -- rows -----------------------------------------------------------------------------------

    def _check(self, X: Any, *, reset: bool) -> tuple[Any, int]:
        """The table and its number of rows; its columns are as scikit-learn has them checked."""
        kind = type(X)  # a column of a frame may have the name of a method, too
        if hasattr(kind, "toarray"):
            raise DataError("X is a sparse matrix; give a dense one: X.toarray()")
        named = False
        if not isinstance(X, np.ndarray | list | tuple):
            table = Table.of(X)
            if table.kind in ("dict", "arrow", "tensor"):  # other columns do not matter
                return X, table.n_rows
            X, named = table.frame, table.kind in ("pandas", "polars")
        if not named:
            X = np.ma.asarray(X) if np.ma.isMA(X) else np.asarray(X)
        if getattr(X, "dtype", np.dtype(float)).kind == "c":
            raise DataError("Complex data not supported: give real and imaginary parts as columns")
        if len(X.shape) != 2:
            raise DataError(
                f"X must have rows and columns, got shape {X.shape}. Reshape your data: "
                "X.reshape(-1, 1) if it is a single column, X.reshape(1, -1) if a single row, "
                "pandas.DataFrame(X) if records with named fields"
            )
        if 0 in X.shape:
            what = "sample(s)" if X.shape[0] == 0 else "feature(s)"
            raise DataError(f"X has 0 {what} (shape={X.shape}) while a minimum of 1 is required.")
        if not reset and named and only_lacks_asides(X, self.schema_):
            return X, int(X.shape[0])  # samples, too, have no columns that were set aside
        # names that are not all text are the schema's to compare
        text = all(isinstance(name, str) for name in getattr(X, "columns", ()))
        with own_errors():
            checked = X if text else np.broadcast_to(0.0, X.shape)
            validate_data(self, checked, reset=reset, skip_check_array=True)
        return X, int(X.shape[0])

    def _rows(self, X: TableLike, *, partial: bool = False) -> tuple[Tensor, Tensor]:
        """Coded rows ``(n, p, 2)``, and the log-probability that codes leave open ``(n, p)``."""
        (rows,) = self._pieces(X, None, partial=partial)
        return rows

    def _pieces(
        self, X: TableLike, n_rows: int | None, *, partial: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The same, some rows at a time."""
        check_is_fitted(self)
        if not partial:
            X, _ = self._check(X, reset=False)
        for x, open_ in self.schema_.pieces(X, n_rows, partial=partial):
            yield torch.from_numpy(x), torch.from_numpy(open_)

    @property
    def _effort(self) -> Effort | None:
        """How many draws answers take."""
        return Effort.of(self.accuracy)

    @property
    def _questions(self) -> Questions:
        """What can be asked about events."""
        effort = self._effort or Effort()
        return Questions(self.schema_, self.distribution_, effort, self.rules_)

    def _log_prob(
        self,
        coded: Tensor,
        open_: Tensor,
        normalizer: str = "quadrature",
        *,
        steady: bool = False,
    ) -> Tensor:
        """Log-likelihood ``(n,)`` of coded rows, in the units of the table.

        Rows with gaps are integrated out where that is asked for. Others are scored in ``steady``
        pieces by the learned ``b``, which is fastest in these.
        """
        _check_normalizer(normalizer)
        if normalizer == "quadrature" and not steady:
            return self.distribution_.marginal(coded, self._effort)[0] + open_.sum(-1)
        log_p = torch.zeros(len(coded), dtype=torch.float64)
        gaps = (coded[..., 0] == GAP).any(-1) & (self._effort is not None)
        if bool(gaps.any()):
            log_p[gaps] = self.distribution_.marginal(coded[gaps], self._effort)[0]
        if not bool(gaps.all()):
            log_p[~gaps] = self.distribution_.steady_log_prob(coded[~gaps], normalizer)
        return log_p + open_.sum(-1)

    def _complete(self, given: TableLike, n_samples: int, seed: int, missing: bool) -> Any:
        """Rows with some of the values given, each ``n_samples`` times."""
        if isinstance(given, Mapping):
            one = {k: v for k, v in given.items() if isinstance(v, str) or not np.ndim(v)}
            if len(one) == len(given):
                given = {name: [value] for name, value in given.items()}
            self.schema_.parts_of(list(given), alone=True)  # names that are not there
        coded, _ = self._rows(given, partial=True)
        unseen = (coded[..., 0] == UNSEEN).any(0).tolist()
        if any(unseen):
            names = [self.schema_.parts[j].name for j, odd in enumerate(unseen) if odd]
            raise DataError(
                f"rows cannot be given a value that was never seen in training: {names}"
            )
        drawn = self._drawn(coded.repeat_interleave(n_samples, 0), seed, missing)
        return self.schema_.decode(drawn, seed)

    def _drawn(self, coded: Tensor, seed: int, missing: bool = False) -> np.ndarray:
        """Coded rows ``(n, p, 2)`` with their gaps drawn, given the rest of the row."""
        seen = torch.from_numpy(~self.schema_.is_gap(coded.numpy()))
        if self._effort is None and not self.rules_:
            drawn = self.distribution_.complete(coded, seen, seed, missing)
            return self.schema_.within_seen(drawn, seen.numpy())
        return self._questions.completed(coded, seen, seed, missing)


def _check_normalizer(normalizer: str) -> None:
    if normalizer not in ("learned", "quadrature"):
        raise ValueError(f"normalizer must be 'learned' or 'quadrature', not {normalizer!r}")


def _refuse_tiny(parts: Sequence[Part], x: np.ndarray) -> None:
    """Refuse numbers of coded rows ``(n, p, 2)`` that are too close to each other to be told apart.

    Example:
        >>> part = Part(0, "mass", 0, rest=True)
        >>> _refuse_tiny([part], np.array([[[0.0, 1e-50]], [[0.0, 3e-50]]]))
        Traceback (most recent call last):
        selfnorm.errors.DataError: column 'mass' varies by as little as 2e-50; multiply it
    """
    problems = []
    for part, (code, number) in zip(parts, np.moveaxis(x, 0, -1), strict=True):
        spread = np.ptp(number[code == part.n_codes]) if (code == part.n_codes).any() else 0.0
        if 0 < spread < _SMALLEST_SPREAD:
            problems.append(
                f"column {part.name!r} varies by as little as {spread:.0e}; multiply it"
            )
    if problems:
        raise DataError.of(problems)
