"""Examples in docstrings begin as tests do: with one thread and one seed."""

from tests.conftest import _deterministic_torch, pytest_fixture_setup  # noqa: F401
