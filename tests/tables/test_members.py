"""Small tables: simple densities beside the chain, judged by folds; weights of rows."""

import shutil
import time

import numpy as np
import pytest
import torch

from selfnorm import EnergyDensity, load, save
from selfnorm.columns import Part
from selfnorm.errors import ModelFileError, SelfnormWarning
from selfnorm.tables import members
from selfnorm.tables.members import mixture_weights
from selfnorm.training import Stepper
from tests.folders import edit_model


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    x[:, 2] = x[:, 0] + x[:, 1] + 0.01 * rng.normal(size=120)
    return x


@pytest.fixture(scope="module")
def density(table):
    return EnergyDensity(random_state=0, max_steps=20).fit(table)


def test_a_gaussian_table_is_not_lost_to_a_gaussian(density, table):
    rng = np.random.default_rng(1)
    new = rng.normal(size=(500, 3))
    new[:, 2] = new[:, 0] + new[:, 1] + 0.01 * rng.normal(size=500)
    truth = -1.5 * np.log(2 * np.pi) - np.log(0.01) - 1.5
    assert density.score(new) == pytest.approx(truth, abs=0.3)
    assert density.judgement_.score == pytest.approx(truth, abs=0.5)
    assert sum(member.weight for member in density.members_) == pytest.approx(1.0)
    assert density.members_[0].name == "chain"
    drawn = density.sample(2000, random_state=0)
    off = drawn[:, 2] - drawn[:, 0] - drawn[:, 1]
    assert np.median(np.abs(off)) < 0.05  # but for the few that come at the ends of the range
    bounds = density.bounds(table, n_samples=256, random_state=0)
    assert bounds.lower <= density.score(table) + 0.01
    assert bounds.upper >= density.score(table) - 0.01


def test_the_closing_words_tell_rows_folds_score_and_time(density):
    told = str(density.judgement_)
    assert "120 rows" in told
    assert "3 folds" in told
    assert "±" in told
    assert " s;" in told
    assert density.lower_bound_ == density.judgement_.score


@pytest.mark.parametrize("weight", [-0.5, 0.5, 1e9])
def test_weights_that_are_no_shares_are_refused(density, tmp_path, weight):
    save(density, tmp_path)

    def change(blueprint):
        blueprint["fitted"]["distribution_"]["members"][1]["weight"] += weight

    edit_model(tmp_path, change)
    with pytest.raises(ModelFileError, match="no shares of its densities"):
        load(tmp_path)


def test_rows_count_by_their_weights():
    rng = np.random.default_rng(0)
    table = {"kind": rng.choice(["a", "b"], 200), "size": rng.normal(size=200)}
    weights = np.where(np.array(table["kind"]) == "a", 4e307, 1e307)  # their sum is not finite
    density = EnergyDensity(random_state=0, max_steps=40).fit(table, sample_weight=weights)
    counts = weights / 1e307
    expected = counts[counts == 4].sum() / counts.sum()
    found = density.probabilities({"size": table["size"]}, "kind")["a"].mean()
    assert found == pytest.approx(expected, abs=0.1)  # by counts alone it is 0.45
    with pytest.raises(ValueError, match="200 numbers"):
        density.fit(table, sample_weight=weights[1:])


def test_a_longer_fit_does_not_end_as_the_shorter_one_did(table, tmp_path):
    def fitted(steps, name):
        model = EnergyDensity(method="autoregressive", max_steps=steps, hidden=16)
        chain = model.fit(table[:40, :2] + table[:40, 2:], checkpoint=tmp_path / name).model_
        return torch.nn.utils.parameters_to_vector(chain.parameters())

    short = fitted(8, "a")  # two runs: without a fold each, then with all rows
    shutil.copy(tmp_path / "a", tmp_path / "b")  # the first of them
    longer = fitted(16, "a")
    assert not torch.equal(longer, short)
    assert torch.equal(longer, fitted(16, "b"))


def test_no_restart_follows_an_interrupt(table, monkeypatch):
    plain, taken = Stepper.step, []

    def step(self, *args):
        taken.append(1)
        if len(taken) == 5:
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(Stepper, "step", step)
    with pytest.warns(SelfnormWarning, match="interrupted"):
        density = EnergyDensity(random_state=0, max_steps=8, n_init=3).fit(table[:60])
    assert density.history_.stopped == "interrupted"
    assert len(taken) == 5
    assert np.isfinite(density.score(table[:60]))


def test_an_interrupt_before_training_leaves_the_model_of_before(table, monkeypatch):
    density = EnergyDensity(random_state=0, max_steps=1, hidden=8).fit(table[:40])
    before = density.score_samples(table)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(members, "held_out_scores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        density.fit(2 * table + 1)
    assert np.array_equal(density.score_samples(table), before)


def test_a_member_that_adds_nothing_is_dropped():
    log_p = np.stack([np.zeros(100), np.full(100, -5.0)], 1)
    assert mixture_weights(log_p, np.ones(100)).tolist() == [1.0, 0.0]


def test_coordinates_of_larger_tables_are_chosen_by_rows_not_seen():
    rng = np.random.default_rng(0)
    light = rng.standard_t(3, size=(3000, 1))
    pixels = light + 0.1 * rng.normal(size=(3000, 4)).cumsum(1)  # beside each other
    sizes = np.exp(rng.normal(size=(3000, 4)))
    folds = torch.where(torch.arange(3000) < 500, 0, -1)
    for x, expected in ((pixels, True), (sizes, False)):
        parts = [Part(j, f"c{j}", 0, rest=True) for j in range(4)]
        number = torch.from_numpy(x)
        coded = torch.stack([torch.zeros_like(number), number], -1)
        weights = torch.ones(3000, dtype=torch.float64)
        kinds = [members.Kind(4, straight) for straight in (True, False)]
        scores = members.held_out_scores(kinds, parts, coded, weights, folds, 0)
        assert members.coordinates(scores) is expected
        columns = members.columns_of(parts, coded, straight=False)
        assert members.has_ridge(columns, coded) is expected


def test_time_covers_all_of_a_fit(table):
    EnergyDensity(random_state=0, max_steps=1).fit(table)  # what is loaded once does not count
    began = time.perf_counter()
    density = EnergyDensity(random_state=0, max_time=2.0).fit(table)
    assert time.perf_counter() - began < 2.2 + 2  # of a machine that does other things, too
    assert density.judgement_.score > -20
