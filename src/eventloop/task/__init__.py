"""Tasks: what is trained."""

from eventloop.task.task import Task

__all__ = ["Task"]
