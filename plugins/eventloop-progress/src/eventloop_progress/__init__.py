"""A progress bar and tables of results for eventloop."""

from eventloop_progress.plugin import Progress

__all__ = ["Progress"]
