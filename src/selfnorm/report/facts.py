"""What a fitted estimator says of itself: in a notebook and in the card of its folder."""

from __future__ import annotations

from html import escape
from typing import Any


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
            bundle["text/html"] += f"<table><caption>What was fitted</caption>{rows}</table>"
        return bundle
