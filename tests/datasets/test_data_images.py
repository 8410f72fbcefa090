"""Each official format is read from a small file, and a fault is reported with the file's name."""

import gzip

import numpy as np
import pytest
import torch

from selfnorm.datasets import find_set, images, maf_benchmark, toy1d
from selfnorm.datasets.directory import FILES
from selfnorm.datasets.images import read_arrays
from selfnorm.errors import DataError, MissingDataError
from tests.datasets import image_files as files


def parts(data):
    return [data.train, data.val, data.test]


def all_labels(data):
    return np.sort(np.concatenate([y[:, 0] for _, y in parts(data)]))


@pytest.mark.parametrize(
    ("name", "write", "sizes", "channels", "step"),
    [
        ("steering_angle", files.write_steering_angle, [21, 3, 6], 3, 0.0),  # 70 / 10 / 20
        ("cell_count", files.write_cell_count, [20, 4, 20], 1, 1.0),
    ],
)
def test_h5_files(tmp_path, name, write, sizes, channels, step):
    labels = write(tmp_path)
    data = images.load(name, data_dir=tmp_path)
    assert [len(x) for x, _ in parts(data)] == sizes
    assert data.train[0].shape[1:] == (channels, 64, 64)
    assert data.train[0].dtype == np.uint8
    assert data.label_step == step
    np.testing.assert_allclose(all_labels(data), np.sort(labels))
    again, other = (images.load(name, data_dir=tmp_path, seed=seed).test[1] for seed in (0, 1))
    assert np.array_equal(data.test[1], again)  # splits depend on the seed alone
    assert not np.array_equal(data.test[1], other)


@pytest.mark.parametrize("kind", ["h5", "zip", "folder"])
def test_utkface_keeps_ages_1_to_60(tmp_path, kind):
    if kind == "h5":
        ages = files.write_utkface_h5(tmp_path)
    else:
        written = files.write_faces(tmp_path, as_zip=kind == "zip")
        ages = np.array([int(name.split("_")[0]) for name in written])
    data = images.load("utkface", data_dir=tmp_path, seed=3)
    np.testing.assert_allclose(all_labels(data), np.sort(ages[ages <= 60]))
    for x, y in parts(data) if kind != "h5" else ():  # image and label belong together
        np.testing.assert_allclose(x.mean((1, 2, 3)), 2 * y[:, 0], atol=1.0)


@pytest.mark.parametrize("channels_first", [False, True])
def test_biwi_keeps_the_official_test_part_and_turns_bgr_round(tmp_path, channels_first):
    poses = files.write_biwi(tmp_path, channels_first=channels_first)
    data = images.load("biwi", data_dir=tmp_path)
    assert [len(x) for x, _ in parts(data)] == [16, 4, 20]
    image, pose = poses["test"]
    np.testing.assert_array_equal(data.test[1], pose)
    np.testing.assert_array_equal(data.test[0], image[..., ::-1].transpose(0, 3, 1, 2))
    assert data.augmentation.flip_signs == (-1.0, 1.0, -1.0)  # yaw and roll, not pitch


def test_cells_count_dots_inside_the_crop(tmp_path):
    dots = files.write_cells(tmp_path)
    data = images.load("cells", data_dir=tmp_path)
    # Tiles of an image hold all of its dots; whole images are on one side of the split.
    assert len(data.test[0]) == 2 * 4
    assert len(data.val[0]) == 1 * 4
    assert data.test[1].reshape(2, 4).sum(1).tolist() == [50, 50]
    assert len(data.train[0]) == 5 * 64
    per_tile = {
        int(d[a : a + 64, b : b + 64].sum() / 255)
        for d in dots.values()
        for a in (0, 64)
        for b in (0, 64)
    }
    assert {int(v) for v in data.test[1][:, 0]} <= per_tile
    assert 0 < data.train[1].mean() < 50
    first, second = data.test_groups[0], data.test_groups[4]
    assert data.test_groups.tolist() == [first] * 4 + [second] * 4  # four tiles of each picture
    # The range does not look at test images.
    seen = max(data.train[1].max(), data.val[1].max())
    assert data.label_range == (0.0, np.ceil(1.25 * seen))


@pytest.mark.parametrize("header", ["image,steering", ""])
def test_driving_log_with_and_without_header(tmp_path, header):
    angles = files.write_driving(tmp_path, header=header)
    data = images.load("driving", data_dir=tmp_path)
    np.testing.assert_allclose(all_labels(data), np.sort(angles))
    shown = np.concatenate([x[:, 0, 0, 0] for x, _ in parts(data)]).astype(float)
    labels = np.concatenate([y[:, 0] for _, y in parts(data)])
    order = np.argsort(shown)
    np.testing.assert_allclose(labels[order], angles, atol=0)  # frame k has brightness k


def test_driving_blocks_stay_together(tmp_path):
    files.write_driving(tmp_path)
    data = images.load("driving", data_dir=tmp_path, seed=1)
    for x, _ in parts(data):
        frames = x[:, 0, 0, 0].astype(int)  # frame k has brightness k
        _, counts = np.unique(frames // 50, return_counts=True)
        assert (counts == 50).all()
    assert np.array_equal(data.test_groups, data.test[0][:, 0, 0, 0].astype(int) // 50)


BLACK = files.jpg(np.zeros((64, 64, 3), np.uint8))
NOISE = files.jpg(files.noise(np.random.default_rng(0), 64, 64, 3))


def test_hidden_files_are_left_out(tmp_path):
    extra = {"__MACOSX/12_0.jpg": b"?", "._x.jpg": b"?", "a/._x.jpg": b"?"}
    files.write_faces(tmp_path, as_zip=True, extra=extra)
    images.load("utkface", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"a/7_0_1.jpg": BLACK, "b/7_0_1.jpg": BLACK}, r"7_0_1\.jpg is there twice, .* b/7_0_1"),
        ({"33_1.jpg": b"\xff\xd8 not a jpg"}, r"33_1\.jpg is not a readable image"),
        ({"33_1.jpg": NOISE[: len(NOISE) // 2]}, r"33_1\.jpg is not a readable image"),
        ({"33_1.jpg": files.jpg(np.zeros((32, 64, 3), np.uint8))}, r"size \(32, 64\) differs"),
        *(
            ({name: BLACK}, rf"{name}: the name does not start with an age of 0 to 120")
            for name in ("face.jpg", "old_1_2.jpg", "x12_1.jpg", "999_0_0_1.jpg")
        ),
    ],
)
def test_a_face_that_cannot_be_used_is_named(tmp_path, extra, told):
    files.write_faces(tmp_path, as_zip=True, extra=extra)
    with pytest.raises(DataError, match=rf"utkface_64\.zip: .*{told}"):
        images.load("utkface", data_dir=tmp_path)


def test_labels_out_of_range_are_named(tmp_path):
    files.write_cell_count(tmp_path, bad=True)
    with pytest.raises(DataError, match=r"Cell200_64x64\.h5: the label of image 3 is \[-5\.0\]"):
        images.load("cell_count", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("center_0001.jpg,left", r"driving_log\.csv, line 252"),
        ("center_0001.jpg,1.5", r"driving_log\.csv: the label of image 250 is \[1\.5\]"),
        ("center_9999.jpg,0.5", r"center_9999\.jpg is missing"),
    ],
)
def test_a_bad_line_of_the_log_is_named(tmp_path, row, told):
    files.write_driving(tmp_path, rows=[row])
    with pytest.raises(DataError, match=told):
        images.load("driving", data_dir=tmp_path)


def test_damaged_containers_are_named(tmp_path):
    (tmp_path / "steering_angle").mkdir()
    (tmp_path / "steering_angle" / "SteeringAngle_64x64.h5").write_bytes(b"no h5")
    with pytest.raises(DataError, match=r"SteeringAngle_64x64\.h5 cannot be read"):
        images.load("steering_angle", data_dir=tmp_path)
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "vgg_cells.zip").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"vgg_cells\.zip is neither a folder nor a zip"):
        images.load("cells", data_dir=tmp_path)
    np.savez(tmp_path / "x.npz", image=np.zeros(3))
    with pytest.raises(DataError, match=r"x\.npz has no 'pose'; it holds \['image'\]"):
        read_arrays(tmp_path / "x.npz", "image", "pose")


def test_tiles_are_grouped_by_picture_whatever_their_size(tmp_path):
    """Pictures of several sizes have different numbers of tiles."""
    (tmp_path / "cells").mkdir()
    rng = np.random.default_rng(0)
    for i in range(10):
        size = (64 * (1 + i % 3), 64, 3)
        # what the picture is: its blue, everywhere
        cell, dots = np.full(size, 20 * i, np.uint8), np.zeros(size, np.uint8)
        dots[rng.integers(0, size[0], 30), rng.integers(0, 64, 30), 0] = 255
        (tmp_path / "cells" / f"{i:03d}cell.png").write_bytes(files.png(cell))
        (tmp_path / "cells" / f"{i:03d}dots.png").write_bytes(files.png(dots))
    data = images.load("cells", data_dir=tmp_path)
    pictures = data.test[0][:, 0, 0, 0]
    assert len(data.test_groups) == len(pictures)
    assert len({*zip(data.test_groups, pictures, strict=True)}) == len({*pictures}) == 3


# -- digits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["binarized_mnist", "."])
def test_binarised_digits(tmp_path, packed, folder):
    truth = files.write_digits(tmp_path / folder, 12, 4, 5, packed=packed)
    for read, written in zip(images.load_binarized(tmp_path), truth, strict=True):
        assert torch.equal(read, torch.from_numpy(written).float())


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


# -- names and places ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [entry.name for entry in FILES])
def test_a_missing_file_is_named_with_its_source(tmp_path, name):
    with pytest.raises(MissingDataError, match=rf"looked for .*{tmp_path.name}.* Source: [^ ]"):
        find_set(name, tmp_path)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (images.load, "no image set is called 'faces'; there are utkface"),
        (maf_benchmark.load, "no set of the benchmark is called 'faces'"),
        (toy1d.load, "dataset1, dataset2"),
    ],
)
def test_an_unknown_set_is_told_the_known_ones(load, words):
    with pytest.raises(DataError, match=words):
        load("faces")
