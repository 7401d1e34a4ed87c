"""Every number and text that eventloop logs as one line of JSON."""

from eventloop_jsonl.lines import LineFile, lines, text_lines
from eventloop_jsonl.plugin import Jsonl

__all__ = ["Jsonl", "LineFile", "lines", "text_lines"]
