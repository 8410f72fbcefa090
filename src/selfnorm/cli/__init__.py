"""The command line: ``selfnorm --help``."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

__all__ = ["main"]


class Stopped(BaseException):
    """A command was interrupted; the message says what was kept. Click knows nothing of it."""


class _Interrupt(KeyboardInterrupt):
    """Of a plain one within an ``exec``, as imports have, Python dies at its end, caught or not."""


def main() -> None:
    """Entry point: Ctrl-C and SIGTERM are one line and exit codes 130 and 143, in imports as well.

    For other ends see :func:`selfnorm.cli.app.run`.
    """
    received = [signal.SIGINT]

    def interrupt(number: int, _: Any) -> None:
        received.append(signal.Signals(number))
        raise _Interrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may ignore it
            before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        from selfnorm.cli.app import run

        run()
    except (KeyboardInterrupt, Stopped) as stop:
        how = "terminated" if received[-1] == signal.SIGTERM else "interrupted"
        print(f"selfnorm: {how}: {str(stop) or 'nothing was written'}", file=sys.stderr)
        sys.exit(128 + received[-1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
