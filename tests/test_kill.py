"""kill -9 at random moments of training, then resume: the same bits as a run never stopped."""

import random
import signal
import subprocess
import sys
import time

import torch

SCRIPT = """
import sys, torch
import selfnorm as sn
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(800, 2).exp()
model = sn.EBM(sn.MLP(2, (32, 32), saturate=10.0), base=sn.StudentT.fit_to(x))
print("started", flush=True)
sn.fit(model, x[:600], val_data=x[600:], seed=3, max_epochs=60, batch_size=64, n_samples=512,
       ema=0.99, lr=3e-3, progress=False, checkpoint=sys.argv[1] or None, checkpoint_every=7)
torch.save(model.state_dict(), sys.argv[2])
"""


def start(checkpoint, result):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(checkpoint), str(result)], stdout=subprocess.PIPE
    )


def test_five_kills_change_nothing(tmp_path):
    whole = tmp_path / "whole.pt"
    process = start("", whole)
    process.stdout.readline()
    began = time.perf_counter()
    assert process.wait() == 0
    duration = time.perf_counter() - began

    checkpoint, resumed = tmp_path / "run.ckpt", tmp_path / "resumed.pt"
    rng = random.Random(0)
    kills = 0
    while kills < 5:
        process = start(checkpoint, resumed)
        process.stdout.readline()
        time.sleep(rng.uniform(0.05, 0.35) * duration)
        if process.poll() is not None:
            break  # done before the fifth kill: what was resumed is compared all the same
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        kills += 1
    assert kills >= 2
    if not resumed.exists():
        process = start(checkpoint, resumed)
        assert process.wait() == 0
    one, other = torch.load(whole, weights_only=True), torch.load(resumed, weights_only=True)
    assert all(torch.equal(one[name], other[name]) for name in one)
