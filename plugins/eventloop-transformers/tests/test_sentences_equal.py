"""sentence-transformers' trainer on eventloop's loop, not a line of it changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import USE_CPU, Recorder, differing, untimed
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel
from trl_cases import table, texts, tokenizer

from eventloop_transformers import on_eventloop

ARGUMENTS = {"fp32": {}, "bf16": {"bf16": True}, "accumulation": {"gradient_accumulation_steps": 4}}


def trained(on: Any, folder: Path, **more: Any) -> list[Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=64, intermediate_size=32, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(16)], device="cpu")
    args = SentenceTransformerTrainingArguments(
        "out", per_device_train_batch_size=2, num_train_epochs=2, learning_rate=1e-2, logging_steps=2,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=USE_CPU, **more,
    )  # fmt: skip
    recorder = Recorder()
    trainer = on(SentenceTransformerTrainer)(
        model=model,
        args=args,
        train_dataset=table(anchor=texts(14, 1), positive=texts(14, 2)),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[recorder],
    )
    trainer.train()
    return [dict(model.state_dict()), untimed(trainer.state.log_history), recorder.calls]


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_sentences_are_trained_as_on_its_own_loop(tmp_path, arguments):
    """Weights, history and callbacks; the loss is one over pairs, in each batch."""
    more = ARGUMENTS[arguments]
    results = [trained(on, tmp_path, **more) for on in (lambda kind: kind, on_eventloop)]

    assert differing(*results) == []
