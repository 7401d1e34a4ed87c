"""A model of transformers, exported as transformers reads it."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

from eventloop_export import Export
from eventloop_testing import isolated_trainer, tiny_task


def bert():
    """A BERT of one layer, made from its configuration."""
    config = BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def batches():
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(16, (4, 6), generator=generator),
            "attention_mask": torch.ones(4, 6, dtype=torch.long),
            "labels": torch.tensor([0, 1, 2, 0]),
        }
        for _ in range(3)
    ]


def test_what_was_exported_is_read_by_transformers(tmp_path):
    """The class, its configuration and the trained weights, which compute the same."""
    folder, (batch, *_) = tmp_path / "exported", batches()
    task = tiny_task(
        model=bert, loss=None, metrics=None, train_dataloader=batches(), eval_dataloaders=None
    )
    with isolated_trainer(tmp_path, task, algorithms=[Export()], max_duration="2ep") as trainer:
        before = {name: one.clone() for name, one in trainer.state.model.state_dict().items()}
        trainer.fit()
        assert trainer.export(folder) == folder
        model = trainer.state.model.eval()

    found = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()

    weights = model.state_dict()
    assert type(found) is BertForSequenceClassification
    assert found.config.to_diff_dict()["num_hidden_layers"] == 1
    assert found.state_dict().keys() == weights.keys()
    assert all(torch.equal(one, weights[name]) for name, one in found.state_dict().items())
    assert any(not torch.equal(one, weights[name]) for name, one in before.items())
    assert torch.equal(found(**batch).logits, model(**batch).logits)
