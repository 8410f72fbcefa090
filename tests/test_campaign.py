"""Damage, strange files, kills, threads, rare tables: some seeds of each trial of the campaign."""

from collections import Counter

import pytest

pytest.importorskip("resource")  # limits of memory and of files
from tests.campaign.trials import attempt

SEEDS = {
    **{"model_folder": range(30), "checkpoint": range(12), "flip": range(15)},
    **{"file": range(30), "strange_file": range(9), "unusual_table": range(8)},
    **{"kill": [11, 4], "threads": [0]},
}
DAMAGED = ("model_folder", "checkpoint", "flip", "file")


@pytest.mark.parametrize("kind", SEEDS)
def test_a_trial_ends_right_or_in_a_clear_error(kind):
    verdicts = Counter()
    for seed in SEEDS[kind]:
        verdict, words, *_ = attempt(kind, seed)
        assert verdict in ("right", "clear error"), f"{kind} {seed}: {words}"
        verdicts[verdict] += 1
    assert kind not in DAMAGED or verdicts["clear error"] > verdicts["right"]
