"""Two gloo processes train what one process trains; checkpoints outlive the number of ranks."""

import json
import os
import re
import socket
import subprocess
import sys
import warnings
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch

import selfnorm as sn
from selfnorm.density import Ranks
from selfnorm.density.model import DensityTask
from selfnorm.errors import DataError
from selfnorm.training.checkpoint import load_checkpoint
from tests.fitting import fit, fit_distributed, weights

lightning_fabric = pytest.importorskip("lightning_fabric")
from tests.density.distributed_worker import fit_table, setting  # noqa: E402

WORKER = Path(__file__).with_name("distributed_worker.py")
OPTIONS = {
    "batch_size": 64,
    "n_samples": 256,
    "max_steps": 100,
    "max_epochs": 100,
    "lr": 3e-3,
    "seed": 5,
    "ema": 0,
    "patience": 0,
}


def launch(runs, out):
    """Exit codes and outputs of two ranks that take these runs."""
    job = out / "job.json"
    job.write_text(json.dumps({"runs": runs, "out": str(out)}))
    for _ in range(5):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        group |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "NODE_RANK": 0, "GROUP_RANK": 0}
        started = []
        for rank in range(2):
            place = group | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            command = [sys.executable, str(WORKER), str(job)]
            started.append(subprocess.Popen(command, env=environment, **pipes))
        try:
            # Generous: it is there to end a group that hangs, not to measure a loaded machine.
            outputs = [process.communicate(timeout=900)[0].decode() for process in started]
        finally:
            for process in started:
                process.kill()
        # Between the probe of a free port and its use another process may have taken it.
        if not any("EADDRINUSE" in text or "already in use" in text for text in outputs):
            break
    return [process.returncode for process in started], outputs


def result(out, name, rank=0):
    return torch.load(out / f"{name}.{rank}.pt", weights_only=True)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """All runs of two ranks, in one pair of processes."""
    out = tmp_path_factory.mktemp("ranks")
    same = {**OPTIONS, "samples": "same"}
    half = {**same, "max_steps": None, "max_epochs": 6}
    half["checkpoint"] = {"path": str(out / "run.ckpt"), "every": 20}
    codes, outputs = launch(
        [
            {"name": "same", "options": same},
            {"name": "accumulated", "options": {**same, "n_accumulate": 4}},
            {"name": "own", "options": {**OPTIONS, "max_steps": 40}},
            {"name": "killed", "options": half, "die_at": 33},
            {"name": "interrupted", "options": OPTIONS, "interrupted_rank": 1},
            {"name": "after", "options": {**OPTIONS, "max_steps": 5}},
            {"name": "table", "table": {"max_steps": 40}},
            {"name": "timed", "table": {"max_time": 2}},
        ],
        out,
    )
    assert codes == [0, 0], "\n".join(outputs)
    return out


def single(**changes):
    x, model = setting()
    history = fit(model, x, progress=False, **{**OPTIONS, **changes})
    return weights(model), history


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", ["same", "accumulated"])
def test_two_ranks_end_where_one_process_ends(two_ranks, name):
    expected, history = single()
    found = result(two_ranks, name)
    assert relative(found["parameters"], expected) < 1e-5
    assert torch.equal(found["parameters"], result(two_ranks, name, rank=1)["parameters"])
    theirs, ours = found["history"]["records"], history.records
    assert [r["step"] for r in theirs] == [r["step"] for r in ours]
    for a, b in zip(theirs, ours, strict=True):
        for key in ("loss", "lower", "grad_norm"):
            assert a[key] == pytest.approx(b[key], abs=1e-4), key
        # The logarithm of a mean is no mean of logarithms: close, above, not the same.
        assert b["upper"] < a["upper"] < b["upper"] + 0.1


def test_two_ranks_fit_a_table_as_one_does_in_two_pieces(two_ranks):
    ours, theirs = (result(two_ranks, "table", rank) for rank in (0, 1))
    alone = lightning_fabric.Fabric(accelerator="cpu", devices=1)
    expected = fit_table(Ranks(alone, 2, "per_piece"), max_steps=40)
    assert len(ours["losses"]) >= 40
    assert ours["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert torch.equal(ours["scores"], theirs["scores"])
    assert torch.allclose(ours["scores"], expected["scores"], atol=1e-3)


def test_ranks_end_together_when_the_time_is_over(two_ranks):
    ours, theirs = (result(two_ranks, "timed", rank) for rank in (0, 1))
    assert len(ours["losses"]) == len(theirs["losses"]) > 0
    assert torch.equal(ours["scores"], theirs["scores"])


def test_own_streams_differ_between_ranks_and_models_agree(two_ranks):
    ours, theirs = (result(two_ranks, "own", rank) for rank in (0, 1))
    assert torch.equal(ours["parameters"], theirs["parameters"])
    expected, _ = single(max_steps=40)
    # Another stream of samples: close to the single run, but not the same numbers.
    distance = relative(ours["parameters"], expected)
    assert 1e-4 < distance < 0.2


def test_ctrl_c_on_one_rank_stops_both_at_the_same_step(two_ranks):
    ours, theirs = (result(two_ranks, "interrupted", rank) for rank in (0, 1))
    for rank in (ours, theirs):
        assert rank["history"]["stopped"] == "interrupted"
        assert rank["history"]["n_steps"] == 19  # the 20th was not taken
    assert torch.equal(ours["parameters"], theirs["parameters"])
    # the group is whole: the next run of the same processes trains as ever
    after = [result(two_ranks, "after", rank)["parameters"] for rank in (0, 1)]
    assert torch.equal(*after)


def test_a_dead_rank_is_told_with_the_checkpoint_to_go_on_from(tmp_path):
    path = tmp_path / "run.ckpt"
    options = {**OPTIONS, "max_epochs": 6, "checkpoint": {"path": str(path), "every": 5}}
    lost = {"name": "lost", "options": options, "killed_rank": 1}
    codes, outputs = launch([lost], tmp_path)
    assert codes == [1, -9], outputs
    assert "a rank has ended or does not answer" in outputs[0]
    assert f"it goes on from {path}" in outputs[0]
    assert load_checkpoint(path)["step"] == 15


def test_a_run_that_drew_its_seed_is_resumed_without_naming_it(tmp_path):
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
    options = {**OPTIONS, "seed": None, "max_steps": 30, "progress": False}

    def train(path, stop=10**9, seed=7):
        x, model = setting()
        torch.manual_seed(seed)  # what the run draws its seed from
        plain, left = model.energy.forward, [stop]

        def forward(rows):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return plain(rows)

        model.energy.forward = forward
        options["checkpoint"] = sn.Checkpoint(path, every=10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sn.SelfnormWarning)
            fit_distributed(model, x, fabric=fabric, **options)
        return weights(model)

    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", stop=20)  # the closing step is interrupted, too
    assert load_checkpoint(tmp_path / "run")["step"] == 10
    assert torch.equal(train(tmp_path / "run", seed=8), whole)


def test_a_run_of_two_ranks_is_resumed_on_one(two_ranks):
    assert load_checkpoint(two_ranks / "run.ckpt")["step"] == 20
    x, model = setting()
    changes = {"max_steps": None, "max_epochs": 6}
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
    history = fit_distributed(
        model,
        x,
        fabric=fabric,
        samples="same",
        progress=False,
        **{**OPTIONS, **changes},
        checkpoint=two_ranks / "run.ckpt",
    )
    assert history.n_steps == 48
    resumed = weights(model)
    expected, _ = single(**changes)
    assert relative(resumed, expected) < 1e-5


def test_a_task_that_stops_a_run_stops_it_on_ranks_too():
    class Enough(DensityTask):
        def guard(self, stepper, *, looking):
            return "enough" if looking else None

    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
    x, model = setting()
    task = Enough(model, model.base, n_samples=64)
    history = fit_distributed(model, x, fabric=fabric, task=task, progress=False, max_steps=9)
    assert history.stopped == "enough"


def test_what_would_not_be_exact_is_refused():
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
    x, model = setting()
    for name in ("importance_ml", "ranking_nce"):
        with pytest.raises(ValueError, match="log Z_hat inside"):
            fit_distributed(model, x, fabric=fabric, objective=name, n_accumulate=2)
    with pytest.raises(DataError, match="multiples of 1 ranks x 3"):
        fit_distributed(model, x, fabric=fabric, n_accumulate=3)
    with pytest.raises(ValueError, match="samples must be"):
        fit_distributed(model, x, fabric=fabric, samples="typo")
    with pytest.raises(TypeError, match="cannot train"):
        fit_distributed(torch.nn.Linear(2, 1), x, fabric=fabric)


def test_the_example_imports_what_the_extra_installs():
    needed = requires("selfnorm") or []
    extra = [each for each in needed if re.search("extra == .distributed", each)]
    installed = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in extra}
    imported = set(re.findall(r">>> (?:from|import) (\w+)", sn.fit_distributed.__doc__))
    assert imported - {"selfnorm"} == installed
