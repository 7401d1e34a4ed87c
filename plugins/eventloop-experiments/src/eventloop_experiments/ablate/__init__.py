"""The command `eventloop ablate`."""

from eventloop_experiments.ablate.ablate_command import run

__all__ = ["run"]
