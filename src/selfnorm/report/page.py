"""One self-contained HTML file: headings, words, tables and figures, without network or scripts.

Text is escaped here and nowhere else. Figures are inline SVG whose ink is the colour of the text,
so that they follow the page into the dark and onto paper.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import warnings
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypeVar

from selfnorm._context import alone
from selfnorm._files import atomic
from selfnorm.errors import DataError, SelfnormWarning
from selfnorm.report.panels import Panel, together

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
_TEMPLATE = Path(__file__).with_name("page.html")
_INK = "#262626"  # of the style file


class Page:
    """A page that grows section by section.

    Example:
        >>> page = Page("Wine", "A report")
        >>> page.section("What was fitted")
        >>> page.words("A density of 3 < 4 columns.")
        >>> "3 &lt; 4" in page.html()
        True
    """

    def __init__(self, title: str, subtitle: str) -> None:
        self.title, self.subtitle = title, subtitle
        self._sections: list[tuple[str, list[str]]] = []
        self._figures = 0

    def section(self, heading: str) -> None:
        """Begin a section; what follows is part of it."""
        self._sections.append((heading, []))

    def words(self, text: str, *, kind: str = "") -> None:
        """A paragraph; where it stands out, of the kind ``verdict``, ``warning`` or ``note``."""
        self._add(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def code(self, text: str, label: str) -> None:
        """Lines of code."""
        name = escape(label, quote=True)
        self._add(f'<pre tabindex="0" aria-label="{name}"><code>{escape(text)}</code></pre>')

    def table(
        self,
        caption: str,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        numbers: Sequence[int] = (),
        marked: Sequence[tuple[int, int]] = (),
    ) -> None:
        """A table whose first column names the rows.

        ``numbers`` are the columns set flush right, ``marked`` the cells (row, column) that stand
        out.
        """
        aligned = [' class="number"' if j in numbers else "" for j in range(len(header))]
        head = "".join(
            f'<th scope="col"{kind}>{escape(cell)}</th>'
            for cell, kind in zip(header, aligned, strict=True)
        )
        body = []
        for i, row in enumerate(rows):
            cells = [f'<th scope="row">{escape(row[0])}</th>']
            for j, cell in enumerate(row[1:], 1):
                shown = f"<mark>{escape(cell)}</mark>" if (i, j) in marked else escape(cell)
                cells.append(f"<td{aligned[j]}>{shown}</td>")
            body.append(f"<tr>{''.join(cells)}</tr>")
        name = escape(caption, quote=True)
        # a table that is wider than the page is scrolled by keyboard, too
        self._add(
            f'<div class="scroll" role="region" aria-label="{name}" tabindex="0"><table>'
            f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )

    def figures(self, panels: Sequence[Panel], *, wide: bool = False) -> None:
        """Panels side by side, as many as there is room for; each with what it shows in words."""
        figures = []
        for panel in panels:
            self._figures += 1
            figure = inline_svg(together([panel]), panel.words, f"f{self._figures}")
            figures.append(f"<figure>{figure}</figure>")
        if figures:
            self._add(f'<div class="{"wide" if wide else "panels"}">{"".join(figures)}</div>')

    def html(self) -> str:
        """The whole page."""
        links, sections = [], []
        for i, (heading, blocks) in enumerate(self._sections):
            links.append(f'<li><a href="#s{i}">{escape(heading)}</a></li>')
            inner = "\n".join(blocks)
            sections.append(
                f'<section aria-labelledby="s{i}"><h2 id="s{i}">{escape(heading)}</h2>\n'
                f"{inner}\n</section>"
            )
        return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
            title=escape(self.title),
            subtitle=escape(self.subtitle),
            links="".join(links),
            sections="\n".join(sections),
        )

    def _add(self, block: str) -> None:
        self._sections[-1][1].append(block)


class Facts:
    """An estimator whose picture in a notebook says what was fitted, below its parameters."""

    def facts(self) -> dict[str, str]:
        """What was fitted, by name; empty before."""
        return {}

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        bundle: dict[str, str] = super()._repr_mimebundle_(**options)  # type: ignore[misc]
        facts = self.facts()
        if facts and "text/html" in bundle:
            rows = "".join(
                f'<tr><th scope="row" style="text-align: left">{escape(name)}</th>'
                f'<td style="text-align: left">{escape(value)}</td></tr>'
                for name, value in facts.items()
            )
            caption = '<caption style="text-align: left">What was fitted</caption>'
            bundle["text/html"] += f"<table>{caption}{rows}</table>"
        return bundle


def inline_svg(figure: Figure, words: str, prefix: str) -> str:
    """A figure as an ``<svg>`` element, read out as ``words``; ``prefix`` keeps its ids apart."""
    from matplotlib import rc_context, style

    from selfnorm.plotting import STYLE

    buffer = io.StringIO()
    with style.context(STYLE), rc_context({"svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", transparent=True, dpi=140, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"\n\s*", "\n", text)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace(_INK, "currentColor")
    label = escape(words, quote=True)
    widest = f"max-width: {96 * figure.get_figwidth() * 1.1:.0f}px"  # letters stay letters
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" style="{widest}" ', 1)


def in_python(text: str) -> str:
    """Any text as a string of Python's.

    >>> print(in_python('x"); import os'))
    "x\\"); import os"
    """
    return json.dumps(text, ensure_ascii=False)


def in_shell(path: str) -> str:
    """Any path as an argument of a command, never an option.

    >>> print(in_shell("-o x.csv"), in_shell("t.csv"))
    './-o x.csv' t.csv
    """
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def findings_of(function: Callable[[], T]) -> tuple[T, list[str]]:
    """What a function gives, and what it warns of, which is passed on, too."""
    with alone(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SelfnormWarning)
        result = function()
    for warning in caught:
        warnings.warn(warning.message, stacklevel=3)
    own = [
        str(warning.message) for warning in caught if issubclass(warning.category, SelfnormWarning)
    ]
    return result, own


def write_report(
    path: str | os.PathLike[str], read: Callable[[], T], page: Callable[[T, list[str]], str]
) -> Path:
    """Write a page whole or not at all.

    Args:
        path: where to.
        read: reads the rows, which may be refused.
        page: makes the page of what was read, and of the warnings that this gave.
    """
    path = Path(path)  # refused before the work is done
    if path.suffix.lower() not in (".html", ".htm"):
        raise DataError(f"{path}: a report is one HTML file; name it {path.stem or 'report'}.html")
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file to write")
    if not path.absolute().parent.is_dir():
        raise DataError(f"{path.parent}: no such folder; create it first")
    rows, unseen = findings_of(read)
    with alone(), warnings.catch_warnings():  # what is odd about the rows was told above
        warnings.simplefilter("ignore", SelfnormWarning)
        html = page(rows, unseen)
    with atomic(path) as part:
        part.write_text(html, encoding="utf-8")
    return path
