"""setfit, whose trainer makes one of sentence-transformers, on eventloop's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import setfit
import setfit.trainer
import torch
from hf_cases import differing
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel
from trl_cases import table, texts, tokenizer

from eventloop_transformers import on_eventloop


def trained(folder: Path, **more: Any) -> list[Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=64, intermediate_size=32, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    body = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(16)], device="cpu")
    head = setfit.SetFitHead(in_features=16, out_features=2, device="cpu")
    args = setfit.TrainingArguments(
        output_dir=str(folder / "out"), batch_size=4, num_epochs=1, report_to="none", **more
    )
    trainer = setfit.Trainer(
        model=setfit.SetFitModel(model_body=body, model_head=head),
        args=args,
        train_dataset=table(text=texts(12, 1), label=[0, 1] * 6),
    )
    trainer.train()
    untrained = BertModel.from_pretrained(folder).state_dict()
    moved = body[0].auto_model.state_dict()
    assert not all(torch.equal(one, moved[name]) for name, one in untrained.items())
    return [dict(body.state_dict()), dict(head.state_dict()), type(trainer.st_trainer).__mro__]


@pytest.mark.nightly
def test_setfit_is_trained_as_on_its_own_loop(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Body and head, with one line: the class of which its trainer makes one. Both are on the CPU."""
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    *expected, _ = trained(tmp_path / "theirs")
    kind = setfit.trainer.BCSentenceTransformersTrainer
    monkeypatch.setattr(setfit.trainer, "BCSentenceTransformersTrainer", on_eventloop(kind))

    *actual, kinds = trained(tmp_path / "ours")

    assert "OnEventloop" in {one.__name__ for one in kinds}
    assert differing(actual, expected) == []
