"""What a fitted estimator says of itself: in a notebook and in the card of its folder."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any


def shortened(names: Sequence[str], most: int = 20) -> str:
    """Names in a line.

    >>> shortened(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def input_names(regressor: Any) -> list[str]:
    """Names of a fitted regressor's inputs; none where they were an array."""
    own = () if regressor.inputs_ is None else regressor.inputs_.schema.columns
    names = getattr(regressor, "feature_names_in_", [column.name for column in own])
    return [str(name) for name in names]


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
