"""Where a result comes from: its code, the packages, the machine.

By the standard library alone: some results are made in environments without torch.
"""

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

PACKAGES = ("selfnorm", "torch", "numpy", "scikit-learn", "zuko")


@functools.cache  # that of the code which runs, whatever is done to the tree meanwhile
def commit(tree: Path = Path(__file__).parent) -> str:
    """The commit of a source tree: ``SELFNORM_COMMIT``, or what its history says.

    ``-dirty`` follows where its code is not as committed. A copy that is installed inside another
    repository has none.
    """
    if stated := os.environ.get("SELFNORM_COMMIT"):
        return stated

    def git(*words: str) -> str:
        try:
            command = ["git", "-C", str(tree), *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.stdout.strip()
        except OSError:  # no git here
            return ""

    if not git("ls-files", "."):
        return "unknown"
    code = (":/src", ":/benchmarks", ":/tests")  # results change while they are made
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *code)
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of the packages that are installed."""
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    found = {name: installed[name] for name in packages if name in installed}
    return {"python": platform.python_version(), **found}


def hardware(device: object = "cpu") -> dict[str, object]:
    """What the figures were measured on."""
    torch, cores = sys.modules.get("torch"), os.cpu_count() or 1
    threads = torch.get_num_threads() if torch else int(os.environ.get("OMP_NUM_THREADS", cores))
    info = {"machine": platform.machine(), "cores": cores, "threads": threads}
    info["device"] = str(device)
    if torch and torch.device(device).type == "cuda":
        info["gpu"] = torch.cuda.get_device_name(device)
    return info
