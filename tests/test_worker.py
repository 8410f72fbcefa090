import os
import signal
import time

import pytest

from tests.worker import Worker, serve


def answer(question):
    if question == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if question == "hang":
        time.sleep(60)
    print("what a test prints is no answer")
    return [question, os.getpid()]


def test_a_worker_that_dies_or_hangs_is_begun_again():
    worker = Worker("tests.test_worker")
    first = worker.ask("a", 60)[1]
    assert worker.ask("b", 60) == ["b", first]
    with pytest.raises(EOFError, match="exit -9"):
        worker.ask("die", 60)
    second = worker.ask("c", 60)[1]
    assert second != first
    with pytest.raises(TimeoutError):
        worker.ask("hang", 0.2)
    assert worker.ask("d", 60)[1] not in (first, second)
    worker.end()


if __name__ == "__main__":
    serve(answer)
