"""A model of transformers, exported as transformers reads it."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

from eventloop_ema import Ema
from eventloop_export import Export
from eventloop_fsdp import Fsdp
from eventloop_testing import isolated_trainer, run_ranks, tiny_task
from eventloop_testing.ranks import RankError


def bert():
    """A BERT of one layer, made from its configuration."""
    config = BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
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
        before = {name: one.cpu().clone() for name, one in trainer.state.model.state_dict().items()}
        trainer.fit()
        assert trainer.export(folder) == folder
        model = trainer.state.model.eval().cpu()

    found = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()

    weights = model.state_dict()
    assert type(found) is BertForSequenceClassification
    assert found.config.to_diff_dict()["num_hidden_layers"] == 1
    assert found.state_dict().keys() == weights.keys()
    assert all(torch.equal(one, weights[name]) for name, one in found.state_dict().items())
    assert any(not torch.equal(one, weights[name]) for name, one in before.items())
    assert torch.equal(found(**batch).logits, model(**batch).logits)


def exported(folder, *plugins, name="exported"):
    """Trains with half of each batch on each of two ranks, or all of it; exports."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    data = [{key: one[rank::world_size] for key, one in batch.items()} for batch in batches()]
    loader = DataLoader(Given(data), batch_size=None)
    task = tiny_task(
        model=bert, loss=None, metrics=None, train_dataloader=loader, eval_dataloaders=None
    )
    plugins = [Export(), *plugins]
    with isolated_trainer(folder / f"run{rank}", task, algorithms=plugins) as trainer:
        trainer.fit()
        trainer.export(folder / name)


class Given(IterableDataset):
    """These batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.nightly
@pytest.mark.parametrize("is_averaged", [False, True])
def test_of_a_sharded_model_the_whole_weights_are_written(tmp_path, is_averaged):
    """Each rank has a part of them; an average's, too."""
    exported(tmp_path, *[Ema(half_life="2ba")] * is_averaged, name="of_one")

    run_ranks(exported, tmp_path, Fsdp(), *[Ema(half_life="2ba")] * is_averaged)

    files = [load_file(tmp_path / name / "model.safetensors") for name in ("exported", "of_one")]
    assert files[0].keys() == files[1].keys()
    for name, one in files[0].items():
        torch.testing.assert_close(one, files[1][name], rtol=0, atol=1e-6)
    assert (tmp_path / "exported" / "config.json").exists()


def test_a_sharded_model_is_not_traced(tmp_path):
    """Nothing is written, rather than a rank's part."""
    with pytest.raises(RankError, match=r"a sharded model can't be traced for '.*model\.pt2'"):
        run_ranks(exported, tmp_path, Fsdp(), name="model.pt2")

    assert not (tmp_path / "model.pt2").exists()
