"""Runs the tests of this folder without pytest; the last line is the verdict.

``python -m tests.gpu [WORDS]``: those whose names have one of the words. They run in a process of
their own, which is begun again after a crash, a hang or an error that the device does not survive:
the next test finds a device that works.
"""

import sys
import time

from tests.worker import Worker

LIMIT, WHOLE = 120.0, 400.0  # seconds: of one test, of all


def main() -> int:
    worker, counts = Worker("tests.gpu.cases"), {"passed": 0, "skipped": 0, "FAILED": 0}
    began = time.perf_counter()
    where, names = worker.ask(None, LIMIT)
    if where is None:
        print("gpu tests: skipped, no CUDA device")
        return 0
    names = [n for n in names if not sys.argv[1:] or any(word in n for word in sys.argv[1:])]
    for name in names:
        start = time.perf_counter()
        left = WHOLE - (start - began)
        verdict, reason, usable = "FAILED", f"no time left of {WHOLE:.0f} s", True
        if left > 0:
            try:
                verdict, reason, usable = worker.ask(name, min(LIMIT, left))
            except (EOFError, TimeoutError) as error:
                reason = str(error)
        counts[verdict] += 1
        told = f"{verdict} {name} {time.perf_counter() - start:.1f} s"
        print(": ".join(filter(None, (told, reason))), flush=True)
        if not usable:
            print("the device is not usable any more: another process", flush=True)
            worker.end()
    worker.end()
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"gpu tests: {told} in {time.perf_counter() - began:.0f} s on {where}")
    return 1 if counts["FAILED"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
