"""A page to play with a density: columns set, the others drawn, rows explained, events asked.

The page is one file, ``explore.html``, served to this machine alone at an address with a secret.
Starlette and uvicorn, the extra ``explore``, are imported when it is served.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import secrets
import socket
import threading
import traceback
import webbrowser
from collections.abc import Callable
from html import escape
from importlib.util import find_spec
from inspect import signature
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from selfnorm.cli.files import Table, write_table
from selfnorm.columns import Cells, Column, from_clock, is_gap, label_text, to_clock
from selfnorm.errors import DataError, SelfnormError, listed
from selfnorm.report import findings_of
from selfnorm.saving import json_safe

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from selfnorm.tables import EnergyDensity

_PAGE = Path(__file__).with_name("explore.html")
_HOST = "127.0.0.1"
_QUESTIONS = ("about", "draw", "sample", "explain", "probability")
_FREE_CELLS = 15_000  # of rows with no column set, which the page begins with
_MOST_DRAWS, _MOST_ROWS = 5000, 100_000  # of an answer, of a file
_MOST_LEVELS, _MOST_BYTES = 500, 100_000  # of a menu, of a question
_POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class Answers:
    """What the page asks of a density, in plain JSON.

    A column goes by its place among the modelled ones; a value that is given is a number, a moment
    as text, or the place of a level in the menu. ``table`` makes a table to write of drawn rows.
    """

    def __init__(self, density: EnergyDensity, table: Callable[[Any], Table]) -> None:
        self.density, self.table, self.schema = density, table, density.schema_
        self.columns = self.schema.modelled
        finite = [column for column in self.columns if column.kind == "category"]
        self.levels = {column.name: [*column.levels, *column.tail] for column in finite}
        n = min(max(_FREE_CELLS // len(self.columns), 100), 1000)
        self.free = self.draw({}, n)["columns"]

    def about(self) -> dict[str, Any]:
        """The model, its columns, and rows of it with no column set."""
        pairs = zip(self.columns, self.free, strict=True)
        return {
            "facts": self.density.facts(),
            "aside": [str(column.name) for column in self.schema.columns if not column.modelled],
            "columns": [self._described(column, drawn) for column, drawn in pairs],
            "draws": self.free,
        }

    def draw(self, given: dict[str, Any], n: int, seed: int = 0) -> dict[str, Any]:
        """Rows that have the values ``given``, column by column."""
        rows, notes = self._drawn(given, n, seed, _MOST_DRAWS)
        cells = self.schema.cells(rows)
        return {"columns": [self._plain(c, cells[c.name]) for c in self.columns], "notes": notes}

    def sample(self, given: dict[str, Any], n: int, seed: int = 0) -> dict[str, Any]:
        """The same as the text of a CSV file."""
        rows, notes = self._drawn(given, n, seed, _MOST_ROWS)
        with TemporaryDirectory() as folder:
            write_table(self.table(rows), path := Path(folder) / "sample.csv")
            return {"csv": path.read_text(encoding="utf-8"), "notes": notes}

    def explain(self, row: str) -> dict[str, Any]:
        """How ordinary a row is, and each of its cells given the rest: the oddest cell first."""
        frame = {name: [cell] for name, cell in self._row(str(row)).items()}
        (scored, tails), notes = findings_of(
            lambda: (self.density.scored(frame), self.density.explain(frame))
        )
        read = self.schema.cells(frame)
        cells: list[dict[str, Any]] = [
            {
                "column": place,
                "shown": str(frame[column.name][0]),
                "tail": float(tails[column.name][0]),
                "value": self._plain(column, read[column.name])[0],
            }
            for place, column in enumerate(self.columns)
            if frame[column.name] != [None]
        ]
        cells.sort(key=lambda cell: cell["tail"])
        return {"score": scored[0][0], "margin": scored[1][0], "cells": cells, "notes": notes}

    def probability(self, event: str, given: dict[str, Any]) -> dict[str, Any]:
        """The probability of an event, with its interval and verdict."""
        values = self._given(given) or None
        estimate, notes = findings_of(lambda: self.density.probability(str(event), given=values))
        names = ("value", "low", "high", "se", "ess", "pareto_k", "reliable", "reasons")
        return {name: getattr(estimate, name) for name in names} | {"notes": notes}

    def _drawn(self, given: dict[str, Any], n: int, seed: int, most: int) -> tuple[Any, list[str]]:
        """Rows as the density gives them, and what it warns of."""
        if not (isinstance(n, int) and isinstance(seed, int) and 1 <= n <= most):
            raise DataError(f"the number of rows must be a whole number from 1 to {most:,}")
        values = self._given(given) or None
        return findings_of(lambda: self.density.sample(n, random_state=seed, given=values))

    def _described(self, column: Column, drawn: list[float]) -> dict[str, Any]:
        """What the page needs to know of a column."""
        part = self.schema.parts[self.schema.parts_of([column.name])[0]]
        ends = drawn
        if column.holds == "date":
            ends = to_clock(column, np.array(column.ends, dtype=np.int64)).tolist()
        levels = self.levels.get(column.name, [])
        shown = sorted(map(float, levels)) if column.numeric else list(map(label_text, levels))
        return {
            "name": str(column.name),
            "holds": column.holds,
            "levels": shown[:_MOST_LEVELS],
            "step": part.step or (0 if column.decimals is None else 10.0**-column.decimals),
            "resolution": column.resolution,
            "ends": [np.nanmin(ends), np.nanmax(ends)],
            "needs": [str(self.schema.columns[place].name) for place in column.counted_from],
        }

    def _given(self, given: dict[str, Any]) -> dict[Any, Any]:
        """Values by the names of their columns, as a density takes them."""
        columns = {str(place): column for place, column in enumerate(self.columns)}
        if not isinstance(given, dict) or not given.keys() <= columns.keys():
            raise DataError("values are given by the places of their columns")
        return {columns[p].name: self._value(columns[p], value) for p, value in given.items()}

    def _value(self, column: Column, value: Any) -> Any:
        try:
            if column.holds == "label":
                return self.levels[column.name][int(value)]
            return _moment(column, value) if column.holds == "date" else float(value)
        except (ValueError, TypeError, LookupError, OverflowError):
            words = f"{str(value)[:40]!r} is not a {column.holds}"
            raise DataError(f"{column.name}: {words}") from None

    def _plain(self, column: Column, cells: Cells) -> list[float]:
        """Numbers, seconds since 1970 on the clock of a column, places of levels; NaN for gaps."""
        values = cells.values
        if column.holds == "date":
            values = to_clock(column, values)
        elif column.holds == "label":
            place = {label_text(level): j for j, level in enumerate(self.levels[column.name])}
            places = [place.get(label_text(label), np.nan) for label in cells.labels]
            values = np.array([*places, np.nan])[values]
        plain: list[float] = np.where(cells.missing, np.nan, values).tolist()
        return plain

    def _row(self, text: str) -> dict[Any, Any]:
        """The cells of a row that was pasted, JSON or CSV, by column."""
        names = [str(column.name) for column in self.schema.columns]
        row = json.loads(text) if text.strip().startswith("{") else _csv_row(text, names)
        unknown = [name for name in row if name not in names]
        if unknown:
            raise DataError(f"there is no column {listed(unknown)}; there are {listed(names)}")
        cells = {column.name: row.get(str(column.name)) for column in self.columns}
        for name, cell in cells.items():
            if is_gap(cell) and cell not in self.levels.get(name, ()):
                cells[name] = None
        return cells


def _csv_row(text: str, names: list[str]) -> dict[str, str]:
    """A line of CSV, perhaps below the line of its header."""
    read = [[*csv.reader(text.strip().splitlines(), delimiter=mark)] for mark in ",;\t"]
    lines = max(read, key=lambda lines: [len(line) for line in lines])
    header, cells = lines if len(lines) == 2 else (names, [*chain(*lines)])
    if len(header) != len(cells):
        many = f"the row has {len(cells)} cells, and there are {len(header)} columns"
        raise DataError(f"{many}, {listed(header)}; for others put their names in a line above it")
    return {name.strip(): cell.strip() for name, cell in zip(header, cells, strict=True)}


def _moment(column: Column, text: str) -> str:
    """A moment on the clock of a column, as text of its own time zone."""
    local = np.array([dt.datetime.fromisoformat(text)], dtype="datetime64[s]")
    (moment,) = from_clock(column, local.astype(np.int64)).astype("datetime64[s]")
    return str(moment).replace("T", " ") + ("Z" if column.form.get("offset") is not None else "")


def listen(port: int) -> socket.socket:
    """A port of this machine alone; refused where it is taken, or the extra is not there."""
    if not (find_spec("starlette") and find_spec("uvicorn")):
        raise SelfnormError("it needs Starlette and uvicorn: pip install 'selfnorm[explore]'")
    try:
        return socket.create_server((_HOST, port))
    except OSError as error:
        raise DataError(f"port {port}: {error.strerror}; without --port one is chosen") from None


def serve(listener: socket.socket, answers: Answers, title: str, *, browser: bool) -> None:
    """Show the page, in a ``browser`` too, until the process is stopped."""
    import uvicorn

    token, host = secrets.token_urlsafe(16), f"{_HOST}:{listener.getsockname()[1]}"
    address = f"http://{host}/{token}/"
    print(f"{title}: {address}\nOnly this machine can open it. Ctrl-C ends it.", flush=True)
    if browser:
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
    app = app_of(answers, title, token, host)
    config = uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


def app_of(answers: Answers, title: str, token: str, host: str) -> ASGIApp:
    """The page at ``http://HOST/TOKEN/`` and its answers; whatever else comes is refused."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.datastructures import Headers
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse
    from starlette.routing import Route

    page = _PAGE.read_text(encoding="utf-8").replace("{title}", escape(title))

    async def show(_: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {**_HEADERS, "Content-Security-Policy": _POLICY.format(nonce)}
        return HTMLResponse(page.replace("{nonce}", nonce), headers=headers)

    async def answer(request: Request) -> Response:
        question = getattr(answers, request.url.path.rpartition("/")[2])
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_BYTES:
                return JSONResponse({"error": "this is too long"}, 413, _HEADERS)
        return JSONResponse(*await run_in_threadpool(_reply, question, body), _HEADERS)

    routes = [Route(f"/{token}/{name}", answer, methods=["POST"]) for name in _QUESTIONS]
    app = Starlette(routes=[Route(f"/{token}/", show), *routes])

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        headers, origin, words = Headers(scope=scope), f"http://{host}", ""
        secret = scope["path"].lstrip("/").partition("/")[0]
        if headers.get("host") != host or headers.get("origin", origin) != origin:
            words = f"This page is for {origin} alone."
        elif not secrets.compare_digest(secret.encode(), token.encode()):
            words = "Open the address that 'selfnorm explore' printed: this one lacks its secret."
        respond = PlainTextResponse(words, 403, _HEADERS) if words else app
        await respond(scope, receive, send)

    return guarded


def _reply(question: Callable[..., dict[str, Any]], body: bytes) -> tuple[dict[str, Any], int]:
    """The answer to a question in JSON, or a sentence on what is wrong; and the HTTP status."""
    try:
        arguments = json.loads(body)
        signature(question).bind(**arguments)
    except (ValueError, TypeError, RecursionError) as error:
        return {"error": f"this is no question of the page: {error}"}, 400
    try:
        return json_safe(question(**arguments)), 200
    except (SelfnormError, ValueError, RecursionError) as error:
        return {"error": str(error)}, 200  # for a person to read: no error of the page
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}. Please report this fault."}, 500
