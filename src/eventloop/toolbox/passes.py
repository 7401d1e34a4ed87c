"""Passes over a model outside of the loop's own, and what their outputs and optimizers are like."""

from __future__ import annotations

from eventloop.rng import kept_generators
from eventloop.training.evaluation import evaluation_mode
from eventloop.training.metrics import predictions
from eventloop.training.optimizers import wants_closure

__all__ = ["evaluation_mode", "kept_generators", "predictions", "wants_closure"]
