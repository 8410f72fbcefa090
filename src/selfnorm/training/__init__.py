"""The engine, which knows no model: task, options, loop, step, schedules, checkpoints, history."""

from selfnorm.training.checkpoint import fingerprint
from selfnorm.training.gradients import accumulate, with_gradients
from selfnorm.training.history import History
from selfnorm.training.loop import run
from selfnorm.training.side_stream import SideStream
from selfnorm.training.step import Stepper, make_optimizer
from selfnorm.training.task import LoopOptions, Task, refuse_unknown, whole_number

__all__ = [
    "History",
    "LoopOptions",
    "SideStream",
    "Stepper",
    "Task",
    "accumulate",
    "fingerprint",
    "make_optimizer",
    "refuse_unknown",
    "run",
    "whole_number",
    "with_gradients",
]
