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
    if question == "slow":
        for _ in range(30):  # little computing in a long time, as on a machine with others to serve
            began = time.process_time()
            while time.process_time() < began + 0.01:
                pass
            time.sleep(0.05)
    print("what a test prints is no answer")
    return [question, os.getpid()]


def test_a_worker_that_dies_or_hangs_is_begun_again_and_one_that_is_slow_is_waited_for():
    worker = Worker("tests.test_worker")
    first = worker.ask("a", 60)[1]
    assert worker.ask("b", 60) == ["b", first]
    with pytest.raises(EOFError, match="exit -9"):
        worker.ask("die", 60)
    second = worker.ask("c", 60)[1]
    assert second != first
    with pytest.raises(TimeoutError):
        worker.ask("hang", 0.2)
    third = worker.ask("d", 60)[1]
    assert third not in (first, second)
    assert worker.ask("slow", 1) == ["slow", third]
    worker.end()


if __name__ == "__main__":
    serve(answer)
