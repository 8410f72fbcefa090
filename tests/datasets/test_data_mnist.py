"""Official MNIST formats, plain and gzipped, and what is wrong with broken files."""

import gzip
import struct

import pytest
import torch

from selfnorm.datasets import mnist
from selfnorm.errors import DataError, MissingDataError

ROWS = {"train": 12, "valid": 4, "test": 5}


def amat(n, seed=0):
    torch.manual_seed(seed)
    x = torch.randint(2, (n, 784))
    text = "\n".join(" ".join(str(int(v)) for v in row) for row in x) + "\n"
    return x.float(), text.encode()


def idx(values):
    head = b"\x00\x00\x08" + bytes([values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    return head + values.to(torch.uint8).numpy().tobytes()


def write(path, content, packed):
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path = path.with_name(path.name + ".gz")
        content = gzip.compress(content)
    path.write_bytes(content)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["binarized_mnist", "."])
def test_binarised_digits(tmp_path, packed, folder):
    truth = {}
    for seed, (part, n) in enumerate(ROWS.items()):
        truth[part], content = amat(n, seed)
        write(tmp_path / folder / f"binarized_mnist_{part}.amat", content, packed)
    digits = mnist.load_binarized(tmp_path)
    for part in ROWS:
        assert torch.equal(getattr(digits, part), truth[part])


@pytest.mark.parametrize("packed", [False, True])
def test_raw_digits_and_dynamic_binarisation(tmp_path, packed):
    torch.manual_seed(0)
    images = torch.randint(256, (24, 28, 28))
    write(tmp_path / "mnist" / "train-images-idx3-ubyte", idx(images), packed)
    write(tmp_path / "mnist" / "t10k-images-idx3-ubyte", idx(images[:6]), packed)
    grey = mnist.load_raw(tmp_path)
    assert (len(grey.train), len(grey.valid), len(grey.test)) == (20, 4, 6)
    assert torch.allclose(grey.test, images[:6].reshape(6, 784) / 255)
    binary = mnist.load_raw(tmp_path, binarize=True, seed=1)
    assert set(binary.test.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(binary.test, mnist.load_raw(tmp_path, binarize=True, seed=1).test)
    assert not torch.equal(binary.test, mnist.load_raw(tmp_path, binarize=True, seed=2).test)
    assert torch.equal(binary.train, grey.train)  # drawn afresh at every step instead
    draw = mnist.Binarizer()
    several = torch.stack([draw(grey.train) for _ in range(400)])
    assert torch.allclose(several.mean(0), grey.train, atol=0.13)


def test_missing_files_say_where_to_get_them(tmp_path):
    with pytest.raises(MissingDataError, match="Larochelle"):
        mnist.load_binarized(tmp_path)
    with pytest.raises(MissingDataError, match="LeCun"):
        mnist.load_raw(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"0 1 2\n", "other than 0 and 1"), (b"0 1\n", "multiple"), (b"", "multiple")],
)
def test_broken_text(tmp_path, content, message):
    (tmp_path / "x.amat").write_bytes(content)
    with pytest.raises(DataError, match=message):
        mnist.read_amat(tmp_path / "x.amat", width=3)


def test_broken_binary_files(tmp_path):
    good = idx(torch.zeros(3, 2, 2, dtype=torch.long))
    for content, message in [
        (b"not an idx file", "not an idx"),
        (good[:-1], "cut short"),
        (good[:7], "header"),
    ]:
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(DataError, match=message):
            mnist.read_idx(tmp_path / "x")
    (tmp_path / "x.gz").write_bytes(gzip.compress(good)[:-6])
    with pytest.raises(DataError, match="copy the file again"):
        mnist.read_idx(tmp_path / "x.gz")
