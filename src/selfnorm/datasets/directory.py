"""Where data files are looked for, and what to say when they are not there.

Files are read in their official formats from ``--data-dir``, else ``$SELFNORM_DATA``, else
``~/.cache/selfnorm``. The library downloads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from selfnorm.errors import DataError, MissingDataError
from selfnorm.errors import optional as library


@dataclass(frozen=True)
class DataFile:
    """A data set on disk.

    Attributes:
        name: of the set.
        paths: that it may have below the data directory.
        source: where to get it.
        parts: of a set in several files, what stands in the place of ``train`` in their names.
    """

    name: str
    paths: tuple[str, ...]
    source: str
    parts: tuple[str, ...] = ("train",)


_CCGAN = "github.com/UBCDingXin/improved_CcGAN (dataset folder)"
FILES: tuple[DataFile, ...] = (
    DataFile(
        "power",
        ("power/data.npy", "power/household_power_consumption.txt"),
        "UCI, Individual household electric power consumption",
    ),
    DataFile(
        "gas",
        ("gas/ethylene_CO.pickle", "gas/ethylene_CO.txt"),
        "UCI, Gas sensor array under dynamic gas mixtures (ethylene_CO)",
    ),
    DataFile("hepmass", ("hepmass/1000_train.csv",), "UCI, HEPMASS", ("train", "test")),
    DataFile(
        "miniboone",
        ("miniboone/data.npy", "miniboone/MiniBooNE_PID.txt"),
        "MAF benchmark files (Papamakarios 2017), or UCI, MiniBooNE",
    ),
    DataFile("bsds300", ("bsds300/BSDS300.hdf5",), "MAF benchmark files (Papamakarios 2017)"),
    DataFile("dataset2", ("toy1d/dataset2_train.csv",), "the authors' draw of the 1-D set 2"),
    DataFile(
        "utkface",
        ("utkface/UTKFace_64x64.h5", "utkface/utkface_64.zip", "utkface"),
        f"{_CCGAN}; or the jpgs named by age, susanqq.github.io/UTKFace",
    ),
    DataFile(
        "cells",
        ("cells/vgg_cells.zip", "cells"),
        "www.robots.ox.ac.uk/~vgg/research/counting, synthetic fluorescence cells",
    ),
    DataFile("driving", ("steering/sim_track_64.zip", "steering"), "Udacity simulator recording"),
    DataFile("steering_angle", ("steering_angle/SteeringAngle_64x64.h5",), _CCGAN),
    DataFile("cell_count", ("cell_count/Cell200_64x64.h5",), _CCGAN),
    DataFile(
        "binarized_mnist",
        tuple(
            f"{folder}binarized_mnist_train.amat{end}"
            for folder in ("binarized_mnist/", "")
            for end in ("", ".gz")
        ),
        "Larochelle's statically binarised MNIST: ..._train, ..._valid and ..._test.amat",
        ("train", "valid", "test"),
    ),
    DataFile(
        "biwi",
        ("biwi/BIWI_train.npz",),
        "github.com/shamangary/FSA-Net, preprocessed BIWI_train.npz and BIWI_test.npz",
        ("train", "test"),
    ),
)
BUILT_IN = ("funnel", "pinwheel", "checkerboard", "four_circles", "dataset1", "dataset2 (redrawn)")


def check_name(name: str, names: Iterable[str], what: str) -> None:
    """Refuse a name that no set has."""
    if name not in names:
        raise DataError(f"no {what} is called {name!r}; there are {', '.join(names)}")


def data_directory(given: str | Path | None = None) -> Path:
    """The directory in force: the argument, ``$SELFNORM_DATA`` or the cache."""
    return Path(given or os.environ.get("SELFNORM_DATA") or Path.home() / ".cache" / "selfnorm")


def find_set(name: str, given: str | Path | None = None) -> list[Path]:
    """The files of a data set, or an error that says where to get the one that is missing.

    Example:
        >>> find_set("power", "/nonexistent")
        Traceback (most recent call last):
        selfnorm.errors.MissingDataError: data file not found: looked for ...power/data.npy or ...
    """
    entry = next(entry for entry in FILES if entry.name == name)
    return [
        find_file([path.replace("train", part) for path in entry.paths], given, entry.source)
        for part in entry.parts
    ]


def find_file(
    paths: str | Iterable[str], given: str | Path | None = None, source: str = ""
) -> Path:
    """First existing path below the data directory, or an error that says where to get it."""
    candidates = (paths,) if isinstance(paths, str) else tuple(paths)
    directory = data_directory(given)
    for candidate in candidates:
        if (directory / candidate).exists():
            return directory / candidate
    looked = " or ".join(str(directory / c) for c in candidates)
    origin = f" Source: {source}." if source else ""
    raise MissingDataError(
        f"data file not found: looked for {looked}.{origin} Put the file there, or set "
        "SELFNORM_DATA (or --data-dir) to the directory that holds it"
    )


def listing(given: str | Path | None = None) -> list[str]:
    """Lines for ``selfnorm datasets``: built-in sets, then files found and missing."""
    directory = data_directory(given)
    lines = ["built in: " + ", ".join(BUILT_IN), f"data directory: {directory}"]
    for entry in FILES:
        present = [p for p in entry.paths if (directory / p).exists()]
        state = f"found    {present[0]}" if present else f"missing  {' or '.join(entry.paths)}"
        lines.append(f"  {entry.name:<15} {state}   ({entry.source})")
    return lines


def optional(module: str, package: str, extra: str = "data") -> ModuleType:
    """A module that a reader of files needs, or an error that says how to install it."""
    return library(module, f"this file needs {package}: pip install 'selfnorm[{extra}]'")
