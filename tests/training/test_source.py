"""The engine trains on whatever gives rows by their numbers: tensors, members' rows, a file."""

import hashlib

import numpy as np
import pytest
import torch

import selfnorm as sn
from selfnorm.density.model import DensityTask
from selfnorm.training import Source, TrainingOptions, run
from tests.fitting import weights


class MappedSource(Source):
    """Rows of a file that is never read as one."""

    def __init__(self, path, shape):
        self.table = np.memmap(path, np.float32, "r", shape=shape)
        self.most = 0

    def __len__(self):
        return len(self.table)

    def take(self, rows):
        self.most = max(self.most, len(rows))
        return (torch.from_numpy(self.table[rows.cpu().numpy()]).to(rows.device),)

    def fingerprint(self):
        return hashlib.sha256(self.table.data).hexdigest()


@pytest.fixture
def x():
    return torch.randn(300, 2, generator=torch.Generator().manual_seed(1)) + 1


@pytest.fixture
def mapped(x, tmp_path):
    x.numpy().tofile(tmp_path / "rows.f32")
    return MappedSource(tmp_path / "rows.f32", tuple(x.shape))


def trained(data, **options):
    torch.manual_seed(0)
    model = sn.EBM(sn.MLP(2, hidden=(16,)), base=sn.Gaussian(torch.ones(2), scale=1.5))
    task = DensityTask(model, None, n_samples=64)
    how = {"batch_size": 32, "max_epochs": 3, "seed": 5, "progress": False}
    history = run(task, data, val_data=data, options=TrainingOptions(**how | options))
    return history, weights(model)


def test_a_file_of_rows_trains_to_the_bits_of_the_tensor(x, mapped):
    history, ended = trained(mapped)
    of_tensor, expected = trained((x,))
    assert torch.equal(ended, expected)
    assert history.best_score == of_tensor.best_score
    assert mapped.most == len(x)  # outside of steps a task sees what fits; here all rows


def test_rows_beyond_memory_are_shown_in_part(mapped, monkeypatch):
    monkeypatch.setattr("selfnorm.training.task._PREVIEW", 100)
    history, _ = trained(mapped)
    assert history.n_steps == 27
    assert mapped.most == 100


def test_a_run_on_a_file_is_resumed_on_the_same_file_only(x, mapped, tmp_path):
    path = tmp_path / "run.ckpt"
    trained(mapped, max_epochs=1, checkpoint=path)
    _, ended = trained(mapped, checkpoint=path)
    assert not torch.equal(ended, trained(mapped, max_epochs=1)[1])
    (x + 1).numpy().tofile(tmp_path / "other.f32")
    with pytest.raises(sn.errors.CheckpointError, match="other data, of 300 rows"):
        trained(MappedSource(tmp_path / "other.f32", (300, 2)), checkpoint=path)


def test_fit_takes_a_source_and_a_task(x, mapped):
    def model():
        torch.manual_seed(0)
        return sn.EBM(sn.MLP(2, hidden=(16,)), base=sn.Gaussian(torch.ones(2), scale=1.5))

    how = {"max_steps": 5, "n_samples": 64, "seed": 5, "progress": False}
    by_file, by_tensor, by_task = model(), model(), model()
    sn.fit(by_file, mapped, **how)
    sn.fit(by_tensor, x, val_data=None, **how)
    sn.fit(by_task, mapped, task=DensityTask(by_task, None, n_samples=64), **how)
    for other in (by_tensor, by_task):
        assert torch.equal(by_file.log_prob(x), other.log_prob(x))
