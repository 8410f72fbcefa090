"""The paper's MNIST table: VAEs with six priors on statically binarised digits.

Rows ``vae``, ``vae_mog``, ``vae_ebm_post_hoc`` and ``vae_ebm`` are the paper's; the two with a
chain of one-dimensional energies are ours. Encoder and decoder are the paper's (``ngf`` 16, 16
latent numbers). Every row is evaluated on the test part with 100 posterior samples and its
``log Z`` by three estimators (exactly, where the prior allows it): a row counts only with its
verdict.

Recipe ``paper`` is the paper's set-up, recipe ``best`` ours (:func:`rows`). Settings were chosen on
the validation part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import selfnorm as sn
from selfnorm.datasets.images import load_binarized
from selfnorm.paper.report import (
    Planned,
    ResultTable,
    Row,
    check_choices,
    history_columns,
    markdown_table,
    mean_sd,
    paper_numbers,
)
from selfnorm.paper.runner import Settings, refuse_cut_short, run_side_by_side
from selfnorm.vae import (
    AutoregressivePrior,
    ConvDecoder,
    ConvEncoder,
    EnergyPrior,
    EnergyVAE,
    LatentPrior,
    MixturePrior,
    StandardNormal,
    VAEReport,
    evaluate_vae,
    latent_energy,
)

MODELS = ("vae", "vae_mog", "vae_ebm_post_hoc", "vae_ebm", "vae_ar_ebm_post_hoc", "vae_ar_ebm")
LATENT = 16
_EVALUATION = {
    "posterior_samples": 100,
    "many_samples": 5000,
    "many_rows": 1000,
    "n_prior_samples": 1_000_000,
}


@dataclass(frozen=True)
class Setup:
    """How the model of a row is trained.

    ``on`` is the row whose encoder and decoder a post-hoc prior is put on. ``fit`` are options of
    :func:`selfnorm.fit`; ``prior`` of the prior's constructor.
    """

    model: str
    on: Setup | None = None
    fit: Row = field(default_factory=dict)
    prior: Row = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How long it is trained."""
        return int(self.fit["max_steps"])

    def make_prior(self, energy_layers: int) -> LatentPrior:
        """The prior, at its start values."""
        if self.model == "vae":
            return StandardNormal(LATENT)
        if self.model == "vae_mog":
            return MixturePrior(LATENT, **self.prior)
        if "ar_ebm" in self.model:
            return AutoregressivePrior(LATENT, **self.prior)
        energy = latent_energy(LATENT, (200,) * energy_layers)
        return EnergyPrior(energy, dim=LATENT, **self.prior)

    def at_most(self, max_steps: int | None) -> Setup:
        """The same row with fewer steps."""
        if max_steps is None:
            return self
        steps = min(max_steps, self.steps)
        fit = {**self.fit, "max_steps": steps, "validate_every": max(1, steps // 4)}
        if "kl_warmup" in fit:
            fit["kl_warmup"] = min(fit["kl_warmup"], steps // 4)
        prior = dict(self.prior)
        if "ar_ebm" in self.model:
            prior["polish_steps"] = min(200, steps)
        source = None if self.on is None else self.on.at_most(max_steps)
        return replace(self, on=source, fit=fit, prior=prior)


_CHAIN = {"hidden": 128, "components": 8, "context": 16, "energy_hidden": 32, "n_samples": 8}


def rows(recipe: str) -> list[Setup]:
    """The six rows of a recipe, those that others build on first.

    ``"paper"``, with the authors' values where the text has none: 100,000 iterations of 256 rows,
    Adam with beta 0.5, 1e-4 (the energy 2e-5) times 0.998 an epoch (0.36 over the run;
    ``exponential`` falls to 0.37), ten posterior samples, ``Z`` from 256 base samples, early
    stopping. The chain priors, which the paper does not have, share the schedule.

    ``"best"``: one cycle to 1e-3, averaged weights, a short KL warm-up, weight decay.
    """
    if recipe == "paper":
        full = _schedule(
            100_000, 1e-4, schedule="exponential", optimizer="adam", betas=(0.5, 0.999),
            posterior_samples=10, n_samples=256, patience=10, clip_norm=None,
        )  # fmt: skip
        post = full
        joint = on_vae = {"proposal": "base", "lr_scale": 0.2}
    else:
        full = _schedule(60_000, 1e-3, ema=0.999, weight_decay=0.05, kl_warmup=1000, n_samples=1024)
        post = _schedule(5_000, 1e-3, ema=0.999, weight_decay=1e-2, n_samples=1024)
        # With a bound of 10 the energy trained from scratch left its base and its verdict was bad;
        # no weight exceeds 2 e^5 with this one.
        joint = {"proposal": "mixture", "bound": 5.0, "weight_decay": 0.1, "lr_scale": 0.2}
        on_vae = {"proposal": "mixture", "bound": 10.0, "weight_decay": 1e-2}
    vae = Setup("vae", fit=full)
    return [
        vae,
        Setup("vae_mog", fit=full),
        Setup("vae_ebm_post_hoc", on=vae, fit=post, prior=on_vae),
        Setup("vae_ebm", fit=full, prior=joint),
        Setup("vae_ar_ebm_post_hoc", on=vae, fit=post, prior=_CHAIN),
        Setup("vae_ar_ebm", fit=full, prior=_CHAIN),
    ]


def _schedule(steps: int, lr: float, **more: Any) -> Row:
    return {
        "batch_size": 256,
        "max_epochs": 10**6,
        "max_steps": steps,
        "validate_every": max(1, steps // 20),
        "lr": lr,
        **more,
    }


@dataclass(frozen=True)
class Job(Planned):
    """One row and how it is to be run."""

    row: Setup
    seed: int
    ngf: int
    energy_layers: int
    evaluation: dict[str, int]
    settings: Settings

    def keys(self) -> Row:
        """What identifies the row in the result file: two jobs that differ share no result."""
        changed = self.evaluation.items() - _EVALUATION.items()
        return {
            "model": self.row.model,
            "seed": self.seed,
            "ngf": self.ngf,
            "energy_layers": self.energy_layers,
            "max_steps": self.row.steps,
            "evaluation": ",".join(f"{name}={n}" for name, n in sorted(changed)) or None,
        }

    def model_folder(self, row: Setup | None = None) -> Path:
        """Where the model of this row, or of one with the same seed and sizes, is kept."""
        row = row or self.row
        sizes = [self.seed, f"ngf{self.ngf}", f"layers{self.energy_layers}", row.steps]
        name = "-".join(map(str, [self.settings.recipe, row.model, *sizes]))
        return Path(self.settings.out) / "models" / name

    @property
    def checkpoint(self) -> Path:
        """Where its training goes on from."""
        return Path(self.settings.out) / "checkpoints" / f"{self.model_folder().name}.pt"


def run(
    *,
    recipe: str = "paper",
    seeds: int = 2,
    models: Sequence[str] = MODELS,
    max_steps: int | None = None,
    ngf: int = 16,
    energy_layers: int = 2,
    evaluation: dict[str, int] | None = None,
    **settings: Any,
) -> ResultTable:
    """Run the table and write ``mnist.json``, ``mnist.md`` and figures of samples into ``out``.

    An interrupted row goes on from its checkpoint; post-hoc rows are run when the others are there.

    Args:
        recipe: ``"paper"`` or ``"best"``.
        seeds: repetitions.
        models: which rows.
        max_steps: shorter training than the recipe's.
        ngf, energy_layers: 16 and 2 as printed; the authors' code has 64 and 3.
        evaluation: other numbers of samples than 100 for each row, 5,000 for some of them and a
            million of the prior; see :func:`selfnorm.vae.evaluate_vae`.
        settings: further ones of :class:`~selfnorm.paper.runner.Settings`.
    """
    common = Settings(recipe, **settings)
    check_choices("model", models, MODELS)
    table = common.table("mnist")
    numbers = {**_EVALUATION, **(evaluation or {})}
    jobs = [
        Job(row.at_most(max_steps), seed, ngf, energy_layers, numbers, common)
        for seed in range(seeds)
        for row in rows(recipe)
        if row.model in models
    ]
    missing = table.missing(jobs)
    alone = [job for job in missing if job.row.on is None]
    put_on_others = [job for job in missing if job.row.on is not None]
    coming = {job.model_folder() for job in alone}
    for job in put_on_others:  # on the VAE that it names, one of that very length
        source = job.model_folder(job.row.on)
        if source not in coming and not source.exists():
            raise ValueError(
                f"{job.row.model} is put on another model, and there is none at {source}: run that "
                "row first (--model)"
            )
    for stage in (alone, put_on_others):
        for job, _ in common.keep(table, run_side_by_side(_run_row, stage, common.jobs)):
            job.checkpoint.unlink(missing_ok=True)
    _digits.cache_clear()
    write_page(table)
    for job in jobs:
        if job.seed == 0 and job.model_folder().exists():  # whenever it was trained
            from selfnorm.plotting import plot_samples

            images = EnergyVAE.load(job.model_folder()).sample(64, mean=True, seed=0)
            plot_samples(images, table.directory / f"mnist_{job.row.model}.png")
    return table


@lru_cache(maxsize=1)
def _digits(data_dir: str | Path | None, device: str) -> tuple[Tensor, ...]:
    """Training, validation and test part, loaded once for all rows of a process."""
    return tuple(part.to(device) for part in load_binarized(data_dir))


def _run_row(job: Job) -> tuple[Row, None]:
    """Train and evaluate one row."""
    train, valid, test = _digits(job.settings.data_dir, job.settings.device)
    began = time.perf_counter()
    vae, history = train_row(job, train, valid)
    common: Row = {"reference": train[:4000], "seed": 10_000 + job.seed}
    report = evaluate_vae(vae, test, **job.evaluation, **common)
    common["n_prior_samples"] = job.evaluation["n_prior_samples"]
    held_out = evaluate_vae(vae, valid, posterior_samples=10, **common)
    row = {
        **job.keys(),
        **({} if job.row.on is None else {"vae_steps": job.row.on.steps}),
        **report_figures(report),
        "valid_snelbo": held_out.snelbo,
        **history_columns(history),
        "stopped": history.stopped,
        "step_ms": round(1e3 * history.seconds / max(history.n_steps, 1), 3),
        "seconds": round(time.perf_counter() - began, 2),
    }
    return row, None


def train_row(job: Job, train: Tensor, valid: Tensor) -> tuple[EnergyVAE, sn.History]:
    """Train one row, or go on with it; its model folder serves the post-hoc rows.

    Ctrl-C ends the run: the checkpoint stays, and nothing half-trained is written down. That of a
    finished run stays as well, until its row is written: it need not be trained again.
    """
    row = job.row
    torch.manual_seed(job.seed)
    encoder = ConvEncoder(ngf=job.ngf)
    decoder = ConvDecoder(ngf=job.ngf)
    vae = EnergyVAE(encoder, decoder, row.make_prior(job.energy_layers)).to(job.settings.device)
    options = dict(row.fit)
    if row.on is not None:
        trained = EnergyVAE.load(job.model_folder(row.on))
        vae.encoder.load_state_dict(trained.encoder.state_dict())
        vae.decoder.load_state_dict(trained.decoder.state_dict())
        options["train"] = "prior"
        options.pop("kl_warmup", None)
    job.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    names = {option.name for option in fields(sn.TrainingOptions)}
    how = {name: options.pop(name) for name in [*options] if name in names}
    how["checkpoint"] = sn.Checkpoint(job.checkpoint, every=max(1, row.steps // 20))
    history = sn.fit(
        vae, train, n_samples=options.pop("n_samples", 1024), val_data=valid, seed=job.seed,
        progress=job.settings.bars, task_options=options, options=sn.TrainingOptions(**how),
    )  # fmt: skip
    refuse_cut_short(history.stopped)
    vae.save(job.model_folder())
    return vae, history


def report_figures(report: VAEReport) -> Row:
    """The columns of a row that come from its evaluation; values are plain, ready for JSON."""
    names = ["elbo", "snelbo", "log_px", "log_px_many", "log_px_few", "many_samples", "many_rows"]
    names += ["se", "reconstruction", "kl", "learned_log_norm", "ess", "pareto_k", "reliable"]
    estimates = report.log_norm.items()
    return {
        "lower": report.snelbo,
        "upper": None,  # log p(x) by importance samples is a lower bound too
        **{name: getattr(report, name) for name in (*names, "active_units")},
        "log_norm": {name: estimate.value for name, estimate in estimates},
        "log_norm_se": {name: estimate.se for name, estimate in estimates},
        "log_norm_pareto_k": {name: estimate.pareto_k for name, estimate in estimates},
        "reasons": list(report.reasons),
    }


Rows = list[Row]

# The paper has no chain of energies; ours are compared with its joint energies.
_SAME_KIND = {"vae_ar_ebm": "vae_ebm", "vae_ar_ebm_post_hoc": "vae_ebm_post_hoc"}
_SIZE = ("seed", "ngf", "energy_layers", "evaluation")

_NOTE = (
    "Statically binarised MNIST, test part, nats, mean ± sd over seeds; 100 posterior "
    "samples a row. `log p(x), part`: with many samples, and with 100 in brackets, on a part of "
    "the rows (their number is in the JSON). `paper`: the printed figure, in brackets that of the "
    "same kind where the paper has no such row; `reached` compares the SNELBO with it. `log Z`: "
    "largest distance between three estimators (base samples, mixture with the aggregate "
    "posterior, tempered SMC). A row that is not reliable is no result, however good it looks."
)


def _counted(rows: Iterable[Row]) -> Rows:
    return [r for r in rows if r["reliable"] and not r.get("diverged")]


def _grouped(rows: Rows) -> dict[str, Rows]:
    """Rows by model, and by size or number of steps where several of them occur."""
    several = {k for k in (*_SIZE[1:], "max_steps") for m in {r["model"] for r in rows}
               if len({r.get(k) for r in rows if r["model"] == m}) > 1}  # fmt: skip
    groups: dict[str, Rows] = {}
    for row in rows:
        sizes = [f"{k.replace('_', ' ')} {row.get(k)}" for k in sorted(several)]
        groups.setdefault(", ".join([row["model"], *sizes]), []).append(row)
    return groups


def _line(name: str, rows: Rows, printed: dict[str, float]) -> list[str]:
    model, good = rows[0]["model"], _counted(rows)
    shown = good or rows
    spread = max(max(v) - min(v) for v in (list(r["log_norm"].values()) for r in shown))
    exact = all("exact" in r["log_norm"] for r in rows)
    value = printed.get(model, printed.get(_SAME_KIND.get(model, "")))
    paper = reached = many = "–"
    if value is not None:
        paper = f"{value:.2f}" if model in printed else f"({value:.2f})"
        short = value - statistics.fmean(r["snelbo"] for r in shown)
        reached = "reached" if short <= 0 else f"missed by {short:.2f}"
    with_many = [r for r in shown if r.get("log_px_few") is not None]
    if with_many:
        few = mean_sd(with_many, "log_px_few", 2)
        many = f"{mean_sd(with_many, 'log_px_many', 2)} ({few})"
    return [
        name,
        str(len(rows)),
        *(mean_sd(shown, key, 2) for key in ("snelbo", "elbo", "log_px")),
        many,
        paper,
        reached if good else "no result",
        "exact" if exact else f"within {spread:.2f}",
        "–" if exact else mean_sd(shown, "pareto_k", 2),
        f"{'reliable' if good else 'NOT reliable'} ({len(good)} of {len(rows)})",
    ]


def gains(rows: Rows) -> list[str]:
    """What each prior gains over the VAE of the same seed, one line each.

    A prior trained from scratch is compared with the VAE given as many steps; one put on the
    finished VAE with that VAE. Runs that are not reliable gain nothing.
    """
    lines = []
    vaes = [r for r in _counted(rows) if r["model"] == "vae"]
    plain = {tuple(r.get(k) for k in (*_SIZE, "max_steps")): r["snelbo"] for r in vaes}
    for name, group in _grouped([r for r in rows if r["model"] != "vae"]).items():
        post_hoc = group[0]["model"].endswith("post_hoc")
        steps = "vae_steps" if post_hoc else "max_steps"
        pairs = [
            {"gain": row["snelbo"] - plain[key]}
            for row in _counted(group)
            if (key := tuple(row.get(k) for k in (*_SIZE, steps))) in plain
        ]
        how = "put on the finished VAE" if post_hoc else "from scratch, as many steps"
        gain = "no reliable pair of runs."
        if pairs:
            gain = f"{mean_sd(pairs, 'gain', 2)} nats ({len(pairs)} paired by seed)"
        lines.append(f"- `{name}`, {how}: {gain}")
    return lines


def write_page(table: ResultTable) -> Path:
    """The table, what the priors gain, and the findings against rows."""
    printed = paper_numbers()["mnist"]
    # Rows that ran side by side come in any order.
    ordered = sorted(table.rows, key=lambda r: MODELS.index(r["model"]))
    header = ["model", "seeds", "SNELBO", "ELBO", "log p(x)", "log p(x), part", "paper", "reached"]
    header += ["log Z", "Pareto k", "verdict"]
    body = [_line(name, group, printed) for name, group in _grouped(ordered).items()]
    reasons = [
        f"- `{r['model']}`, seed {r['seed']}: "
        + " ".join([*r["reasons"], *["Its training diverged."] * r.get("diverged", False)])
        for r in ordered
        if r["reasons"] or r.get("diverged")
    ]
    sections = [f"# VAEs with energy priors, recipe `{table.recipe}`", _NOTE]
    sections.append(markdown_table(header, body))
    for title, lines in (
        ("SNELBO above that of the VAE:", gains(ordered)),
        ("Against the rows that are not reliable:", reasons),
    ):
        if lines:
            sections += [title, "\n".join(lines)]
    return table.write_page(*sections)
