"""Sequence length warm-up for eventloop: a run begins with short sequences."""

from eventloop_seq_length_warmup.plugin import SeqLengthWarmup
from eventloop_seq_length_warmup.sequences import full_length, length_at, reshape, truncate

__all__ = ["SeqLengthWarmup", "full_length", "length_at", "reshape", "truncate"]
