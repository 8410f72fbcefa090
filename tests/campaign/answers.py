"""One trial at a time: the process that ``__main__`` asks."""

import os

from tests.campaign.trials import attempt
from tests.worker import serve, told


def answer(asked):
    """Verdict, a word on it, and figures: what the trial has, and the processor's seconds."""
    before = sum(os.times()[:4])
    try:
        verdict, word, *figures = attempt(*asked)
        word = word.encode(
            "ascii", "backslashreplace"
        ).decode()  # it may name what no file can hold
    except Exception as error:
        verdict, word, figures = "traceback", told(error), []
    spent = round(sum(os.times()[:4]) - before, 2)
    return verdict, word, {"processor_seconds": spent, **(figures[0] if figures else {})}


if __name__ == "__main__":
    serve(answer)
