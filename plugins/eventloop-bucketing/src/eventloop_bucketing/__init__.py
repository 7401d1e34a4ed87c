"""Bucketing for eventloop: batches of samples of similar lengths, so that little is padded."""

from eventloop_bucketing.samplers import LengthBatchSampler, TokenBatchSampler

__all__ = ["LengthBatchSampler", "TokenBatchSampler"]
