"""The tests by name, and one of them at a time: the process that ``__main__`` asks."""

import unittest
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from tests.gpu.tools import DEVICE
from tests.worker import serve, told


def cases():
    """Calls by name."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = import_module(f"tests.gpu.{file.stem}")
        for name, function in vars(module).items():
            if name.startswith("test_") and function.__module__ == module.__name__:
                each = getattr(function, "cases", None)
                found |= {name: function} if each is None else {}
                found |= {f"{name}[{case}]": partial(function, case) for case in each or ()}
    return found


def usable():
    """Whether the device still computes: an error inside a kernel ends that for this process."""
    try:
        return float(torch.ones(3, device=DEVICE).sum()) == 3
    except RuntimeError:
        return False


def answer(name):
    """Verdict, reason and whether the device is usable; for no name, the device and all names."""
    if name is None:
        if DEVICE.type == "cuda" and not torch.cuda.is_available():
            return None, []
        where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else str(DEVICE)
        return f"{where}, torch {torch.__version__}", list(cases())
    torch.manual_seed(0)
    try:
        cases()[name]()
    except unittest.SkipTest as skipped:
        return "skipped", str(skipped), True
    except Exception as error:
        return "FAILED", told(error), usable()
    return "passed", "", True


if __name__ == "__main__":
    serve(answer)
