"""Every number that eventloop logs, in a wide CSV file."""

from eventloop_csv.plugin import Csv
from eventloop_csv.wide import Position, WideFile

__all__ = ["Csv", "Position", "WideFile"]
