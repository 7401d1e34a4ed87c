"""Tasks: model, data, loss, optimizer and metrics of a run."""

from eventloop.task.task import Task

__all__ = ["Task"]
