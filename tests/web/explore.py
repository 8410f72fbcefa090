"""The page of ``selfnorm explore``: columns set, a row explained, an event asked, rows taken."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import pandas as pd
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Error, Locator, Page, expect, sync_playwright

from selfnorm import EnergyDensity
from tests.web.browser import chromium, overhear, serious, too_wide

ALL = re.compile("4,000 draws")
LOOKS = [(1400, "light"), (400, "light"), (1400, "dark"), (400, "dark")]


def make_model(folder: Path) -> Path:
    """A model of a table with columns of many kinds."""
    rng = np.random.default_rng(0)
    sex = rng.choice(["F", "M"], n := 400)
    table = pd.DataFrame(
        {
            "sex": sex,
            "height": (rng.normal(165, 7, n) + 12 * (sex == "M")).round(),
            "visits": rng.poisson(3, n),
            "paid": np.where(rng.random(n) < 0.4, 0.0, rng.gamma(2, 20, n).round(2)),
            "since": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 365, n), "D"),
        }
    )
    EnergyDensity(max_steps=150, random_state=0).fit(table).save(folder / "people")
    return folder / "people"


@contextmanager
def explored(model: Path) -> Iterator[str]:
    """The address of the page while the command runs."""
    command = [sys.executable, "-m", "selfnorm", "explore", str(model), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        yield line.split()[-1]
    finally:
        server.terminate()
        said = server.communicate(timeout=60)[1]
    assert "the page is closed" in said, said
    assert server.returncode == 143, server.returncode


def status(address: str, **headers: str) -> int:
    """What a stranger's question comes to."""
    try:
        with urlopen(Request(address, b"{}", headers), timeout=30) as reply:
            return int(reply.status)
    except HTTPError as error:
        return error.code


def play(browser: Browser, axe: Axe, folder: Path, out: Path) -> list[str]:
    """What is wrong with the page, used as a person does; screenshots are kept."""
    wrong: list[str] = []
    with explored(make_model(folder)) as address:
        home = f"http://{urlsplit(address).netloc}"
        page = browser.new_page(accept_downloads=True)
        overhear(page, home, wrong)
        try:
            set_columns(page, address)
            explain_a_row(page)
            ask_for_a_probability(page)
            take_rows(page, folder)
        except (AssertionError, Error) as error:
            wrong.append("".join(traceback.format_exception(error, limit=-1)))
        for width, scheme in LOOKS:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=out / f"explore-{scheme}-{width}.png", full_page=True)
            wrong += too_wide(page) + serious(page, axe)
        page.close()
        codes = {
            "without its token": status(f"{home}/about"),
            "with another token": status(f"{home}/{'x' * 22}/about"),
            "from another host": status(f"{address}about", Host="evil.example"),
            "from another page": status(f"{address}about", Origin="http://evil.example"),
        }
        wrong += [f"answers {how}: {code}" for how, code in codes.items() if code != 403]
        if status(f"{address}about") != 200:
            wrong.append("does not answer with its token")
    return [f"explore: {words}" for words in dict.fromkeys(wrong)]


def card(page: Page, name: str) -> Locator:
    """The card of a column."""
    return page.locator(".card", has=page.get_by_role("heading", name=name, exact=True))


def control(page: Page, name: str) -> Locator:
    """The box or menu of a column."""
    return card(page, name).get_by_label(name, exact=True)


def set_columns(page: Page, address: str) -> None:
    """By a menu, a box and the keyboard; the others follow, and can be set free."""
    page.goto(address)
    state, medians = page.locator("#state"), {}
    expect(state).to_contain_text(ALL, timeout=60_000)
    for sex in ("F", "M"):
        control(page, "sex").select_option(label=sex)
        expect(state).not_to_contain_text(ALL)
        expect(state).to_contain_text(ALL, timeout=60_000)
        medians[sex] = float(re.findall(r"median ([\d.]+)", card(page, "height").inner_text())[0])
    assert medians["M"] > medians["F"] + 6, f"heights do not follow: {medians}"
    expect(card(page, "sex")).to_contain_text("100 %")
    page.get_by_label("paid, slider").focus()
    page.keyboard.press("ArrowRight")
    expect(control(page, "paid")).not_to_have_value("")
    control(page, "since").fill("2024-05-06")
    control(page, "height").fill("1e300")
    expect(page.get_by_role("alert")).to_contain_text("as large as 1e+300", timeout=30_000)
    expect(page.locator("#chips li")).to_have_count(4)
    page.get_by_role("button", name="Set all free").click()
    expect(page.locator("#chips li")).to_have_count(0)
    expect(page.get_by_role("alert")).to_be_hidden()


def explain_a_row(page: Page) -> None:
    """The cell to blame comes first, and what the rest of the row makes of it is one step away."""
    row, button = page.locator("#pasted"), page.get_by_role("button", name="Explain", exact=True)
    row.fill("F,177")
    button.click()
    expect(page.locator("#explained")).to_contain_text("the row has 2 cells")
    row.fill("F,210,3,0,2024-05-06")
    button.click()
    expect(page.locator("#explained tbody tr").first).to_contain_text("height")
    page.get_by_role("button", name="height given the rest").click()
    expect(page.locator("#chips li")).to_have_count(4)
    expect(page.locator("#state")).to_contain_text(ALL, timeout=60_000)


def set_free_but_sex(page: Page) -> None:
    """Men alone."""
    page.get_by_role("button", name="Set all free").click()
    control(page, "sex").select_option(label="M")


def ask_for_a_probability(page: Page) -> None:
    """Given what is set; what cannot be read is answered with a sentence."""
    set_free_but_sex(page)
    event, answer = page.get_by_label("Event, given what is set above"), page.locator("#answer")
    shares = []
    for words in ("height > 165", "height > 165 and visits >= 3"):
        event.fill(words)
        event.press("Enter")
        expect(answer.locator("strong")).to_be_visible(timeout=60_000)
        shares.append(float(answer.locator("strong").inner_text().split()[0]))
        expect(answer).to_contain_text("between")
    assert 85 < shares[0] < 100, f"P(height > 165 | M) is {shares[0]} %"
    assert shares[1] < shares[0]
    event.fill("hight > 165")
    event.press("Enter")
    expect(answer).to_contain_text("there is no column 'hight'")


def take_rows(page: Page, folder: Path) -> None:
    """They have the columns of the table, and what is set."""
    set_free_but_sex(page)
    page.locator("#count").fill("25")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    download.value.save_as(folder / "taken.csv")
    taken = pd.read_csv(folder / "taken.csv", parse_dates=["since"])
    assert list(taken) == ["sex", "height", "visits", "paid", "since"], list(taken)
    assert len(taken) == 25
    assert (taken["sex"] == "M").all()
    assert (taken["since"].dt.year == 2024).all()


if __name__ == "__main__":  # the page alone: python -m tests.web.explore OUT
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started, TemporaryDirectory() as place:
        findings = play(chromium(started), Axe(), Path(place), Path(sys.argv[1]))
    sys.exit("\n".join(findings) or 0)
