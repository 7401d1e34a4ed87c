"""Metrics of eval sets by name, for options such as `test/accuracy`."""

from __future__ import annotations

from eventloop.training.metrics import NamedMetric, find_metric, metric_name, named_metrics

__all__ = ["NamedMetric", "find_metric", "metric_name", "named_metrics"]
