"""``selfnorm evidence``: draws that carry their log-density."""

import json
import math

import numpy as np
import pytest

from tests.cli.test_app import selfnorm, write_csv  # noqa: F401 a fixture


@pytest.fixture
def draws(tmp_path):
    rng = np.random.default_rng(0)
    x, s = rng.normal(size=400), rng.gamma(2.0, size=400)
    log_p = 3.0 - 0.5 * x**2 + np.log(s) - s  # log Z = 3 + log(2 pi) / 2
    chain = np.repeat([1, 2], 200)
    write_csv(
        tmp_path / "draws.csv", np.column_stack([chain, x, s, log_p]), ["chain", "x", "s", "lp__"]
    )
    return tmp_path / "draws.csv"


def test_value_bound_and_verdict(selfnorm, draws):  # noqa: F811
    options = ["--log-density", "lp__", "--chain", "chain", "--positive", "s"]
    code, out, _ = selfnorm("evidence", draws, *options, "--json")
    found = json.loads(out)
    exact = 3.0 + 0.5 * math.log(2 * math.pi)
    assert code == 0
    assert found["columns"] == ["x", "s"]
    assert abs(found["log_z"] - exact) < 4 * found["se"] + 0.01
    assert found["upper"] > exact - 4 * found["upper_se"]
    assert found["lower"] is None
    code, out, _ = selfnorm("evidence", draws, *options)
    assert "reciprocal estimate and an upper bound" in out


def test_wrong_names_are_refused_in_one_line(selfnorm, draws):  # noqa: F811
    right = ["--log-density", "lp__"]
    for options in (["--log-density", "lp"], [*right, "--positive", "chainn"], right):
        err = selfnorm.refused("evidence", draws, *options)
    assert "'chain' holds 2 whole numbers" in err


def test_strict_ends_with_a_code_of_its_own(selfnorm, draws):  # noqa: F811
    """The second half of the one long chain is elsewhere."""
    lines = draws.read_text().splitlines()
    for i in range(200, 401):
        chain, x, s, lp = lines[i].split(",")
        lines[i] = f"{chain},{float(x) + 20},{s},{lp}"
    draws.write_text("\n".join(lines) + "\n")
    options = ["--log-density", "lp__", "--drop", "chain", "--strict"]
    assert selfnorm("evidence", draws, *options)[0] == 3
