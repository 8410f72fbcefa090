"""Figures are drawn without a screen and show what they should."""

from html import escape

import numpy as np
import pytest
import torch

import selfnorm as sn
from selfnorm.plotting import (
    Scale,
    plot_densities,
    plot_dependence,
    plot_history,
    plot_log_densities,
    plot_marginal,
    plot_pair,
    plot_predictive,
    plot_reliability,
    plot_shares,
    plot_snl_surface,
)
from selfnorm.report.page import inline_svg


@pytest.mark.parametrize("money", ["$0_to_$50", "$0-$50"])
def test_dollar_signs_of_names_are_drawn_as_they_stand(money):
    values, x = np.arange(20.0), torch.randn(20, 2)
    levels, named = Scale("paid", labels=(money, "more")), Scale(money)
    drawn = [
        plot_marginal(levels, values % 2),
        plot_marginal(named, values),
        plot_pair((levels, levels), np.stack([values % 2] * 2, 1)),
        plot_pair((named, named), np.stack([values, values], 1)),
        plot_dependence([money, "b"], np.eye(2), np.eye(2)),
        plot_log_densities(values, xlabel=money),
        plot_shares([money, "b"], [0.5, 0.25], money),
        plot_predictive(values, values, name=money),
        plot_reliability({money: values / 20, "b": values / 20}),
        plot_densities([(money, x, [(money, lambda x: -(x**2).sum(-1))])]),
    ]
    times = [inline_svg(figure, "", "f").count(f"{escape(money)}<") for figure in drawn]
    assert times == [1, 1, 2, 2, 2, 1, 2, 1, 1, 1]


def test_snl_surface_marks_the_optimum(tmp_path):
    figure = plot_snl_surface(tmp_path / "surface.png", mean=0.8)
    axes = figure.axes[0]
    star = axes.lines[1]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (0.8, 0.8**2 / 2)
    ridge = axes.lines[0]
    torch.testing.assert_close(
        torch.as_tensor(ridge.get_ydata()), torch.as_tensor(ridge.get_xdata()) ** 2 / 2
    )
    assert (tmp_path / "surface.png").exists()


def test_history_and_density_panels(tmp_path):
    x = torch.randn(300, 2)
    q = sn.Gaussian.fit_to(x)
    model = sn.EBM(sn.MLP(2, (8,)), base=q)
    history = sn.fit(model, x, val_data=x[:50], max_epochs=3, progress=False, seed=0)
    figure = plot_history(history, tmp_path / "h.png")
    assert [line.get_label() for line in figure.axes[0].lines][:2] == [
        "lower bound (SNL)",
        "upper bound (IS)",
    ]
    plain = sn.fit(model, x, max_epochs=2, progress=False, seed=0)
    plain.plot(tmp_path / "plain.png")
    plot_densities([("blob", x, [("SNL", model.log_prob)])], tmp_path / "d.png")
    assert all((tmp_path / f).stat().st_size > 2000 for f in ("h.png", "plain.png", "d.png"))


def test_a_run_that_exploded_can_still_be_drawn(tmp_path):
    nan, inf = float("nan"), float("inf")
    records = [
        {"step": k, "val_lower": low, "val_upper": up}
        for k, (low, up) in enumerate([(-3.0, -2.9), (-inf, -1.0), (nan, nan), (-2.0, inf)])
    ]
    sn.History(records=records).plot(tmp_path / "bad.png")
    sn.History(records=[{"step": 1, "val_lower": nan, "val_upper": nan}]).plot(tmp_path / "nan.png")
    assert (tmp_path / "nan.png").exists()


def test_numbers_of_many_magnitudes_are_drawn_by_magnitude():
    values = np.random.default_rng(0).lognormal(30, 4, (500, 2))
    size = Scale("size")
    axes = plot_marginal(size, values[:, 0], values[:, 0]).axes[0]
    bars = [patch.get_data().values for patch in axes.patches]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert max(shares.max() for shares in bars) < 0.3
    for ax in plot_pair((size, size), values, values).axes:
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        assert ax.get_xlim()[0] > 0
    for plain in (values[:, 0] - 1e12, np.log(values[:, 0])):  # of both signs, of one magnitude
        assert plot_marginal(size, plain, plain).axes[0].get_xscale() == "linear"
