"""Write the golden files anew: ``python -m tests.golden.record [values] [folders]``."""

import json
import sys
from pathlib import Path

import torch

from tests.golden import cases

HERE = Path(__file__).parent


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
    "folders": lambda: listed(cases.SAVED, save),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for file in sys.argv[1:] or FILES:
        text = json.dumps(FILES[file](), indent=1, sort_keys=True)
        (HERE / f"{file}.json").write_text(text + "\n")
