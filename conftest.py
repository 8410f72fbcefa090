"""Examples in docstrings begin as tests do; ``--shuffle SEED`` runs tests in another order."""

import random
from collections import defaultdict

from tests.conftest import _deterministic_torch, pytest_fixture_setup  # noqa: F401


def pytest_addoption(parser):
    """``--shuffle``."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="shuffle files, and tests in each")


def pytest_collection_modifyitems(config, items):
    """Files in an order of the seed, and the tests of each."""
    if config.getoption("shuffle") is not None:
        rng = random.Random(config.getoption("shuffle"))
        places = defaultdict(rng.random)
        items.sort(key=lambda item: (places[item.path], rng.random()))
