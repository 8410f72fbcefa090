"""A process that answers one question at a time, and is begun again where it dies or hangs."""

import json
import os
import select
import subprocess
import sys
import traceback


class Worker:
    """Asks ``python -m module``, which must :func:`serve`."""

    def __init__(self, module):
        self.module, self.process = module, None

    def ask(self, question, limit):
        """The answer; ``TimeoutError`` after ``limit`` seconds, ``EOFError`` where it died."""
        if self.process is None:
            command, pipe = [sys.executable, "-m", self.module], subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        if ready:
            code = self.process.wait()
            self.end()
            raise EOFError(f"the process has died, exit {code}")
        self.end()
        raise TimeoutError(f"not done after {limit:.0f} s")

    def end(self):
        """End the process; the next question begins another."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
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
