"""The MNIST table in words: means over seeds beside the paper's numbers, verdicts, gains."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from selfnorm.paper.mnist_rows import MODELS
from selfnorm.paper.report import markdown_table, paper_numbers

__all__ = ["finished", "gains", "markdown", "rewrite"]

Rows = list[dict[str, Any]]

# The paper has no chain of energies; ours are held against its joint energies.
_SAME_KIND = {"vae_ar_ebm": "vae_ebm", "vae_ar_ebm_post_hoc": "vae_ebm_post_hoc"}
_SIZE = ("ngf", "energy_layers")
# Nats that a prior should gain over its VAE, from scratch and put on the finished VAE.
_ASKED = {False: 1.5, True: 0.9}

_NOTE = (
    "Statically binarised MNIST, test part, nats, mean ± standard error over seeds; 100 posterior "
    "samples a row. `log p(x), part`: with many samples, and with 100 in brackets, on a part of "
    "the rows (their number is in the JSON). `paper`: the printed figure, in brackets that of the "
    "same kind where the paper has no such row; `reached` compares the SNELBO with it. `log Z`: "
    "largest distance between three estimators (base samples, mixture with the aggregate "
    "posterior, tempered SMC). A row that is not reliable is no result, however good it looks."
)


def finished(rows: Iterable[dict[str, Any]]) -> Rows:
    """Rows that count: an interrupted run is no row of a table."""
    return [r for r in rows if r.get("stopped") != "interrupted"]


def _counted(rows: Iterable[dict[str, Any]]) -> Rows:
    return [r for r in rows if r["reliable"] and not r.get("diverged")]


def _grouped(rows: Rows) -> dict[str, Rows]:
    """Rows by model, and by size or number of steps where several of them occur."""
    several = {k for k in (*_SIZE, "max_steps") for m in {r["model"] for r in rows}
               if len({r.get(k) for r in rows if r["model"] == m}) > 1}  # fmt: skip
    groups: dict[str, Rows] = {}
    for row in rows:
        sizes = [f"{k.replace('_', ' ')} {row.get(k)}" for k in sorted(several)]
        groups.setdefault(", ".join([row["model"], *sizes]), []).append(row)
    return groups


def mean_se(values: Sequence[float], digits: int = 2) -> str:
    """``mean ± standard error``; a single value has no error to show.

    Example:
        >>> mean_se([1.0, 2.0]), mean_se([1.0]), mean_se([])
        ('1.50 ± 0.50', '1.00', '–')
    """
    if not values:
        return "–"
    text = f"{statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"
    return text


def _against(rows: Rows, printed: float | None) -> str:
    """``reached``, ``missed by ...``, or that there is nothing to compare."""
    good = _counted(rows)
    if printed is None:
        return "–"
    if not good:
        return "no result"
    missing = printed - statistics.fmean(r["snelbo"] for r in good)
    return "reached" if missing <= 0 else f"missed by {missing:.2f}"


def _many(rows: Rows) -> str:
    full = [r for r in rows if r.get("log_px_few") is not None]
    if not full:
        return "–"
    many, few = (mean_se([r[key] for r in full]) for key in ("log_px_many", "log_px_few"))
    return f"{many} ({few})"


def _line(name: str, rows: Rows, printed: dict[str, float]) -> list[str]:
    model, good = rows[0]["model"], _counted(rows)
    shown = good or rows
    spread = max(max(v) - min(v) for v in (list(r["log_norm"].values()) for r in shown))
    exact = all("exact" in r["log_norm"] for r in rows)
    value = printed.get(model, printed.get(_SAME_KIND.get(model, "")))
    paper = "–" if value is None else f"{value:.2f}" if model in printed else f"({value:.2f})"
    verdict = "reliable" if good else "NOT reliable"
    return [
        name,
        str(len(rows)),
        *(mean_se([r[key] for r in shown]) for key in ("snelbo", "elbo", "log_px")),
        _many(shown),
        paper,
        _against(rows, value),
        "exact" if exact else f"within {spread:.2f}",
        "–" if exact else mean_se([r["pareto_k"] for r in shown]),
        f"{verdict} ({len(good)} of {len(rows)})",
    ]


def gains(rows: Rows) -> list[str]:
    """What each prior gains over the VAE of the same seed, one line each.

    A prior trained from scratch is compared with the VAE given as many steps; one put on the
    finished VAE with that VAE. Runs that are not reliable gain nothing.
    """
    lines = []
    plain = [r for r in _counted(rows) if r["model"] == "vae"]
    for name, group in _grouped([r for r in rows if r["model"] != "vae"]).items():
        post_hoc = group[0]["model"].endswith("post_hoc")
        found = [
            row["snelbo"] - vae["snelbo"]
            for row in _counted(group)
            for vae in plain
            if _steps_of_vae(row) in (None, vae["max_steps"])
            and all(row.get(k) == vae.get(k) for k in ("seed", *_SIZE))
        ]
        how = "put on the finished VAE" if post_hoc else "from scratch, as many steps"
        if not found:
            lines.append(f"- `{name}`, {how}: no reliable pair of runs.")
            continue
        asked = _ASKED[post_hoc]
        seeds = f"{len(found)} seed{'s' if len(found) > 1 else ''}"
        verdict = "reached" if statistics.fmean(found) >= asked else "missed"
        lines.append(
            f"- `{name}`, {how}: {mean_se(found)} nats ({seeds}, paired; {asked} asked for: "
            f"{verdict})"
        )
    return lines


def _steps_of_vae(row: dict[str, Any]) -> int | None:
    """Steps of the VAE to compare with; ``None`` where an older file does not say."""
    key = "vae_steps" if row["model"].endswith("post_hoc") else "max_steps"
    steps: int | None = row.get(key)
    return steps


def _stopped(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [
        f"- `{r['model']}`, seed {r['seed']}: interrupted at step {r['n_steps']:,} of "
        f"{r['max_steps']:,}"
        for r in rows
        if r.get("stopped") == "interrupted"
    ]


def markdown(
    rows: Rows, recipe: str, command: str, seconds: float, notes: Sequence[str] = ()
) -> str:
    """The table, what the priors gain, and what speaks against rows."""
    printed = paper_numbers()["mnist"]
    # Rows that ran side by side come in any order.
    counted = sorted(finished(rows), key=lambda r: MODELS.index(r["model"]))
    header = ["model", "seeds", "SNELBO", "ELBO", "log p(x)", "log p(x), part", "paper", "reached"]
    header += ["log Z", "Pareto k", "verdict"]
    body = [_line(name, group, printed) for name, group in _grouped(counted).items()]
    reasons = [
        f"- `{r['model']}`, seed {r['seed']}: {' '.join([*r['reasons'], *_diverged(r)])}"
        for r in counted
        if r["reasons"] or r.get("diverged")
    ]
    sections = [
        f"# VAEs with energy priors, recipe `{recipe}`",
        _NOTE,
        markdown_table(header, body),
    ]
    for title, lines in (
        ("SNELBO above that of the VAE:", gains(counted)),
        ("Against the rows that are not reliable:", reasons),
        ("Not counted:", _stopped(rows)),
    ):
        if lines:
            sections += [title, "\n".join(lines)]
    sections.append(f"`{command}`, {seconds:.0f} s")
    if notes:
        sections.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(sections) + "\n"


def _diverged(row: dict[str, Any]) -> list[str]:
    return ["Its training diverged."] if row.get("diverged") else []


def rewrite(directory: str | Path) -> Path:
    """Write ``mnist.md`` anew from the ``mnist.json`` beside it."""
    path = Path(directory) / "mnist.json"
    content = json.loads(path.read_text())
    rows = content["rows"] + [r for r in content.get("left_out", []) if "max_steps" in r]
    text = markdown(
        [r for r in rows if r in content["rows"] or r.get("stopped") == "interrupted"],
        content["recipe"], content["command"], content["seconds"], content.get("notes", ()),
    )  # fmt: skip
    path.with_suffix(".md").write_text(text)
    return path.with_suffix(".md")
