"""Texts of files as people write them, and command lines, of ``heads.toml``."""

from pathlib import Path

from tests.test_mutations import tomllib

ROWS = 12
GIVEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
REFUSED, DONE = GIVEN["lines"]["refused"], GIVEN["lines"]["done"]


def column(name):
    text = GIVEN["columns"][name]
    cells = text.split("|") if "|" in text else text.split()
    return [cells[i % len(cells)] for i in range(ROWS)]


def quoted(cell, mark):
    return f'"{cell}"' if mark in cell or '"' in cell else cell


def lines(names, mark=","):
    """A text of the columns with a counter before them."""
    rows = [["key", *names], *zip(map(str, range(ROWS)), *map(column, names), strict=True)]
    return "".join(mark.join(quoted(cell, mark) for cell in row) + "\n" for row in rows)


def heads():
    """Every file of the corpus: its name and its bytes."""
    files = {k: v.encode(GIVEN["encodings"].get(k, "utf-8")) for k, v in GIVEN["files"].items()}
    for name in GIVEN["columns"]:
        files[f"{name}.csv"] = lines([name]).encode()
        files[f"{name}_semicolons.csv"] = lines([name, "number"], ";").encode()
    return files
