"""Statically binarised MNIST, plain and gzipped, and what is wrong with broken files."""

import gzip

import pytest
import torch

from selfnorm.datasets import images
from selfnorm.errors import DataError, MissingDataError
from tests.datasets.image_files import write_digits


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["binarized_mnist", "."])
def test_binarised_digits(tmp_path, packed, folder):
    truth = write_digits(tmp_path / folder, 12, 4, 5, packed=packed)
    for read, written in zip(images.load_binarized(tmp_path), truth, strict=True):
        assert torch.equal(read, torch.from_numpy(written).float())


def test_missing_files_say_where_to_get_them(tmp_path):
    with pytest.raises(MissingDataError, match="Larochelle"):
        images.load_binarized(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"0 1 2\n", "other than 0 and 1"), (b"0 1\n", "multiple"), (b"", "multiple")],
)
def test_broken_text(tmp_path, content, message):
    (tmp_path / "x.amat").write_bytes(content)
    with pytest.raises(DataError, match=message):
        images.read_amat(tmp_path / "x.amat", width=3)


def test_a_broken_archive(tmp_path):
    (tmp_path / "x.amat.gz").write_bytes(gzip.compress(b"0 1 1\n")[:-6])
    with pytest.raises(DataError, match="copy the file again"):
        images.read_amat(tmp_path / "x.amat.gz", width=3)
