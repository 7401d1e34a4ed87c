"""Every number that eventloop logs in TensorBoard, with histograms and hyperparameters."""

from eventloop_tensorboard.files import EventFile
from eventloop_tensorboard.histograms import histogram, measure
from eventloop_tensorboard.plugin import Tensorboard

__all__ = ["EventFile", "Tensorboard", "histogram", "measure"]
