"""Tiny files in the official formats of the image regression sets."""

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


def write_steering_angle(root, n=30):
    rng = np.random.default_rng(0)
    (root / "steering_angle").mkdir()
    labels = rng.uniform(-60, 60, n)
    with h5py.File(root / "steering_angle" / "SteeringAngle_64x64.h5", "w") as file:
        file["images"] = noise(rng, n, 3, 64, 64)
        file["labels"] = labels
    return labels


def write_cell_count(root, n=44, bad=False):
    rng = np.random.default_rng(0)
    (root / "cell_count").mkdir()
    counts = rng.integers(1, 201, n)
    if bad:
        counts[3] = -5
    with h5py.File(root / "cell_count" / "Cell200_64x64.h5", "w") as file:
        file["IMGs_grey"] = noise(rng, n, 1, 64, 64)
        file["CellCounts"] = counts
    return counts


def write_utkface_h5(root, n=40):
    rng = np.random.default_rng(0)
    (root / "utkface").mkdir()
    ages = rng.integers(1, 100, n)
    with h5py.File(root / "utkface" / "UTKFace_64x64.h5", "w") as file:
        file["images"] = noise(rng, n, 3, 64, 64)
        file["labels"] = ages
    return ages


def face_files(n=30, size=64):
    """Names and contents; the brightness of a face is its age."""
    rng = np.random.default_rng(0)
    files = {}
    for i in range(n):
        age = int(rng.integers(1, 80))
        picture = np.full((size, size, 3), 2 * age, dtype=np.uint8)
        files[f"{age}_0_{i % 5}_2017010{i % 10}{i}.jpg.chip.jpg"] = jpg(picture)
    return files


def write_faces(root, *, as_zip, extra=None):
    files = face_files() | (extra or {})
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


def write_biwi(root, n=20):
    rng = np.random.default_rng(0)
    (root / "biwi").mkdir()
    poses = {}
    for part in ("train", "test"):
        image = noise(rng, n, 64, 64, 3)
        poses[part] = image, rng.uniform(-75, 75, (n, 3))
        path = root / "biwi" / f"BIWI_{part}.npz"
        np.savez(path, image=image, pose=poses[part][1], img_size=64)
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
