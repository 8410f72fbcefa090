"""What the library does, in two minutes on two cores: ``make demo``.

A real table is fitted and reported on, and a set of points whose true density is known is drawn
beside what was found. All settings are the defaults.
"""

import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split

from selfnorm import EnergyDensity
from selfnorm.datasets import toy2d
from selfnorm.plotting import plot_densities
from selfnorm.report import About


def wine(out: Path) -> None:
    """A table of chemical analyses, its strangest wines and a report to mail."""
    data = load_wine(as_frame=True)
    table = data.data.assign(cultivar=data.target_names[data.target])
    train, test = train_test_split(table, test_size=0.25, random_state=0)
    print(f"Wine: {len(table)} rows, {table.shape[1]} columns, {len(test)} rows held out")

    density = EnergyDensity(random_state=0).fit(train)
    print(f"  fit: {density.judgement_}")

    scores = density.score_samples(test)
    bounds = density.bounds(test, n_samples=500, random_state=0)
    low, high = bounds.interval()
    print(
        f"  held-out log-likelihood {scores.mean():.2f} nats per row, 95 % interval "
        f"{low:.2f} to {high:.2f}: {'reliable' if bounds.reliable else 'not reliable'}"
    )
    strangest = test.index[scores.argmin()]
    cells = density.explain(test.loc[[strangest]]).iloc[0]
    print(
        f"  strangest wine: row {strangest}, for its {cells.idxmin()} of "
        f"{test.loc[strangest, cells.idxmin()]}"
    )

    named = density.probabilities(test.drop(columns="cultivar"), "cultivar").idxmax(axis=1)
    right = int((named == test["cultivar"]).sum())
    print(f"  the same density names the cultivar of {right} of {len(test)} held-out wines")
    density.save(out / "wine")
    about = About("the held-out wines", str(out / "wine"), title="178 wines: fit and held-out rows")
    report = density.report(test, out / "report.html", train=train, about=about)
    print(f"  report: {report}")


def points(out: Path, name: str = "pinwheel") -> None:
    """Seven thousand points of the plane, and how near a fit comes to their true density."""
    split = toy2d.load(name, seed=1)
    print(f"{name.capitalize()}: {len(split.train)} points of a density that is known")
    density = EnergyDensity(random_state=1).fit(split.train.numpy())
    fresh = split.draw(20_000, seed=2)
    found = density.score_samples(fresh.numpy()).mean()
    limit = float(split.log_density(fresh).mean())
    print(
        f"  held-out log-likelihood {found:.3f} nats per point; of the true density, which is "
        f"the limit for any model, {limit:.3f}"
    )

    def fitted(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(density.score_samples(x.numpy()))

    models = [("fitted density", fitted), ("true density: the limit", split.log_density)]
    plot_densities([(name, split.train, models)], out / f"{name}.png")
    print(f"  figure: {out / f'{name}.png'}")


def main(out: Path) -> None:
    """Both, and where to look."""
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    wine(out)
    points(out)
    print(
        f"{time.perf_counter() - began:.0f} s. Open {out / 'report.html'} in a browser, look at "
        f"{out / 'pinwheel.png'}.\nThe paper's own table: selfnorm reproduce toy2d"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo"))
