"""Packing for eventloop: rows of whole documents, so that a language model computes no padding."""

from eventloop_packing.batches import PackBatch, document_mask
from eventloop_packing.fit import OpenPacks, best_fit
from eventloop_packing.sources import PackedDataset, PackedStream

__all__ = [
    "OpenPacks",
    "PackBatch",
    "PackedDataset",
    "PackedStream",
    "best_fit",
    "document_mask",
]
