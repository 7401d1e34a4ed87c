"""Tensor and sequence parallelism for eventloop: ranks share the matrices of each layer."""

from eventloop_tp.plans import Placed, resolved
from eventloop_tp.plugin import Tp

__all__ = ["Placed", "Tp", "resolved"]
