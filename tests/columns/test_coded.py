import numpy as np
import pytest
import torch

from selfnorm.columns import FAR, CodedColumns, Part


@pytest.mark.parametrize("straight", [True, False])
def test_numbers_of_absurd_size_have_scores_that_lead_back_to_them(straight):
    parts = [Part(0, "free", 0, rest=True), Part(1, "positive", 0, rest=True, low=0.0)]
    number = torch.from_numpy(np.exp(np.random.default_rng(0).normal(size=(400, 2))))
    coded = torch.stack([torch.zeros_like(number), number], -1)
    columns = CodedColumns(parts, 30).double().fit(coded, straight=straight)
    x = torch.tensor(10.0) ** torch.arange(0.0, 120.0, dtype=torch.float64)
    x = torch.stack([x, x], -1)
    z, slope = columns.to_scores(x)
    assert bool((z.diff(dim=0) > 0).all())
    assert float(z.max()) < FAR
    assert torch.allclose(columns.from_scores(z), x, rtol=1e-6)
    step = 1e-4 * x
    by_differences = (columns.to_scores(x + step)[0] - columns.to_scores(x - step)[0]) / (2 * step)
    # the slopes are those of the map, so a density still integrates to one
    assert torch.allclose(slope[1:], by_differences[1:], rtol=1e-3)
    most = torch.full((1, 2), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert bool(torch.isfinite(columns.to_scores(most)[0]).all())
    assert bool(torch.isfinite(columns.from_scores(torch.full_like(most, FAR))[:, 0]).all())
