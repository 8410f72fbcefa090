"""Whether processes that a test started have ended."""

import os
import time


def gone(pid):
    """Whether a process has ended, within a while."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
