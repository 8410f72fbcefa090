"""Random tables of every kind and size, from a seed."""

import numpy as np

WORDS = ("$a to $b", "$0_to_$50", "<script>alert(1)</script>", "a\nb", "", " a", "=1+1", "x" * 300)
CONTINUOUS = ("normal", "shifted", "heavy", "skewed", "two humps", "uniform")


def column(rng, n, only=None):
    """One column, and what it is."""
    kinds = {
        "normal": lambda: rng.normal(size=n) * 10.0 ** rng.uniform(-6, 6),
        "shifted": lambda: rng.normal(size=n) + 10.0 ** rng.uniform(0, 9),
        "heavy": lambda: rng.standard_cauchy(size=n),
        "skewed": lambda: rng.lognormal(sigma=rng.uniform(0.5, 3), size=n),
        "whole": lambda: rng.poisson(rng.uniform(0.5, 50), size=n).astype(float),
        "two values": lambda: rng.integers(0, 2, size=n).astype(float),
        "cents": lambda: np.round(rng.exponential(20, size=n), 2),
        "zeros": lambda: np.where(rng.random(n) < 0.6, 0.0, rng.normal(size=n)),
        "capped": lambda: np.minimum(rng.exponential(size=n), 1.0),
        "two humps": lambda: rng.normal(size=n) + 8 * rng.integers(0, 2, size=n),
        "uniform": lambda: rng.random(n),
        "tiny": lambda: 1e-200 * rng.normal(size=n),
        "huge": lambda: 1e160 * rng.normal(size=n),
        "constant": lambda: np.full(n, rng.normal()),
        "gaps": lambda: np.where(rng.random(n) < 0.1, np.nan, rng.normal(size=n)),
        "infinite": lambda: np.where(np.arange(n) == n // 2, np.inf, rng.normal(size=n)),
    }
    # What is to be refused comes seldom, or hardly a table would be fitted.
    often = list(kinds)[:11]
    name = str(rng.choice(only or (list(kinds) if rng.random() < 0.06 else often)))
    return name, kinds[name]()


def table(rng, most_rows, least_rows=4, only=None):
    """``(n, d)`` numbers and the kinds of their columns; some columns depend on others.

    ``only``: no other kinds of columns than these, and no row twice.
    """
    n = int(np.exp(rng.uniform(np.log(least_rows), np.log(most_rows))))
    d = int(rng.integers(1, 7))
    named = [column(rng, n, only) for _ in range(d)]
    x = np.stack([values for _, values in named], axis=1)
    with np.errstate(all="ignore"):
        for j in range(1, d):
            if rng.random() < 0.4:
                spread = np.nanstd(x[:, j]) / max(float(np.nanstd(x[:, 0])), 1e-300)
                mixed = x[:, j] + spread * x[:, 0]
                x[:, j] = mixed if np.isfinite(mixed).all() else x[:, j]
    if only is None and rng.random() < 0.1:
        x = np.repeat(x, 3, axis=0)
    return x, [name for name, _ in named]


def frame(rng, most_rows=400):
    """A dict of columns of any kind, and what they are; half of them have gaps."""
    n = int(np.exp(rng.uniform(np.log(5), np.log(most_rows))))
    words = np.array(["red", "green", "blue", "ocher", "über", " ", "0", "nan", *WORDS])
    days = np.datetime64("1999-12-28") + rng.integers(0, 10 ** rng.integers(1, 5), size=n)
    kinds = {
        "words": lambda: rng.choice(words, size=n, p=rng.dirichlet(np.ones(len(words)))),
        "names": lambda: [f"name {k}" for k in rng.permutation(n)],
        "flags": lambda: rng.random(n) < rng.uniform(),
        "days": lambda: days.astype(str),
        "moments": lambda: days.astype("datetime64[s]") + rng.integers(0, 86_400, size=n),
        "codes": lambda: 2**53 + rng.integers(0, 4, size=n),
        "numbers as text": lambda: [f"{v:.2f}" for v in rng.normal(size=n)],
        "one word": lambda: ["same"] * n,
        "nothing": lambda: [None] * n,
        "anything": lambda: [[1, "a", 2.5, True, None][k] for k in rng.integers(5, size=n)],
    }
    # What a schema may set aside or refuse comes seldom, or hardly a column would be left.
    often = list(kinds)[:7]
    found, named = {}, []
    for j in range(int(rng.integers(1, 6))):
        if rng.random() < 0.4:
            name, values = column(rng, n)
        else:
            name = str(rng.choice(list(kinds) if rng.random() < 0.15 else often))
            values = kinds[name]()
        values = np.asarray(values, dtype=object) if isinstance(values, list) else values
        cells = values.tolist() if values.dtype.kind != "M" else list(values.astype(object))
        if rng.random() < 0.5:
            cells = [None if gap else v for v, gap in zip(cells, rng.random(n) < 0.2, strict=True)]
        found[f"c{j}" if rng.random() < 0.95 else str(rng.choice(WORDS))] = cells
        named.append(name)
    terms = [cells for cells in found.values() if all(isinstance(v, float | None) for v in cells)]
    if terms and rng.random() < 0.5:
        rows = zip(*terms, rng.choice([0.0, 2.5], size=n).tolist(), strict=True)
        with np.errstate(all="ignore"):
            found["sum"] = [None if None in row else float(np.sum(row)) for row in rows]
        named.append("sum")
    return found, named
