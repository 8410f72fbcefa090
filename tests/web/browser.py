"""Chromium, and what is wrong with a page that is open in it."""

from __future__ import annotations

import shutil

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Request

FLAGS = [
    "--no-sandbox",  # as root, in a container
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def chromium(playwright: Playwright) -> Browser:
    """The system's Chromium, else playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    return playwright.chromium.launch(executable_path=found, args=FLAGS)


def overhear(page: Page, home: str, wrong: list[str]) -> None:
    """Note errors of the console and of scripts, and what is asked of other hosts."""

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            wrong.append(f"console: {message.text} {message.location.get('url')}")

    def asked(request: Request) -> None:
        if not request.url.startswith((home, "data:", "blob:", "file:")):
            wrong.append(f"asks another host: {request.url}")

    page.on("console", said)
    page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
    page.on("request", asked)


def too_wide(page: Page) -> list[str]:
    """Whether the page has to be scrolled sideways."""
    over, width = page.evaluate(
        "[document.documentElement.scrollWidth - window.innerWidth, window.innerWidth]"
    )
    return [f"{over} pixels too wide at {width}"] if over > 0 else []


def serious(page: Page, axe: Axe) -> list[str]:
    """Findings of axe that keep people out."""
    # its preload moves style sheets into the page, where their imports lead nowhere
    options = {"preload": False, "resultTypes": ["violations"]}
    wrong = []
    for finding in axe.run(page, options=options).response["violations"]:
        if finding["impact"] in ("serious", "critical"):
            where = "; ".join(str(node["target"][0]) for node in finding["nodes"][:3])
            wrong.append(f"axe, {finding['impact']}: {finding['id']} at {where}")
    return wrong
