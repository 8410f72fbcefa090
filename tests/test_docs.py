"""Python blocks of README and docs run, links lead somewhere, figures are those of results/."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.name)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict = {}
    for number, block in enumerate(BLOCK.findall(page.read_text()), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_within_the_docs_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_generated_pages_are_what_the_results_say():
    wanted = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()
    stale = [
        str(page.relative_to(ROOT))
        for page, text in wanted.items()
        if not page.exists() or page.read_text() != text
    ]
    assert not stale, f"run python docs/generate.py: {stale} are out of date"
    tables = {page for page in PAGES if page.parent.name == "tables"}
    assert tables <= wanted.keys(), "a page in docs/tables that nothing makes"
