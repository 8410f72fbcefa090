"""Every page of the site, a report and the page of ``selfnorm explore``, in Chromium.

``make test-web`` runs it.

Of each page: no console error, nothing asked of another host, no sideways scrolling at 400, 800 and
1400 pixels, pictures and formulas there, no serious finding of axe. The search works.
Some pages are looked at in the dark, too. Screenshots of the pages people land on are kept.

python -m tests.web SITE OUT
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

from tests.web.browser import chromium, overhear, serious, too_wide
from tests.web.explore import play

WIDTHS = (400, 800, 1400)
KEPT = ("index", "theory", "is-this-real", "how-to", "reproduce", "tables/mixed", "reference/index")
IN_THE_DARK = ("index", "tutorials/table", "theory", "reproduce", "report")
CUT_OFF = """[...document.querySelectorAll('.bd-article .highlight pre')]
    .filter(e => e.scrollWidth > e.clientWidth + 1)
    .map(e => e.innerText.split('\\n').sort((a, b) => b.length - a.length)[0])"""


class Quiet(SimpleHTTPRequestHandler):
    """A server that does not log."""

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: Path) -> str:
    """The folder on a local port; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def look(page: Page, address: str, axe: Axe, shot: Path | None) -> list[str]:
    """What is wrong with one page."""
    wrong: list[str] = []
    page.set_viewport_size({"width": max(WIDTHS), "height": 900})
    page.goto(address)
    broken = page.evaluate(
        "[...document.images].filter(i => !i.naturalWidth && i.loading !== 'lazy').map(i => i.src)"
    )
    wrong += [f"picture missing: {source}" for source in broken]
    formulas = page.locator(".math")
    if formulas.count():
        page.wait_for_function(
            "document.querySelectorAll('.math').length <= "
            "document.querySelectorAll('.math mjx-container').length",
            timeout=20_000,
        )
        if page.locator("[data-mjx-error]").count():
            wrong.append("a formula that MathJax does not understand")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        wrong += too_wide(page)
        cut = page.evaluate(CUT_OFF) if width == max(WIDTHS) else []
        wrong += [f"code cut off at {width}: {line}" for line in cut]
        if shot is not None:
            shot.parent.mkdir(parents=True, exist_ok=True)
            page.wait_for_timeout(500)  # sidebars slide away
            page.screenshot(path=shot.with_name(f"{shot.name}-{width}.png"), full_page=width > 400)
    return wrong + serious(page, axe)


def search(page: Page, home: str) -> list[str]:
    """Whether the search finds a class and leads to it."""
    page.goto(home + "search.html?q=EnergyDensity")
    page.wait_for_selector("#search-results ul.search li", timeout=20_000)
    links = page.locator("#search-results ul.search a").evaluate_all("all => all.map(a => a.href)")
    wanted = any("selfnorm.EnergyDensity" in link for link in links)
    return [] if wanted else ["search does not find EnergyDensity"]


def make_report(folder: Path) -> Path:
    """A report of a small model."""
    from sklearn.datasets import load_wine

    from selfnorm import EnergyDensity

    wine = load_wine(as_frame=True).data.iloc[:, :5]
    wine.to_csv(folder / "wine.csv", index=False)
    EnergyDensity(max_steps=50, random_state=0).fit(wine).save(folder / "model")
    command = ["report", folder / "model", folder / "wine.csv", "-o", folder / "report.html"]
    subprocess.run([sys.executable, "-m", "selfnorm", *map(str, command)], check=True)
    return folder / "report.html"


def main(site: Path, out: Path) -> int:
    """Look at everything; the number of pages with something wrong."""
    out.mkdir(parents=True, exist_ok=True)
    home, axe, bad = serve(site), Axe(), 0
    names = sorted(str(p.relative_to(site).with_suffix("")) for p in site.rglob("*.html"))
    names = [name for name in names if not name.startswith(("_static", "genindex", "py-modindex"))]
    with sync_playwright() as playwright, TemporaryDirectory() as folder:
        browser = chromium(playwright)
        addresses = {name: f"{home}{name}.html" for name in names if name != "search"}
        addresses["report"] = make_report(Path(folder)).as_uri()
        page, heard = browser.new_page(), list[str]()
        overhear(page, home, heard)
        visits = [(name, name, "light") for name in addresses]
        visits += [(name, f"{name}-dark", "dark") for name in IN_THE_DARK]
        for name, called, scheme in visits:
            keep = name in KEPT or name.startswith("tutorials/") or name == "report"
            page.emulate_media(color_scheme=scheme)
            wrong = look(page, addresses[name], axe, out / called if keep else None) + heard
            heard.clear()
            bad += bool(wrong)
            for each in dict.fromkeys(wrong):
                print(f"{called}: {each}", flush=True)
        page.emulate_media(color_scheme="light")
        lost = search(page, home) + play(browser, axe, Path(folder), out)
        browser.close()
    bad += bool(lost)
    print(*lost, f"{len(addresses)} pages, {bad} with findings; screenshots in {out}/", sep="\n")
    return bad


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]), Path(sys.argv[2])), 1))
