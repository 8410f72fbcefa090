"""Runs the tests of this folder without pytest; the last line is the verdict."""

import sys
import time
import traceback
import unittest
from importlib import import_module
from pathlib import Path

import torch

from tests.gpu.tools import DEVICE


def main() -> int:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        print("gpu tests: skipped, no CUDA device")
        return 0
    counts = {"passed": 0, "skipped": 0, "FAILED": 0}
    began, wanted = time.perf_counter(), sys.argv[1:]
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = import_module(f"tests.gpu.{file.stem}")
        for name, function in vars(module).items():
            if not name.startswith("test_") or function.__module__ != module.__name__:
                continue
            for case in getattr(function, "cases", (None,)):
                called = name if case is None else f"{name}[{case}]"
                if wanted and not any(word in called for word in wanted):
                    continue
                start, reason = time.perf_counter(), ""
                torch.manual_seed(0)
                try:
                    function() if case is None else function(case)
                    verdict = "passed"
                except unittest.SkipTest as skipped:
                    verdict, reason = "skipped", f": {skipped}"
                except Exception:
                    verdict = "FAILED"
                    traceback.print_exc()
                counts[verdict] += 1
                seconds = time.perf_counter() - start
                print(f"{verdict} {called} {seconds:.1f} s{reason}", flush=True)
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else str(DEVICE)
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    seconds = time.perf_counter() - began
    print(f"gpu tests: {told} in {seconds:.0f} s on {where}, torch {torch.__version__}")
    return 1 if counts["FAILED"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
