"""The tests on analytic models have teeth: a typical mistake in the library makes them fail.

Each case copies the package, plants one mistake and runs the tests that should notice.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import selfnorm

PACKAGE = Path(selfnorm.__file__).parent
TESTS = Path(__file__).parent

MISTAKES = {
    "forgotten_log_q": (
        "evaluation.py",
        "model.log_unnormalized(samples) - proposal.log_prob(samples)",
        "model.log_unnormalized(samples)",
        "analytic/test_log_norm.py",
    ),
    "sign_of_b": (
        "functional.py",
        "return log_p_data - log_norm - capped_exp(",
        "return log_p_data + log_norm - capped_exp(",
        "analytic/test_log_norm.py",
    ),
    "sign_of_b_in_the_weight": (
        "functional.py",
        "capped_exp(log_z - log_norm, max_exponent)",
        "capped_exp(log_z + log_norm, max_exponent)",
        "analytic/test_log_norm.py",
    ),
    "mean_without_division": (
        "functional.py",
        "return torch.logsumexp(log_w, dim) - math.log(log_w.shape[dim])",
        "return torch.logsumexp(log_w, dim)",
        "analytic/test_log_norm.py",
    ),
    "forgotten_log_q_in_a_chain": (
        "autoregressive_evaluation.py",
        "unnormalised = (f + at.proposal.log_prob(here)).sum(-1) + log_det",
        "unnormalised = f.sum(-1) + log_det",
        "test_chain_bounds.py",
    ),
    "dropped_determinant_of_a_gaussian": (
        "proposals.py",
        'module.register_buffer("log_scale_const", (-log_det).to(loc.dtype))',
        'module.register_buffer("log_scale_const", (0 * log_det).to(loc.dtype))',
        "test_proposals.py",
    ),
    "dropped_jacobian_of_the_data_scaling": (
        "data/toy2d.py",
        "log_density(raw) + transform.log_scale",
        "log_density(raw)",
        "test_data_toy2d.py",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(name, tmp_path):
    file, right, wrong, tests = MISTAKES[name]
    shutil.copytree(PACKAGE, tmp_path / "selfnorm", ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / "selfnorm" / file
    source = target.read_text()
    assert right in source, f"the line to break is not in {file} any more: update this test"
    target.write_text(source.replace(right, wrong))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{TESTS.parent}"}
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
            *("-p", "no:xdist", "-o", "addopts=", f"--rootdir={tmp_path}", str(TESTS / tests)),
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout[-2000:]
    assert "1 failed" in result.stdout
