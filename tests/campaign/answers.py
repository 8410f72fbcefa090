"""One trial at a time: the process that ``__main__`` asks."""

from tests.campaign.trials import attempt
from tests.worker import serve, told


def answer(asked):
    try:
        return attempt(*asked)
    except Exception as error:
        return "traceback", told(error)


if __name__ == "__main__":
    serve(answer)
