"""Muon for eventloop: hidden matrices step by Muon, everything else by AdamW."""

from eventloop_muon.matrices import Weights, split
from eventloop_muon.plugin import Muon

__all__ = ["Muon", "Weights", "split"]
