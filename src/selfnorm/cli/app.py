"""The command line: ``selfnorm --help``.

Input is read and checked before anything is trained or written; output appears whole or not at all.
A refused request is one line on stderr and exit code 2 (see :func:`run`). What needs torch is
imported where it is used, after tables and names are checked: help and refusals come at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from glob import has_magic
from importlib import import_module
from inspect import Parameter, Signature, signature
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import numpy as np
import typer
from typer import Argument, Option
from typer.core import TyperGroup

import selfnorm
from selfnorm.cli import Stopped
from selfnorm.cli.files import (
    SUFFIXES,
    Table,
    check_output,
    kind_of,
    missing,
    numeric,
    read_table,
    table_of,
    write_table,
)
from selfnorm.columns import FORMATS, SAMPLED_ROWS, Shards
from selfnorm.columns import Table as Frame
from selfnorm.errors import DataError, ModelFileError, SelfnormError, SelfnormWarning, listed

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped from None


class _Commands(TyperGroup):
    """Commands whose interrupts ``main`` reports, not click."""

    make_context = _interruptible()(TyperGroup.make_context)
    invoke = _interruptible()(TyperGroup.invoke)


app = typer.Typer(
    name="selfnorm",
    cls=_Commands,
    help="Energy-based models that are normalised, for tables: fit one, then ask it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

paper = typer.Typer(
    help="Reproduce a table of the paper; finished rows in --out are kept, so it can be resumed.",
    no_args_is_help=True,
)
app.add_typer(paper, name="reproduce")

NOT_RELIABLE = 3

DataFile = Annotated[Path, Argument(help="Table: .csv, .tsv, .parquet, .npy or .npz.")]
Header = Annotated[
    bool | None,
    Option("--header/--no-header", help="Whether line 1 of a text table is names; else a guess."),
]
ModelFolder = Annotated[Path, Argument(help="Folder written by 'selfnorm fit'.")]
ManyFiles = Annotated[
    Path,
    Argument(help="Table; or a folder or 'glob' of Parquet or Arrow files, read some at a time."),
]
TableOut = Annotated[Path, Option("--output", "-o", help="Table to write.")]
FilesOut = Annotated[
    Path, Option("--output", "-o", help="Table to write; a folder, of more rows than memory.")
]
Normalizer = Annotated[
    str, Option(help="quadrature, or learned: one pass, several times as fast, off a little.")
]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON, for scripts.")]
Seed = Annotated[int | None, Option(help="Same seed, same numbers.")]
Device = Annotated[str, Option(help="'cpu' or 'cuda'.")]
Progress = Annotated[bool, Option(help="Show progress bars.")]
DataDir = Annotated[Path | None, Option(help="Data directory; default $SELFNORM_DATA.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfnorm {selfnorm.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    del version


@dataclass(frozen=True)
class _FitOptions:
    """What ``selfnorm fit`` is given."""

    data: ManyFiles
    output: Annotated[Path, Option("--output", "-o", help="Folder for the model.")]
    target: Annotated[
        str | None, Option(help="Fit p(target | other columns) instead of a density.")
    ] = None
    columns: Annotated[str | None, Option(help="Use only these columns (comma-separated).")] = None
    drop: Annotated[str | None, Option(help="Leave these columns out.")] = None
    kinds: Annotated[
        str | None,
        Option(
            help="What columns are, where the rules would say otherwise, e.g. zip=category,"
            "day=date: continuous, cells, category, date, angle or ignore (density only)."
        ),
    ] = None
    method: Annotated[str, Option(help="auto, joint or autoregressive (density only).")] = "auto"
    max_steps: Annotated[int | None, Option(min=1, help="Training steps (density only).")] = None
    max_time: Annotated[str | None, Option(help="Time for the fit, e.g. 90s or 5min.")] = None
    max_epochs: Annotated[
        int | None, Option(min=1, help="Passes over the data (with --target only).")
    ] = None
    contamination: Annotated[
        float | None,
        Option(help="Share of training rows to call outliers (density only); 1 % of unseen rows."),
    ] = None
    model_gaps: Annotated[
        bool, Option("--model-gaps", help="Model which cells are missing, too (density only).")
    ] = False
    rule: Annotated[
        list[str] | None,
        Option(help="Event that every row obeys, 'paid <= price' (density only, repeatable)."),
    ] = None
    checkpoint: Annotated[
        Path | None,
        Option(help="File for the progress of a long fit: the same command goes on from it."),
    ] = None
    device: Device = "cpu"
    seed: Seed = 0
    force: Annotated[bool, Option(help="Replace a model that is there, unless stopped.")] = False
    progress: Progress = True
    header: Header = None
    as_json: AsJson = False

    @property
    def replaces(self) -> bool:
        """Whether there is something in the folder of the model."""
        return self.output.is_dir() and any(self.output.iterdir())

    @property
    def common(self) -> dict[str, Any]:
        """Parameters that all estimators have."""
        return {
            "device": self.device,
            "random_state": self.seed,
            "verbose": self.progress,
            "max_time": self.max_time,
        }

    def check(self) -> None:
        """Refuse what cannot be, before anything is read."""
        _check_folder(self.output)
        if self.replaces and not self.force:
            raise DataError(
                f"{self.output} is not empty; choose another folder, or --force to replace it"
            )
        if self.checkpoint is not None:
            _check_folder(self.checkpoint.parent)
        if self.target is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise DataError("--target is for one process; several fit densities")
        if self.target is None and self.max_epochs is not None:
            raise DataError("--max-epochs is for --target; a density takes --max-steps")
        of_densities = ("max_steps", "method", "contamination", "kinds", "model_gaps", "rule")
        for name in of_densities if self.target is not None else ():
            if getattr(self, name) not in (None, False, "auto", []):
                flag = name.replace("_", "-")
                raise DataError(f"--{flag} is for densities; --target takes --max-epochs")
        _kinds(self.kinds)

    @property
    def shards(self) -> Shards | None:
        """The table where it is in several files, or has more rows than are read at once."""
        several = _several(self.data)
        if not several and self.data.suffix.lower() not in FORMATS:
            return None
        if not several and not self.data.is_file():
            return None
        shards = Shards.of(str(self.data))
        if not several and shards.n_rows <= SAMPLED_ROWS and self.data.suffix.lower() in SUFFIXES:
            return None
        if self.target is not None or self.rule:
            raise DataError("--target and --rule are for one file that fits into memory")
        return shards

    def features(self, table: Table) -> list[str]:
        """The columns that are modelled, or are the inputs of a target."""
        chosen = _chosen_columns(table, self.columns, self.drop)
        if self.target is not None:
            _check_column(table, self.target)
        features = [name for name in chosen if name != self.target]
        if not features:
            raise DataError(f"{self.data}: no column is left to fit; check --columns and --drop")
        return features


def _fit(**given: Any) -> None:
    """Fit the density of a table, or with --target of one column given the others."""
    options = _FitOptions(**given)
    options.check()
    shards = options.shards
    table = _columns_of(shards) if shards else read_table(options.data, options.header)
    features = options.features(table)
    from selfnorm import saving
    from selfnorm._inputs import check_device

    check_device(options.device)
    begin = time.perf_counter()
    train = _fit_density if options.target is None else _fit_target
    if shards is not None:
        train = partial(_fit_density, shards=shards.select(features))
    estimator, notes, own = train(table, features, options)
    if int(os.environ.get("RANK", "0")):  # the first of several processes tells and saves
        return
    histories = estimator.history_ if isinstance(estimator.history_, list) else [estimator.history_]
    stopped = any(history.stopped == "interrupted" for history in histories)
    if stopped and options.checkpoint is not None and options.checkpoint.exists():
        raise Stopped(f"{options.checkpoint} is kept; the same command goes on from it")
    output, as_it_was = options.output, ""
    if stopped and options.replaces:  # a model that is barely trained takes no other's place
        as_it_was = f"; {output} is as it was"
        output = output.resolve()  # "." has no name
        output = output.with_name(f"{output.name}.stopped")
    report = {
        "model": str(output),
        "kind": type(estimator).__name__,
        "rows": len(table) if shards is None else shards.n_rows,
        "columns": features,
        "target": options.target,
        "steps": int(estimator.n_iter_),
        "seconds": round(time.perf_counter() - begin, 2),
        "judgement": estimator.judgement_.to_dict(),
        **own,
    }
    estimator.feature_names_in_ = np.array(features, dtype=object)
    if table.style != Table.style:  # draws are written as the table was
        notes["style"] = list(table.style)
    saving.save(estimator, output, notes=notes)
    if stopped:
        kept = f"the best state after {estimator.n_iter_} steps is kept in {output}"
        raise Stopped(kept + as_it_was)
    given_by = "of" if options.target is None else f"of {options.target} given"
    lines = [f"{output}: {report['kind']} {given_by} {len(features)} columns"]
    lines.append(str(estimator.judgement_))
    if options.target is None:
        lines.append(table.by_line(f"what the columns are:\n{estimator.schema_}"))
    _tell(report, options.as_json, *lines)


_Fitted = tuple[Any, dict[str, Any], dict[str, Any]]  # an estimator, notes, entries of the report


@contextmanager
def _group() -> Iterator[dict[str, Any]]:
    """What ``fit`` is given of the processes that ``torchrun`` began, which train together."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield {}
        return
    from torch.distributed import destroy_process_group

    from selfnorm.density import launched

    fabric = launched()
    yield {"fabric": fabric}
    fabric.barrier()
    destroy_process_group()


def _fit_density(
    table: Table, features: list[str], options: _FitOptions, shards: Shards | None = None
) -> _Fitted:
    """A density of columns of a table."""
    from selfnorm.columns import Schema
    from selfnorm.tables import EnergyDensity

    rows: Any = shards or Frame.of(table.frame(features))
    kinds, how = _kinds(options.kinds), {"missing": True, "model_gaps": options.model_gaps}
    read: Callable[..., Schema] = Schema.scan if shards else Schema.detect
    schema = _about(table, read, rows, kinds, **how)
    schema.frame = "file" if schema.frame == "dict" else schema.frame
    density = EnergyDensity(
        schema=schema,
        contamination="auto" if options.contamination is None else options.contamination,
        method=options.method,
        max_steps=options.max_steps,
        **options.common,
    )
    with _group() as group:
        _train(density, table, options, rows, rules=options.rule or [], **group)
    return density, {}, {
        "method": density.method_,
        "lower_bound": density.lower_bound_,
        "members": [asdict(member) for member in density.members_],
        "measure": schema.fingerprint,
        "consistency": density.consistency_,
        "kinds": {str(column.name): column.kind for column in schema.columns},
        "rules": list(density.rules_),
        "notes": schema.notes,
    }  # fmt: skip


def _fit_target(table: Table, features: list[str], options: _FitOptions) -> _Fitted:
    """The distribution of one column given others."""
    from selfnorm.tables import EnergyRegressor, RegressorNetwork

    regressor = EnergyRegressor(
        max_epochs=options.max_epochs,
        network=RegressorNetwork(energy_epochs=options.max_epochs),
        **options.common,
    )
    y = numeric(table, [str(options.target)])[:, 0]
    _train(regressor, table, options, _inputs(table, features), y)
    return regressor, {"target": options.target}, {}


def _train(estimator: Any, table: Table, options: _FitOptions, *rows: Any, **further: Any) -> None:
    """Fit an estimator, which says nothing: the report does, in one place."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.filterwarnings("ignore", "training interrupted", SelfnormWarning)
        _about(table, estimator.fit, *rows, checkpoint=options.checkpoint, **further)


_fit.__signature__ = signature(_FitOptions, eval_str=True)  # type: ignore[attr-defined]
app.command("fit")(_fit)


@app.command()
def evaluate(
    model: ModelFolder,
    data: DataFile,
    n_samples: Annotated[
        int | None, Option(min=100, help="Proposal samples; 20000, or 2000 a row with a target.")
    ] = None,
    against: Annotated[
        Path | None, Option(help="Another model: by how much is its log-likelihood lower?")
    ] = None,
    strict: Annotated[
        bool, Option(help=f"Exit with code {NOT_RELIABLE} if the bounds are not reliable.")
    ] = False,
    seed: Seed = 0,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Lower and upper bound of the log-likelihood of a table, and whether to trust them."""
    table = read_table(data, header)

    def bounds_of(folder: Path) -> Any:
        fitted = _load(folder)
        X, y = fitted.matrices(table)
        rows, usual = ((X,), 20_000) if y is None else ((X, y), 2000)
        options = {"n_samples": n_samples or usual, "random_state": seed}
        return _about(table, fitted.estimator.bounds, *rows, **options)

    bounds = bounds_of(model)
    low, high = bounds.interval(0.95)
    report = {"rows": len(table), "interval_95": [low, high], **bounds.to_dict()}
    figures = {
        "rows": len(table),
        "log-likelihood": f"{low:.4f} to {high:.4f} nats a row (95 % interval)",
        "bounds": f"{bounds.lower:.4f} and {bounds.upper:.4f}",
        "log Z": f"{bounds.log_norm:.4f} ± {bounds.log_norm_se:.4f}, learned b off by "
        f"{bounds.learned_error:+.4f}",
        "samples": f"ESS {bounds.ess:.3f}, Pareto k {bounds.pareto_k:.2f}",
        "verdict": "reliable" if bounds.reliable else "NOT RELIABLE",
    }
    if against is not None:
        low, high = report["higher_by"] = bounds.minus(bounds_of(against))
        figures["against"] = f"higher than {against} by {low:.4f} to {high:.4f} nats a row"
    _tell(report, as_json, _aligned(figures), *bounds.reasons, *bounds.remarks)
    if strict and not bounds.reliable:
        raise typer.Exit(NOT_RELIABLE)


@app.command()
def compare(
    model: ModelFolder,
    data: DataFile,
    reference: Annotated[
        Path | None,
        Option(help="Rows as they were, not trained on; or the training table: those held out."),
    ] = None,
    alpha: Annotated[
        float, Option(help="Probability of an alarm without a change, however long one watches.")
    ] = 0.01,
    seed: Seed = 0,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Has the distribution changed? An e-value that may be watched day by day; columns to blame."""
    fitted = _load(model)
    table = read_table(data, header)
    X, y = fitted.matrices(table)
    if y is not None:
        raise DataError("compare is for densities; this model predicts a target")
    usual = None if reference is None else fitted.matrices(read_table(reference, header))[0]
    drift = _about(table, fitted.estimator.compare, X, usual, random_state=seed)
    report = {
        "rows": len(table),
        "e_value": drift.e_value,
        "alarm_at_row": drift.alarm(alpha),
        "nats": drift.nats,
        "nats_se": drift.nats_se,
        "columns": [vars(column) for column in drift.columns],
    }
    _tell(report, as_json, str(drift))


@app.command()
def score(
    model: ModelFolder,
    data: ManyFiles,
    output: FilesOut,
    explain: Annotated[
        bool, Option(help="Add a column for each one of the model: how ordinary its cells are.")
    ] = False,
    reference: Annotated[
        Path | None, Option(help="Normal rows that were not trained on: add a column p_value.")
    ] = None,
    normalizer: Normalizer = "quadrature",
    progress: Progress = True,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Add log_density and outlier columns to a table; with --explain, which cells are to blame."""
    if _streams(output, data):
        if explain or reference is not None:
            raise DataError("--explain and --reference are for tables that fit into memory")
        how: dict[str, Any] = {"normalizer": normalizer, "progress": progress}
        density = _load(model, "score of files").estimator
        _tell({"output": str(output)} | density.score_batches(data, output, **how), as_json)
        return
    check_output(output, source=data)
    table, fitted = read_table(data, header), _load(model)
    X, y = fitted.matrices(table)
    added: dict[str, np.ndarray] = {}
    if y is not None:
        added["log_density"] = _about(table, fitted.estimator.log_prob, X, y)
        if explain or reference is not None:
            raise DataError("--explain and --reference are for densities; this predicts a target")
    else:
        added["log_density"], inside = _about(
            table, fitted.estimator.scored, X, normalizer=normalizer
        )
        added["outlier"] = (~(inside >= 0)).astype(np.float64)
        if reference is not None:
            usual = fitted.matrices(read_table(reference, header))[0]
            added["p_value"] = _about(table, fitted.estimator.p_values, X, usual)
        if explain:
            cells = table_of(_about(table, fitted.estimator.explain, X)).cells
            shares = np.array([cells[name] for name in cells], dtype=np.float64)
            least = np.nan_to_num(shares, nan=np.inf).argmin(0)
            added["least_expected"] = np.array(list(cells), dtype=object)[least]
            added["least_expected"][np.isnan(shares).all(0)] = ""
            added |= {f"p_{name}": values for name, values in zip(cells, shares, strict=True)}
    write_table(table.added(added), output)
    report: dict[str, Any] = {
        "rows": len(table),
        "output": str(output),
        "mean_log_density": float(added["log_density"].mean()),
    }
    if "outlier" in added:
        report["outliers"] = int(added["outlier"].sum())
    _tell(report, as_json)


@app.command()
def impute(
    model: ModelFolder,
    data: ManyFiles,
    output: FilesOut,
    draws: Annotated[int, Option(min=1, help="Filled tables, one below the other.")] = 1,
    seed: Seed = 0,
    progress: Progress = True,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Fill the gaps of a table with draws from the model, given what its rows have."""
    if _streams(output, data):
        if draws > 1:
            raise DataError("--draws is for tables that fit into memory; use another --seed")
        density = _load(model, "impute").estimator
        report = density.impute_batches(data, output, random_state=seed, progress=progress)
        _tell({"output": str(output)} | report, as_json)
        return
    check_output(output, source=data)
    table, fitted = read_table(data, header), _load(model, "impute")
    X, _ = fitted.matrices(table)
    filled = _about(table, fitted.estimator.impute, X, n_draws=draws, random_state=seed)
    tables = [table_of(frame) for frame in (filled if draws > 1 else [filled])]
    joined: dict[str, Any] = {}
    for name in table.names:
        pieces = [t if name in t.cells else table for t in tables]
        joined[name] = np.concatenate([t.array(name) for t in pieces])
    if draws > 1:
        joined["draw"] = np.repeat(np.arange(1.0, draws + 1), len(table))
    alone = tables[0] if draws == 1 and tables[0].names == table.names else table_of(joined)
    write_table(replace(alone, style=table.style), output)
    _tell({"rows": len(table) * draws, "output": str(output)}, as_json)


def _count(text: str | int) -> int:
    """A number of rows, ``1e9`` among them."""
    try:
        number = float(text)
        if number >= 1 and number == int(number):
            return int(text) if str(text).isdigit() else int(number)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(f"{text!r} is no whole number of one or more")


@app.command()
def sample(
    model: ModelFolder,
    output: FilesOut,
    n: Annotated[int, Option("-n", "--n", parser=_count, help="Number of rows: 1000, 1e9.")] = 1000,
    missing: Annotated[
        bool, Option("--missing", help="With gaps as in the data (of a fit with --model-gaps).")
    ] = False,
    given: Annotated[
        list[str] | None, Option(help="Value that rows are to have, column=value (repeatable).")
    ] = None,
    where: Annotated[
        str | None, Option(help="Event that every row obeys, such as 'age > 50 and sex == \"F\"'.")
    ] = None,
    seed: Seed = 0,
    progress: Progress = True,
    as_json: AsJson = False,
) -> None:
    """Write synthetic rows drawn from a density; into a folder, a million a file."""
    files = _streams(output)
    if not files:
        check_output(output)
    fitted = _load(model, "sample")
    from selfnorm.evaluation import free_memory

    # a draw goes through some ten candidates a row
    need, free = 80 * n * len(fitted.names), free_memory()
    if need > free and not files:
        raise DataError(
            f"{n} rows need about {need / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are free: "
            "name a folder to write to, which gets files of a million rows"
        )
    if missing and not any(part.gap for part in fitted.estimator.schema_.parts):
        raise DataError(
            f"{model} does not know where gaps fall: use fit --model-gaps, of a table that has some"
        )
    how: dict[str, Any] = {
        "given": _values_given(fitted, given or []),
        "where": where,
        "missing": missing,
    }
    if files:
        how |= {"random_state": seed, "progress": progress}
        report = fitted.estimator.sample_batches(n, output, **how)
        _tell({"output": str(output)} | report, as_json)
        return
    drawn = fitted.estimator.sample(n, random_state=seed, **how)
    write_table(fitted.table(drawn), output)
    _tell({"rows": n, "output": str(output)}, as_json)


def _values_given(fitted: _Model, pairs: list[str]) -> dict[Any, str] | None:
    """What ``--given`` says of columns."""
    values: dict[Any, str] = {}
    names = {str(column.name): column.name for column in fitted.estimator.schema_.columns}
    for pair in pairs:
        name, sign, value = (piece.strip() for piece in pair.partition("="))
        if not (name and sign and value):
            raise DataError(f"--given must be such as 'sex=F', not {pair!r}")
        if name not in names:
            raise DataError(f"--given: there is no column {name!r}; there is {listed(names)}")
        if names[name] in values:
            raise DataError(f"--given names {name!r} twice; leave one out")
        values[names[name]] = value
    return values or None


@app.command()
def ask(
    model: ModelFolder,
    questions: Annotated[
        list[str],
        Argument(help="\"P(income == '>50K' | age > 60, sex == 'F')\" or \"E(hours | age > 60)\"."),
    ],
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Ask a density for probabilities of events and means of columns, given other events."""
    from selfnorm.cli.ask import Question

    read = [Question.read(text) for text in questions]
    density = _load(model, "ask").estimator
    entries: list[dict[str, Any]] = []
    lines: list[str] = []
    for question in read:
        estimate = question.answer(density, seed)
        names = ("value", "low", "high", "se", "ess", "pareto_k", "reliable", "reasons")
        entries.append({"question": question.text} | {n: getattr(estimate, n) for n in names})
        value, low, high = map(_shown, (estimate.value, estimate.low, estimate.high))
        lines.append(f"{question.text}  {value} (95 % interval {low} to {high})")
        lines.extend(f"  NOT RELIABLE: {reason}" for reason in estimate.reasons)
    _tell({"answers": entries}, as_json, *lines)


@app.command()
def predict(
    model: ModelFolder,
    data: DataFile,
    levels: Annotated[list[str] | None, Argument(hidden=True)] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Table to write; default NAME.predicted.csv.")
    ] = None,
    quantiles: Annotated[
        list[str] | None, Option(help="Levels, e.g. 0.05 0.5 0.95 (the default) or 0.05,0.5,0.95.")
    ] = None,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Add the predicted mean and quantiles of the target to a table."""
    output = output or Path(f"{data.stem}.predicted.csv")
    check_output(output, source=data)
    # What follows the first level of --quantiles after a space comes as further arguments.
    numbers = _levels([*(quantiles or []), *(levels or [])])
    table, fitted = read_table(data, header), _load(model)
    if fitted.kind != "EnergyRegressor":
        raise ModelFileError(f"{model} holds an {fitted.kind}; fit one with --target to predict")
    X = fitted.numbers(table)
    added = {f"{fitted.target}_mean": fitted.estimator.predict(X)}
    for level, values in zip(
        numbers, fitted.estimator.predict_quantiles(X, numbers).T, strict=True
    ):
        added[f"{fitted.target}_q{level:g}"] = values
    write_table(table.added(added), output)
    _tell({"rows": len(table), "output": str(output), "columns": list(added)}, as_json)


def _levels(given: list[str]) -> list[float]:
    pieces = [piece for text in given for piece in text.split(",") if piece]
    try:
        return [float(piece) for piece in pieces] or [0.05, 0.5, 0.95]
    except ValueError:
        raise DataError(
            f"--quantiles must be numbers such as 0.05 0.5 0.95, not {' '.join(given)!r}"
        ) from None


@app.command()
def plot(
    model: Annotated[
        Path, Argument(help="Model folder; or 'surface', the SNL of a Gaussian mean.")
    ],
    data: Annotated[
        Path | None, Argument(help="Table to compare the model with (optional).")
    ] = None,
    output: Annotated[Path, Option("--output", "-o", help="Folder for the figures.")] = Path(
        "plots"
    ),
    seed: Seed = 0,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Draw marginals (model against data), training curves and weight diagnostics."""
    _check_folder(output)
    if str(model) == "surface" and not model.exists():
        from selfnorm.plotting import plot_snl_surface

        plot_snl_surface(output / "snl_surface.png")
        _tell({"output": [str(output / "snl_surface.png")]}, as_json)
        return
    table, fitted = None if data is None else read_table(data, header), _load(model)
    from selfnorm.tables import plot_density_model, plot_regressor

    X, y = (None, None) if table is None else fitted.matrices(table)
    if fitted.kind == "EnergyRegressor":
        written = plot_regressor(fitted.estimator, output, X, y, fitted.target)
    else:
        written = plot_density_model(fitted.estimator, output, X, seed)
    _tell({"output": [str(path) for path in written]}, as_json)


@app.command()
def report(
    model: ModelFolder,
    data: DataFile,
    output: Annotated[Path, Option("--output", "-o", help="File to write.")] = Path("report.html"),
    train: Annotated[
        Path | None, Option(help="Table that the model was fitted to, for simple models.")
    ] = None,
    title: Annotated[str | None, Option(help="Title of the page.")] = None,
    seed: Seed = 0,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Write a report on a model and a table: one HTML file to open, print and pass on."""
    check_output(output, (".html", ".htm"))
    from selfnorm.plotting import need_matplotlib

    need_matplotlib()
    table, fitted = read_table(data, header), _load(model)
    from selfnorm.report import About

    X, y = fitted.matrices(table)
    names = tuple(fitted.names)
    read = _reading(data, table, header, frame=y is not None)
    about = About(data.name, str(model), title, table.lines, fitted.target, names, read=read)
    options: dict[str, Any] = {"about": about, "random_state": seed}
    if train is not None:
        X_train, y_train = fitted.matrices(read_table(train, header))
        options["train"] = X_train if y is None else (X_train, y_train)
    rows: tuple[Any, ...] = (X,) if y is None else (X, y)
    _about(table, fitted.estimator.report, *(*rows, output), **options)
    _tell(
        {"rows": len(table), "output": str(output)},
        as_json,
        f"report on {len(table):,} rows: {output}",
    )


def _reading(data: Path, table: Table, header: bool | None, *, frame: bool) -> tuple[str, str]:
    """Python that reads the table as it was read here, as a ``frame`` or as columns."""
    from selfnorm.report import in_python

    name, suffix = in_python(data.name), kind_of(data)
    if not frame:
        stated = "" if header is None else f", header={header}"
        return "from selfnorm.cli.files import read_table", f"read_table({name}{stated}).frame()"
    if suffix in (".parquet", ".pq"):
        return "import pandas as pd", f"pd.read_parquet({name})"
    if suffix in (".npy", ".npz"):
        imported = "import pandas as pd\nfrom selfnorm.cli.files import read_table"
        return imported, f"pd.DataFrame(read_table({name}).frame())"
    mark, point = "\t" if suffix == ".tsv" else table.style[0], table.style[1]
    options = f", sep={mark!r}" if mark != "," else ""
    options += ", decimal=','" if point == "," else ""
    gaps = [gap for gap in "?-" if any((table.array(name) == gap).any() for name in table.names)]
    options += f", na_values={gaps}" if gaps else ""  # others pandas knows
    names = ("", "") if table.named else (", header=None", '.add_prefix("x")')
    return "import pandas as pd", f"pd.read_csv({name}{options}{names[0]}){names[1]}"


@app.command()
def explore(
    model: ModelFolder,
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: any that is free.")] = 0,
    browser: Annotated[bool, Option(help="Open the page in a browser.")] = True,
) -> None:
    """Play with a density in a page of this machine: set columns, see the others, explain rows."""
    from selfnorm.cli.explore import Answers, listen, serve

    listener = listen(port)
    fitted = _load(model, "explore")
    try:
        serve(
            listener, Answers(fitted.estimator, fitted.table), model.resolve().name, browser=browser
        )
    except KeyboardInterrupt:
        raise Stopped("the page is closed") from None


@app.command()
def evidence(
    draws: Annotated[Path, Argument(help="Draws, one a row: .csv, .tsv, .parquet, .npy or .npz.")],
    log_density: Annotated[
        str, Option(help="Column with the log-density of each draw (of the columns beside it).")
    ],
    columns: Annotated[str | None, Option(help="Use only these columns (comma-separated).")] = None,
    drop: Annotated[str | None, Option(help="Leave these columns out.")] = None,
    chain: Annotated[str | None, Option(help="Column with the number of the chain.")] = None,
    positive: Annotated[str | None, Option(help="Columns whose support is x > 0.")] = None,
    strict: Annotated[
        bool, Option(help=f"Exit with code {NOT_RELIABLE} if the value is not reliable.")
    ] = False,
    seed: Seed = 0,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """log Z of a density from draws that carry its logarithm: reciprocal value, upper bound."""
    table = read_table(draws, header)
    named = [log_density] + ([] if chain is None else [chain])
    own = _chosen_columns(table, ",".join(named), None)
    chosen = [name for name in _chosen_columns(table, columns, drop) if name not in own]
    above_zero = [] if positive is None else [name.strip() for name in positive.split(",")]
    for name in above_zero:
        if name not in chosen:
            raise DataError(f"--positive names {name!r}, which is not among {chosen}")
    x, log_p = numeric(table, chosen), numeric(table, [log_density])[:, 0]
    if chain is not None:
        numbers = numeric(table, [chain])[:, 0]
        parts = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        if len({len(part) for part in parts}) > 1:
            raise DataError(f"the chains of column {chain!r} differ in length; cut them to one")
        x, log_p = x[np.stack(parts)], log_p[np.stack(parts)]
    result = selfnorm.evidence(
        None,
        {name: x[..., j] for j, name in enumerate(chosen)},
        log_density_draws=log_p,
        support=dict.fromkeys(above_zero, "positive"),
        chains=chain is not None,
        seed=seed,
    )
    figures = {
        "draws": f"{len(table):,}, {result.effective_draws:,.0f} effective",
        "log Z": f"{result.log_z:.4f} ± {result.se:.4f}",
        "at most": f"{result.upper:.4f} ± {result.upper_se:.4f}",
        "Pareto k": f"{result.pareto_k_draws:.2f}",
        "verdict": "reliable" if result.reliable else "NOT RELIABLE",
    }
    report = {"columns": chosen, **result.to_dict()}
    _tell(report, as_json, _aligned(figures), *result.reasons, *result.notes)
    if strict and not result.reliable:
        raise typer.Exit(NOT_RELIABLE)


@app.command()
def datasets(data_dir: DataDir = None) -> None:
    """List the data sets: built in, found on disk, missing, and where they were looked for."""
    from selfnorm.datasets import listing

    for line in listing(data_dir):
        typer.echo(line)


def _reproduce(table: str, given: dict[str, Any]) -> None:
    """Run a table of the paper with options."""
    _check_folder(given["out"])
    from selfnorm._inputs import check_device

    check_device(given["device"])
    from selfnorm.plotting import need_matplotlib

    need_matplotlib()  # figures come last, an hour later
    run = import_module(f"selfnorm.paper.{'everything' if table == 'all' else table}").run
    # A name given twice is meant once: its rows would be run and counted twice.
    options = {
        name: tuple(dict.fromkeys(value)) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    try:
        run(**options)
    except KeyboardInterrupt:
        kept = f"finished rows are kept in {given['out']}; the same command goes on from there"
        raise Stopped(kept) from None
    written = given["out"] / f"{table}.md"
    if written.exists():
        typer.echo(written.read_text())


_EVERY_TABLE: dict[str, Any] = {
    "seeds": Annotated[
        int | None, Option(min=1, help="Repetitions; default: what the table asks.")
    ],
    "out": Annotated[Path, Option(help="Where the JSON, Markdown and figures go.")],
    "device": Device,
    "data_dir": DataDir,
    "jobs": Annotated[int | None, Option(min=1, help="Runs at once, in processes; default 1.")],
    "progress": Progress,
}
_DEFAULTS = {"recipe": "paper", "out": Path("out"), "device": "cpu", "progress": True}


def _add_table(name: str, summary: str, **own: Any) -> None:
    """A command for a table of the paper: its own options, then those that every table has."""

    def command(**given: Any) -> None:
        _reproduce(name, given)

    options = [
        Parameter(option, Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(option), annotation=kind)
        for option, kind in {**own, **_EVERY_TABLE, **own}.items()
    ]
    command.__signature__ = Signature(options)  # type: ignore[attr-defined]
    paper.command(name, help=summary)(command)


def _only(flag: str, what: str) -> Any:
    return Annotated[list[str] | None, Option(flag, help=f"Only these{what} (repeatable).")]


_RECIPE = Annotated[str, Option(help="'paper' pins its set-up, 'best' is ours.")]
_IMAGE_RECIPE = Annotated[
    str, Option(help="'paper' pins its set-up, 'literal' adds no noise to labels, 'best' is ours.")
]
_SETS = {"datasets": _only("--dataset", " sets")}
_METHODS = _SETS | {"objectives": _only("--objective", ", e.g. snl")}
_add_table(
    "toy2d",
    "Densities of four sets of points in the plane, SNL beside NCE (minutes on a CPU).",
    recipe=_RECIPE,
    **_METHODS,
    bases=_only("--base", ": none, standard_normal"),
    together=Annotated[
        bool | None,
        Option(
            "--together/--one-by-one",
            help="Train all runs as one batched model (default on a GPU).",
        ),
    ],
)
_add_table(
    "toy1d", "Regression on two one-dimensional sets, twelve rows each.", recipe=_RECIPE, **_METHODS
)
_add_table(
    "uci",
    "Densities of tables of 6 to 63 columns, those whose files are there.",
    recipe=_RECIPE,
    **_SETS,
)
_add_table(
    "images",
    "Regression from images: age, pose, steering, cells (a GPU is needed in practice).",
    recipe=_IMAGE_RECIPE,
    **_METHODS,
    proposals=_only("--proposal", ", e.g. mdn-4"),
)
_add_table(
    "images_ablation",
    "The same with few and many samples from the proposal.",
    recipe=_IMAGE_RECIPE,
    **_METHODS,
)
_add_table(
    "mnist",
    "Energy priors of VAEs of binary MNIST (hours on a GPU).",
    recipe=_RECIPE,
    models=_only("--model", ", e.g. vae_ebm"),
    ngf=Annotated[int | None, Option(min=1, help="Width of networks: 16, or 64.")],
    energy_layers=Annotated[
        int | None, Option(min=1, help="Hidden layers of the energy: 2, or 3.")
    ],
)
_add_table(
    "all",
    "Every table whose data are there, by both recipes, and one page of them.",
    only=Annotated[
        list[str] | None,
        Option(
            help="Only these pieces, e.g. toy2d/paper or toy2d (repeatable); images/paper and "
            "mnist/paper, which take hours, run only when named so."
        ),
    ],
    jobs=Annotated[int | None, Option(min=1, help="Runs at once, in processes; 1, on a GPU 8.")],
)


@dataclass
class _Model:
    """A fitted table model, and the names of its columns."""

    estimator: Any
    kind: str
    names: list[str]
    named: bool
    target: str
    style: tuple[str, str]

    def numbers(self, table: Table) -> Any:
        """The inputs of a regressor; by position where the model knows no names."""
        fits = not self.named and len(table.names) == len(self.names)
        names = table.names if fits else self.names
        inputs = self.estimator.inputs_
        if inputs is None or not {str(c.name) for c in inputs.schema.modelled} <= {*table.names}:
            return numeric(table, names)
        return table.without_gaps([name for name in names if name in table.cells])

    def frame(self, table: Table) -> Any:
        """The columns of a density; by position where the model or the table knows no names."""
        columns = {str(column.name): column for column in self.estimator.schema_.columns}
        absent = [n for n, column in columns.items() if column.modelled and n not in table.cells]
        if absent and len(columns) == len(table.names) and not (self.named and table.named):
            table, absent = table.renamed(list(columns)), []
        if absent:
            shown = listed(table.names)
            raise DataError(f"{table.source}: {missing(absent)}; the table has {shown}")
        frame = table.frame([name for name in columns if name in table.cells])
        if not isinstance(frame, dict):  # Arrow's
            return frame
        return {columns[name].name: values for name, values in frame.items()}

    def table(self, drawn: Any) -> Table:
        """A table to write, as the one that was fitted, of rows that a density gave."""
        if isinstance(drawn, np.ndarray):
            drawn = dict(zip(self.names, drawn.T, strict=True))
        return replace(table_of(drawn), style=self.style)

    def matrices(self, table: Table) -> tuple[Any, np.ndarray | None]:
        """The columns that the model takes, and the target of a regressor."""
        if self.kind != "EnergyRegressor":
            return self.frame(table), None
        return self.numbers(table), numeric(table, [self.target])[:, 0]


def _load(path: Path, command: str | None = None) -> _Model:
    """The model of a folder; a density where the ``command`` is for densities alone."""
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a model folder; give one that 'selfnorm fit' wrote")
    from selfnorm import saving

    folder = saving.read_folder(path)
    if command is not None and folder.kind == "EnergyRegressor":
        raise ModelFileError(f"{path} holds an {folder.kind}; {command!r} is for densities")
    if folder.kind not in ("EnergyDensity", "EnergyRegressor"):
        raise ModelFileError(f"{path} holds a {folder.kind}: this command is for models of tables")
    estimator = folder.model()
    names = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
    named = bool(names)
    try:  # a header may be changed, its hash too, and the weights still fit
        if folder.kind == "EnergyDensity":
            if estimator.schema_.frame == "file":  # draws are texts as the file had them
                estimator.schema_.frame = "dict"
            estimator.score_samples(estimator.sample(1, random_state=0))
        elif estimator.inputs_ is None:
            estimator.predict(np.zeros((1, estimator.n_features_in_)))
        else:
            schema = estimator.inputs_.schema
            estimator.predict(schema.decode(np.zeros((1, len(schema.parts), 2))))
    except saving.BUILD_ERRORS as error:
        detail = " ".join(str(error).split())[:300]
        raise ModelFileError(
            f"{path} holds a model that cannot compute ({detail}); refit it"
        ) from error
    names = names or [f"x{i}" for i in range(estimator.n_features_in_)]
    target, style = str(folder.notes.get("target", "y")), folder.notes.get("style", Table.style)
    return _Model(estimator, folder.kind, names, named, target, (style[0], style[1]))


def _several(data: Path) -> bool:
    """Whether a path is a folder of files or a pattern of their names."""
    return data.is_dir() or (not data.exists() and has_magic(str(data)))


def _columns_of(shards: Shards) -> Table:
    """A table of the columns of files, whose rows stay where they are."""
    return Table(dict.fromkeys(shards.names, np.zeros(0)), shards.shards[0].name)


def _streams(output: Path, data: Path | None = None) -> bool:
    """Whether files are read or written some rows at a time: several, or into a folder."""
    return (data is not None and _several(data)) or not output.suffix or output.is_dir()


def _chosen_columns(table: Table, columns: str | None, drop: str | None) -> list[str]:
    """The columns that are named by an option, all by default, without those to be dropped."""
    chosen = table.names if columns is None else [name.strip() for name in columns.split(",")]
    dropped = [] if drop is None else [name.strip() for name in drop.split(",")]
    for name in (*chosen, *dropped):
        _check_column(table, name)
    for name, times in Counter(chosen).items():
        if times > 1:
            raise DataError(f"--columns names {name!r} twice; leave one out")
    return [name for name in chosen if name not in dropped]


def _check_column(table: Table, name: str) -> None:
    if name not in table.cells:
        raise DataError(
            f"{table.source}: there is no column {name!r}; it has {listed(table.names)}"
        )


def _kinds(text: str | None) -> dict[str, str]:
    """What ``--kinds`` says of columns."""
    pieces = [] if text is None else [piece.rpartition("=") for piece in text.split(",")]
    if not all(name.strip() for name, _, _ in pieces):
        raise DataError(f"--kinds must be such as zip=category,day=date, not {text!r}")
    return {name.strip(): kind.strip() for name, _, kind in pieces}


def _check_folder(output: Path) -> None:
    """Refuse a folder that cannot be written to: before the work, not after it."""
    if output.exists() and not output.is_dir():
        raise DataError(f"{output} is a file; name a folder")
    there = next(place for place in (output, *output.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise DataError(f"cannot write to {there}; choose another folder")


def _inputs(table: Table, names: list[str]) -> Any:
    """Inputs of a regressor: a matrix where all are numbers, else the columns as they are."""
    columns = map(table.numbers, names)
    if all(column is not None and np.isfinite(column).all() for column in columns):
        from selfnorm._inputs import refuse_constant

        X = numeric(table, names)
        refuse_constant(X, names, source=table.source)
        return X
    return table.without_gaps(names)


def _about(table: Table, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What a function says of a table; errors and warnings name the file's lines."""
    shown = warnings.showwarning
    warnings.showwarning = lambda message, *where, **more: shown(
        table.by_line(str(message)), *where, **more
    )
    try:
        return function(*args, **options)
    except DataError as error:
        raise DataError(f"{table.source}: {table.by_line(str(error))}") from None
    finally:
        warnings.showwarning = shown


def _tell(report: dict[str, Any], as_json: bool, *lines: str) -> None:
    """Print a report: as JSON, or these lines, or an entry on each line."""
    if as_json:
        from selfnorm import saving

        lines = (json.dumps(saving.json_safe(report), allow_nan=False),)
    typer.echo("\n".join(lines or [_aligned(report)]))


def _aligned(entries: dict[str, Any]) -> str:
    """An entry on each line, values below each other."""
    wide = max(map(len, entries))
    lines = (f"{key.replace('_', ' '):<{wide}}  {_shown(value)}" for key, value in entries.items())
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Six digits of a number, the names of a list."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def run() -> None:
    """A command, from ``sys.argv``: a refused request is one line on stderr and exit code 2.

    So is a fault of the library, with exit code 1 and how to report it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", SelfnormWarning)
        # columns are put in the model's order here: scikit-learn need not ask for names
        warnings.filterwarnings("ignore", "X does not have valid feature names", UserWarning)
        warnings.showwarning = partial(_show_warning, set())
        try:
            app()
        except np.linalg.LinAlgError as error:  # a ValueError, but no refusal
            _fault(error)
        except (SelfnormError, ValueError) as error:
            _refuse(str(error))
        except OSError as error:  # a file that cannot be read, a disk that is full
            where = "" if error.filename is None else f"{error.filename}: "
            _refuse(f"{where}{error.strerror or error}")
        except Exception as error:
            words = _first_line(error)
            of_torch = isinstance(error, RuntimeError) and "memory" in words
            if not (of_torch or isinstance(error, MemoryError)):
                _fault(error)
            _refuse(f"there is not enough memory: {words}")


def _refuse(words: str) -> NoReturn:
    typer.echo(f"selfnorm: {words}", err=True)
    sys.exit(2)


def _show_warning(shown: set[str], message: Any, category: Any, *where: Any, **_: Any) -> None:
    """A finding as one line, once; other warnings with their place in the code."""
    own = issubclass(category, SelfnormWarning)
    text = f"selfnorm: {message}" if own else warnings.formatwarning(message, category, *where[:2])
    if text not in shown:
        typer.echo(text, err=True)
    shown.add(text)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _fault(error: Exception) -> NoReturn:
    """Tell of what should not have happened."""
    if os.environ.get("SELFNORM_TRACEBACK"):
        raise error
    typer.echo(
        f"selfnorm: {type(error).__name__}: {_first_line(error)[:300]}. This is a fault of "
        "selfnorm: please report it as an issue of its repository, with the command and what it "
        "says after SELFNORM_TRACEBACK=1",
        err=True,
    )
    sys.exit(1)
