"""Write docs/reproduce.md from the result files under results/: no number is typed by hand.

python docs/generate.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reproduce.md"

INTRODUCTION = """# The paper's tables, reproduced

Every table here is made from a JSON file under `results/` by `python docs/generate.py`; each file
holds one row per run, the command, the versions and the hardware. Log-likelihoods are in nats,
higher is better.
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


def page() -> str:
    """The whole page."""
    files = sorted(
        p
        for p in (ROOT / "results").rglob("*.json")
        if p.with_suffix(".md").exists() and "rows" in json.loads(p.read_text())
    )
    return "\n".join([INTRODUCTION, *(section(path) for path in files)])


def main() -> int:
    """Write the page, or with --check say whether it is up to date."""
    text = page()
    if "--check" in sys.argv:
        if PAGE.read_text() != text:
            print("docs/reproduce.md is out of date: run python docs/generate.py")
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
