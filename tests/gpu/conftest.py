import pytest
import torch


def pytest_generate_tests(metafunc):
    cases = getattr(metafunc.function, "cases", None)
    if cases is not None:
        name = metafunc.fixturenames[0]
        metafunc.parametrize(name, cases, ids=[str(case) for case in cases])


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
