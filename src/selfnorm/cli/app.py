"""The command line: ``selfnorm --help``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import selfnorm
from selfnorm.cli import tables as cli_tables
from selfnorm.errors import SelfnormError

__all__ = ["app", "main"]

app = typer.Typer(
    name="selfnorm",
    help="Energy-based models that are normalised: fit, evaluate, score, sample, reproduce.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TABLES = ("toy2d", "toy1d", "uci", "images", "images_ablation", "mnist")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfnorm {selfnorm.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    del version


@app.command()
def reproduce(
    table: Annotated[
        str, typer.Argument(help=f"Which table of the paper: {', '.join(TABLES)}; or all.")
    ],
    recipe: Annotated[
        str | None,
        typer.Option(help="'paper' (default) pins its set-up, 'best' is ours; all runs both."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Repetitions; default: what the table asks.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the JSON, Markdown and figures go.")] = Path(
        "out"
    ),
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu",
    data_dir: Annotated[
        Path | None, typer.Option(help="Data directory; default $SELFNORM_DATA.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Only these data sets (may be repeated).")
    ] = None,
    base: Annotated[
        list[str] | None, typer.Option(help="toy2d: only these bases (may be repeated).")
    ] = None,
    objective: Annotated[
        list[str] | None, typer.Option(help="toy2d, toy1d, images: only these (repeatable).")
    ] = None,
    proposal: Annotated[
        list[str] | None, typer.Option(help="images: only these proposals (repeatable).")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="mnist: only these rows (may be repeated).")
    ] = None,
    ngf: Annotated[
        int | None, typer.Option(min=1, help="mnist: width of the networks; 16, or 64.")
    ] = None,
    energy_layers: Annotated[
        int | None, typer.Option(min=1, help="mnist: hidden layers of the energy; 2, or 3.")
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(help="toy2d: 'train' (default), 'population' or 'per_split'."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs at once, in processes; 1. all: over all pieces, on a GPU 8."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="all: only these pieces, e.g. toy2d/paper or toy2d (repeatable); images/paper and "
            "mnist/paper, which take hours, run only when named so."
        ),
    ] = None,
    side_by_side: Annotated[
        int | None,
        typer.Option(min=1, help="all: pieces at once, each with its part of --jobs; 1."),
    ] = None,
    together: Annotated[
        bool | None,
        typer.Option(
            "--together/--one-by-one",
            help="toy2d: train all runs as one batched model (default on a GPU).",
        ),
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
) -> None:
    """Reproduce a table of the paper; finished rows in --out are kept, so it can be resumed."""
    if table not in (*TABLES, "all"):
        raise SelfnormError(f"unknown table {table!r}; choose one of {', '.join(TABLES)} or all")
    cli_tables.check_device(device)
    cli_tables.check_folder(out)
    asked = {
        "recipe": recipe,
        "datasets": dataset,
        "bases": base,
        "objectives": objective,
        "proposals": proposal,
        "models": model,
        "ngf": ngf,
        "energy_layers": energy_layers,
        "scaling": scaling,
        "together": together,
        "jobs": jobs,
        "only": only,
        "side_by_side": side_by_side,
        "seeds": seeds,
    }
    options: dict[str, Any] = {
        # A name given twice is meant once: its rows would be run and counted twice.
        name: tuple(dict.fromkeys(value)) if isinstance(value, list) else value
        for name, value in asked.items()
        if value is not None
    }
    _refuse_unknown(table, options)
    options |= {"out": out, "device": device, "progress": progress, "data_dir": data_dir}
    if table == "all":
        from selfnorm.paper import everything

        typer.echo(everything.run(**options).read_text())
        return
    module = import_module(f"selfnorm.paper.{table}")
    module.run(**{"recipe": "paper", **options})
    written = out / f"{table}.md"
    if written.exists():
        typer.echo(written.read_text())


# What each table takes beside --seeds, --out, --device, --data-dir and --progress.
_OWN_OPTIONS = {
    "toy2d": {"recipe", "datasets", "bases", "objectives", "scaling", "together", "jobs"},
    "toy1d": {"recipe", "datasets", "objectives", "jobs"},
    "uci": {"recipe", "datasets", "jobs"},
    "images": {"recipe", "datasets", "objectives", "proposals", "jobs"},
    "images_ablation": {"recipe", "datasets", "objectives", "jobs"},
    "mnist": {"recipe", "models", "ngf", "energy_layers", "jobs"},
    "all": {"jobs", "only", "side_by_side"},
}


def _refuse_unknown(table: str, given: dict[str, object]) -> None:
    """An option that a table does not take is an error, not a wish unheard."""
    for name in given:
        if name != "seeds" and name not in _OWN_OPTIONS[table]:
            flag = name.removesuffix("s").replace("_", "-")
            raise SelfnormError(f"the table {table!r} takes no --{flag}; leave it out")


@app.command()
def datasets(
    data_dir: Annotated[
        Path | None, typer.Option(help="Data directory; default $SELFNORM_DATA.")
    ] = None,
) -> None:
    """List the data sets: built in, found on disk, missing, and where they were looked for."""
    from selfnorm.datasets import listing

    for line in listing(data_dir):
        typer.echo(line)


def main() -> None:
    """Entry point: a refused request is one line on stderr and exit code 2, not a traceback."""
    try:
        app()
    except (SelfnormError, ValueError) as error:
        typer.echo(f"selfnorm: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # a file that cannot be read, a disk that is full
        where = "" if error.filename is None else f"{error.filename}: "
        typer.echo(f"selfnorm: {where}{error.strerror or error}", err=True)
        sys.exit(2)


cli_tables.register(app)
