import os
import subprocess
import sys
import threading
import time
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import selfnorm as sn
from selfnorm import EnergyDensity, saving
from selfnorm.errors import ModelFileError, SelfnormError, SelfnormWarning
from selfnorm.saving import CARD_FILE, MODEL_FILE
from selfnorm.vae import EnergyPrior
from tests.folders import edit, edit_model, put_document, with_tensor


def rows(n=150, d=2, seed=0):
    X = np.random.default_rng(seed).gumbel(size=(n, d))
    X[:, -1] += 0.5 * X[:, 0]
    return X


def test_a_folder_holds_two_files_the_notes_and_the_names_of_columns(tmp_path):
    table = pd.DataFrame(rows(60), columns=["a", "b"])
    density = EnergyDensity(max_steps=5, random_state=0).fit(table)
    sn.save(density, tmp_path, notes={"target": "y"})
    assert {p.name for p in tmp_path.iterdir()} == {CARD_FILE, MODEL_FILE}
    assert str(density.judgement_) in (tmp_path / CARD_FILE).read_text()
    assert saving.read_folder(tmp_path).notes == {"target": "y"}
    assert list(EnergyDensity.load(tmp_path).feature_names_in_) == ["a", "b"]


def test_another_process_with_other_threads_scores_the_same(tmp_path):
    X, expected = rows(d=3, seed=3), []
    for name, d in (("joint", 2), ("autoregressive", 3)):
        density = EnergyDensity(method=name, max_steps=5, random_state=0).fit(rows(60, d))
        density.save(tmp_path / name)
        expected.append(density.score_samples(X[:, :d]))
    np.save(tmp_path / "X.npy", X)
    code = (
        "import sys, numpy as np, torch; torch.set_num_threads(2)\n"
        "torch.set_default_dtype(torch.float64)\n"
        "from selfnorm import EnergyDensity\n"
        "models = [EnergyDensity.load(name) for name in ('joint', 'autoregressive')]\n"
        "X = np.load('X.npy')\n"
        "np.save('s.npy', [m.score_samples(X[:, : m.n_features_in_]) for m in models])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert np.allclose(np.load(tmp_path / "s.npy"), expected, rtol=1e-9)


@pytest.fixture
def folder(tmp_path):
    EnergyDensity(method="joint", max_steps=5, random_state=0).fit(rows(60)).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema_version=99), "newer selfnorm"),
        (lambda d: d["blueprint"].update({"class": "Sneaky"}), "holds a Sneaky"),
        (
            lambda d: d["blueprint"]["fitted"]["distribution_"]["model"].update({"class": "Popen"}),
            "unknown class 'Popen'",
        ),
        (
            lambda d: d["blueprint"]["fitted"]["distribution_"]["model"]["members"][0][
                "energy"
            ].update({"dim": 3}),
            "do not fit together",
        ),
        (lambda d: d["blueprint"]["fitted"].pop("distribution_"), "do not fit together"),
    ],
)
def test_clear_errors(folder, change, words):
    edit(folder, change)
    with pytest.raises(ModelFileError, match=words):
        EnergyDensity.load(folder)
    if "Sneaky" in words:
        with pytest.raises(ModelFileError, match="unknown class 'Sneaky'"):
            saving.load(folder)


@pytest.mark.parametrize(
    ("size", "model"),
    [
        ("blocks", lambda: sn.AutoregressiveEBM(2, hidden=8, components=2, context=2)),
        ("drop", lambda: sn.AutoregressiveEBM(2, hidden=8, components=2, context=2)),
        ("n_components", lambda: sn.GaussianMixture.fit_to(torch.randn(50, 2), n_components=2)),
        ("dim", lambda: sn.Gaussian(torch.zeros(2), scale=1.0)),
    ],
)
@pytest.mark.parametrize("value", [10**4, 10**6, 10**30])
def test_a_size_that_the_weights_do_not_have_is_refused_at_once(tmp_path, size, model, value):
    sn.save(model(), tmp_path)
    edit_model(tmp_path, lambda blueprint: blueprint.update({size: value}))
    before = time.process_time()
    with pytest.raises(ModelFileError, match="do not fit together"):
        sn.load(tmp_path)
    assert time.process_time() - before < 3


@pytest.mark.parametrize("size", ["n_knots", "components", "context", "hidden", "n_codes"])
def test_a_size_of_a_chain_that_its_weights_do_not_have_takes_no_memory(size, tmp_path):
    table = {"kind": ["a", "b"] * 30, "size": rows(60)[:, 0]}
    EnergyDensity(max_steps=1, random_state=0).fit(table).save(tmp_path)

    def change(blueprint):
        model = blueprint["fitted"]["distribution_"]["model"]
        (model["parts"][0] if size == "n_codes" else model)[size] = 10**9

    edit_model(tmp_path, change)
    with pytest.raises(ModelFileError, match="much larger model"):
        sn.load(tmp_path)


def test_what_a_call_of_torch_would_make_is_known_before_it_is_made():
    with saving._WithinItsWeights({}):
        for make in (
            lambda: torch.arange(10**8),
            lambda: torch.eye(10**4),
            lambda: torch.eye(10**6),
            lambda: torch.ones(2).repeat(10**8),
            lambda: torch.ones(10**4, 1) * torch.ones(10**4),
            lambda: torch.randperm(10**8),
        ):
            with pytest.raises(ValueError, match="much larger model"):
                make()


@pytest.mark.parametrize("value", [[{"class": "ReLU"}] * 2000, [[1] * 10] * 20_000])
def test_a_config_with_more_parts_than_weights_is_refused(value, tmp_path):
    sn.save(sn.EBM(nn.Sequential(nn.Linear(2, 1))), tmp_path)
    edit_model(tmp_path, lambda blueprint: blueprint["energy"].update(parts=value))
    with pytest.raises(ModelFileError, match="much larger model"):
        sn.load(tmp_path)


@pytest.mark.parametrize("path", [5, None, "a" * 5000, "a\0b", b"nowhere"])
def test_what_names_no_folder_is_refused(path):
    with pytest.raises(ModelFileError, match="model folder"):
        sn.load(path)


def test_weights_that_are_not_finite_are_refused_but_in_parts_of_ones_own(tmp_path):
    model = sn.EBM(energy(), base=sn.Gaussian(torch.zeros(2), scale=1.0))
    for value in (torch.nan, torch.inf):
        with torch.no_grad():
            model.log_norm.fill_(value)
        sn.save(model, tmp_path / str(value))
        with pytest.raises(ModelFileError, match="'log_norm' hold NaN or infinity"):
            sn.load(tmp_path / str(value))
    EnergyDensity(max_steps=1, random_state=0).fit(rows()).save(tmp_path / "table")
    limits = "distribution_.model.columns.high"
    with_tensor(tmp_path / "table", limits, lambda high: torch.full_like(high, torch.nan))
    with pytest.raises(ModelFileError, match=f"{limits!r} hold NaN"):
        sn.load(tmp_path / "table")
    own = Bowl()
    own.register_buffer("mask", torch.tensor(-torch.inf))
    sn.save(sn.EBM(own), tmp_path / "own")
    assert sn.load(tmp_path / "own", energy=own).energy.mask == -torch.inf


@pytest.mark.parametrize(
    ("frame", "form"),
    [
        ("pandas", {"dtype": "evil"}),
        ("pandas", {"dtype": "timedelta64[ns]"}),
        ("pandas", {"dtype": "object", "arrow": "ZXZpbA=="}),
        ("arrow", {"arrow": "ZXZpbA=="}),
        ("array", {"dtype": "S2000000000"}),
    ],
)
def test_a_form_of_a_column_that_cannot_be_written_is_refused_by_load(frame, form, tmp_path):
    EnergyDensity(max_steps=1, random_state=0).fit({"kind": ["a", "b"] * 30}).save(tmp_path)

    def change(blueprint):
        schema = blueprint["fitted"]["schema_"]["values"]
        schema["frame"] = frame
        schema["columns"][0]["form"] = form

    edit_model(tmp_path, change)
    with pytest.raises(ModelFileError, match="do not fit together"):
        sn.load(tmp_path)


def test_names_of_columns_are_plain_text_on_the_card(tmp_path):
    name = "<script>alert(1)</script>[a](b)|"
    EnergyDensity(max_steps=1, random_state=0).fit({name: ["a", "b"] * 30}).save(tmp_path)
    card = (tmp_path / CARD_FILE).read_text()
    assert "&lt;script&gt;" in card
    assert "<script>" not in card
    assert r"\[a\](b)\|" in card


def test_damaged_configs_and_deep_nesting(folder):
    start = f'{{"sha256": "{saving._NO_HASH}"'
    ends = ("", "}", ', "schema_version": true}', ', "schema_version": 1, "a": ' + "[" * 100_000)
    for text in (
        "[" * 100_000,
        "{}",
        "null",
        "{" * 50_000,
        "1e999",
        *(start + end for end in ends),
    ):
        put_document(folder, text)
        with pytest.raises(ModelFileError):
            saving.load(folder)
    with pytest.raises(ModelFileError, match="not a model folder"):
        saving.load(folder / "nowhere")


def test_a_pickle_in_place_of_the_weights_is_never_executed(folder):
    marker = folder / "executed"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    torch.save(Bomb(), folder / MODEL_FILE)
    with pytest.raises(ModelFileError, match="its size or hash"):
        EnergyDensity.load(folder)
    assert not marker.exists()


def energy(dim=2, **options):
    return sn.MLP(dim, hidden=(8, 8), **options)


class Bowl(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x.square().sum(-1) / self.width


def test_parts_of_ones_own_are_given_to_load(tmp_path):
    model = sn.EBM(Bowl(), base=torch.distributions.Normal(torch.zeros(2), 1.0))
    with torch.no_grad():
        model.energy.width.fill_(3.0)
    sn.save(model, tmp_path)
    with pytest.raises(ModelFileError, match=r"energy of your own making \(Bowl\): pass energy="):
        sn.load(tmp_path)
    with pytest.raises(ModelFileError, match="pass base="):
        sn.load(tmp_path, energy=Bowl())
    own, base = Bowl(), torch.distributions.Normal(torch.zeros(2), 1.0)
    with pytest.warns(SelfnormWarning, match="was a Bowl when the model was saved"):
        sn.load(tmp_path, energy=type("Other", (type(own),), {})(), base=base)
    twin = sn.load(tmp_path, energy=own, base=base)
    x = torch.randn(5, 2)
    assert torch.equal(twin.log_prob(x), model.log_prob(x))
    assert own.width.item() == 1.0  # a copy was filled
    with pytest.raises(ModelFileError, match="no part 'decoder'"):
        sn.load(tmp_path, energy=own, base=base, decoder=own)
    with pytest.raises(ModelFileError, match="energy, base do not fit together"):
        sn.load(tmp_path, energy=energy(), base=base)


def test_a_part_that_computes_something_else_than_the_saved_one_is_told(tmp_path):
    def base(scale):
        return torch.distributions.Normal(torch.zeros(2), scale)

    sn.save(sn.EBM(energy(), base=base(1.0)), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SelfnormWarning)
        sn.load(tmp_path, base=base(1.0))
    with pytest.warns(SelfnormWarning, match="not the one that was saved"):
        sn.load(tmp_path, base=base(2.0))


def test_a_prior_with_an_energy_of_ones_own_is_loaded(tmp_path):
    prior, x = EnergyPrior(Bowl(), dim=2), torch.randn(5, 2)
    sn.save(prior, tmp_path)
    assert torch.equal(sn.load(tmp_path, energy=Bowl()).log_prob(x), prior.log_prob(x))


def test_normed_weights_are_ones_own(tmp_path):
    nets = [torch.nn.utils.parametrizations.spectral_norm(nn.Linear(2, 1)) for _ in "ab"]
    model = sn.Ensemble([sn.EBM(nets[0])]).eval()
    sn.save(model, tmp_path)
    with pytest.raises(ModelFileError, match="pass energy="):
        sn.load(tmp_path)
    x = torch.randn(5, 2)
    assert torch.equal(sn.load(tmp_path, energy=nets[1]).log_prob(x), model.log_prob(x))


def test_a_module_of_ones_own_is_not_saved(tmp_path):
    class EBM(sn.EBM):
        pass

    for model in (
        Bowl(),
        EBM(energy()),
        nn.Sequential(Bowl()),
        nn.Sequential(OrderedDict(a=nn.Linear(2, 1))),
        np.array(["a model"]),
    ):
        with pytest.raises(ModelFileError, match="state_dict"):
            sn.save(model, tmp_path)
    assert saving.take_apart(None) is None
    assert issubclass(ModelFileError, SelfnormError)


def test_saving_where_nothing_can_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelFileError, match="cannot write"):
        sn.save(nn.Linear(2, 1), blocked)


def put(path, width, value):
    model = nn.Linear(width, 1)
    nn.init.constant_(model.weight, value)
    sn.save(model, path, notes={"value": value})


class Killed(BaseException):
    """Stands for a process that ends between two of its calls to the system."""


def _stop_before(monkeypatch, call):
    """End the process, as it were, before its ``call``-th write, flush, rename or removal."""
    left = [call]

    def counted(real):
        def wrapped(*args, **kwargs):
            if left[0] <= 0:
                raise Killed
            left[0] -= 1
            return real(*args, **kwargs)

        return wrapped

    for owner, name in ((Path, "open"), (Path, "replace"), (Path, "unlink"), (os, "fsync")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return left


def test_a_save_that_ends_anywhere_leaves_the_old_model_or_the_new_one(tmp_path, monkeypatch):
    seen = []
    for call in range(100):
        folder = tmp_path / str(call)
        put(folder, 2, 1.0)
        with monkeypatch.context() as patched:
            left = _stop_before(patched, call)
            with suppress(Killed):
                put(folder, 3, 2.0)
        found = sn.load(folder)
        expected = saving.read_folder(folder).notes["value"]
        assert torch.equal(found.weight, torch.full((1, {1.0: 2, 2.0: 3}[expected]), expected))
        seen.append(expected)
        put(folder, 4, 3.0)  # and it can be replaced again, with nothing left over
        assert sn.load(folder).in_features == 4
        assert {file.name for file in folder.iterdir()} == {CARD_FILE, MODEL_FILE}
        if left[0] > 0:
            break
    assert seen[0] == 1.0
    assert seen[-1] == 2.0
    assert seen == sorted(seen)
    assert 6 < len(seen) < 99


def test_a_save_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    put(tmp_path / "old", 2, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for name in ("old", "new"):
            with pytest.raises(ModelFileError, match="No space left"):
                put(tmp_path / name, 3, 2.0)
    assert sn.load(tmp_path / "old").in_features == 2
    assert sorted(f.name for f in (tmp_path / "old").iterdir()) == [MODEL_FILE, CARD_FILE]
    assert not (tmp_path / "new").exists()


def test_a_model_is_read_while_two_others_write_it(tmp_path):
    put(tmp_path, 2, 0.0)
    stop = threading.Event()

    def write(first):
        for k in range(30):
            put(tmp_path, 2, float(first + k))
        stop.set()

    with ThreadPoolExecutor(2) as pool:
        writing = [pool.submit(write, first) for first in (100, 200)]
        while not stop.is_set():
            folder = saving.read_folder(tmp_path)
            assert float(folder.tensors["weight"][0, 0]) == folder.notes["value"]
        for each in writing:
            each.result()
    assert sn.load(tmp_path).in_features == 2
    assert {file.name for file in tmp_path.iterdir()} == {CARD_FILE, MODEL_FILE}
