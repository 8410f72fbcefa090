"""Code of README, docs and notebooks runs, links lead somewhere, figures are those of results/."""

import inspect
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import selfnorm

ROOT = Path(__file__).parent.parent
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
# A block of a page, or a cell of a notebook below its options.
BLOCK = re.compile(
    r"^```(?:python|\{code-cell\} python)\n(?:---\n.*?^---\n|(?::[^\n]*\n)+)?(.*?)^```",
    re.MULTILINE | re.DOTALL,
)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.name)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    torch.manual_seed(0)
    namespace: dict = {}
    for number, block in enumerate(BLOCK.findall(page.read_text()), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_within_the_docs_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        if "/generated/" in target:  # made by the build, which is strict about them
            continue
        other = page.parent / target if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


def public_names() -> dict[str, object]:
    """What people use, by the path the reference has it under."""
    return {
        name: value
        for name in selfnorm.__all__
        if not inspect.ismodule(value := getattr(selfnorm, name))
    }


def test_every_public_name_is_in_the_reference():
    listed = re.findall(
        r"^   ([A-Za-z0-9_.]+)$", (ROOT / "docs/reference/index.md").read_text(), re.MULTILINE
    )
    assert len(listed) == len(set(listed))
    assert set(public_names()) <= set(listed)
    rooms = {m.name for m in pkgutil.iter_modules(selfnorm.__path__) if not m.name.startswith("_")}
    own_pages = {"cli", "paper", "saving", "evidence"}  # commands, and names that are at the top
    assert rooms - own_pages <= set(listed)


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_an_example(name):
    assert ">>>" in (inspect.getdoc(public_names()[name]) or "")


def test_results_name_the_commit_they_are_of():
    """Made at, brought by, or as many as runs that were joined; a list belongs to its neighbour."""
    for path in sorted((ROOT / "results").rglob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            of = content.get("made_by") or [content]
            named = [run.get("commit") or run.get("recorded_in") or "" for run in of]
            commits = [one for each in named for one in each.split(", ")]
            named_well = re.compile(r"[0-9a-f]{7,40}(-dirty)?")  # dirty: code changed after it
            unknown = [one for one in commits if not named_well.fullmatch(one)]
            assert not unknown, f"{path.relative_to(ROOT)} is of {unknown}"


def test_files_that_the_design_names_exist():
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs/design.md").read_text(), flags=re.M | re.DOTALL)
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text))
    places = ROOT, ROOT / "src/selfnorm"
    gone = [name for name in named if not any((place / name).exists() for place in places)]
    assert not gone, f"docs/design.md names {sorted(gone)}"


def test_the_walks_of_the_design_enter_the_files_it_says():
    """In a process of its own: what is imported already is entered otherwise."""
    walks = [sys.executable, str(ROOT / "docs" / "walks.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    checked = subprocess.run(walks, capture_output=True, text=True, env=environment, check=False)
    assert checked.returncode == 0, checked.stderr[-2000:]


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
