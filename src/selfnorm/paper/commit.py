"""Which code made a result; by the standard library alone, for environments without torch."""

import functools
import os
import subprocess
from pathlib import Path


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
