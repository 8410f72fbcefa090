import numpy as np
import pytest
import torch

from selfnorm.training import StoredRows, stored


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "BLOCK", 16)
    monkeypatch.setattr(stored, "BUFFER", 16 * 12 * 5)  # five blocks
    rows = np.arange(1003, dtype=np.float32)[:, None] * [1.0, 10.0, 100.0]
    rows.astype(np.float32).tofile(tmp_path / "rows")
    source = StoredRows(tmp_path / "rows", (3,), "rows", ())
    yield source
    source.close()


def epoch(source, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return source.epoch(torch.device("cpu"))


def test_an_epoch_is_every_row_in_another_order(source):
    batches = source.batches(epoch(source, 0), 50)
    rows = torch.cat(list(batches))
    assert len(batches) == 20
    assert len(rows.unique()) >= 1000 - 16  # the last two blocks share some
    assert torch.corrcoef(torch.stack([rows, torch.arange(1000)]))[0, 1].abs() < 0.3
    first = torch.cat(list(source.batches(epoch(source, 1), 50)))
    assert not torch.equal(rows, first)


def test_rows_are_those_of_their_numbers_in_any_order(source):
    batches = source.batches(epoch(source, 0), 64)
    for k in (3, 0, 14, 3, 7):
        (rows,) = source.take(batches[k])
        assert torch.equal(rows, batches[k][:, None].float() * torch.tensor([1.0, 10.0, 100.0]))
    source.close()
    assert torch.equal(source.take(torch.arange(1003))[0][:, 0], torch.arange(1003.0))


def test_any_place_of_an_epoch_is_reached_without_those_before(source):
    order = epoch(source, 0)
    every = list(source.batches(order, 64))
    assert torch.equal(source.batches(order, 64)[9], every[9])
    assert [len(rows) for rows in source.batches(order, 64)[:2]] == [64, 64]


def test_ranks_share_every_batch(source):
    order = epoch(source, 0)
    of_ranks = [source.batches(order, 64, rank, 2)[5] for rank in range(2)]
    both = torch.stack(of_ranks, 1).flatten()
    assert torch.equal(both, source.batches(order, 64)[5])
