"""Errors of figures over images: paired over seeds, and over groups that belong together."""

import numpy as np
import pytest

from selfnorm.paper.image_judging import paired, standard_error


def test_paired_error_covers_images_and_seeds():
    rng = np.random.default_rng(0)
    base = [rng.normal(size=400) for _ in range(3)]
    noisy = [b + 0.5 + rng.normal(0, 0.2, 400) for b in base]
    found = paired(noisy, base)
    assert found.difference == pytest.approx(0.5, abs=0.03)
    assert found.se_images == pytest.approx(0.2 / np.sqrt(1200), rel=0.1)
    assert found.se == max(found.se_images, found.se_seeds)
    assert found.by_seed == pytest.approx(
        [np.mean(a - b) for a, b in zip(noisy, base, strict=True)]
    )
    shifted = [a + s for a, s in zip(noisy, (-0.3, 0.0, 0.3), strict=True)]
    assert paired(shifted, base).se == pytest.approx(0.3 / np.sqrt(3), rel=0.1)
    assert paired(noisy[:1], base[:1]).se_seeds is None


def test_standard_errors_are_over_groups():
    rng = np.random.default_rng(0)
    shared = np.repeat(rng.normal(size=200), 10)
    groups = np.repeat(np.arange(200), 10)
    assert standard_error(shared, groups) == pytest.approx(1 / np.sqrt(200), rel=0.15)
    assert standard_error(shared) == pytest.approx(1 / np.sqrt(2000), rel=0.15)
    free = rng.normal(size=2000)
    assert standard_error(free, groups) == pytest.approx(standard_error(free), rel=0.15)
    assert paired([shared], [np.zeros(2000)], [groups])[1] == standard_error(shared, groups)
