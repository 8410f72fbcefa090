"""The monitor of spikes: quiet where noise is all there is, and never late for a spike."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from selfnorm.vae.evaluation import check_spikes, comparisons_needed, confirmed

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import vae_spikes

RESULTS = Path(__file__).parents[2] / "results"


def test_the_monitor_is_quiet_where_weights_are_moderate():
    torch.manual_seed(0)
    base = torch.randn(50_000)
    level = base * 0.01
    beyond = check_spikes(torch.full((100,), 5.0), level, level)  # beyond, but harmless
    assert (beyond.share, beyond.spiked) == (1.0, False)
    assert beyond.room < 0.01
    deep = check_spikes(torch.full((100,), 30.0), base, base + 5)
    assert deep.spiked
    assert deep.room > deep.drift > 4
    odd = torch.cat([torch.zeros(500), torch.tensor([90.0])])
    assert not check_spikes(odd, base, base).spiked
    assert check_spikes(torch.zeros(3), torch.full((5,), -math.inf), base).spiked
    # two effective samples say nothing: their estimate is 0.7 nats off as often as not
    rough = torch.cat([torch.full((2,), 20.0), torch.zeros(50_000)])
    assert not check_spikes(torch.full((100,), 25.0), rough, rough + 0.5).spiked


def test_the_chance_of_a_false_alarm_is_spent_over_all_checks():
    chance = sum(
        sum(math.comb(k, misses) * 0.8**misses * 0.2 ** (k - misses) for misses in range(3))
        for k in map(comparisons_needed, range(1, 20_000))
    )
    assert chance < 0.01
    needed = [comparisons_needed(n) for n in range(1, 2000)]
    assert needed == sorted(needed)


def noisy_pair(shift):
    """Weights with a handful of effective samples: two estimates of one Z part by nats."""
    proposal, wide = 4 * torch.randn(2, 300)
    return check_spikes(torch.full((20,), 60.0), proposal, wide + shift)


def test_noise_flags_single_comparisons_and_no_run():
    torch.manual_seed(0)
    single = sum(noisy_pair(0.0).spiked for _ in range(400)) / 400
    assert 0.03 < single < 0.2  # what a rule without confirmation would say, one check in ten
    flagged = [confirmed(lambda: noisy_pair(0.0), n).spiked for n in range(1, 1001)]
    assert not any(flagged)


@pytest.mark.parametrize("n_checks", [1, 50, 5000])
@pytest.mark.parametrize("shift", [15.0, -15.0])
def test_a_spike_is_caught_at_every_check_and_a_quiet_one_costs_one_comparison(n_checks, shift):
    torch.manual_seed(0)
    calls = []

    def compare():
        calls.append(1)
        return noisy_pair(shift)

    report = confirmed(compare, n_checks)
    assert report.spiked == (shift > 0)
    assert len(calls) == (comparisons_needed(n_checks) if shift > 0 else 1)
    if shift > 0:
        assert report.drift < 15  # the mildest of the comparisons is told
        assert report.drift_se > 0.1


@pytest.mark.parametrize(("n_quiet", "flagged"), [(2, True), (3, False)])
def test_two_comparisons_may_find_nothing(n_quiet, flagged):
    torch.manual_seed(0)
    shifts = iter([15.0, *[0.0] * n_quiet, *[15.0] * 50])
    log_w = torch.randn(500)

    def compare():
        return check_spikes(torch.full((20,), 60.0), log_w, log_w + next(shifts))

    assert confirmed(compare, 20).spiked is flagged


@pytest.mark.parametrize("data", ["digits", "mnist"])
def test_the_experiment_runs_on_either_data(data, tmp_path, monkeypatch):
    torch.manual_seed(0)
    for part, n in (("train", 40), ("valid", 12), ("test", 10)):
        lines = [" ".join(str(int(v)) for v in row) for row in torch.rand(n, 784) < 0.2]
        (tmp_path / f"binarized_mnist_{part}.amat").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(vae_spikes, "N_LOOKS", 2)
    monkeypatch.setattr(vae_spikes, "SIZES", {data: (20, 2, 1e-3, 2000)})
    options = f"--setting spike --data {data} --data-dir {tmp_path} --steps 2 --rows 30"
    monkeypatch.setattr("sys.argv", ["vae_spikes.py", *options.split(), "--out", str(tmp_path)])
    vae_spikes.main()
    name = "spike" if data == "digits" else "mnist_spike"
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert [r["step"] for r in result["curve"]] == [1, 2]
    assert result["n_checks"] == 2
    assert (result["n_flags"], result["first_flag"]) == (0, None)
    assert isinstance(result["final"]["reliable"], bool)
    assert math.isfinite(result["curve"][0]["val_drift_se"])
    assert not (tmp_path / f"{name}.pt").exists()


def test_the_recorded_runs_say_what_the_docs_say():
    folder = RESULTS / "vae_spikes"
    spike, honest = (json.loads((folder / f"{n}.json").read_text()) for n in ("spike", "honest"))
    assert spike["first_flag"] <= spike["best_step"]  # before the state that looks best
    assert not spike["final"]["reliable"]
    assert (honest["n_steps"], honest["n_checks"], honest["n_flags"]) == (50_000, 50, 0)
    assert honest["final"]["reliable"]
    assert honest["final"]["elbo"] > spike["final"]["elbo"] + 2
