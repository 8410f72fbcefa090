"""The engine, which knows no model: task, options, loop, step, schedules, checkpoints, history."""
