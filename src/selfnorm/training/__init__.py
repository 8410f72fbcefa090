"""The engine, which knows no model: task, source and options, loop, checkpoints, history."""

from selfnorm.training.checkpoint import load_checkpoint
from selfnorm.training.history import History, Judgement
from selfnorm.training.loop import MAX_BAD_STREAK, MAX_ROLLBACKS, Data, Stepper, run, split_rows
from selfnorm.training.stored import StoredRows
from selfnorm.training.task import (
    Checkpoint,
    Clock,
    Keeper,
    MemberSource,
    MembersTask,
    Options,
    ParameterGroup,
    Source,
    State,
    Task,
    TaskOptions,
    TensorSource,
    TrainingOptions,
    copy_rows,
    fingerprint,
    lr_factor,
    seconds,
    whole_number,
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
    "StoredRows",
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
