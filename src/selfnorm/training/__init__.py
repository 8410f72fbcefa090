"""The engine, which knows no model: task, source, options, loop, checkpoints, history."""

from selfnorm.training.checkpoint import load_checkpoint
from selfnorm.training.history import History, Judgement
from selfnorm.training.loop import MAX_BAD_STREAK, MAX_ROLLBACKS, Data, Stepper, run, split_rows
from selfnorm.training.options import (
    Checkpoint,
    Clock,
    Keeper,
    Options,
    TrainingOptions,
    copy_rows,
    lr_factor,
    seconds,
    whole_number,
)
from selfnorm.training.task import (
    MemberSource,
    MembersTask,
    ParameterGroup,
    Source,
    State,
    Task,
    TaskOptions,
    TensorSource,
    fingerprint,
)

__all__ = [
    "MAX_BAD_STREAK",
    "MAX_ROLLBACKS",
    "Checkpoint",
    "Clock",
    "Data",
    "History",
    "Judgement",
    "Keeper",
    "MemberSource",
    "MembersTask",
    "Options",
    "ParameterGroup",
    "Source",
    "State",
    "Stepper",
    "Task",
    "TaskOptions",
    "TensorSource",
    "TrainingOptions",
    "copy_rows",
    "fingerprint",
    "load_checkpoint",
    "lr_factor",
    "run",
    "seconds",
    "split_rows",
    "whole_number",
]
