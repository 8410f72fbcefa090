"""The monitor of spikes: quiet where noise is all there is, and never late for a spike."""

import json
import math

import pytest
import torch

import vae_spikes
from selfnorm.vae.normaliser import COMPARISONS, confirmed, drift_of


def test_the_monitor_is_quiet_where_weights_are_moderate():
    torch.manual_seed(0)
    base = torch.randn(50_000)
    assert not drift_of(base, base + 0.1).spiked
    deep = drift_of(base, base + 5)
    assert deep.spiked
    assert deep.drift > 4
    assert drift_of(torch.full((5,), -math.inf), base).spiked
    # two effective samples say nothing: their estimate is 0.7 nats off as often as not
    rough = torch.cat([torch.full((2,), 20.0), torch.zeros(50_000)])
    assert not drift_of(rough, rough + 0.5).spiked


def noisy_pair(shift):
    """Weights with a handful of effective samples: two estimates of one Z part by nats."""
    proposal, wide = 4 * torch.randn(2, 300)
    return drift_of(proposal, wide + shift)


def test_noise_flags_single_comparisons_and_no_run():
    torch.manual_seed(0)
    single = sum(noisy_pair(0.0).spiked for _ in range(400)) / 400
    assert 0.03 < single < 0.2  # what a rule without confirmation would say, one check in ten
    flagged = [confirmed(lambda: noisy_pair(0.0)).spiked for _ in range(1000)]
    assert not any(flagged)


@pytest.mark.parametrize("shift", [15.0, -15.0])
def test_a_spike_is_caught_at_every_check_and_a_quiet_one_costs_one_comparison(shift):
    torch.manual_seed(0)
    calls = []

    def compare():
        calls.append(1)
        return noisy_pair(shift)

    report = confirmed(compare)
    assert report.spiked == (shift > 0)
    assert len(calls) == (COMPARISONS if shift > 0 else 1)
    if shift > 0:
        assert report.drift < 15  # the mildest of the comparisons is told
        assert report.drift_se > 0.1


@pytest.mark.parametrize(("n_quiet", "flagged"), [(2, True), (3, False)])
def test_two_comparisons_may_find_nothing(n_quiet, flagged):
    torch.manual_seed(0)
    shifts = iter([15.0, *[0.0] * n_quiet, *[15.0] * 50])
    log_w = torch.randn(500)

    def compare():
        return drift_of(log_w, log_w + next(shifts))

    assert confirmed(compare).spiked is flagged


def test_the_experiment_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(vae_spikes, "N_LOOKS", 2)
    monkeypatch.setattr(vae_spikes, "N_PRIOR_SAMPLES", 2000)
    options = f"--setting spike --steps 2 --rows 30 --out {tmp_path}"
    monkeypatch.setattr("sys.argv", ["vae_spikes.py", *options.split()])
    vae_spikes.main()
    result = json.loads((tmp_path / "spike.json").read_text())
    assert [r["step"] for r in result["curve"]] == [1, 2]
    assert result["n_checks"] == 2
    assert (result["n_flags"], result["first_flag"]) == (0, None)
    assert isinstance(result["final"]["reliable"], bool)
    assert math.isfinite(result["curve"][0]["val_drift_se"])
    assert not (tmp_path / "spike.pt").exists()
