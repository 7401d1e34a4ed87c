"""Supervised fine-tuning for eventloop: a task that trains a language model on chats."""

from eventloop_sft.batches import Documents, batches_of
from eventloop_sft.from_command import task
from eventloop_sft.models import language_model, tokenizer_at
from eventloop_sft.passes import model_inputs, token_log_probs
from eventloop_sft.rows import read_rows
from eventloop_sft.samples import Samples
from eventloop_sft.tokens import Conversations, Example

__all__ = [
    "Conversations",
    "Documents",
    "Example",
    "Samples",
    "batches_of",
    "language_model",
    "model_inputs",
    "read_rows",
    "task",
    "token_log_probs",
    "tokenizer_at",
]
