"""Arrows point one way: a lower room never imports a higher one."""

import ast
from pathlib import Path

import selfnorm

ROOT = Path(selfnorm.__file__).parent

# Rooms from the ground up; a module may import from its own floor and below.
FLOORS = [
    {"errors", "randomness", "torch_defaults", "gradients", "side_stream", "modes"},
    {
        "compiled_loss",
        "counters",
        "functional",
        "fused_adam",
        "wide_adam",
        "mlp_gradient",
        "stacked_gradient",
        "schedules",
        "snl_loss",
        "row_snl",
        "step_graph",
        "task",
        "history",
        "checkpoint",
        "weight_stream",
        "columns",
        "rows",
    },
    {
        "data",
        "diagnostics",
        "calibration",
        "target_steps",
        "scaling",
        "mixtures1d",
        "resmade",
        "stacked",
    }
    | {"bins"}
    | {"augmentation", "label_space", "resnet"},
    {"energies", "proposals", "adapters", "defensive", "sampling", "factors", "mdn"},
    {"models", "mixture", "stacked_energies", "stacked_proposals", "members", "member_adam"},
    {"objectives", "mcmc_objectives", "score_matching", "memory", "stepper", "loop"}
    | {"overlapped"},
    {"evaluation", "training", "flows", "flow_training", "many", "many_task", "distributed"}
    | {"grid_quadrature"},
    {"autoregressive", "autoregressive_evaluation", "autoregressive_training"},
    {"conditional", "conditional_training", "ensemble", "image_model", "image_training"},
    {"vae", "vae_energy_prior", "vae_evaluation", "vae_likelihoods", "vae_log_norm", "vae_monitor"}
    | {"vae_networks", "vae_posterior", "vae_priors", "vae_training", "vae_chain", "vae_fused"}
    | {"vae_dreams"},
    {"recipes", "blueprints", "predictive", "predictive_model", "predictive_methods"}
    | {"image_predictive", "image_predictions"},
    {"table_files", "tables", "serialization", "density_methods", "estimators", "regressor"}
    | {"vae_files", "regressor_files"}
    | {"image_regression"},
    {"plotting", "plotting_tables", "plotting_regression", "plotting_images"} | {"plotting_digits"},
    {"experiments"},
    {"cli", "cli_tables", "__main__"},
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


def test_every_room_has_a_floor():
    rooms = {room_of(p) for p in ROOT.rglob("*.py")} - {"__init__"}
    assert set(FLOOR_OF) == rooms, set(FLOOR_OF) ^ rooms


def test_lower_rooms_do_not_import_higher_ones():
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = room_of(path)
        if room == "__init__":
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
