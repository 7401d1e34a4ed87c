"""Every number that eventloop logs as one line of JSON."""

from eventloop_jsonl.lines import LineFile, lines
from eventloop_jsonl.plugin import Jsonl

__all__ = ["Jsonl", "LineFile", "lines"]
