"""kill -9 at random moments of training, then resume: the same bits as a run never stopped."""

import itertools
import random
import signal
import subprocess
import sys

import torch

from selfnorm.training.checkpoint import load_checkpoint

# A process strikes itself down: after a number of passes and a random instant more, or between a
# checkpoint written and its taking the old one's place. Counted in passes, not in seconds, so that
# every kill falls within the run however fast the machine is.
SCRIPT = """
import os, signal, sys, threading, torch
import selfnorm as sn
from selfnorm.training import checkpoint

path, result, kind, count, delay = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(800, 2).exp()
model = sn.EBM(sn.MLP(2, (32, 32), saturate=10.0), base=sn.StudentT.fit_to(x))
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
left = int(count)

def count_down(*_):
    global left
    left -= 1
    if left == 0 and kind == "pass":
        threading.Timer(float(delay), die).start()
    elif left == 0:
        die()

if kind == "pass":
    model.energy.register_forward_hook(count_down)
elif kind == "write":
    replace = os.replace
    checkpoint.os.replace = lambda *paths: (count_down(), replace(*paths))
sn.fit(model, x[:600], val_data=x[600:], seed=3, max_epochs=30, batch_size=64, n_samples=512,
       lr=3e-3, progress=False,
       options=sn.TrainingOptions(ema=0.99, checkpoint=path and sn.Checkpoint(path, every=7)))
torch.save(model.state_dict(), result)
"""


def run(checkpoint, result, kind="none", count=0, delay=0.0):
    arguments = [str(value) for value in (checkpoint, result, kind, count, delay)]
    return subprocess.run([sys.executable, "-c", SCRIPT, *arguments], check=False).returncode


def test_kills_change_nothing(tmp_path):
    whole = tmp_path / "whole.pt"
    assert run("", whole) == 0

    checkpoint, resumed = tmp_path / "run.ckpt", tmp_path / "resumed.pt"
    rng = random.Random(0)
    reached = [0]
    for kind in ("pass", "write"):
        # at most 80 of the 270 steps before each kill, at least one checkpoint
        count = rng.randint(40, 80) if kind == "pass" else 3
        code = run(checkpoint, resumed, kind, count, rng.uniform(0, 0.02))
        assert code == -signal.SIGKILL
        assert not resumed.exists()
        reached.append(load_checkpoint(checkpoint)["step"])
    assert all(a < b for a, b in itertools.pairwise(reached)), reached
    assert run(checkpoint, resumed) == 0
    one, other = torch.load(whole, weights_only=True), torch.load(resumed, weights_only=True)
    assert all(torch.equal(one[name], other[name]) for name in one)
