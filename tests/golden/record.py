"""Write the golden files anew: ``python -m tests.golden.record [values] [api] [folders]``."""

import inspect
import json
import sys
from pathlib import Path

import torch

import selfnorm as sn
from tests.golden import cases

HERE = Path(__file__).parent


def signature(value):
    """Names of the parameters, and the signature as text."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return [], ""
    return list(found.parameters), str(found)


def described(value):
    """Kind and signature of a public name; of a class also its public methods."""
    if inspect.ismodule(value):
        names = {n: described(getattr(value, n)) for n in sorted(value.__all__)}
        return {"kind": "module", "names": names}
    found = {"kind": "class" if inspect.isclass(value) else "function", "own": signature(value)}
    if inspect.isclass(value):
        own = [c for c in value.__mro__ if c.__module__.startswith("selfnorm")]
        public = sorted({n for c in own for n in vars(c) if not n.startswith("_")})
        methods = [n for n in public if callable(getattr(value, n))]
        found["methods"] = {n: signature(getattr(value, n)) for n in methods}
        found["attributes"] = [n for n in public if n not in methods]
    return found


def folder_values(name):
    """What a saved model answers."""
    load, values = cases.of_make(cases.SAVED[name])
    return cases.run(lambda: values(load(HERE / "folders" / name)))


def save(name):
    cases.run(lambda: cases.SAVED[name]().save(HERE / "folders" / name) or {})
    return folder_values(name)


def listed(names, ask):
    return {name: {k: v.tolist() for k, v in ask(name).items()} for name in names}


FILES = {
    "values": lambda: listed(cases.CASES, lambda name: cases.run(cases.CASES[name])),
    "api": lambda: {name: described(getattr(sn, name)) for name in sorted(sn.__all__)},
    "folders": lambda: listed(cases.SAVED, save),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for file in sys.argv[1:] or FILES:
        text = json.dumps(FILES[file](), indent=1, sort_keys=True)
        (HERE / f"{file}.json").write_text(text + "\n")
