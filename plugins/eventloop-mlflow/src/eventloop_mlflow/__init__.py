"""Runs of eventloop in MLflow: parameters, metrics, manifest and checkpoints."""

from eventloop_mlflow.names import accepted_name, parameters
from eventloop_mlflow.plugin import Mlflow

__all__ = ["Mlflow", "accepted_name", "parameters"]
