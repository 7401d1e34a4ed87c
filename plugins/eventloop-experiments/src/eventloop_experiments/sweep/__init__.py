"""The command `eventloop sweep`."""

from eventloop_experiments.sweep.sweep_command import run

__all__ = ["run"]
