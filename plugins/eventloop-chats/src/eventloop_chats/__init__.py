"""Chats, texts and pairs of answers as batches of tokens, for packages that train language models."""

from eventloop_chats.batches import Documents, batches_of, num_tokens
from eventloop_chats.pairs import PairBatch, Pairs, pair_batches_of, pairs_of
from eventloop_chats.rows import read_rows
from eventloop_chats.tokens import Conversations, Example

__all__ = [
    "Conversations",
    "Documents",
    "Example",
    "PairBatch",
    "Pairs",
    "batches_of",
    "num_tokens",
    "pair_batches_of",
    "pairs_of",
    "read_rows",
]
