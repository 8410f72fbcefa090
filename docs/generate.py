"""Write docs/reproduce.md and docs/benchmarks.md from results/: no number is typed by hand.

python docs/generate.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from selfnorm.paper.report import markdown_table

ROOT = Path(__file__).resolve().parent.parent
SPEED = ROOT / "results" / "speed"

INTRODUCTION = """# The paper's tables, reproduced

Every table here is made from a JSON file under `results/` by `python docs/generate.py`; each file
holds one row per run, the command, the versions and the hardware. Log-likelihoods are in nats,
higher is better. `selfnorm reproduce all` makes the tables in one go, resumable, with a page of its
own ([how](speed.md#the-whole-paper-in-one-go)).
"""


BENCHMARKS = """# Benchmarks of speed and memory

Every table here is made from a JSON file under `results/speed/` by `python docs/generate.py`; the
scripts are under `benchmarks/`, and `make bench` runs those that need no GPU. Variants of one table
take turns in one run, so ratios hold on a busy machine where absolute times do not.
"""


def section(path: Path) -> str:
    """The Markdown table beside a result file, with its provenance."""
    content = json.loads(path.read_text())
    text = path.with_suffix(".md").read_text().strip()
    text = text.replace("# ", "## ", 1)
    hardware = content["hardware"]
    place = hardware.get("gpu") or f"{hardware['cores']} CPU cores"
    version = content["versions"]
    return (
        f"{text}\n\nFile `{path.relative_to(ROOT)}`, {place}, torch {version['torch']}, "
        f"Python {version['python']}.\n"
    )


def reproduce_page() -> str:
    """Tables of the paper and of the comparisons with peers."""
    files = sorted(
        p
        for p in (ROOT / "results").rglob("*.json")
        if p.with_suffix(".md").exists() and "rows" in json.loads(p.read_text())
    )
    return "\n".join([INTRODUCTION, *(section(path) for path in files)])


def cell(value: object) -> str:
    """A number with the digits it deserves."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("_", " ")


def speed_section(path: Path) -> str:
    """All scalar columns of one benchmark."""
    content = json.loads(path.read_text())
    rows = content["rows"]
    columns = list(dict.fromkeys(k for r in rows for k, v in r.items() if not isinstance(v, list)))
    header = [column.replace("_", " ") for column in columns]
    table = markdown_table(header, [[cell(row.get(c)) for c in columns] for row in rows])
    hardware, version = content["hardware"], content["versions"]
    place = hardware.get("gpu") or f"{hardware['cores']} CPU cores"
    note = f"{content['note']}\n\n" if content.get("note") else ""
    return (
        f"## {path.stem.replace('_', ' ')}\n\n{note}{table}\n\n`{content['command']}`, {place}, "
        f"torch {version['torch']}; file `{path.relative_to(ROOT)}`.\n"
    )


def benchmarks_page() -> str:
    """Speed and memory."""
    files = sorted(SPEED.glob("*.json"))
    return "\n".join([BENCHMARKS, *(speed_section(path) for path in files)])


PAGES = {"reproduce.md": reproduce_page, "benchmarks.md": benchmarks_page}


def main() -> int:
    """Write the pages, or with --check say whether they are up to date."""
    stale = 0
    for name, page in PAGES.items():
        path, text = ROOT / "docs" / name, page()
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"docs/{name} is out of date: run python docs/generate.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
