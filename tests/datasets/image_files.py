"""Tiny files in the official formats of the image regression sets."""

import gzip
import io
import zipfile

import h5py
import numpy as np
from PIL import Image


def jpg(array):
    content = io.BytesIO()
    Image.fromarray(array).save(content, "JPEG", quality=95)
    return content.getvalue()


def png(array):
    content = io.BytesIO()
    Image.fromarray(array).save(content, "PNG")
    return content.getvalue()


def noise(rng, *shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)


def write_h5(root, path, labels, channels=3, names=("images", "labels")):
    """Noise with these labels, in arrays of these names."""
    images = noise(np.random.default_rng(0), len(labels), channels, 64, 64)
    (root / path).parent.mkdir()
    with h5py.File(root / path, "w") as file:
        for name, values in zip(names, (images, labels), strict=True):
            file[name] = values
    return labels


def write_digits(root, train=40, valid=12, test=10, packed=False):
    """Binarised digits of noise in three files, gzipped or not; what was written."""
    root.mkdir(parents=True, exist_ok=True)
    rng, written = np.random.default_rng(0), []
    for part, n in (("train", train), ("valid", valid), ("test", test)):
        written.append(rng.random((n, 784)) < 0.2)
        lines = [" ".join(map(str, row)) for row in written[-1].astype(int)]
        content, path = ("\n".join(lines) + "\n").encode(), root / f"binarized_mnist_{part}.amat"
        if packed:
            content, path = gzip.compress(content), path.with_name(f"{path.name}.gz")
        path.write_bytes(content)
    return written


def write_steering_angle(root, n=30):
    labels = np.random.default_rng(0).uniform(-60, 60, n)
    return write_h5(root, "steering_angle/SteeringAngle_64x64.h5", labels)


def write_cell_count(root, n=44, bad=False):
    counts = np.random.default_rng(0).integers(1, 201, n)
    if bad:
        counts[3] = -5
    path, names = "cell_count/Cell200_64x64.h5", ("IMGs_grey", "CellCounts")
    return write_h5(root, path, counts, channels=1, names=names)


def write_utkface_h5(root, n=40):
    ages = np.random.default_rng(0).integers(1, 100, n)
    return write_h5(root, "utkface/UTKFace_64x64.h5", ages)


def write_faces(root, *, as_zip, extra=None):
    """Thirty faces and what is ``extra``, by name; the brightness of a face is its age."""
    ages = np.random.default_rng(0).integers(1, 80, 30)
    files = {
        f"{age}_0_{i % 5}_2017010{i % 10}{i}.jpg.chip.jpg": jpg(np.full((64, 64, 3), 2 * age, "u1"))
        for i, age in enumerate(ages)
    } | (extra or {})
    (root / "utkface").mkdir(exist_ok=True)
    if as_zip:
        with zipfile.ZipFile(root / "utkface" / "utkface_64.zip", "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        (root / "utkface" / "UTKFace").mkdir()
        for name, content in files.items():
            (root / "utkface" / "UTKFace" / name).write_bytes(content)
    return files


def write_biwi(root, n=20, channels_first=False):
    rng = np.random.default_rng(0)
    (root / "biwi").mkdir()
    poses = {}
    for part in ("train", "test"):
        image = noise(rng, n, 64, 64, 3)
        poses[part] = image, rng.uniform(-75, 75, (n, 3))
        stored = image.transpose(0, 3, 1, 2) if channels_first else image
        path = root / "biwi" / f"BIWI_{part}.npz"
        np.savez(path, image=stored, pose=poses[part][1], img_size=64)
    return poses


def write_cells(root, n=8, size=128):
    """Pairs of images and dot maps; a dot is one red pixel."""
    rng = np.random.default_rng(0)
    (root / "cells").mkdir()
    dots = {}
    with zipfile.ZipFile(root / "cells" / "vgg_cells.zip", "w") as archive:
        for i in range(1, n + 1):
            cell = noise(rng, size, size, 3)
            dot = np.zeros((size, size, 3), dtype=np.uint8)
            places = rng.permutation(size * size)[:50]
            dot.reshape(-1, 3)[places, 0] = 255
            dots[i] = dot[..., 0]
            archive.writestr(f"{i:03d}cell.png", png(cell))
            archive.writestr(f"{i:03d}dots.png", png(dot))
    return dots


def write_driving(root, n=250, rows=None, header="image,steering"):
    rng = np.random.default_rng(0)
    (root / "steering").mkdir()
    angles = np.round(rng.uniform(-1, 1, n), 2)
    lines = [header] if header else []
    with zipfile.ZipFile(root / "steering" / "sim_track_64.zip", "w") as archive:
        for i in range(n):
            name = f"center_{i:04d}.jpg"
            if header:
                lines.append(f"{name},{angles[i]}")
            else:  # as the simulator writes it
                lines.append(f"C:\\IMG\\{name},l.jpg,r.jpg,{angles[i]},1,0,30.1")
            archive.writestr(name, jpg(np.full((64, 64, 3), i % 256, dtype=np.uint8)))
        archive.writestr("driving_log.csv", "\n".join(lines + (rows or [])))
    return angles
