"""Arrows point one way: a lower room never imports a higher one."""

import ast
from pathlib import Path

import selfnorm

ROOT = Path(selfnorm.__file__).parent

# Rooms from the ground up; a module may import from its own floor and below.
FLOORS = [
    {"errors", "randomness"},
    {"functional", "schedules", "task", "history", "checkpoint", "data"},
    {"energies", "proposals", "adapters", "defensive", "sampling"},
    {"models"},
    {"objectives", "stepper", "loop", "evaluation", "training"},
    {"recipes"},
    {"estimators", "regressor", "serialization"},
    {"experiments"},
    {"cli", "cli_tables"},
]
FLOOR_OF = {name: level for level, names in enumerate(FLOORS) for name in names}


def imported_modules(path):
    """Modules of the package imported when the file is loaded (not inside functions)."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("selfnorm"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("selfnorm.")}
    return found


def room_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_listed_room_exists():
    rooms = {room_of(p) for p in ROOT.rglob("*.py")}
    assert set(FLOOR_OF) <= rooms, set(FLOOR_OF) - rooms


def test_lower_rooms_do_not_import_higher_ones():
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = room_of(path)
        if room not in FLOOR_OF:
            continue
        wrong += [
            f"{room} imports {other}"
            for other in imported_modules(path)
            if FLOOR_OF.get(other, -1) > FLOOR_OF[room]
        ]
    assert not wrong, wrong


def test_public_names_are_there_and_documented():
    for name in selfnorm.__all__:
        assert getattr(selfnorm, name).__doc__, name
