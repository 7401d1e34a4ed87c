"""Exports a trained model as ONNX, as a torch.export program, or with save_pretrained."""

from eventloop_export.formats import save_onnx, save_program
from eventloop_export.plugin import Export

__all__ = ["Export", "save_onnx", "save_program"]
