"""Statically binarised MNIST, plain and gzipped, and what is wrong with broken files."""

import gzip

import pytest
import torch

from selfnorm.datasets import images
from selfnorm.errors import DataError, MissingDataError

ROWS = {"train": 12, "valid": 4, "test": 5}


def amat(n, seed=0):
    torch.manual_seed(seed)
    x = torch.randint(2, (n, 784))
    text = "\n".join(" ".join(str(int(v)) for v in row) for row in x) + "\n"
    return x.float(), text.encode()


def write(path, content, packed):
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path = path.with_name(path.name + ".gz")
        content = gzip.compress(content)
    path.write_bytes(content)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["binarized_mnist", "."])
def test_binarised_digits(tmp_path, packed, folder):
    truth = []
    for seed, (part, n) in enumerate(ROWS.items()):
        rows, content = amat(n, seed)
        truth.append(rows)
        write(tmp_path / folder / f"binarized_mnist_{part}.amat", content, packed)
    for read, written in zip(images.load_binarized(tmp_path), truth, strict=True):
        assert torch.equal(read, written)


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
