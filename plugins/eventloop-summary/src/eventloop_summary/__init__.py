"""Parameters, shapes and FLOPs of a model, layer by layer."""

from eventloop_summary.layers import Layer, Passes, table
from eventloop_summary.plugin import Summary

__all__ = ["Layer", "Passes", "Summary", "table"]
