"""A process that answers one question at a time, and is begun again where it dies or hangs."""

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path


class Worker:
    """Asks ``python -m module``, which must :func:`serve`."""

    def __init__(self, module):
        self.module, self.process = module, None

    def ask(self, question, limit):
        """The answer; ``TimeoutError`` where it takes too long, ``EOFError`` where it died.

        That is after ``limit`` seconds in which it computes nothing, or of its own computing: a
        machine that has others to serve is no fault of what it is asked.
        """
        if self.process is None:
            command, pipe = [sys.executable, "-m", self.module], subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
            )
        begun = spent = self._spent()
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        while not (ready := select.select([self.process.stdout], [], [], limit)[0]):
            before, spent = spent, self._spent()
            if spent - before < limit / 500 or spent - begun > limit:
                break
        line = self.process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        if ready:
            code = self.process.wait()
            self.end()
            raise EOFError(f"the process has died, exit {code}")
        self.end()
        raise TimeoutError(f"not done after {limit:.0f} s")

    def _spent(self):
        """Processor seconds of the process and of those it began, where ``/proc`` says so."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended
                fields = path.read_text().rpartition(")")[2].split()  # from the state on
                ticks += (int(fields[3]) == self.process.pid) * sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self):
        """End the process and those it began; the next question begins another."""
        process, self.process = self.process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
            process.stdout.close()
            process.wait()


def serve(answer):
    """Answer questions on stdin by ``answer(question)``; other output goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()


def told(error):
    """An error in one line; its traceback goes to stderr."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"
