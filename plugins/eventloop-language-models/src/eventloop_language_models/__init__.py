"""What tasks of language models share: models by name, passes over documents, references, samples."""

from eventloop_language_models.models import language_model, tokenizer_at
from eventloop_language_models.passes import model_inputs, token_log_probs
from eventloop_language_models.references import AdaptersOff, Chosen, Companion, Reference
from eventloop_language_models.samples import ModelTask, Samples
from eventloop_language_models.stored import Stored

__all__ = [
    "AdaptersOff",
    "Chosen",
    "Companion",
    "ModelTask",
    "Reference",
    "Samples",
    "Stored",
    "language_model",
    "model_inputs",
    "token_log_probs",
    "tokenizer_at",
]
