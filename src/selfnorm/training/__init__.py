"""The engine, which knows no model: task, options, loop, step, checkpoints, history."""

from selfnorm.training.checkpoint import fingerprint, load_checkpoint
from selfnorm.training.history import History, Judgement
from selfnorm.training.loop import (
    MAX_BAD_STREAK,
    MAX_ROLLBACKS,
    Checkpoint,
    Clock,
    Options,
    Task,
    TrainingOptions,
    lr_factor,
    run,
    seconds,
    split_rows,
    whole_number,
)
from selfnorm.training.step import Stepper

__all__ = [
    "MAX_BAD_STREAK",
    "MAX_ROLLBACKS",
    "Checkpoint",
    "Clock",
    "History",
    "Judgement",
    "Options",
    "Stepper",
    "Task",
    "TrainingOptions",
    "fingerprint",
    "load_checkpoint",
    "lr_factor",
    "run",
    "seconds",
    "split_rows",
    "whole_number",
]
